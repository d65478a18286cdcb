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
    from parallel_dit.backend.planner.machine import Machine
    from parallel_dit.backend.protocol import Described, RefusedError, Sample
    from parallel_dit.backend.quantization.lora_bytes import LoraBytes
    from parallel_dit.nodes.graph.latent_sizes import LatentSize
    from parallel_dit.nodes.host import auto_plan, one_rank, plan_report
    from parallel_dit.nodes.host.graph_requests import GraphRequest
    from parallel_dit.nodes.host.handle import ParallelDiT

SHAPE = replace(FLUX, patch=(1, 2, 2))
LATENT = torch.zeros(1, 16, 128, 128)
PROMPT = torch.zeros(1, 7, 64)


def handle(auto) -> SimpleNamespace:
    """A handle of a model with ComfyUI's usual latents."""
    format = SimpleNamespace(latent_channels=16, latent_dimensions=2, spacial_downscale_ratio=8)
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
    monkeypatch.setattr(auto_plan, "run_planned", lambda asked, run: asked.request(shape))
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


@pytest.mark.parametrize("steps, drained, count", [(20, False, 3), (4, False, 2), (20, True, 1)])
def test_the_loader_describes_the_patches_of_the_graphs_steps(staged, monkeypatch, steps, drained, count):
    """Under Parallel Model each is a call of its own, which has one patch."""
    asked = []
    rank = {"text": "", "device_bytes": 2, "weight_bytes": 1, "host_bytes": 0, "bytes_per_step": {}}

    def describe(message, check):
        asked.append(message)
        return Described([rank, rank])

    backend = SimpleNamespace(describe=describe)
    monkeypatch.setattr(plan_report, "ensure_loaded", lambda dit: (backend, None))
    monkeypatch.setattr(plan_report, "family_named", lambda loaded: SimpleNamespace(latents=(), images=False))
    size = LatentSize(1024, 1024, 1)
    request = GraphRequest(size, (1, 128, 128), steps, 1, cfg=1.0, drained=drained, has_size=True)
    (line,) = plan_report.request_lines(staged, [request, request])
    assert [message.num_pipeline_patch or 2 for message in asked] == [count]
    told = f"{steps} steps{' of a call each' * drained} (assumed), cfg 1.0"
    assert line.startswith(f"1024 x 1024, {told}: about ")
    assert line.endswith(" · 1 patch" if drained else f"{count} patches (reuse)")
    assert [message.drained for message in asked] == [drained]


#: A request of which a graph tells everything.
REQUEST = GraphRequest(LatentSize(1328, 1328, 1), (1, 166, 166), 4, 1, cfg=1.0, has_size=True, has_steps=True)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({}, "1328 x 1328, 4 steps, cfg 1.0"),
        ({"has_size": False}, "1328 x 1328 (assumed), 4 steps, cfg 1.0"),
        ({"steps": 1, "has_steps": False}, "1328 x 1328, 1 step (assumed), cfg 1.0"),
        ({"cfg": None, "prompts": 2}, "1328 x 1328, 4 steps, two prompts (assumed)"),
        ({"cfg": 4.5, "prompts": 2}, "1328 x 1328, 4 steps, cfg 4.5"),
        ({"prompts": 2}, "1328 x 1328, 4 steps, cfg 1.0 (two prompts)"),  # of a solver with cfg_pp
        (
            {"size": LatentSize(832, 480, 81, batch=2)},
            "2 times 81 frames of 832 x 480, 4 steps, cfg 1.0",
        ),
        (
            {"references": ((1, 128, 128),)},
            "1328 x 1328 with 1 reference image, 4 steps, cfg 1.0",
        ),
    ],
    ids=str,
)
def test_a_line_says_for_which_request_its_numbers_stand(monkeypatch, changes, says):
    monkeypatch.setattr(plan_report, "family_named", lambda loaded: SimpleNamespace(latents=()))
    dit = SimpleNamespace(patcher=handle(None).patcher, loaded=None)
    assert plan_report.request_text(replace(REQUEST, **changes), dit) == says


def test_the_plans_line_counts_further_samplers(monkeypatch):
    monkeypatch.setattr(plan_report, "request_text", lambda request, dit: f"{request.steps} steps")
    requests = [replace(REQUEST, steps=steps) for steps in (9, 4, 3)]
    lines = [plan_report.planned_line(requests[:count], handle(None)) for count in (1, 2, 3)]
    assert lines == [
        "for 9 steps:",
        "for 9 steps, and 1 further sampler:",
        "for 9 steps, and 2 further samplers:",
    ]


def test_what_two_cfg_branches_cannot_run_is_not_described(staged, monkeypatch):
    """Auto loads again for it; what the graph does not tell is taken for what they can."""
    two = replace(staged, config=ParallelConfig(cfg_degree=2, device="cpu"))
    monkeypatch.setattr(plan_report, "_request_line", lambda dit, request: request)
    known = replace(REQUEST, cfg=4.0, prompts=2)
    unknown = replace(REQUEST, cfg=None, prompts=1)
    lines = plan_report.request_lines(two, [REQUEST, known, unknown])
    assert lines == [known, replace(unknown, prompts=2)]
    assert plan_report.request_lines(staged, [REQUEST]) == [REQUEST]
    call = replace(REQUEST, drained=True)
    assert plan_report.request_lines(two, [call]) == [call]


def test_a_size_that_ranks_refuse_is_said_and_the_load_goes_on(staged, monkeypatch):
    """Nodes that are unknown here may make another one."""

    def describe(message, check):
        assert (message.batch, message.references) == (3, [[1, 64, 64]])
        raise RefusedError("more patches than tokens")

    backend = SimpleNamespace(describe=describe)
    monkeypatch.setattr(plan_report, "ensure_loaded", lambda dit: (backend, None))
    monkeypatch.setattr(plan_report, "family_named", lambda loaded: SimpleNamespace(latents=(), images=False))
    several = replace(REQUEST, size=replace(REQUEST.size, batch=3), references=((1, 64, 64),))
    (line,) = plan_report.request_lines(staged, [several])
    assert line.startswith("3 times 1328 x 1328") and line.endswith(": more patches than tokens")
