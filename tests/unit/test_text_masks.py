"""What a mask of the prompt hides, of every family that reads one: its tokens change nothing."""

from dataclasses import replace

import pytest
import torch
from ranks.family_runs import MASKED, request
from tiny import relative, write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.models import FAMILIES
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

MASK = "attention_mask"
READING = ("hunyuan-video", "qwen-image", "ltxv", "sana", "ideogram4")
#: Other families that take a mask -> where it is compared.
ELSEWHERE = {
    "hunyuan-video-1.5": "test_text_order.py",
    "hunyuan-image-2.1": "test_text_order.py",
    "qwen-image-2.1": "test_qwen_image21_masks.py",
    "ltx2": "refused, but of finished prompts (test_variant_refusals.py)",
}


def test_every_family_that_reads_a_mask_is_there():
    known = {name: family.conditioning for name, family in FAMILIES.items()}
    found = {name for name, each in known.items() if MASK in each.accepted and MASK not in each.ignored}
    assert found == {*READING, *ELSEWHERE}


@pytest.mark.parametrize("family", READING)
def test_hidden_tokens_change_nothing(family, tmp_path):
    """And without the mask they do."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "default")
    sample = replace(request(f"{family}+mask", engine.config), model="tiny")

    def latent(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        changed = replace(sample, tensors=tensors)
        engine.check_sample(changed)
        return engine.sample(changed, Callbacks())[0]

    others = dict(sample.tensors)
    for name in filter(lambda name: name.endswith(".c_crossattn"), sample.tensors):
        others[name] = sample.tensors[name].clone()
        others[name][:, -MASKED:] += 1.0
    shown = {name: value for name, value in others.items() if not name.endswith(MASK)}
    found = latent(sample.tensors)
    assert relative(latent(others), found) < 1e-6
    assert relative(latent(shown), found) > 1e-4
