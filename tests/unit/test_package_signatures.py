"""Installed packages have the signatures that were recorded: a version that differs names itself here."""

from itertools import groupby

import pytest
import recorded_signatures as records
import torch
from recorded_signatures import COMFY_KITCHEN, YUNCHANG, Recorded, parameters_of

from backend.parallel.attention.ring_library import ring_library
from backend.quantization.int8_rows import SCALED_PRODUCT
from backend.quantization.kernels import CALLED
from backend.runtime.torch_version import installed


def place(recorded: Recorded) -> tuple[str, str]:
    return recorded.module, recorded.function


ATTENTION = [each for each in vars(records).values() if isinstance(each, Recorded) and each is not YUNCHANG]
#: (module, function) -> its records, of one version or of several.
PLACES = {at: [*them] for at, them in groupby(sorted([*ATTENTION, *COMFY_KITCHEN], key=place), key=place)}


def named(records: list[Recorded], found: str) -> str:
    """Say which version differs, and from what."""
    package = records[0].package
    known = "; ".join(f"{each.version}: {each.parameters}" for each in records)
    return f"{package} {installed(package)} has {records[0].function}({found}), recorded is {known}"


@pytest.mark.parametrize("at", PLACES, ids=".".join)
def test_an_installed_package_is_as_recorded(at):
    """After a change of one, compare what the backend calls with its source, and record it."""
    first = PLACES[at][0]
    if not installed(first.package):
        pytest.skip(f"{first.package} is not installed")
    found = first.installed()
    assert found in [each.parameters for each in PLACES[at]], named(PLACES[at], found)


def test_a_rings_merge_is_as_recorded():
    """By the file that rings read; its package imports whatever kernels are installed."""
    found = parameters_of(ring_library().update_out_and_lse)
    assert found == YUNCHANG.parameters, named([YUNCHANG], found)


def test_a_rings_merge_returns_what_rings_read():
    """Output (B, S, H, D) in float32 and log-sum-exp (B, S, H, 1), of (B, S, H, D) in bf16 and (B, H, S)."""
    block, block_lse = torch.randn(2, 5, 3, 8).bfloat16(), torch.randn(2, 3, 5)
    out, lse = ring_library().update_out_and_lse(None, None, block, block_lse)
    assert out.equal(block.float()) and out.dtype == torch.float32
    assert lse.equal(block_lse.transpose(1, 2)[..., None])


def test_all_that_is_called_of_comfy_kitchen_is_recorded():
    recorded = {each.function for each in COMFY_KITCHEN}
    assert {*CALLED, SCALED_PRODUCT} <= recorded


def test_a_version_that_differs_names_itself(monkeypatch):
    """And whose names are the same in another order, or with other defaults."""
    recorded = Recorded("yunchang 0.6.4", __name__, "newer", "out, lse")

    def newer(lse, out=None): ...

    monkeypatch.setitem(globals(), "newer", newer)
    found = recorded.installed()
    assert found == "lse, out=None"
    version = installed("yunchang")
    assert named([recorded], found) == (
        f"yunchang {version} has newer(lse, out=None), recorded is yunchang 0.6.4: out, lse"
    )
