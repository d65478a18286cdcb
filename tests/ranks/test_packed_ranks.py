"""Quantized files on several ranks, on gloo: the latents of one process, LoRAs included, and each rank holds
the stored bytes of its share alone."""

import math
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from launch import run_ranks
from loras import write_mixed
from quantized import write_gguf, write_scaled
from ranks.packed import FILES, Run, runs
from tiers import params
from tiny import made_once, shallow_flux, weights_module

RUNS = runs()
KINDS = {
    **{"fp8": "float8_e4m3fn", "int8": "int8_tensorwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"},
    **{"w4a4": "convrot_w4a4", "w4a8": "asym_w4a8_int8"},
}
#: Columns and bytes of a block of Q4_K.
BLOCK, BLOCK_BYTES = 256, 144
#: Layers of what attention returns, which ranks have by heads, narrower than a block.
AFTER_ATTENTION = ("attn.proj.weight", "linear2.weight")


def of_cut_blocks(run: Run) -> int:
    """Bytes of what several ranks hold of Q4_K: a block within which columns are cut is held whole by each of
    them. Wider matrices are cut between blocks."""
    ranks, scheme = run.config.tensor_parallel_degree, run.config.split_scheme
    over = {"megatron": ranks, "row": ranks, "column": 1, "2d": math.isqrt(ranks)}[scheme]
    inside = {key: shape for key, shape in shallow_flux().items() if "_blocks." in key and len(shape) == 2}
    rows = sum(
        shape[0]
        for key, shape in inside.items()
        if (key.endswith(AFTER_ATTENTION) if scheme == "megatron" else shape[1] == BLOCK)
    )
    return (over - 1) * rows * BLOCK_BYTES if run.format == "Q4_K" else 0


@cache
def state() -> dict[str, torch.Tensor]:
    """Weights of the shallow Flux."""
    return weights_module().state_dict(shallow_flux())


def write(format: str, path: Path):
    """A file of a format."""
    if format in KINDS:
        write_scaled(path, state(), KINDS[format])
    else:
        write_gguf(path, state(), (format,))


def run_program(ranks: int, folder: Path, selected: list[Run]) -> dict[str, dict]:
    """Id -> what ranks/packed.py finds of these runs on so many ranks."""
    made_once(folder / "lora.safetensors", lambda path: write_mixed(path, shallow_flux(), with_factored=True))
    for format in {run.format for run in selected}:
        made_once(folder / FILES[format], partial(write, format))
    ids = [run.id for run in selected]
    found = {row["id"]: row for row in run_ranks("ranks.packed", ranks, folder, str(folder), ids)}
    assert found.keys() == set(ids)
    return found


@pytest.mark.parametrize("run", params(RUNS))
def test_configuration(run, rank_programs):
    """1e-5 relative in float32 to the single process, plain and with LoRAs, which leave nothing behind."""
    row = rank_programs[__name__, run.ranks].result()[run.id]
    assert row["relative"] and all(error <= 1e-5 for error in row["relative"])
    assert row["same"]
    stored, config = row["whole"]["packed"], run.config
    parts = config.tensor_parallel_degree * config.pipefusion_degree
    parts *= config.sp_degree * config.data_parallel_degree if config.shard_weights else 1
    copies = config.world_size // parts
    total = sum(rank["packed"] for rank in row["held"])
    # scales take a little too, and a group that is rotated together is held whole where a rank needs some
    assert total == pytest.approx(copies * (stored + of_cut_blocks(run)), rel=0.03)
    assert all(rank["reported"] > rank["packed"] for rank in row["held"])
    of_loras = [rank["loras"] for rank in row["held"]]
    assert all(counted == held > 0 for counted, held in of_loras)
