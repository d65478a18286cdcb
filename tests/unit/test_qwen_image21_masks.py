"""The attention mask of Qwen-Image 2.1's given tokens: one for all blocks, gone with the request."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_same_bits
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.models import qwen_image21
from backend.models.latent_tokens import TokenGrid
from backend.parallel import compiled_blocks, mesh, request_caches
from backend.parallel.pipeline_stage import model_output
from backend.sampling.step_loop import Callbacks


@torch.inference_mode()
@pytest.mark.parametrize("padded", [False, True])
def test_all_blocks_share_a_mask_that_goes_with_the_request(padded, tmp_path, monkeypatch):
    """Of three references it has 164 MB, on the GPU that ComfyUI's VAE needs next."""
    case = "qwen-image21-edit"
    checkpoint = open_checkpoint(str(write(tmp_path / f"{case}.safetensors", case)))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    sample = request(case)
    names = ("c_crossattn", "ref_latents.0", "image_slots")
    cond = {name: sample.tensors[f"negative.{name}"] for name in names}
    if padded:
        cond["attention_mask"] = torch.ones(1, cond["c_crossattn"].shape[1])
    latent = sample.tensors["noise"]
    grid = TokenGrid(tuple(latent.shape[1:]), (1, 1, 1))
    attend = F.scaled_dot_product_attention
    masks = []

    def seen(query, *rest, attn_mask):
        if attn_mask is not None and attn_mask.shape[2] > 1:
            masks.append((weakref.ref(attn_mask), id(attn_mask)))
        return attend(query, *rest, attn_mask=attn_mask)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    family = checkpoint.family
    arguments = family.io.arguments(checkpoint.config, grid, latent, torch.tensor(0.7), cond)
    model_output(checkpoint.transformer, family, arguments)
    del arguments  # of a request
    gc.collect()
    assert len(masks) == checkpoint.block_count > 1
    assert len({identity for _, identity in masks}) == 1
    assert not any(found() is not None for found, _ in masks)


def test_given_tokens_see_what_is_before_them_their_own_image_and_no_padding():
    picture, latent = (SimpleNamespace(tokens=count) for count in (2, 9))
    parts = [(0, 2, picture), (2, 3, latent)]
    rows = ["10000", "11000", "11110", "11110", "11111"]
    want = torch.tensor([[letter == "1" for letter in row] for row in rows])
    assert_same_bits(qwen_image21.before(parts, None, torch.device("cpu"))[0, 0], want)
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    visible = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]], dtype=torch.bool)
    assert_same_bits(qwen_image21.before(parts, mask, torch.device("cpu"))[:, 0], want & visible[:, None])


def test_compiled_blocks_share_the_mask_too(tmp_path, monkeypatch):
    """Each made one of its own, and the request held all of them: 32 of 164 MB."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    case = "qwen-image21-edit"
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / f"{case}.safetensors", case)), "default")
    found = set()
    needed = request_caches.Masks.needed

    def noted(masks, mask, where):
        found.update([id(mask)] if mask is not None and mask.shape[2] > 1 else [])
        return needed(masks, mask, where)

    monkeypatch.setattr(request_caches.Masks, "needed", noted)
    sample = replace(request(case), model="tiny", compile="blocks")
    engine.sample(sample, Callbacks())
    assert len(found) == 2  # of both prompts
