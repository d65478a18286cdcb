"""Writes files whole or not at all: nobody reads half of one, and an earlier one stays until the new one is
complete. Standard library only."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: str | bytes | Callable[[Path], object]):
    """Write a file of this text (as UTF-8), these bytes, or what ``content`` writes to the path that it is
    given. Raises what writing raises, and then leaves no unfinished file."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # another process may write the same file
    try:
        if isinstance(content, str):
            part.write_text(content, encoding="utf-8")
        elif isinstance(content, bytes):
            part.write_bytes(content)
        else:
            content(part)
        part.replace(path)
    finally:
        with suppress(OSError):  # replaced, or never begun: what writing raised says more
            part.unlink()
