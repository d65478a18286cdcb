"""The lines under the nodes."""

from dataclasses import replace

import pack  # noqa: F401  # makes parallel_dit importable
import pytest
from parallel_dit.nodes.host import report

from backend.config import ParallelConfig
from backend.protocol import Described

RANK = {"rank": 0, "weight_bytes": int(12.3 * 2**30), "blocks": (0, 29)}


def test_a_line_a_rank():
    ranks = [RANK, {**RANK, "rank": 1, "blocks": (29, 57)}]
    lines = report.rank_lines(ranks, [0, 3], [24 * 2**30] * 2)
    assert lines == ["GPU 0 · 12.3 of 24 GiB · blocks 0-28", "GPU 3 · 12.3 of 24 GiB · blocks 29-56"]


def test_ranks_without_gpus():
    (line,) = report.rank_lines([{"rank": 1, "weight_bytes": 9_400_000, "blocks": (0, 0)}], [], [])
    assert line == "rank 1 · 9.4 MB · all blocks"


def test_layers_of_one_format_are_one_line():
    """With each reason. Of others, and of those that multiply otherwise, there is a line each."""

    def kind(layers: int, multiplication: str, format: str = "fp8") -> dict:
        return {"layers": layers, "format": format, "multiplication": multiplication}

    native, no_kernel = "native: fp8 on this GPU", "weight only: this CPU has no kernel for it"
    rows = "weight only: its rows have scales of their own"
    assert report.quantized_lines([kind(28, no_kernel), kind(20, rows), kind(3, native)]) == [
        f"48 fp8 layers, {no_kernel} (28), its rows have scales of their own (20)",
        f"3 fp8 layers, {native}",
    ]
    alike = [kind(28, no_kernel), kind(3, no_kernel, "int8")]
    assert report.quantized_lines(alike) == [f"28 fp8 layers, {no_kernel}", f"3 int8 layers, {no_kernel}"]


def lora_info(factors: int, *stages: int, **changes) -> dict:
    """Loaded.info with a LoRA of so many bytes, on ranks of these stages, the last of which is the larger."""
    ranks = [{"stage": stage, "weight_bytes": 40 + 20 * (stage == max(stages))} for stage in stages]
    info = {"notes": ["LoRA on 1 layer"], "lora_bytes": [factors, 0, 0], "ranks": ranks, "device": "cuda"}
    return info | changes


def test_a_lora_next_to_quantized_weights_says_what_it_takes():
    """The last one alone, on the rank that has most of it; one that is summed into weights takes nothing."""
    gb = 10**9
    tp, pp = ParallelConfig(tensor_parallel_degree=2), ParallelConfig(pipefusion_degree=2)
    line = report.lora_line(lora_info(gb, 0), lora_info(3 * gb, 0), ParallelConfig())
    assert line == "LoRA on 1 layer · +2.0 GB on each GPU"
    on_cpu = lora_info(4 * gb, 0, 0, device="cpu")
    assert report.lora_line(lora_info(0, 0, 0), on_cpu, tp) == "LoRA on 1 layer · +3.0 GB on each rank"
    uneven = replace(tp, shares="3,1")
    line = report.lora_line(lora_info(0, 0, 0), lora_info(4 * gb, 0, 0), uneven)
    assert line == "LoRA on 1 layer · at most +3.5 GB on each GPU"
    line = report.lora_line(lora_info(0, 0, 1), lora_info(gb // 2, 0, 1), pp)
    assert line == "LoRA on 1 layer · at most +300.0 MB on each GPU"
    assert report.lora_line(lora_info(0, 0), lora_info(0, 0), ParallelConfig()) == "LoRA on 1 layer"


def test_one_line_for_the_plan():
    rank = {"device_bytes": 5_000_000_000, "weight_bytes": 4_000_000_000, "host_bytes": 0}
    ranks = [{**rank, "bytes_per_step": {"ulysses": 30_000_000, "cfg": 5_000_000}}]
    config = ParallelConfig(pipefusion_degree=2)
    line = report.plan_line(config, "1024 x 1024", Described(ranks))
    assert line == "1024 x 1024: about 1.0 GB more · sends 35.0 MB a step · 2 patches (reuse)"
    line = report.plan_line(replace(config, wire="fp8"), "1024 x 1024", Described(ranks))
    assert "· sends 35.0 MB a step (wire fp8: not exact) ·" in line


def test_shares_are_counted():
    rank = {"device_bytes": 5_000_000_000, "weight_bytes": 4_000_000_000, "host_bytes": 0, "samples": 1}
    ranks = [
        {**rank, "bytes_per_step": {}, "patches": [(128, 2048)], "heads": 16, "blocks": (0, 57)},
        {**rank, "bytes_per_step": {}, "patches": [(0, 1024)], "heads": 8, "blocks": (0, 57)},
    ]
    config = ParallelConfig(ulysses_degree=2, shares="2,1")
    line = report.plan_line(config, "1024 x 1024", Described(ranks))
    assert line.endswith("sends nothing · tokens 2176 / 1024 · heads 16 / 8")


@pytest.mark.parametrize(
    "ranks, one, projected, line",
    [
        (2, 1.8, 1.5, "10 steps in 10.0 s · 1.00 s/step · 2 GPUs · 1.8x one GPU"),
        (2, None, 1.5, "10 steps in 10.0 s · 1.00 s/step · 2 GPUs · about 1.5x one GPU (projected)"),
        (2, None, None, "10 steps in 10.0 s · 1.00 s/step · 2 GPUs"),
        (1, 1.0, 1.0, "10 steps in 10.0 s · 1.00 s/step · 1 GPU"),
    ],
)
def test_a_run_is_compared_with_one_rank_where_that_is_known(ranks, one, projected, line):
    config = ParallelConfig(ulysses_degree=ranks)
    assert report.run_lines(config, 10, 10.0, "cuda", one, projected) == [line]


@pytest.mark.parametrize(
    "one, projected, is_auto, says",
    [
        (0.2, None, True, "set gpus to 1, or make larger"),
        (0.2, None, False, "set the degrees to 1, or make larger"),
        (None, 0.94, False, "set the degrees to 1, if the model fits there, or make larger"),
        (0.96, 0.5, False, None),
    ],
)
def test_a_run_that_one_rank_does_faster_says_what_to_do(one, projected, is_auto, says):
    config = ParallelConfig(ulysses_degree=2)
    _, *further = report.run_lines(config, 10, 10.0, "cpu", one, projected, is_auto)
    assert further == ([f"Slower than one rank here: {says} images or videos."] if says else [])
    idle = replace(config, pipefusion_degree=2, warmup_steps=10)
    assert [line.split(":")[0] for line in report.run_lines(idle, 10, 10.0, "cpu", one, projected)[1:]] == [
        "PipeFusion had no effect"
    ]


@pytest.mark.parametrize("steps, idle", [(4, True), (5, False)])
def test_steps_within_the_warm_up_are_named(steps, idle):
    config = ParallelConfig(pipefusion_degree=2, warmup_steps=4)
    assert [line.split(":")[0] for line in report.idle_pipeline(config, steps)] == (
        ["PipeFusion had no effect"] * idle
    )
    assert not report.idle_pipeline(ParallelConfig(), steps)
