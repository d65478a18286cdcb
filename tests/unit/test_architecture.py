"""The rooms of the project and who may import whom, read from the source with ast."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKEND = sorted((ROOT / "backend").rglob("*.py"))
NODES = sorted((ROOT / "nodes").rglob("*.py"))
STDLIB_ONLY = [
    "config.py",
    "errors.py",
    "folders.py",
    "handshake.py",
    "protocol.py",
    "regular.py",
    "solver_names.py",
]
#: Imported by ComfyUI's process: these packages must not come with them.
HEAVY = ("diffusers", "yunchang", "transformers", "accelerate", "torch.distributed")
#: Opens a folder with diffusers' own pipeline, which it imports then.
LATE = {"pipelines.py"}
#: Only these speak torch.distributed; the rest uses their verbs.
COLLECTIVES = {"mesh.py", "dispatch.py", "denoise.py", "comm.py", "sharding.py", "worker.py"}


def imports(path: Path, at_start: bool = False) -> set[str]:
    """Every module that a file imports, relative ones as written (".config"); ``at_start``: when it is
    imported itself."""
    found, tree = set(), ast.parse(path.read_text())
    for node in tree.body if at_start else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found |= {module} | {
                f"{module.rstrip('.')}.{alias.name}" for alias in node.names if node.level == 0
            }
    return found


def under(module: str, packages) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


@pytest.mark.parametrize("path", BACKEND, ids=lambda p: str(p.relative_to(ROOT)))
def test_backend_never_imports_comfy(path):
    assert not [m for m in imports(path) if m.split(".")[0].startswith(("comfy", "nodes", "folder_paths"))]


@pytest.mark.parametrize("path", NODES, ids=lambda p: p.name)
def test_nodes_reach_the_backend_through_its_shared_files_only(path):
    reached = {m for m in imports(path) if m.startswith("..backend")}
    assert reached <= {
        "..backend",
        "..backend.config",
        "..backend.frames",
        "..backend.handshake",
        "..backend.protocol",
        "..backend.solver_names",
        "..backend.errors",
        "..backend.regular",
    }
    assert not [m for m in imports(path, at_start=path.name in LATE) if under(m, HEAVY)]


@pytest.mark.parametrize("name", STDLIB_ONLY)
def test_shared_files_need_nothing(name):
    assert not [
        m
        for m in imports(ROOT / "backend" / name)
        if m.split(".")[0] in ("torch", "safetensors", "diffusers")
    ]


@pytest.mark.parametrize("name", ["client.py", "launcher.py", "backends.py", "verdict.py"])
def test_scripts_can_use_the_client_without_comfyui(name):
    assert not [m for m in imports(ROOT / "nodes" / name) if m.startswith(("comfy", "folder_paths"))]


@pytest.mark.parametrize("path", BACKEND, ids=lambda p: str(p.relative_to(ROOT)))
def test_collectives_live_in_their_rooms(path):
    if path.name not in COLLECTIVES:
        assert not [m for m in imports(path) if under(m, ["torch.distributed"])]


@pytest.mark.parametrize("path", sorted((ROOT / "backend" / "parallel").glob("*.py")), ids=lambda p: p.name)
def test_parallel_methods_name_no_family(path):
    families = [p.stem for p in FAMILY_FILES]
    code = "\n".join(
        ast.unparse(node) for node in ast.parse(path.read_text()).body if not isinstance(node, ast.Expr)
    ).lower()
    assert not [family for family in families if f"{family}." in code or f"'{family}'" in code]


def assigned(path: Path) -> dict[str, ast.expr]:
    """The module's own names that an assignment gives a value, and the values."""
    statements = ast.parse(path.read_text()).body
    return {ast.unparse(n.targets[0]): n.value for n in statements if isinstance(n, ast.Assign)} | {
        ast.unparse(n.target): n.value for n in statements if isinstance(n, ast.AnnAssign)
    }


FAMILY_FILES = [path for path in sorted((ROOT / "backend/models").glob("*.py")) if "FAMILY" in assigned(path)]


@pytest.mark.parametrize("path", FAMILY_FILES, ids=lambda p: p.stem)
def test_a_family_is_one_short_literal_in_one_file(path):
    literal = assigned(path)["FAMILY"]
    assert literal.end_lineno - literal.lineno + 1 <= 40
    assert len(path.read_text().splitlines()) < 350


def test_models_import_nothing_that_reads_files():
    """Loading imports models: key layouts are theirs."""
    for path in sorted((ROOT / "backend/models").rglob("*.py")):
        assert not [m for m in imports(path) if under(m.lstrip("."), ["loading"])], path.name


def test_every_family_file_is_in_the_registry():
    assert sorted(
        ast.unparse(module) for module in assigned(ROOT / "backend/models/__init__.py")["MODULES"].elts
    ) == [path.stem for path in FAMILY_FILES]


def test_root_package_needs_no_comfyui():
    assert imports(ROOT / "__init__.py") <= {".nodes.extension"}
