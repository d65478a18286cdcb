"""Files are written whole or not at all (backend/runtime/whole_files.py)."""

from pathlib import Path

import pytest

from backend.runtime.whole_files import replace_file


@pytest.mark.parametrize(
    "content", ["zwölf", "zwölf".encode(), lambda path: path.write_text("zwölf", "utf-8")]
)
def test_a_file_is_replaced(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text("a longer one, which was there before")
    replace_file(path, content)
    assert path.read_text("utf-8") == "zwölf" and list(tmp_path.iterdir()) == [path]


def test_an_earlier_file_stays_where_the_new_one_fails(tmp_path):
    """Also while the new one is written: its readers are not locked out."""
    path = tmp_path / "file.json"
    path.write_text("before")

    def full(part: Path):
        part.write_bytes(b"half")
        assert path.read_text() == "before"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_file(path, full)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_takes_no_files_is_reported(tmp_path):
    """As it is, not as the unfinished file that could not be removed."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/out"):
        replace_file(tmp_path / "file/out", "text")
