"""Auto's next plan where ranks run out of memory."""

import resource
import sys
from pathlib import Path

import pytest
from comfy_modules import comfy_modules
from golden_graphs import error_of, graph, ranks_of

with comfy_modules():
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.client.auto.planning import Asked
    from parallel_dit.backend.config import ConfigError, ParallelConfig
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.planner.choose import MEMORY
    from parallel_dit.backend.protocol import BackendError, RefusedError
    from parallel_dit.nodes import load_parallel_dit
    from parallel_dit.nodes.host import auto_plan

MODEL = ModelChoice("model.safetensors")
RAN_OUT = BackendError("rank 1 ran out of memory in the middle of a request")
ALL = AutoConfig()
#: Plans in the order in which they need less.
PLANS = [ParallelConfig(ring_degree=2), ParallelConfig(ulysses_degree=2), ParallelConfig(pipefusion_degree=2)]


class Planning:
    """backend.client.auto.planning with so many plans that fit."""

    def __init__(self, plans: list):
        self.plans, self.spared = plans, 0

    def plan_for(self, asked, check, show):
        if self.spared >= len(self.plans):
            raise ConfigError("does not fit")
        return self.plans[self.spared], ()

    def is_memory_shortage(self, error) -> bool:
        return "ran out of memory" in str(error)

    def spare_more(self, asked, plan) -> bool:
        self.spared += 1
        return asked.auto.gpus != "1"

    def spare_no_more(self, auto, model) -> bool:
        had, self.spared = self.spared, 0
        return had > 0


@pytest.fixture
def run(monkeypatch):
    """Run with the plans that fit, and an error or a result for each; return the plans that ran, the result
    and how many plans are spared."""

    def run_all(plans: list, outcomes: list, auto: AutoConfig = ALL, spared: int = 0):
        planning = Planning(plans)
        planning.spared = spared
        monkeypatch.setattr(auto_plan, "planning", planning)
        monkeypatch.setattr(auto_plan, "_make_room", lambda auto: None)
        ran = []

        def once(plan, lines):
            ran.append(plan)
            outcome = outcomes[len(ran) - 1]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        try:
            found = auto_plan.run_planned(Asked(auto, MODEL, lambda shape: None), once)
        except (BackendError, RefusedError, ConfigError) as error:
            found = error
        return ran, found, planning.spared

    return run_all


def test_the_next_plan_runs_where_memory_runs_out(run):
    assert run(PLANS, [RAN_OUT, "latent"]) == (PLANS[:2], "latent", 1)


def test_the_error_is_told_where_no_plan_needs_less(run):
    """And all plans may be chosen again: something else may have taken the memory for a while."""
    assert run(PLANS[:2], [RAN_OUT, RAN_OUT]) == (PLANS[:2], RAN_OUT, 0)


def test_a_request_that_leaves_less_than_was_spared_is_tried(run):
    """What was learned of a smaller one is forgotten."""
    assert run(PLANS, ["latent"], spared=3) == (PLANS[:1], "latent", 0)


def test_a_request_that_never_fitted_is_refused(run):
    ran, found, _ = run([], [])
    assert isinstance(found, ConfigError) and not ran


def test_it_ends_after_some_plans(run):
    """The next run goes on from there."""
    assert run(PLANS * 2, [RAN_OUT] * 6) == (PLANS, RAN_OUT, auto_plan.ATTEMPTS)


@pytest.mark.parametrize("error", [BackendError("rank 1 was killed by SIGKILL"), RefusedError("steps is 0")])
def test_other_errors_are_told_at_once(run, error):
    assert run(PLANS, [error]) == (PLANS[:1], error, 0)


def test_one_gpu_has_no_other_plan(run):
    ran, found, _ = run(PLANS, [RAN_OUT], AutoConfig(gpus="1"))
    assert (ran, found) == (PLANS[:1], RAN_OUT)


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's memory")
def test_a_rank_that_runs_out_is_named_and_the_next_run_is_whole(comfy):
    """No plan leaves more of the host's memory free than a tiny model's first, so the error comes."""
    auto = {"gpus": "2", "device": "cpu", "warmup_steps": 3}  # a loader that no other test has
    assert error_of(comfy.run(graph(config=auto))) <= 1e-4
    rank = max(ranks_of(comfy))
    pages = int(Path(f"/proc/{rank}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (16 << 20)
    resource.prlimit(rank, resource.RLIMIT_AS, (limit, limit))
    large = graph(config=auto)
    large["6"] = {
        "class_type": "EmptySD3LatentImage",
        "inputs": {"width": 1536, "height": 1536, "batch_size": 1},
    }
    large["4"]["inputs"]["latent_image"] = ["6", 0]
    del large["5"]
    large["7"] = {"class_type": "PreviewAny", "inputs": {"source": ["4", 0]}}
    run = comfy.run(large)
    assert run.status == "error" and "ran out of memory in the middle of a request" in run.message
    assert error_of(comfy.run(graph(config=auto))) <= 1e-4
    assert rank not in ranks_of(comfy)


def test_a_load_whose_estimate_does_not_fit_takes_the_leanest_plan(monkeypatch):
    """And its samplers plan again by the method that was asked for."""

    def run_planned(asked, run):
        if asked.auto.method != MEMORY:
            raise ConfigError("does not fit")
        return run(PLANS[0], ("why",))

    monkeypatch.setattr(load_parallel_dit, "run_planned", run_planned)
    monkeypatch.setattr(load_parallel_dit.handle, "load", lambda plan, choice, **planned: (plan, planned))
    plan, planned = load_parallel_dit._load(ALL, MODEL, {}, "1")
    assert plan == PLANS[0] and planned["auto"] is ALL
    assert planned["lines"] == ("why", load_parallel_dit.LEANEST)
