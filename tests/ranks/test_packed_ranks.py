"""Quantized files on several ranks, on gloo: the latents of one process, LoRAs included, and each rank holds
the stored bytes of its share alone."""

from pathlib import Path

import pytest
from launch import run_ranks
from loras import write_mixed
from quantized import write_gguf, write_scaled
from ranks.packed import FILES, Run, runs
from tiers import params
from tiny import shallow_flux, weights_module

RUNS = runs()
KINDS = {
    **{"fp8": "float8_e4m3fn", "int8": "int8_tensorwise", "mxfp8": "mxfp8", "nvfp4": "nvfp4"},
    **{"w4a4": "convrot_w4a4", "w4a8": "asym_w4a8_int8"},
}


def run_program(ranks: int, folder: Path, selected: list[Run]) -> dict[str, dict]:
    """Id -> what ranks/packed.py finds of these runs on so many ranks."""
    shapes = shallow_flux()
    state = weights_module().state_dict(shapes)
    write_mixed(folder / "lora.safetensors", shapes)
    for format in {run.format for run in selected}:
        path = folder / FILES[format]
        if format in KINDS:
            write_scaled(path, state, KINDS[format])
        else:
            write_gguf(path, state, (format,))
    ids = [run.id for run in selected]
    found = {row["id"]: row for row in run_ranks("ranks.packed", ranks, folder, str(folder), ids)}
    assert found.keys() == set(ids)
    return found


@pytest.mark.parametrize("run", params(RUNS))
def test_configuration(run, rank_programs):
    """1e-5 relative in float32 to the single process, plain and with LoRAs, which leave nothing behind."""
    row = rank_programs[__name__, run.ranks].result()[run.id]
    assert max(row["relative"]) <= 1e-5
    assert row["same"]
    stored, config = row["whole"]["packed"], run.config
    parts = config.tensor_parallel_degree * config.pipefusion_degree
    parts *= config.sp_degree * config.data_parallel_degree if config.shard_weights else 1
    copies = config.world_size // parts
    total = sum(rank["packed"] for rank in row["held"])
    # a block of 256 values, or a group that is rotated together, is held whole where a rank needs some
    assert total == pytest.approx(copies * stored, rel=0.03) or (
        run.format == "Q4_K" and total > copies * stored
    )
    assert all(rank["reported"] > rank["packed"] for rank in row["held"])
    of_loras = [rank["loras"] for rank in row["held"]]
    assert all(counted == held > 0 for counted, held in of_loras)
