"""What the side panel's benchmark tries after its best trial was written into Parallel Config."""

from dataclasses import replace

import pytest
import torch
from comfy_modules import comfy_modules
from published import FLUX, L40

with comfy_modules():
    from parallel_dit.backend.client import pool
    from parallel_dit.backend.client.auto import measurements, planning
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.client.auto.plan_history import PlanHistory
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.planner.auto_config import AutoConfig, config_of
    from parallel_dit.backend.planner.machine import RequestEstimate
    from parallel_dit.nodes.panel import benchmark_prompts

GB = 1_000_000_000
GPUS = 2


@pytest.fixture
def alike(monkeypatch):
    """Two GPUs that are alike; ComfyUI computes on the first."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(measurements, "model_shape", lambda *_: FLUX)
    monkeypatch.setattr(measurements, "machine_rates", lambda *_: replace(L40, speeds=(1.0,) * GPUS))
    monkeypatch.setattr(measurements, "free_memory", lambda *_: (40 * GB,) * GPUS)
    monkeypatch.setattr(measurements, "unified_among", lambda *_: ())
    monkeypatch.setattr(measurements, "load_rate", lambda *_: 0.0)
    monkeypatch.setattr(pool, "launched", lambda: None)
    monkeypatch.setattr(planning, "_history", PlanHistory())
    planning.note_shared(0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_best_trial_leaves_all_gpus_open(alike, ranks):
    """gpus "1", GPU number 1 to degrees of 1, is how many to auto: only one was tried again, and it was
    ComfyUI's own."""
    auto = AutoConfig()
    asked = planning.Asked(auto, ModelChoice("a"), lambda shape: RequestEstimate(4096, 512, 20, 2))
    question, devices = planning.question_of(asked)
    plan = ParallelConfig(ulysses_degree=ranks)
    inputs = benchmark_prompts.inputs_of(auto, plan, question, devices)
    best = config_of(GPUS, **inputs)
    assert isinstance(best, ParallelConfig) and best.gpus == inputs["gpus"] == ""
    assert planning.devices_of(benchmark_prompts._auto(best)) == [0, 1]


def test_gpus_that_are_listed_are_tried_again(alike):
    """Those of several ranks, and as many as there are shares."""
    for config, gpus in (
        (ParallelConfig(ulysses_degree=2, gpus="1,0"), "1,0"),
        (ParallelConfig(ulysses_degree=2, shares="70,30"), "2"),
        (ParallelConfig(), ""),
        (ParallelConfig(gpus="1"), ""),
        (ParallelConfig(device="cpu"), "1"),
    ):
        assert benchmark_prompts._auto(config).gpus == gpus
