"""Every combination of degrees against the single process, on gloo. One spawn a world size: starting a rank
costs seconds.
"""

import math
import re
from pathlib import Path

import pytest
from launch import run_ranks
from loras import write_mixed
from quantized import legacy_fp8
from ranks.flux_cases import (
    CHUNKS,
    COMPILED,
    COMPILED_FP8,
    COUNTED,
    EVALUATIONS_AHEAD,
    FP8,
    LIKE_OTHERS,
    UNDESCRIBED,
    Run,
    is_compiled,
    is_pair,
    runs,
)
from ranks.flux_requests import LORA
from safetensors.torch import save_file
from tiers import params
from tiny import facts, save_whole, weights_module

#: World size -> configurations into which ranks change without reading weights, of those that matrix.py
#: changes into one after the other.
WITHOUT_READING = {2: 0, 3: 2, 4: 13, 8: 5}
#: Largest relative drift on random weights in 6 steps, where nothing is smooth (trained ones: docs/drift.md).
#: Extrapolation follows a line through keys that random weights do not keep to, over more patches: 0.21 was
#: seen at 5 patches, where reuse stays below 0.06.
DRIFT = {"stale": 0.15, "stale, uneven patches": 0.25}
#: Largest relative error of float8 on the wire on random weights in 2 to 4 steps: 0.016 was seen.
FLOAT8 = 0.03
#: Solvers whose last step ends in the last prediction, which is that of the whole batch.
ANCESTRAL = ("batch of 5", "euler_ancestral_simple")
#: Features of the tiny Flux.
WIDTH = facts("flux-dev")["unet_config"]["hidden_size"]
RUNS = runs()


def run_program(ranks: int, folder: Path, selected: list[Run]) -> dict[str, dict]:
    """Id -> what ranks/matrix.py finds of these runs on so many ranks."""
    folder, ids = folder / f"{ranks}", [run.id for run in selected]
    folder.mkdir()
    write_mixed(folder / "lora.safetensors", shapes())
    weights = weights_module().state_dict(shapes())
    save_file(legacy_fp8(weights), folder / "fp8.safetensors")
    checkpoint = save_whole(weights, folder / "flux-tiny.safetensors")
    found = {row["id"]: row for row in run_ranks("ranks.matrix", ranks, folder, str(checkpoint), ids)}
    assert found.keys() == set(ids)
    return found


def shapes() -> dict[str, list[int]]:
    """Shapes of the tiny Flux with half of its blocks and of its heads: a quarter of the time, and golden
    latents are of one process (unit/test_golden.py) and of backends (socket/test_backend.py)."""
    of_golden = facts("flux-dev")["shapes"]
    deepest = {"double": 2, "single": 4}
    blocks = {key: re.match(r"(double|single)_blocks\.(\d+)\.", key) for key in of_golden}
    return {
        key: narrow(key, shape)
        for key, shape in of_golden.items()
        if (block := blocks[key]) is None or int(block[2]) < deepest[block[1]]
    }


def narrow(key: str, shape: list[int]) -> list[int]:
    """A shape of the tiny Flux with half of its heads, and so of its features; not of a timestep's."""
    known = shape[1:] if key in ("time_in.in_layer.weight", "guidance_in.in_layer.weight") else []
    return [size // 2 if size % WIDTH == 0 else size for size in shape[: len(shape) - len(known)]] + known


@pytest.mark.parametrize("run", params(RUNS))
def test_configuration(run, rank_programs):
    """Every combination of degrees against the single process, the simulation of stale keys and values,
    and what describe() says; see the checks."""
    row = rank_programs[__name__, run.ranks].result()[run.id]
    if run.variant in (COMPILED, COMPILED_FP8):
        check_compiled(row["compiled"])
    elif run.varied.wire != "full":
        check_float8(run, row)
    elif run.variant.startswith("stale"):
        check_stale(run, row)
    else:
        check_exact(run, row)
    if run.variant == CHUNKS:
        assert row["chunks"] == [math.ceil(run.case.steps / EVALUATIONS_AHEAD)] * run.ranks
    if row.get("described") is not None:
        check_bytes_sent(row)
    if "bytes_read" in row and not run.config.shares:  # of another model
        check_bytes_read(run, row)
    if run.variant in (LORA, FP8):  # fused per stage, shard and sharded row, and taken out: the same bits
        assert row["restored"]


def check_exact(run: Run, row: dict):
    """CFG, Ulysses, ring, their hybrids, and pipelines of one patch or in warm-up: 1e-5 relative in float32
    to the single process."""
    assert row["relative"] <= 1e-5
    if run.case.name in ANCESTRAL:
        assert row["denoised"] < 1e-6


def check_stale(run: Run, row: dict):
    """Stale keys and values change the result, within DRIFT: no drift would mean that nothing was stale.
    Which tokens are fresh, and which stale, is as in benchmarks/drift.py's simulation, for every solver: so
    docs/drift.md holds for ranks."""
    if run.variant in DRIFT:
        assert 1e-6 < row["relative"] < DRIFT[run.variant]
    assert row["simulated"] <= 1e-5
    if run.case.name in ANCESTRAL:
        assert row["denoised"] < 1e-6


#: Of float8's error, what numbers that round to the next one change: 0.06 with MKL's compatible kernels.
FLIPPED = 0.2


def check_float8(run: Run, row: dict):
    """float8 on the wire changes the result within FLOAT8, as one process does that rounds the same numbers;
    the same with compiled blocks."""
    assert 1e-4 < row["relative"] < FLOAT8
    # rings merge what hops bring in float32, after which a number may round to the next float8; with buffers
    # they gather instead
    merges = run.config.ring_degree > 1 and run.varied.patches == 1
    assert row["simulated"] <= (FLIPPED * row["relative"] if merges else 1e-5)
    if is_compiled(run):
        check_compiled(row["compiled"])


def check_compiled(found: dict):
    """Compiled blocks change nothing, trace without a break into the promised graphs, and no other request
    compiles again."""
    assert found["notes"] == []
    assert found["graphs"] > 0 and found["too many"] <= 0 and found["recompiled"] == 0
    assert found["relative"] <= 1e-5
    assert found["receive buffers"] <= 2


def check_bytes_sent(row: dict):
    """Counted bytes of every mechanism, and of modulation ahead, on every rank, at most 2 % off (synchronous
    steps share tokens among ranks a little differently than patches do)."""
    for sent, described in zip(row["sent"], row["described"], strict=True):
        assert sent.keys() == described.keys()
        assert not [name for name, size in sent.items() if abs(size - described[name]) > 0.02 * size]


def check_bytes_read(run: Run, row: dict):
    """Ranks that keep their weights read nothing. A stage reads its own blocks, its share of the modulation
    and the shared layers; a tensor-parallel rank its pieces."""
    assert (row["bytes_read"] == 0) == row["is_reused"]
    if not row["is_reused"]:
        weights = 4 * sum(map(math.prod, shapes().values()))
        assert row["bytes_read"] / weights <= part_of_weights(run.config)


def part_of_weights(config) -> float:
    """The most that a rank should read: its part of the blocks and 10 %, and all that is in no block."""
    sizes = {name: math.prod(shape) for name, shape in shapes().items()}
    blocks = sum(size for name, size in sizes.items() if "blocks." in name) / sum(sizes.values())
    return 1.1 * blocks / config.tensor_parallel_degree / config.pipefusion_degree + 1 - blocks


@pytest.mark.full
@pytest.mark.parametrize(
    "runs",
    [[r for r in RUNS if r.ranks == ranks] for ranks in WITHOUT_READING],
    ids=[f"{n} ranks" for n in WITHOUT_READING],
)
def test_degrees_that_leave_the_weights_where_they_are_read_nothing(runs, rank_programs):
    """Other process groups around the same weights (and as exact as anything: above)."""
    found = rank_programs[__name__, runs[0].ranks].result()
    assert len({run.label for run in runs if found[run.id]["is_reused"]}) == WITHOUT_READING[runs[0].ranks]


@pytest.mark.parametrize("ranks", WITHOUT_READING)
def test_every_kind_of_run_is_there(ranks):
    """Runs whose last prediction is compared, stale ones, and those whose bytes are counted; and in the fast
    tier something exact and something stale."""
    here = [run for run in RUNS if run.ranks == ranks]
    assert len({run.id for run in here}) == len(here)
    assert {run.case.name for run in here} & set(ANCESTRAL)
    assert any(run.variant in DRIFT for run in here)
    assert any(run.case.name in COUNTED and run.variant not in UNDESCRIBED for run in here)
    fast = [run for run in here if run.is_fast]
    assert any(run.variant in DRIFT for run in fast)
    assert any(run.variant in ("exact", "one patch") for run in fast)


def test_the_fast_tier_has_every_case_and_every_pair_of_methods():
    """A case or a pair that no run of the fast tier shows would be seen under --all alone."""
    fast = [run for run in RUNS if run.is_fast]
    assert {run.case.name for run in fast} == {run.case.name for run in RUNS} - LIKE_OTHERS
    pairs = {run.label for run in RUNS if run.ranks == 4 and is_pair(run.config)}
    assert len(pairs) == 15 and pairs <= {run.label for run in fast}
