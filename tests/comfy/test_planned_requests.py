"""What the planner is told of a request when a sampler runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from published import FLUX

with comfy_modules():
    from parallel_dit.backend.client.auto import measurements
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.planner.machine import Machine, RequestEstimate
    from parallel_dit.backend.protocol import Described, Sample
    from parallel_dit.backend.quantization.lora_bytes import LoraBytes
    from parallel_dit.nodes.host import auto_plan, one_rank, plan_report
    from parallel_dit.nodes.host.handle import ParallelDiT

SHAPE = replace(FLUX, patch=(1, 2, 2))
LATENT = torch.zeros(1, 16, 128, 128)
PROMPT = torch.zeros(1, 7, 64)


def handle(auto) -> SimpleNamespace:
    """A handle of a model with ComfyUI's usual latents."""
    format = SimpleNamespace(latent_channels=16, spacial_downscale_ratio=8)
    model = SimpleNamespace(latent_format=format)
    found = {"patcher": SimpleNamespace(model=model), "wanted": (), "others": (), "config": ParallelConfig()}
    return SimpleNamespace(auto=auto, choice=None, **found)


@pytest.mark.parametrize("static_text", [False, True])
@pytest.mark.parametrize("references", [0, 1, 3])
def test_reference_images_are_counted(monkeypatch, references, static_text):
    """Qwen-Image-Edit, Kontext and FLUX.2 have 2 to 4 times the tokens of the latent alone. Qwen-Image 2.1
    has them among the text, whose keys and values it keeps."""
    given = [LATENT] * references
    shape = replace(SHAPE, static_text=static_text)
    monkeypatch.setattr(auto_plan, "run_planned", lambda auto, choice, request, others, run: request(shape))
    monkeypatch.setattr(auto_plan, "lora_bytes", lambda dit: (LoraBytes(), LoraBytes()))
    positive = [[PROMPT, {"reference_latents": given} if given else {}]]
    latent = {"samples": LATENT.clone()}
    asked = auto_plan.sample_planned(handle(AutoConfig()), 4, 1.0, "euler", positive, latent, repr)
    of_text = 4096 * references if static_text else 0
    assert asked.image_tokens + of_text == (1 + references) * 4096 and asked.text_tokens == 7 + of_text
    assert asked.latent_tokens == 4096

    monkeypatch.setattr(one_rank.planning, "projected", lambda config, model, request: request(shape))
    tensors = {"noise": LATENT, "sigmas": torch.linspace(1, 0, 5), "positive.c_crossattn": PROMPT}
    tensors |= {f"positive.ref_latents.{i}": each for i, each in enumerate(given)}
    sample = Sample("m", "euler", 1.0, 1, tensors=tensors)
    digest = f"{references} references, {static_text}"
    assert one_rank.projected_speedup(digest, handle(None), sample) == asked


def test_a_speedup_is_estimated_once_for_a_request(monkeypatch):
    """The latent waits for it; what is not known yet is asked again."""
    answers = [None, 1.5, 2.5]
    monkeypatch.setattr(one_rank, "_projected", {})
    monkeypatch.setattr(one_rank.planning, "projected", lambda config, model, request: answers.pop(0))
    sample = Sample("m", "euler", 1.0, 1)
    asked = ["first", "first", "first", "second", "second"]
    times = [one_rank.projected_speedup(digest, handle(None), sample) for digest in asked]
    assert times == [None, 1.5, 1.5, 2.5, 2.5]


@pytest.mark.parametrize(
    "plan, is_another",
    [
        (ParallelConfig(), False),
        (ParallelConfig(warmup_steps=2), False),
        (ParallelConfig(ulysses_degree=2), True),
        (ParallelConfig(tensor_parallel_degree=2), True),
    ],
)
def test_another_plan_than_the_loaders_is_said(monkeypatch, plan, is_another):
    """Its text, of least memory where the graph told no size, stays on the page."""
    monkeypatch.setattr(auto_plan, "with_plan", lambda dit, config, lines: lines)
    monkeypatch.setattr(
        auto_plan, "run_planned", lambda *asked: asked[-1](plan, ("auto: it.", "next: another."))
    )
    latent = {"samples": LATENT.clone()}
    first, *further = auto_plan.sample_planned(
        handle(AutoConfig()), 4, 1.0, "euler", [[PROMPT, {}]], latent, list
    )
    assert first == "auto: it." + auto_plan.REPLANNED * is_another and further == ["next: another."]


@pytest.fixture
def staged(monkeypatch) -> ParallelDiT:
    """A handle of two stages set by hand, on a machine of slow links that was measured before."""
    machine = Machine("slow", 1e14, 1e14, 1e12, p2p=5e8, all_to_all={2: 5e8}, on_host=True)
    monkeypatch.setattr(measurements, "known", lambda choice, device, indices: (SHAPE, machine))
    monkeypatch.setattr(auto_plan, "lora_bytes", lambda dit: (LoraBytes(), LoraBytes()))
    config = ParallelConfig(pipefusion_degree=2, device="cpu")
    return ParallelDiT(config, None, SimpleNamespace(model="m"), handle(None).patcher)


def sampled_with(
    dit: ParallelDiT, steps: int, cfg: float = 1.0, prompt: torch.Tensor = PROMPT
) -> tuple[int, tuple[str, ...]]:
    """The number of patches of a sampler on ``dit``, and the lines of its handle."""
    positive = [[prompt, {}]]
    latent = {"samples": LATENT.clone()}
    used = auto_plan.sample_planned(dit, steps, cfg, "euler", positive, latent, lambda each: each)
    return used.config.patches, used.lines


def test_a_sampler_chooses_the_patches_that_are_left_open(staged):
    """For its own steps and prompts, and says so; a number that is set stays."""
    count, lines = sampled_with(staged, 20)
    assert count == 3 and lines[0].startswith("num_pipeline_patch 0: 3 patches, about ")
    assert sampled_with(staged, 4) == (2, ("num_pipeline_patch 0: 2 patches",))
    assert sampled_with(staged, 20, cfg=4.0)[0] == 2
    assert sampled_with(staged, 1) == (2, ())  # of warm-up, which has no patches
    by_hand = replace(staged, config=replace(staged.config, num_pipeline_patch=4))
    assert sampled_with(by_hand, 20) == (4, ())


def test_a_sampler_reads_no_prompt_where_nothing_is_known(staged, monkeypatch):
    """Ranks refuse what is wrong with it, in words."""
    monkeypatch.setattr(measurements, "known", lambda choice, device, indices: None)
    assert sampled_with(staged, 20, prompt=PROMPT[0, 0])[0] == 2


@pytest.mark.parametrize("steps, drained, count", [(20, False, 3), (4, False, 2), (20, True, 2)])
def test_the_loader_describes_the_patches_of_the_graphs_steps(staged, monkeypatch, steps, drained, count):
    """Under Parallel Model each is a call of its own, which bears no further patch."""
    asked = []
    rank = {"text": "", "device_bytes": 2, "weight_bytes": 1, "host_bytes": 0, "bytes_per_step": {}}

    def describe(message, check):
        asked.append(message)
        return Described([rank, rank])

    backend = SimpleNamespace(describe=describe)
    monkeypatch.setattr(plan_report, "ensure_loaded", lambda dit: (backend, None))
    monkeypatch.setattr(plan_report, "assumed_latent", lambda dit: ("1024 x 1024", [16, 128, 128]))
    told = RequestEstimate(steps=steps, drained=drained)
    line = plan_report.request_line(staged, 1, lambda shape: told)
    assert [message.num_pipeline_patch or 2 for message in asked] == [count]
    assert line.endswith(f"{count} patches (reuse)")
