"""Every family under every parallel method against the single process, on gloo. One spawn a world size:
starting a rank costs seconds."""

from pathlib import Path

import pytest
import signatures
from launch import EVERY_COMPILED, run_ranks
from ranks.family_cases import (
    CASES,
    CONFIGURATIONS,
    FAMILIES,
    TURNS,
    UNCOMPILED,
    Run,
    methods,
    runs,
)
from tiers import params
from variants import VARIANTS

#: How much of docs/drift.md's error of float8 over 4 steps of a whole schedule these first 2 steps may have,
#: and half of the table's last digit.
FLOAT8, LAST_DIGIT = 2, 5e-4
#: Family -> the same where the first steps err more.
MORE_FLOAT8 = {"pixart-sigma": 3}


def run_program(ranks: int, folder: Path, selected: list[Run]) -> dict[str, dict]:
    """Id -> what ranks/family_runs.py finds of these runs on so many ranks."""
    ids = [run.id for run in selected]
    found = {row["id"]: row for row in run_ranks("ranks.family_runs", ranks, folder, str(folder), ids)}
    assert found.keys() == set(ids)
    return found


def weights_stay(before: dict, now: dict) -> bool:
    """Do ranks of these degrees hold the same weights? Not where pipelines or tensor parallelism put others
    on each; CFG and sequence parallelism, and patches of a pipeline, leave them where they are."""
    of_weights = ("tensor_parallel_degree", "pipefusion_degree", "split_scheme", "shares")
    return all(before.get(name) == now.get(name) for name in of_weights)


@pytest.mark.parametrize("run", params(runs()))
def test_configuration(run, rank_programs):
    """Exact methods (CFG, Ulysses, ring, a pipeline of one patch, and hybrids) equal the single process to
    1e-5 relative in float32, and stale keys and values change random weights a little: no drift means that
    nothing was stale. Which tokens are stale is as in one process that computes the same patches. A call of
    the model, on samples at different times, drains a pipeline: nothing is stale in it."""
    row = rank_programs[__name__, run.ranks].result()[run.id]
    if run.stale:
        assert 1e-6 < row["relative"] < 0.25
        assert not run.is_simulated or row["simulated"] <= 1e-5
    else:
        assert row["relative"] <= 1e-5
    assert row["called"] <= 1e-5
    if run.is_rounded:
        factor = MORE_FLOAT8.get(run.case, FLOAT8)
        assert 1e-5 < row["rounded"] <= factor * documented(run.case, dict(run.degrees)) + LAST_DIGIT
    if run.is_compiled:
        check_compiled(row["compiled"])
    degrees = dict(run.degrees)
    before = dict(zip(row["before"].split()[::2], map(_number, row["before"].split()[1::2])))
    if not before:
        assert row["bytes_read"] > 0
    elif "cfg_degree" not in degrees or "pipefusion_degree" not in degrees:  # those hold others on some ranks
        assert (row["bytes_read"] == 0) == weights_stay(before, degrees)


def documented(case: str, degrees: dict[str, int]) -> float:
    """The error of float8 in docs/drift.md over the fewest steps."""
    page = (Path(__file__).parents[2] / "docs/drift.md").read_text()
    table = page.split("<!-- wire:")[1].split("<!-- end of wire -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    method = "Ulysses 2" if "ulysses_degree" in degrees else "ring 2"
    column = next(i for i, name in enumerate(rows[0]) if name.startswith(method))
    return float(next(row for row in rows if row[0] == case)[column])


def check_compiled(found: dict):
    """Compiled blocks change nothing, trace without a break, into no more graphs than there are kinds of
    blocks and of sequences, and none for another request. Activations arrive in two buffers of a shape."""
    assert found["notes"] == []
    assert found["graphs"] > 0 and found["too many"] <= 0 and found["recompiled"] == 0
    assert found["relative"] <= 1e-5
    assert found["receive buffers"] <= 2


def _number(word: str) -> int | str:
    return int(word) if word.isdigit() else word


def test_every_signature_has_a_representative():
    """The fast tier runs every method that a case of each signature has there, all of them some on two ranks,
    something of every family, and of a third of the variants that have another one's."""
    for ranks in CASES:
        here = [run for run in runs() if run.ranks == ranks]
        for signature, representative in signatures.representatives(CASES[ranks]).items():
            of_it = [run for run in here if run.case == representative]
            fast = [run for run in of_it if run.is_fast]
            wanted = methods(ranks, representative)
            assert wanted or ranks == 4, signature
            assert all(degrees in [dict(run.degrees) for run in fast] for degrees in wanted), signature
    fast = [run for run in runs() if run.is_fast]
    every = {case for cases in CASES.values() for case in cases}
    left_out = every - {run.case for run in fast}
    assert left_out <= VARIANTS.keys() and len(left_out) <= 2 / 3 * len(every & VARIANTS.keys())


def test_every_kind_of_blocks_is_compiled_under_every_cut(monkeypatch):
    """By a run of some family of the kind, or there is a reason."""
    monkeypatch.delenv(EVERY_COMPILED, raising=False)
    cuts = ("tokens", "matrices", "patches")
    compiled = {
        (signatures.kind_of_blocks(run.case), cut) for run in runs() if run.is_compiled for cut in run.cuts
    }
    kinds = {signatures.kind_of_blocks(case): case for case in reversed(FAMILIES)}
    missing = {(case, cut) for kind, case in kinds.items() for cut in cuts if (kind, cut) not in compiled}
    assert missing == UNCOMPILED.keys()


def test_the_fast_tier_has_every_method():
    """Every degree, exact and stale pipelines, and every way to cut matrices, of several families each."""
    fast = [run for run in runs() if run.is_fast]
    for config in [config for configs in CONFIGURATIONS.values() for config in configs]:
        for axis, degree in config.items():
            if axis not in ("num_pipeline_patch", "shares"):
                assert len({run.case for run in fast if getattr(run.config, axis) == degree}) >= 5, axis
    for stale, least in ((False, 8), (True, 20)):
        staged = {run.case for run in fast if run.config.pipefusion_degree > 1 and run.stale == stale}
        assert len(staged) >= least
    for turn in TURNS:
        assert len({run.case for run in fast if dict(run.degrees) == turn}) >= 4
