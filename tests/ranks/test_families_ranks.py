"""Every family under every parallel method against the single process, on gloo. One spawn a world size:
starting a rank costs seconds."""

from pathlib import Path

import pytest
from families import LATENT_FORMATS
from launch import run_ranks
from variants import VARIANTS

#: Flux has tests of its own.
FAMILIES = [family for family in LATENT_FORMATS if family != "flux-dev"]
#: World size -> cases; on two ranks also prompts with hidden rows, where the family takes a mask.
CASES = {
    2: [
        *FAMILIES,
        *(variant for variant in VARIANTS if variant not in ("wan22-i2v-low", "ltx2-i2v")),
        "qwen-image+mask",
        "hunyuan-video+mask",
        "hunyuan-video15+mask",
        "ideogram4+mask",
        "qwen-image21+mask",
    ],
    4: [
        *FAMILIES,
        "flux-kontext",
        "flux2-edit",
        "flux3-edit",
        "qwen-image-edit-2511",
        "qwen-image21-edit",
        "krea2-edit",
        "wan21-i2v",
        "wan22-ti2v",
        "ltxv-i2v",
        "ltx25-i2v",
        "minimax-h3-guides",
        "cogvideox-1.5-i2v",
    ],
}


def run_program(ranks: int, folder: Path) -> list[dict]:
    """What ranks/families.py finds on so many ranks."""
    return run_ranks("ranks.families", ranks, folder, str(folder), " ".join(CASES[ranks]))


@pytest.fixture(scope="session", params=CASES, ids="{} ranks".format)
def rows(request, rank_programs):
    found = rank_programs[__name__, request.param].result()
    assert {row["family"] for row in found} == set(CASES[request.param])
    return found


def test_exact_methods_equal_the_single_process(rows):
    """CFG, Ulysses, ring, a pipeline of one patch, and hybrids: 1e-5 relative in float32."""
    wrong = [row for row in rows if not row["stale"] and row["relative"] > 1e-5]
    assert not wrong


def test_model_calls_equal_the_single_process(rows):
    """One call on rows at different times, in every configuration: a pipeline is drained there, so nothing is
    stale."""
    wrong = [row for row in rows if row["called"] > 1e-5]
    assert not wrong


def test_degrees_that_leave_the_weights_where_they_are_read_nothing(rows):
    """CFG and ring behind Ulysses, other patches of a pipeline; pipelines and tensor parallelism put other
    weights on each rank."""
    kept = {row["config"] for row in rows if row["bytes_read"] == 0 and not row["stale"]}
    assert all(row["bytes_read"] == 0 for row in rows if row["stale"] and "cfg" not in row["config"])
    assert kept == (
        {"cfg_degree 2 = 2 ranks", "ring_degree 2 = 2 ranks"} if "2 ranks" in rows[0]["config"] else set()
    )


def test_pipefusion_drifts_a_little(rows):
    """Stale keys and values change the result of random weights a little; no drift would mean that nothing
    was stale."""
    stale = [row["relative"] for row in rows if row["stale"]]
    assert stale and all(1e-6 < drift < 0.25 for drift in stale)
