"""The number of patches where num_pipeline_patch is 0: as many as stages, or one more."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from published import A100, FLUX, H100, L40, RTX4090, WAN

from backend.client import pool
from backend.client.auto import measurements, planning
from backend.client.auto.model_choice import ModelChoice
from backend.client.auto.open_patches import with_patches
from backend.client.auto.planning import known_question
from backend.config import ParallelConfig
from backend.planner import patches
from backend.planner.candidates import MIN_STEPS
from backend.planner.cost import Cost
from backend.planner.drift import FEW_STEPS
from backend.planner.machine import OVERHEAD, Machine, RequestEstimate
from backend.planner.model_shape import ModelShape
from backend.planner.question import Question
from backend.quantization import dequantized_cache

MODEL = ModelChoice("model.safetensors")
TWO = ParallelConfig(pipefusion_degree=2)
FOUR = ParallelConfig(pipefusion_degree=4)
IMAGE = RequestEstimate(4096, 512, 20, 1)
VIDEO = RequestEstimate(32760, 512, 28, 1)


def linked(gigabytes: float) -> Machine:
    """Eight cards with so many GB/s between two of them."""
    rate = gigabytes * 1e9
    links = {"p2p": rate, "all_to_all": {2: rate, 4: rate, 8: rate}}
    return replace(RTX4090, **links, memory=(48 * 10**9,) * 8)


def timed(by_patches: dict[int, tuple[float, float]], request: RequestEstimate = IMAGE) -> Any:
    """A question whose options have these (seconds, score)."""

    def option(plan: ParallelConfig) -> SimpleNamespace:
        seconds, score = by_patches[plan.num_pipeline_patch]
        return SimpleNamespace(seconds=seconds, score=score)

    return SimpleNamespace(shape=FLUX, request=request, option=option)


@pytest.fixture
def measured(monkeypatch):
    """Have the model and these cards' rates be known; a test may change them."""
    found = SimpleNamespace(known=(FLUX, linked(2)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(measurements, "usual_memory", lambda device, indices: (22 * 10**9,) * len(indices))
    monkeypatch.setattr(measurements, "known", lambda choice, device, indices: found.known)
    return found


def chosen(config: ParallelConfig, request: RequestEstimate = IMAGE) -> int:
    return with_patches(config, MODEL, lambda shape: request)[0].patches


@pytest.mark.parametrize(
    "seconds, score, found",
    [
        (9.7, 9.7, (3, 0.03)),
        (9.79, 9.79, (3, 0.021)),
        (9.81, 9.81, (2, 0.0)),  # within the error of the estimate
        (10.2, 10.2, (2, 0.0)),
        (9.7, 10.3, (2, 0.0)),  # faster, and not worth its drift
    ],
)
def test_one_more_has_to_save_two_per_cent(seconds, score, found):
    count, saved = patches.filling(timed({2: (10.0, 10.0), 3: (seconds, score)}), TWO)
    assert (count, pytest.approx(saved)) == found


@pytest.mark.parametrize(
    "request_, count",
    [
        (IMAGE, 3),
        (replace(IMAGE, steps=MIN_STEPS), 3),
        (replace(IMAGE, steps=MIN_STEPS - 1), 2),
        (replace(IMAGE, image_tokens=96, text_tokens=3 * 128 - 96), 3),
        (replace(IMAGE, image_tokens=96, text_tokens=3 * 128 - 97), 2),  # too short to keep a GPU busy
        (replace(IMAGE, image_tokens=4099, reference_tokens=4096), 3),
        (replace(IMAGE, image_tokens=4098, reference_tokens=4096), 2),  # the latent has two tokens to cut
        (replace(IMAGE, drained=True), 2),
    ],
)
def test_what_bears_no_further_patch_has_as_many_as_stages(request_, count):
    assert patches.filling(timed({2: (10.0, 10.0), 3: (5.0, 5.0)}, request_), TWO)[0] == count


def test_stages_that_the_user_divides_keep_their_number():
    """The projection is of even ones."""
    faster = timed({2: (10.0, 10.0), 3: (5.0, 5.0)})
    for split, count in (("", 3), ("24,33", 2), (" ", 3)):
        assert patches.filling(faster, replace(TWO, attn_layer_num_for_pp=split))[0] == count


def test_few_steps_of_many_patches_would_drift_too_far():
    faster = {4: (10.0, 10.0), 5: (5.0, 5.0)}
    for steps, count in ((FEW_STEPS - 1, 4), (FEW_STEPS, 5)):
        assert patches.filling(timed(faster, replace(IMAGE, steps=steps)), FOUR)[0] == count


def test_sequence_ranks_need_a_token_of_each_patch():
    config = replace(TWO, ulysses_degree=4)
    faster = {2: (10.0, 10.0), 3: (5.0, 5.0)}
    for tokens, count in ((12, 3), (11, 2)):
        request = replace(IMAGE, image_tokens=tokens, text_tokens=4096)
        assert patches.filling(timed(faster, request), config)[0] == count


@pytest.mark.parametrize(
    "config, shape, request_, gigabytes, count",
    [
        (TWO, FLUX, IMAGE, 2, 3),
        (TWO, FLUX, IMAGE, 11, 2),  # the link of two 4090
        (TWO, FLUX, replace(IMAGE, prompts=2), 2, 2),  # the other prompt fills the pipeline
        (replace(TWO, cfg_degree=2), FLUX, replace(IMAGE, prompts=2), 2, 3),
        (FOUR, FLUX, IMAGE, 2, 4),  # 6 % of the time for 2.6 dB
        (FOUR, FLUX, replace(IMAGE, steps=28), 2, 5),
        (FOUR, WAN, VIDEO, 2, 5),
        (FOUR, WAN, VIDEO, 11, 4),
        (replace(TWO, warmup_steps=20), FLUX, IMAGE, 2, 2),  # no step has patches
    ],
)
def test_slow_links_and_one_prompt_want_one_more(config, shape, request_, gigabytes, count):
    question = Question(shape, request_, linked(gigabytes), config.world_size)
    assert patches.filling(question, config)[0] == count


def test_the_line_says_the_number_and_why(measured):
    config, lines = with_patches(TWO, MODEL, lambda shape: IMAGE)
    assert config == replace(TWO, num_pipeline_patch=3)
    assert lines == ("num_pipeline_patch 0: 3 patches, about 3% less time than with 2 (projected)",)
    config, lines = with_patches(TWO, MODEL, lambda shape: replace(IMAGE, prompts=2))
    assert (config, lines) == (TWO, ("num_pipeline_patch 0: 2 patches",))


def test_the_page_has_the_projections():
    """docs/degrees.md, of the machines of docs/scaling.md."""
    host = {"launch": Machine.launch, "overhead": OVERHEAD}
    cards = {
        "RTX 4090, PCIe": RTX4090,
        "RTX 4090, 2 GB/s": linked(2),
        "L40, PCIe": L40,
        "A100, NVLink": A100,
        "H100, NVLink": H100,
    }
    rows = []
    for name, machine in cards.items():
        cells = []
        for shape, request in ((FLUX, IMAGE), (WAN, replace(VIDEO, steps=20))):
            cells.append(
                ", ".join(change(shape, request, replace(machine, **host), each) for each in (2, 4, 8))
            )
        rows.append(f"| {name} | {' | '.join(cells)} |")
    page = (Path(__file__).parents[2] / "docs" / "degrees.md").read_text()
    assert "\n".join(rows) in page


def change(shape: ModelShape, request: RequestEstimate, machine: Machine, stages: int) -> str:
    """What one patch more than stages changes of a request's time."""
    plans = [ParallelConfig(pipefusion_degree=stages, num_pipeline_patch=stages + more) for more in (0, 1)]
    before, after = (Cost(shape, plan, machine, request=request).total for plan in plans)
    return f"{100 * (after / before - 1):+.1f} %"


@pytest.mark.parametrize("config", [replace(TWO, num_pipeline_patch=count) for count in (1, 2, 4)])
def test_a_number_that_is_set_is_taken(measured, config):
    assert with_patches(config, MODEL, lambda shape: IMAGE) == (config, ())


def test_one_stage_has_nothing_to_fill(measured):
    config = ParallelConfig(ulysses_degree=2)
    assert with_patches(config, MODEL, lambda shape: IMAGE) == (config, ())


def test_who_does_not_know_the_machine_takes_as_many_as_stages(measured):
    assert chosen(replace(TWO, address="unix:/run/b.sock")) == 2  # its ranks are elsewhere
    assert chosen(TWO) == 3
    measured.known = None
    assert chosen(TWO) == 2


def test_equal_requests_get_equal_numbers(measured, monkeypatch):
    """Whatever runs and is free meanwhile: another number would be another latent."""
    monkeypatch.setattr(measurements, "free_memory", lambda *_: pytest.fail("it changes"))
    monkeypatch.setattr(pool, "launched", lambda: pytest.fail("there is one from the first queue on"))
    first = with_patches(TWO, MODEL, lambda shape: IMAGE)
    assert all(with_patches(TWO, MODEL, lambda shape: IMAGE) == first for _ in range(3))
    assert chosen(replace(TWO, num_pipeline_patch=3)) == 3


def test_equal_requests_get_equal_numbers_after_ranks_ran_out_of_memory(measured, monkeypatch):
    """Weights stay dequantized no more from then on, so that a patch costs more on the same ranks."""
    blocks = (
        replace(each, weights=each.weights // 2, unpacked=each.weights, dequantizing=2 * each.weights)
        for each in FLUX.blocks
    )
    quantized = replace(FLUX, is_quantized=True, blocks=tuple(blocks))
    measured.known = (quantized, linked(1.5))
    monkeypatch.setattr(measurements, "usual_memory", lambda device, indices: (48 * 10**9,) * len(indices))
    monkeypatch.setattr(dequantized_cache, "_have_run_out", False)
    found = [known_question(TWO, MODEL, lambda shape: IMAGE)]
    first = with_patches(TWO, MODEL, lambda shape: IMAGE)
    dequantized_cache.stop_caching_dequantized()
    assert with_patches(TWO, MODEL, lambda shape: IMAGE) == first
    found.append(known_question(TWO, MODEL, lambda shape: IMAGE))
    assert [patches.filling(each, TWO)[0] for each in found if each] == [3, 2]  # it would matter


def test_equal_requests_get_equal_numbers_where_comfyui_uses_a_gpu_of_the_ranks(measured, monkeypatch):
    """Which is known once auto has planned in this process: known_question says it, and it does not count."""
    asked = []
    monkeypatch.setattr(patches, "filling", lambda question, config: asked.append(question) or (2, 0.0))
    for shared in (None, 0):
        monkeypatch.setattr(planning._history, "shared", shared)
        with_patches(replace(TWO, device="cuda"), MODEL, lambda shape: IMAGE)
    assert asked[0] == asked[1]


def test_the_chosen_number_is_another_setting_of_the_same_ranks(measured):
    """Nothing starts again, and no weights are read."""
    config, _ = with_patches(TWO, MODEL, lambda shape: IMAGE)
    assert config.topology() == TWO.topology() and config.placement == TWO.placement
    assert config.per_request["num_pipeline_patch"] == config.patches == 3
    assert patches.are_open(TWO) and not patches.are_open(config)
