"""What scripts/doctor.py says of attention packages that can be imported, and are refused all the same."""

import sys

import doctor
import doctor_checks
import pytest
import torch
from doctor_findings import OK, WARNING
from doctor_stubs import machine
from doctor_wheels import KERNELS, WHEELS, Wheel, is_installed, tried

from backend.parallel.attention import kernel_table as table
from backend.runtime.install_command import TOGETHER, install_command
from backend.runtime.torch_version import has_torch

#: Functions of FlashAttention 4, as a bridge of torch looks at them: of two results and of five, and the
#: early one of FlashAttention 2.8.
TWO, FIVE = (
    f"def _flash_attn_fwd(q, k, v, return_lse=False) -> tuple[{', '.join(['int'] * results)}]: pass"
    for results in (2, 5)
)
EARLY = "def _flash_attn_fwd(q, k, v): pass"
REMEDY = f"run: {install_command([table.KERNELS['flash-attn-4'].package])}, or set attention to auto."


@pytest.fixture
def tried_with(monkeypatch, tmp_path):
    """Return what tries a FlashAttention 4 whose interface is ``code``."""

    def tries(code: str) -> Wheel:
        folder = tmp_path / "flash_attn/cute"
        folder.mkdir(parents=True)
        (folder / "interface.py").write_text(f"print('imported')\n{code}\n")
        described = tmp_path / "flash_attn_4-4.0.0b36.dist-info"
        described.mkdir()
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        assert is_installed("flash-attn-4")
        return tried("flash-attn-4")

    return tries


def found(wheel: Wheel) -> tuple[str, str]:
    """The status and the text of the check."""
    return next(iter(doctor_checks.wheels(machine(wheels={"flash-attn-4": wheel}))))


def test_each_kernel_of_a_package_is_asked_about():
    modules = {name: WHEELS[package] for package, name in KERNELS.items()}
    assert modules == {name: kernel.module for name, kernel in table.KERNELS.items() if kernel.module}


@pytest.mark.skipif(
    "FA4" not in getattr(torch.nn.attention, "list_flash_attention_impls", list)(),
    reason="this torch has no bridge to FlashAttention 4",
)
@pytest.mark.parametrize("code", [TWO, FIVE, EARLY], ids=["two results", "five results", "early"])
def test_a_flash_attention_4_that_torch_cannot_call_is_named(tried_with, code):
    wheel = tried_with(code)
    assert (wheel.version, wheel.error) == ("4.0.0b36", "")
    is_callable = code == TWO or (code == FIVE and has_torch(*table.TAKES_ALL_RESULTS))
    status, text = found(wheel)
    assert text.startswith("flash-attn-4 4.0.0b36 can be imported")
    if is_callable:
        assert (status, wheel.refusal) == (OK, "")
        return
    why = "returns 5 results, of which torch" if code == FIVE else "the early FlashAttention 4"
    assert wheel.refusal.startswith("attention is flash-attn-4, but ") and why in wheel.refusal
    assert wheel.refusal.endswith(REMEDY)
    assert status == WARNING and text.endswith(f", but is refused: {wheel.refusal[:-1]}")


def test_a_python_that_does_not_import_from_its_folder_breaks_no_package(monkeypatch):
    """Two packages are imported by this pack's own modules."""
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setitem(WHEELS, "own", "backend.runtime.install_command")
    assert tried("own").error == ""


@pytest.mark.parametrize(
    "error",
    [
        OSError("libcudart.so.12: cannot open shared object file: No such file or directory"),
        ValueError("libcublas.so.*[0-9] not found in the system path"),
        ModuleNotFoundError("No module named 'torch'", name="torch"),
    ],
    ids=["no file", "no path", "no torch"],
)
def test_a_torch_without_its_libraries_is_said_with_its_remedy(monkeypatch, capsys, own_signals, error):
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "doctor_facts":  # which imports torch
                raise error

    for name in ("doctor_checks", "doctor_facts"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert doctor.main([]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(f"problem packages {error}; {TOGETHER}; then run: ")


def test_a_package_that_cannot_be_imported_is_broken_and_not_refused(tried_with):
    wheel = tried_with("import no_such_module")
    assert "no_such_module" in wheel.error and not wheel.refusal
