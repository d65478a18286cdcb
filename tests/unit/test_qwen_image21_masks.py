"""The attention mask of Qwen-Image 2.1's given tokens: one for all blocks, gone with the request."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from families import model_call as calls
from tolerance import assert_same_bits
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.models import qwen_image21
from backend.models.common.request_arguments import RequestArguments
from backend.models.latent_tokens import TokenGrid
from backend.parallel import compiled_blocks, mesh, request_caches
from backend.parallel.pipeline_stage import model_output
from backend.sampling import model_call
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
    arguments = family.io.arguments(
        checkpoint.config, grid, family.io.of_latent(latent, grid), torch.tensor(0.7), cond
    )
    model_output(checkpoint.transformer, arguments)
    del arguments  # of a request
    gc.collect()
    assert len(masks) == checkpoint.block_count > 1
    assert len({identity for _, identity in masks}) == 1
    assert not any(found() is not None for found, _ in masks)


def test_given_tokens_see_what_is_before_them_their_own_image_and_no_padding():
    image, latent = (SimpleNamespace(tokens=count) for count in (2, 9))
    parts = [(0, 2, image), (2, 3, latent)]
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


@pytest.mark.parametrize(
    "rows, made", [(None, 1), ([[1, 1, 1, 0]] * 2, 1), ([[1, 1, 1, 0], [1, 1, 0, 0]], 2)]
)
def test_samples_and_prompts_share_masks(rows, made):
    """A pipeline takes samples one by one, then all at once: all spans of all prompts have one mask."""
    grid = TokenGrid((64, 8, 10), (1, 1, 1))
    text, padding = torch.zeros(2, 4, 8), {} if rows is None else {"attention_mask": torch.tensor(rows)}
    shared: dict = {}
    spans = [slice(0, 1), slice(1, 2), slice(0, 2)]
    held = set()
    for _ in ("positive", "negative"):
        whole = {"c_crossattn": text, "ref_latents.0": torch.zeros(2, 64, 4, 8), **padding}
        for span in spans:
            own = {name: value[span] for name, value in whole.items()}
            parts = qwen_image21.image_pieces(grid, own)
            cond = RequestArguments(own, whole, span, shared)
            seen = qwen_image21.request_mask(parts, cond, text.device)
            held.add(seen.untyped_storage().data_ptr())
            alone = qwen_image21.before(parts, own.get("attention_mask"), text.device)
            assert_same_bits(seen.expand(len(alone), -1, -1, -1), alone)
    [mask] = shared.values()
    assert len(held) == 1 and len(mask) == made


@pytest.mark.parametrize("padded", [False, True])
def test_samples_of_a_call_read_one_mask(padded, tmp_path, monkeypatch):
    """Above 8192 tokens each runs by itself, and is what it is in a call of its own."""
    monkeypatch.setattr(model_call, "samples_at_once", lambda tokens: 1)
    case = "qwen-image21-edit"
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    engine.load("tiny", str(write(tmp_path / f"{case}.safetensors", case)), "default")
    call = calls(request(case), engine.models["tiny"].family.name, 2)
    if padded:
        mask = torch.ones(2, call.tensors["cond.c_crossattn"].shape[1])
        mask[0, -3:] = mask[1, -1:] = 0
        call = replace(call, tensors=call.tensors | {"cond.attention_mask": mask})
    found = []
    needed = request_caches.Masks.needed

    def noted(masks, mask, where):
        found.extend([mask] if mask is not None and mask.shape[2] > 1 else [])
        return needed(masks, mask, where)

    monkeypatch.setattr(request_caches.Masks, "needed", noted)
    both, _ = engine.forward(call)
    assert len({mask.untyped_storage().data_ptr() for mask in found}) == 1
    for row in range(2):
        own = {
            name: value[row : row + 1] if len(value) == 2 else value for name, value in call.tensors.items()
        }
        assert_same_bits(engine.forward(replace(call, tensors=own))[0], both[row : row + 1])
