"""What auto takes is what scripts/doctor.py --full compares and times."""

from functools import cache

import card_plans
import doctor_quantized_ranks
import doctor_runs
import doctor_speed
import pytest
import scaling
from doctor_stubs import StubLab

from backend.config import ParallelConfig
from backend.planner.candidates import candidates
from backend.planner.choose import AUTO, choose
from backend.planner.machine import RequestEstimate

RANKS = card_plans.GPUS


def kind_of(plan: ParallelConfig) -> tuple:
    """Return what divides the work and the weights."""
    return tuple(plan.degrees.values()), plan.shard_weights


@cache
def plans() -> dict[str, tuple]:
    """Return what auto takes for each line of docs/degrees.md's tables."""
    rows = [(card, row) for card, table in card_plans.TABLES.items() for row in table]
    taken = ((card, row, choose(card_plans.question(row, card), AUTO).option.plan) for card, row in rows)
    return {f"{row.file}, {row.steps} steps, {card} GB": kind_of(plan) for card, row, plan in taken}


def test_every_plan_of_the_tables_is_compared_with_one_rank():
    tried = {kind_of(config) for config in doctor_runs.methods(RANKS).values()}
    assert {name: plan for name, plan in plans().items() if plan not in tried} == {}


def test_sharded_plans_of_quantized_files_are_those_that_they_are_compared_under():
    sharded = {plan for plan in plans().values() if plan[1]}
    assert sharded and sharded <= set(map(kind_of, doctor_quantized_ranks.methods(RANKS).values()))


def test_a_sharded_ring_is_timed(monkeypatch):
    monkeypatch.setattr(doctor_speed, "timed_or_none", lambda *_: None)
    lab = StubLab()
    monkeypatch.setattr(lab, "run", lambda config, *_, **how: StubLab.run(lab, ParallelConfig(), *_, **how))
    timed = {found.values["method"] for found in doctor_speed.speed(lab) if "seconds" in found.values}
    assert {"FSDP", "ring, FSDP"} < timed


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_number_of_patches_that_auto_weighs_is_timed(ranks):
    shape = card_plans.shape_of_file("Flux.1 dev, fp8")
    request = RequestEstimate(*card_plans.SQUARE, 20)
    every = candidates(shape, request, ranks, ParallelConfig())
    weighed = {plan.num_pipeline_patch for plan in every if plan.pipefusion_degree == ranks}
    timed = {config.num_pipeline_patch for config in scaling.methods(ranks).values()}
    assert {ranks, ranks + 1, 2 * ranks} < weighed and weighed - {1} <= timed
