"""Native products of int8 (ConvRot) and nvfp4 on two ranks: activations are quantized as in the single
process."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from launch import run_ranks
from quantized import described
from ranks.native_int8 import CONFIGS, INT8, LATENTS, NVFP4, REFUSED
from safetensors.torch import save_file
from tiers import params
from tiny import shallow_flux, weights_module

pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")


#: Format -> below what the median share of latents stays where ranks agree on the largest values, and above
#: what one of them is where they do not.
SHARES = {INT8: (0.5, median, 0.95), NVFP4: (0.01, min, 0.5)}


#: Of the fast tier: inputs that are cut by columns, and scales of each rank's own.
FAST = ("row", "row, scales of each rank's own")


@dataclass(frozen=True)
class Run:
    """A configuration of CONFIGS; its id is that of its test."""

    id: str
    ranks: int = 2

    @property
    def is_fast(self) -> bool:
        return self.id in FAST


def run_program(ranks: int, folder: Path, selected: list[Run]) -> dict[str, dict]:
    """Id -> what ranks/native_int8.py finds."""
    plain = weights_module().state_dict(shallow_flux())
    for form in (INT8, NVFP4):
        save_file(described(plain, form)[0], folder / f"{form}.safetensors")
    return run_ranks("ranks.native_int8", ranks, folder, str(folder), [run.id for run in selected])


@pytest.mark.parametrize("run", params(map(Run, CONFIGS)))
def test_two_ranks(run, rank_programs):
    """To flipped roundings, which spread over blocks, of what native products change (rms, in standard
    deviations of the output), with MKL's usual and its compatible kernels. Of int8, which changes 0.01, the
    median of five latents is 1e-5 to 0.17. Of nvfp4, which changes 0.02, no rounding flips: 7e-6 at most.
    Ranks that quantize by their own largest values are as far from one process as native from weight only:
    1.0 to 1.1 of int8 in all of them, and 0.70 to 0.75 of nvfp4.
    """
    row = rank_programs[__name__, run.ranks].result()[run.id]
    case = CONFIGS[run.id]
    agreed, of_latents, own = SHARES[case.format]
    assert row["quantization"] > 1e-3
    assert len(row["shares"]) == LATENTS and all(map(math.isfinite, row["shares"]))
    assert median(row["shares"]) < agreed if case.is_agreed else of_latents(row["shares"]) > own


@pytest.mark.parametrize("run", [Run(REFUSED)], ids=lambda run: run.id)
def test_all_ranks_leave_what_one_refuses(run, rank_programs):
    """Of columns that are cut, a rank that multiplies natively asks the others for their largest values."""
    row = rank_programs[__name__, run.ranks].result()[run.id]
    why = "on rank 1 (CPU) its product failed (not supported)"
    assert row["said"] == [[["int8_tensorwise", "float32", why]]] * 2
    assert len(row["distances"]) == LATENTS and all(distance < 1e-5 for distance in row["distances"])
