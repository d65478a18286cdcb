"""The Python files of the project, for tests that read them."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("backend", "nodes")
    for path in sorted((ROOT / top).rglob("*.py"))
}
#: What McCabe counts.
BRANCHES = (
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.For, ast.AsyncFor, ast.While),
    *(ast.ExceptHandler, ast.match_case),
)


def assigned(path: Path) -> dict[str, ast.expr]:
    """The module's own names that an assignment gives a value, and the values."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            found[ast.unparse(node.targets[0])] = node.value
        elif isinstance(node, ast.AnnAssign) and node.value:
            found[ast.unparse(node.target)] = node.value
    return found


def python_files() -> list[Path]:
    """Every Python file of the project, tests and scripts too, below ROOT. Environments are in hidden
    folders, and output/ is what the scripts write."""
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "output"))]
    found = [*ROOT.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))]
    return sorted(path.relative_to(ROOT) for path in found)


def lines(node) -> int:
    return node.end_lineno - node.lineno + 1


def complexity(function) -> int:
    """McCabe's number, as ruff's C901 counts it: one for a function, and one for every branch."""
    return sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """NAME or CLASS.NAME -> every function of a file that is in no other function."""
    found = {}
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = node
    return found
