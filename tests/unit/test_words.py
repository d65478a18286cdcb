"""Words that the glossary of CONTRIBUTING.md has others for, in code, comments and pages."""

import re
from pathlib import Path

from source_files import ROOT, python_files

#: Word -> what to say, in code and pages. The first column of CONTRIBUTING.md's glossary has more.
EVERYWHERE = {
    r"(?i)beside(?!s)": "next to, with, besides; overlap of communication and compute",
    # plain English: "kept open", "kept from", "kept to", "well-kept"
    r"(?i)(?<![-a-z])kept(?! (?:open|from|to))": "cached, or what it is: reused, stored, reported",
    # drawings of the methods, and MiniMax's own name of an image in a prompt
    r"(?i)(?<!method_)(?<!in )(?<!<)picture": "image; drawing, thumbnail, frame",
    r"(?i)(?<!Wan)sound": "audio",
}
#: The same in code alone.
IN_CODE = {
    r"steady steps?": "step in steady state",
    r"exchang(?:e|es|ed) (?:heads|predictions|tokens)": "all_to_all, gather",
    r"def _?remember\w*": "note, cache",
    r"\b_tell\w*\(|\bTELL_\w+": "send, report",
    r"answers = \S*all_gather_object": "gathered",
    r"given tokens of (?:video|audio)": "reference tokens",
}
#: The same on pages alone: a node comes after another one, and receives.
ON_PAGES = {r"\bbehind (?:it|the loader)\b": "after", r"\bhears\b": "receives"}


def found(words: str, paths: list[Path]) -> list[str]:
    """Return the lines with these words."""
    pattern = re.compile(words)
    lines = [(path, line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [f"{path.relative_to(ROOT)}: {line.strip()}" for path, line in lines if pattern.search(line)]


def check(say: dict[str, str], paths: list[Path]):
    assert not {words: (instead, lines) for words, instead in say.items() if (lines := found(words, paths))}


def test_code_has_the_glossarys_words():
    """In every file but this one."""
    check(EVERYWHERE | IN_CODE, [ROOT / path for path in python_files() if path.name != "test_words.py"])


def test_pages_have_the_glossarys_words():
    """Those in English; docs/released_files.md has names of files that tests have of models."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "web/docs").rglob("*.md")]
    check(EVERYWHERE | ON_PAGES, [page for page in pages if page.name != "released_files.md"])
