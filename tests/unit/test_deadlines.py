"""Tests wait for steps, not for seconds, but where the product itself promises seconds."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CLOCKS = {"monotonic", "perf_counter", "time"}
MINUTE = 60
#: File with a deadline below a minute -> what the product promises in seconds.
PROMISED = {
    "comfy/test_parallel_model.py": "Cancel within a call",
    "socket/test_backend_life.py": "silent ranks are found, Cancel of a hung backend",
    "socket/test_doors.py": "a stranger does not hold up a handshake",
    "socket/test_machines.py": "a cut cable is found",
    "socket/test_odd_files.py": "refusals of files before anything large is read",
    "socket/test_server_handshake.py": "clients that say nothing are hung up on",
    "socket/test_silence.py": "silent ranks are found",
}


def elapsed(node: ast.AST) -> bool:
    """Whether it is time.monotonic() - x, or of another clock."""
    if (
        not isinstance(node, ast.BinOp)
        or not isinstance(node.op, ast.Sub)
        or not isinstance(node.left, ast.Call)
    ):
        return False
    clock = node.left.func
    return isinstance(clock, ast.Attribute) and clock.attr in CLOCKS and ast.unparse(clock.value) == "time"


def deadlines(source: str) -> list[tuple[int, str]]:
    """The deadlines below a minute, or of no number that is seen here: (line, deadline)."""
    tree = ast.parse(source)
    constants = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants |= {ast.unparse(target): node.value.value for target in node.targets}
    found = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Compare)
            and elapsed(node.left)
            and isinstance(node.ops[0], (ast.Lt, ast.LtE))
        ):
            limit = node.comparators[0]
            seconds = limit.value if isinstance(limit, ast.Constant) else constants.get(ast.unparse(limit))
            if not isinstance(seconds, (int, float)) or seconds < MINUTE:
                found.append((node.lineno, ast.unparse(limit)))
    return found


def test_deadlines_below_a_minute_are_promises():
    found = {
        str(path.relative_to(TESTS)): deadlines(path.read_text()) for path in sorted(TESTS.rglob("*.py"))
    }
    assert {name: lines for name, lines in found.items() if lines and name not in PROMISED} == {}
    assert {name for name in PROMISED if not found[name]} == set()


@pytest.mark.parametrize(
    "limit, lines", [("59.5", 1), ("60", 0), ("SOON", 0), ("SHORT", 1), ("a.SECONDS", 1)]
)
def test_a_deadline_is_seen(limit, lines):
    source = f"SOON = 60\nSHORT = 5\nassert 1 and time.monotonic() - began[0] < {limit}\n"
    assert len(deadlines(source)) == lines
    assert not deadlines(source.replace("<", ">"))
