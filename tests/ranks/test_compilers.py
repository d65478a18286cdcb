"""Compilers of several ranks (compilers.py): one that fails, and Inductor itself."""

import os

import pytest
from launch import EVERY_COMPILED, run_ranks
from ranks.compilers import FULL

#: Double and single blocks of Flux.
KINDS = 2


def test_a_compiler_that_fails_on_another_rank_is_named(tmp_path):
    """By rank 0, in one line for all kinds of blocks: its peers waited for it, and nothing was said."""
    found = run_ranks("ranks.compilers", 2, tmp_path, str(tmp_path), "eager")
    assert found["graphs and failed"] == [[KINDS, 0], [0, KINDS]]
    [note] = [each for each in found["notes"] if "uncompiled" in each]
    kinds = "FluxBlock, FluxSingleBlock"
    assert note.startswith(f"rank 1: {kinds} run uncompiled: ") and FULL in note
    assert found["relative"] <= 1e-5


@pytest.mark.skipif(EVERY_COMPILED not in os.environ, reason="a C++ compiler on every rank, for minutes")
def test_inductor_on_every_rank(tmp_path):
    """Ranks generate code for shards of their own, and send in one order."""
    found = run_ranks("ranks.compilers", 2, tmp_path, str(tmp_path), "inductor")
    assert all(graphs and not failed for graphs, failed in found["graphs and failed"])
    assert not [note for note in found["notes"] if "uncompiled" in note]
    assert found["relative"] <= 1e-5
