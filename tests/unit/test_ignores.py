"""Whoever switches a rule off for a line or a file says which one, and why."""

import io
import re
import tokenize
import tomllib

import pytest
from source_files import ROOT, python_files

#: A comment that switches rules off, by their names, and what follows it.
IGNORE = re.compile(r"(?:noqa|type: ignore|pyright: ignore)\b", re.I)
NAMED = re.compile(
    r"(?:noqa: [A-Z]+\d+(?:, [A-Z]+\d+)*|(?:type|pyright): ignore\[[\w, -]+\])(?:  # (?P<why>.+))?$", re.I
)


def unexplained(source: str) -> list[str]:
    """Return the lines that switch a rule off without its name, or without a reason after it or above."""
    lines = source.splitlines()
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        ignore = IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
        if ignore is None:
            continue
        row = token.start[0]
        named = NAMED.match(token.string[ignore.start() :])
        above = lines[row - 2].strip() if row > 1 else ""
        is_one = len(IGNORE.findall(token.string)) == 1  # another one would stand for a reason
        if named is None or not is_one or not (named["why"] or above.startswith("#")):
            found.append(lines[row - 1].strip())
    return found


def test_every_ignore_names_its_rule_and_has_a_reason():
    found = {str(path): unexplained((ROOT / path).read_text()) for path in python_files()}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    "line, explained",
    [
        ("import x  # noqa: F401  # makes y importable", True),
        ("# makes y importable\nimport x  # noqa: F401", True),
        ("import x  # noqa: F401", False),
        ("import x  # noqa  # makes y importable", False),
        ("x = y()  # pyright: ignore[reportCallIssue, reportArgumentType]  # documented", True),
        ("x = y()  # pyright: ignore  # documented", False),
        ("x = y()  # type: ignore", False),
        ("x = y()  # pyright: ignore[reportCallIssue]  # noqa", False),
        ("import x  # NOQA", False),
        ("x = 'noqa'  # nothing is switched off", True),
    ],
)
def test_what_explains_an_ignore(line, explained):
    assert (unexplained(line) == []) is explained


def test_every_group_of_files_has_a_reason():
    """The first of a group in pyproject.toml, and so every one after it, has a comment above."""
    text = (ROOT / "pyproject.toml").read_text()
    files = tomllib.loads(text)["tool"]["ruff"]["lint"]["per-file-ignores"]
    table = text.split("[tool.ruff.lint.per-file-ignores]\n")[1].split("\n\n")[0].splitlines()
    rules = None
    for above, line in zip(["", *table], table):
        if line.startswith("#"):
            continue
        name, _, value = line.partition(" = ")
        assert name.strip('"') in files
        assert above.startswith("#") or value == rules
        rules = value


def test_general_ignores_have_a_reason():
    text = (ROOT / "pyproject.toml").read_text()
    ignored = re.search(r"^ignore = \[\n(.*?)^\]", text, re.M | re.S)
    assert ignored and all("#" in line for line in ignored[1].splitlines())
