"""Words that the glossary of CONTRIBUTING.md has others for, in code and comments."""

import re

from source_files import ROOT, python_files

#: Word -> what to say. The first column of CONTRIBUTING.md's glossary has more.
SAY = {
    r"steady steps?": "step in steady state",
    r"exchang(?:e|es|ed) (?:heads|predictions|tokens)": "all_to_all, gather",
    r"def _?remember\w*": "note, cache",
    r"\b_tell\w*\(|\bTELL_\w+": "send, report",
    r"answers = \S*all_gather_object": "gathered",
    r"given tokens of (?:video|audio)": "reference tokens",
}


def found(words: str) -> list[str]:
    """Return the lines with these words, in every file but this one."""
    pattern = re.compile(words)
    paths = [path for path in python_files() if path.name != "test_words.py"]
    lines = [(path, line) for path in paths for line in (ROOT / path).read_text().splitlines()]
    return [f"{path}: {line.strip()}" for path, line in lines if pattern.search(line)]


def test_the_glossarys_words_are_used():
    assert not {words: (say, lines) for words, say in SAY.items() if (lines := found(words))}
