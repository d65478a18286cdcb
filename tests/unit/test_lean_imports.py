"""A rank starts whatever packages diffusers finds beside it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMPORTS = "import sys; import backend.lean_imports as lean; assert 'diffusers' in sys.modules"
#: As if a later diffusers imported a package that is not among the hidden ones.
UNHIDDEN = """
import importlib.util, sys
source = importlib.util.find_spec("backend.lean_imports").loader.get_source("backend.lean_imports")
names = {"__name__": "backend.lean_imports"}
exec(source.replace('"peft", ', ""), names)
assert "peft" not in names["UNUSED"] and "transformers" in sys.modules
from diffusers import FluxTransformer2DModel
"""


@pytest.fixture
def peft(tmp_path) -> Path:
    """A folder with a package by the name of PEFT, which imports transformers as PEFT does."""
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("import transformers.utils\n")
    described = tmp_path / "peft-0.18.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.18.0\n")
    return tmp_path


@pytest.mark.parametrize("code", [IMPORTS, UNHIDDEN], ids=["hidden", "unhidden"])
def test_packages_that_need_transformers_keep_no_rank_from_starting(peft, code):
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONPATH": str(peft)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
