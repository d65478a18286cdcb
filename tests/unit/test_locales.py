"""locales/: the nodes' texts in ComfyUI's form, and help pages, in English and Chinese."""

import re
from pathlib import Path

import locale_texts
import pytest

ROOT = Path(__file__).resolve().parents[2]
HELP = ROOT / "web" / "docs"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
#: Texts that are names in both languages.
SAME = ("DiT", "GPU", "JSON", "CLIP", "VAE", "cfg", "Sigmas")


def leaves(texts: dict, prefix: str = ""):
    for key, value in texts.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_both_languages_have_the_same_texts():
    assert locale_texts.paths_of(locale_texts.read("zh")) == locale_texts.paths_of(locale_texts.read("en"))
    assert all(value.strip() for _, value in leaves(locale_texts.read("en")))


def test_chinese_texts_are_chinese():
    texts = dict(leaves(locale_texts.read("zh")))
    assert not [path for path, text in texts.items() if text not in SAME and not CHINESE.search(text)]


def test_the_category_has_a_name():
    for language in ("en", "zh"):
        assert locale_texts.read(language, "main.json")["nodeCategories"].keys() == {locale_texts.CATEGORY}


@pytest.mark.parametrize("node", sorted(locale_texts.read("zh")))
def test_every_node_has_help_in_both(node):
    """ComfyUI's page looks for docs/NODE/LANGUAGE.md, then for docs/NODE.md."""
    assert (HELP / f"{node}.md").read_text().startswith("# ")
    chinese = (HELP / node / "zh.md").read_text(encoding="utf-8")
    assert chinese.startswith(f"# {locale_texts.read('zh')[node]['display_name']}\n")
    assert len(CHINESE.findall(chinese)) > 30


@pytest.mark.parametrize("page", sorted(HELP.rglob("*.md")), ids=lambda path: str(path.relative_to(HELP)))
def test_help_has_no_wide_tables(page):
    """The panel is narrow: two columns, and short cells."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert all(row.count("|") <= 3 and len(row) <= 110 for row in rows), rows


def test_the_help_of_the_config_begins_with_which_degrees():
    headings = [
        line for line in (HELP / "ParallelConfig.md").read_text().splitlines() if line.startswith("#")
    ]
    assert headings[:2] == ["# Parallel Config", "## Which degrees?"]
