"""A rank starts whatever packages diffusers finds next to it, and under the oldest torch."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import doctor_wheels
import pytest

ROOT = Path(__file__).parents[2]
#: As a rank does, without a type that torch 2.6 lacks: one process for both, since it imports everything.
HIDDEN = """
import sys
import torch
import torch._inductor.utils  # which names it, in this version
assert "float8_e8m0fnu" in vars(torch)
del torch.float8_e8m0fnu
from backend.runtime import lean_imports
assert "transformers" not in sys.modules
import backend.worker, backend.preflight
from backend.loading.files.mapped_file import DTYPES
assert DTYPES["F8_E8M0"] == torch.uint8
"""
#: As if diffusers imported a package that needs transformers and is not among the hidden ones.
NEEDED = """
import sys
class Needs:
    def find_spec(self, name, path=None, target=None):
        if name == "diffusers.loaders.peft" and sys.modules.get("transformers", self) is None:
            raise ImportError("import of transformers halted")
sys.meta_path.insert(0, Needs())
from backend.runtime import lean_imports
assert "transformers" not in sys.modules or sys.modules["transformers"]
"""


def starts(code: str, *folders: Path):
    """Run it with packages of these folders, and use what diffusers has."""
    command = [sys.executable, "-c", f"{code}\nfrom diffusers import FluxTransformer2DModel"]
    here = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    ended = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


#: Package -> what its import runs: PEFT's needs transformers, others were built for another torch.
BROKEN = {"peft": "import transformers.utils\n"} | dict.fromkeys(
    ("bitsandbytes", "torchao", "xformers", "optimum"), "raise RuntimeError('no module triton.ops')\n"
)


def test_broken_packages_and_an_older_torch_do_not_hinder_ranks(tmp_path):
    for name, code in BROKEN.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        described = tmp_path / f"{name}-0.18.0.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.18.0\n")
    starts(HIDDEN, tmp_path)


def test_nothing_is_hidden_where_something_else_needs_it():
    starts(NEEDED)


def test_it_comes_before_all_else_of_the_project():
    """Sorted among others it would come after those that import diffusers, and hide nothing."""
    seen = []
    for path in [*sorted((ROOT / "backend").rglob("*.py")), ROOT / "scripts/describe.py"]:
        names = [
            (node.module or "", {each.name for each in node.names}, node.level)
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.ImportFrom)
        ]
        at = [i for i, (_, imported, _) in enumerate(names) if "lean_imports" in imported]
        if at:
            seen.append(path.stem)
            before = [module for module, _, level in names[: at[0]] if level or module.startswith("backend")]
            assert not before, path
            assert names[at[0]][1] == {"lean_imports"}, path
    assert {"engine", "worker", "preflight", "describe"} <= set(seen)


@pytest.mark.parametrize("how", doctor_wheels.HOW.values())
def test_the_doctor_imports_what_there_is(how):
    """In a process of its own, of which a wrong name would say that the package is broken."""
    [first] = [node for node in ast.parse(how).body if isinstance(node, ast.ImportFrom)]
    module = importlib.import_module(first.module or "")
    for each in first.names:
        assert hasattr(module, each.name) or importlib.util.find_spec(f"{module.__name__}.{each.name}")


@pytest.mark.parametrize(
    "script, heavy",
    [
        # benchmarks import it ahead of the engine: diffusers would come with SciPy and transformers
        ("benchmarks/report.py", {"diffusers"}),
        # whose process does no more than start its ranks
        ("scripts/check_family.py", {"diffusers", "backend", "torch", "family_ranks"}),
    ],
)
def test_scripts_do_not_import_what_ranks_do_without(script, heavy):
    found = set()
    for node in ast.parse((ROOT / script).read_text()).body:
        if isinstance(node, ast.Import):
            found |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    assert found and not found & heavy
