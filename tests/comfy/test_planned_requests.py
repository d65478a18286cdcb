"""What the planner is told of a request when a sampler runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from published import FLUX

with comfy_modules():
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.protocol import Sample
    from parallel_dit.backend.quantization.lora_bytes import LoraBytes
    from parallel_dit.nodes.host import auto_plan, one_rank

SHAPE = replace(FLUX, patch=(1, 2, 2))
LATENT = torch.zeros(1, 16, 128, 128)
PROMPT = torch.zeros(1, 7, 64)


def handle(auto) -> SimpleNamespace:
    """A handle of a model with ComfyUI's usual latents."""
    format = SimpleNamespace(latent_channels=16, spacial_downscale_ratio=8)
    model = SimpleNamespace(latent_format=format)
    found = {"patcher": SimpleNamespace(model=model), "wanted": (), "others": (), "config": ParallelConfig()}
    return SimpleNamespace(auto=auto, choice=None, **found)


@pytest.mark.parametrize("references", [0, 1, 3])
def test_reference_images_are_counted(monkeypatch, references):
    """Qwen-Image-Edit, Kontext and FLUX.2 have 2 to 4 times the tokens of the latent alone."""
    given = [LATENT] * references
    monkeypatch.setattr(auto_plan, "run_planned", lambda auto, choice, request, others, run: request(SHAPE))
    monkeypatch.setattr(auto_plan, "lora_bytes", lambda dit: (LoraBytes(), LoraBytes()))
    positive = [[PROMPT, {"reference_latents": given} if given else {}]]
    latent = {"samples": LATENT.clone()}
    asked = auto_plan.sample_planned(handle(AutoConfig()), 4, 1.0, "euler", positive, latent, repr)
    assert asked.image_tokens == (1 + references) * 4096 and asked.text_tokens == 7
    assert asked.latent_tokens == 4096

    monkeypatch.setattr(one_rank.planning, "projected", lambda config, model, request: request(SHAPE))
    tensors = {"noise": LATENT, "sigmas": torch.linspace(1, 0, 5), "positive.c_crossattn": PROMPT}
    tensors |= {f"positive.ref_latents.{i}": each for i, each in enumerate(given)}
    sample = Sample("m", "euler", 1.0, 1, tensors=tensors)
    assert one_rank.projected_speedup(f"{references} references", handle(None), sample) == asked
