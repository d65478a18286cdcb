"""What each Python file of the product imports, read from the source with ast."""

import ast
from dataclasses import dataclass
from functools import cache

from source_files import SOURCES, assigned, complexity, functions, lines

#: Imports every family's file by its name.
REGISTRY = "backend.models"


def registered() -> list[str]:
    """The files that the registry of families imports by their names, all of them, in its order."""
    values = assigned(SOURCES[REGISTRY])
    assert ast.unparse(values["MODULES"]) == "[import_module(f'.{name}', __name__) for name in NAMES]"
    text, _, rest = ast.unparse(values["NAMES"]).rpartition(".")
    assert rest == "split()"
    return ast.literal_eval(text).split()


@dataclass(frozen=True)
class Facts:
    """What the rules ask of a file. imports: every module that it imports, by full name; at_start: when it is
    imported itself; absolute: packages that it does not name by dots. functions: NAME or CLASS.NAME of all
    that are in no other one -> lines, complexity."""

    imports: frozenset[str]
    at_start: frozenset[str]
    absolute: frozenset[str]
    functions: dict[str, tuple[int, int]]


@cache
def facts(module: str) -> Facts:
    """Read a file once for all tests. Its tree, which is large, goes."""
    tree = ast.parse(SOURCES[module].read_text())
    return Facts(
        imports=_imported(module, ast.walk(tree)),
        at_start=_imported(module, tree.body),
        absolute=_absolute(tree),
        functions={name: (lines(node), complexity(node)) for name, node in functions(tree).items()},
    )


def imports(module: str) -> frozenset[str]:
    return facts(module).imports


def _imported(module: str, nodes) -> frozenset[str]:
    found = {f"{REGISTRY}.{name}" for name in registered()} if module == REGISTRY else set()
    package = module.split(".")[: None if SOURCES[module].name == "__init__.py" else -1]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in SOURCES or not base.startswith(("backend", "nodes"))}
            found |= set() if names <= SOURCES.keys() else {base}
    return frozenset(found - {""})


def _absolute(tree: ast.Module) -> frozenset[str]:
    """The packages that a file imports by their own names, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            found.add(str(node.module))
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(name.partition(".")[0] for name in found)


def all_imports(module: str) -> set[str]:
    """Every module that comes with a file: what it imports, what that imports, and their packages."""
    found: set[str] = set()
    fresh = {module}
    while fresh:
        found |= fresh
        parents = {".".join(name.split(".")[:-1]) for name in fresh}
        fresh = (parents | {each for name in fresh & SOURCES.keys() for each in imports(name)}) - found - {""}
    return found


def under(module: str, packages) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)
