"""Blocks of two streams in fewer passes: what diffusers' gives in float32, about as precise in 16 bits, and
fewer bytes."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_flux2 import (
    Flux2SingleTransformerBlock,
    Flux2TransformerBlock,
)
from diffusers.models.transformers.transformer_krea2 import Krea2TransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_z_image import ADALN_EMBED_DIM, ZImageTransformerBlock
from moved_bytes import MovedBytes
from tolerance import assert_same_bits
from torch import Tensor, nn

from backend.loading.checkpoint import IN_FEWER_PASSES
from backend.models import krea2
from backend.models.common.joint_blocks import cat_text_image, cat_with_gelu
from backend.models.common.replaced_classes import replace_classes
from backend.models.flux2 import REPLACED
from backend.runtime import opaque_ops

IMAGE, TEXT, HEADS, SIZE = 33, 7, 2, 32
WIDTH = HEADS * SIZE
BLOCKS = {
    "flux": FluxTransformerBlock,
    "flux, single": FluxSingleTransformerBlock,
    "qwen": QwenImageTransformerBlock,
    "flux2": Flux2TransformerBlock,
    "flux2, single": Flux2SingleTransformerBlock,
    "z-image": ZImageTransformerBlock,
    "krea2": Krea2TransformerBlock,
}
#: What blocks are made of.
SIZES = {
    "z-image": (0, WIDTH, HEADS, HEADS, 1e-5, True),
    "krea2": (WIDTH, 2 * WIDTH, HEADS, HEADS // 2, 1e-5),
}


def number(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    block = BLOCKS[name](*SIZES.get(name, (WIDTH, HEADS, SIZE))).eval().requires_grad_(False)
    for parameter in block.parameters():
        if parameter.ndim == 1:  # weights of norms are ones
            parameter.add_(0.1 * number(*parameter.shape))
    return block


def ours(block: nn.Module) -> nn.Module:
    block = copy.deepcopy(block)
    replace_classes(block, {**REPLACED, **krea2.REPLACED, **IN_FEWER_PASSES})
    attention: Any = getattr(block, "attn", None)
    if type(block) is krea2.Krea2Block and not isinstance(attention, Passes):
        attention.set_processor(krea2.Processor())
    assert type(block) is not type(block).__base__ and type(block).__base__ in BLOCKS.values()
    return block


def arguments(name: str, dtype: torch.dtype, batch: int, image: int = IMAGE) -> tuple:
    """Tokens of image and text, large enough for float16's clipping to matter in no place, and positions."""
    tokens = number(batch, image, WIDTH).to(dtype), number(batch, TEXT, WIDTH, seed=1).to(dtype)
    embedding, angles = number(batch, WIDTH, seed=2).to(dtype), number(image + TEXT, SIZE // 2, seed=3)
    turns = torch.polar(torch.ones_like(angles), angles)
    if name == "qwen":
        return *tokens, None, embedding, (turns[:image], turns[image:])
    if name == "z-image":
        embedding = number(batch, min(WIDTH, ADALN_EMBED_DIM), seed=2).to(dtype)
        return tokens[0], None, turns[None, :image].expand(batch, -1, -1), embedding
    angles = angles.repeat_interleave(2, 1)
    tables = angles.cos(), angles.sin()
    if name == "krea2":
        embedding = number(batch, 1, 6 * WIDTH, seed=4).to(dtype)
        return tokens[0], embedding, tuple(table[:image] for table in tables)
    if name == "flux2":
        return *tokens, *(number(batch, 6 * WIDTH, seed=each).to(dtype) for each in (4, 5)), tables
    if name == "flux2, single":
        return torch.cat(tokens, dim=1), None, number(batch, 3 * WIDTH, seed=4).to(dtype), tables
    return *tokens, embedding, tables


def in_float32(given: tuple) -> tuple:
    return tuple(x.float() if isinstance(x, Tensor) and not x.is_complex() else x for x in given)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_about_as_precise(name, dtype, batch):
    block, given = made(name), arguments(name, dtype, batch)
    exact = block(*in_float32(given))
    block.to(dtype)
    before = given[0].clone()
    theirs, found = block(*given), ours(block)(*given)
    assert given[0].equal(before)
    for want, other, out in zip(*map(listed, (exact, theirs, found)), strict=True):
        assert out.dtype == dtype and out.shape == want.shape
        assert (out.float() - want).norm() <= 1.15 * (other.float() - want).norm() + 1e-6 * want.norm()


def listed(found) -> tuple[Tensor, ...]:
    """What a block returns: one stream, or two."""
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name", ["flux", "flux, single", "qwen", "flux2", "flux2, single"])
def test_float16s_infinities_are_its_largest_numbers(name):
    """As diffusers' blocks have it; Z-Image's have no such limit."""
    block, given = made(name).half(), arguments(name, torch.float16, 1)
    for tokens in given[:2]:
        if tokens is not None:
            tokens[:] = 65504  # and what is added to it
    theirs, found = (listed(each(*given)) for each in (block, ours(block)))
    assert all(other.isinf().equal(out.isinf()) for other, out in zip(theirs, found, strict=True))
    assert any(not other.isinf().any() and (other == 65504).any() for other in theirs)


def two_timesteps(dtype: torch.dtype, batch: int, image: int = IMAGE) -> tuple[nn.Module, tuple]:
    """diffusers' block of Qwen-Image Edit 2511, whose references are at timestep 0, and what it is given."""
    torch.manual_seed(0)
    block = QwenImageTransformerBlock(WIDTH, HEADS, SIZE, zero_cond_t=True).eval().requires_grad_(False)
    tokens, text, mask, _, turns = arguments("qwen", dtype, batch, image)
    index = (torch.arange(image) > 20).int().expand(batch, -1)
    return block, (tokens, text, mask, number(2 * batch, WIDTH, seed=2).to(dtype), turns, None, index)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens_with_two_timesteps_are_about_as_precise(dtype, batch):
    block, given = two_timesteps(dtype, batch)
    exact = block(*in_float32(given))
    block.to(dtype)
    for want, other, out in zip(exact, block(*given), ours(block)(*given), strict=True):
        assert out.dtype == dtype and out.shape == want.shape
        assert (out.float() - want).norm() <= 1.15 * (other.float() - want).norm() + 1e-6 * want.norm()


def test_modulation_that_is_cached_stays_as_it_is():
    """Of files that are not Edit 2511's, whose requests may ask for two timesteps."""
    block, given = two_timesteps(torch.float32, 1)
    block, cached = ours(block), number(2, 6 * WIDTH, seed=5)
    before = cached.clone()
    block.img_mod.forward = lambda embedding: cached
    block(*given)
    assert cached.equal(before)


def test_two_timesteps_move_two_thirds_of_the_bytes():
    block, given = two_timesteps(torch.bfloat16, 1, image=100 * IMAGE)
    block.bfloat16()
    block.attn, block.img_mlp, block.txt_mlp = Passes(), Passes(), Passes()
    moved, kernels = [], []
    for each in (ours(block), block):
        with MovedBytes() as found:
            each(*given)
        moved.append(found.bytes / given[0].numel())
        kernels.append(found.kernels)
    assert moved == pytest.approx((53, 77), abs=1)
    assert kernels[0] <= 0.6 * kernels[1]


@pytest.mark.parametrize("name", ["flux", "flux, single", "qwen", "flux2", "flux2, single"])
def test_further_arguments_of_attention_are_refused(name):
    """Nothing here would read them."""
    block, given = ours(made(name)), arguments(name, torch.float32, 1)
    with pytest.raises(AssertionError, match="joint_attention_kwargs"):
        block(*given, joint_attention_kwargs={"attention_mask": torch.ones(1)})
    block(*given, joint_attention_kwargs={})


@pytest.mark.parametrize("name", ["noise_mask", "adaln_noisy", "adaln_clean"])
def test_z_image_omnis_modulation_is_refused(name):
    with pytest.raises(AssertionError, match="Omni"):
        ours(made("z-image"))(*arguments("z-image", torch.float32, 1), **{name: torch.ones(1, IMAGE)})


def test_flux2s_single_blocks_refuse_text_apart():
    block = ours(made("flux2, single"))
    joined, _, modulation, tables = arguments("flux2, single", torch.float32, 1)
    with pytest.raises(AssertionError, match="one stream"):
        block(joined[:, TEXT:], joined[:, :TEXT], modulation, tables)


class Passes(nn.Module):
    """Stands for attention and MLPs: what is left is norms, modulation and residuals."""

    def forward(self, x=None, hidden_states=None, encoder_hidden_states=None, **others):
        if x is not None:
            return x
        return hidden_states if encoder_hidden_states is None else (hidden_states, encoder_hidden_states)


#: Attention and MLPs.
PASSED = (
    "attn",
    "attention",
    "feed_forward",
    "ff",
    "ff_context",
    "img_mlp",
    "txt_mlp",
    "proj_mlp",
)


class Half(nn.Module):
    """Stands for the layer after attention and MLP."""

    def forward(self, x):
        return x[..., : x.shape[-1] // 2]


@pytest.mark.parametrize(
    "name, bytes",
    [
        ("flux", (20, 44)),
        ("qwen", (20, 44)),
        ("flux, single", (22, 38)),
        ("flux2", (20, 44)),
        ("flux2, single", (10, 22)),
        ("krea2", (28, 76)),
    ],
)
def test_a_block_moves_fewer_bytes(name, bytes, monkeypatch):
    """With RMS norms of one kernel, as on GPUs."""
    monkeypatch.setattr(nn.functional, "rms_norm", lambda x, *others, **named: x * 1)
    block = made(name).bfloat16()
    for child in PASSED:
        if hasattr(block, child):
            setattr(block, child, Passes())
    if hasattr(block, "proj_out"):
        block.proj_out = Half()
    moved = []
    for each in (ours(block), block):
        given = arguments(name, torch.bfloat16, 1, image=100 * IMAGE)
        with MovedBytes() as found:
            each(*given)
        moved.append(found.bytes / given[0].numel())
    assert moved == pytest.approx(bytes, abs=1)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("waits", [True, False], ids=["attention waits for others", "attention fails"])
def test_attention_has_the_mlp_multiply_meanwhile(waits, overlaps, monkeypatch):
    """Once, for the same bits; what it did not come to is forgotten. Before other attention, as in compiled
    blocks: what layers send comes in one order on all ranks."""
    block, given = ours(made("flux, single")), arguments("flux, single", torch.float32, 1)
    wanted, attend, calls = block(*given), nn.functional.scaled_dot_product_attention, []

    monkeypatch.setattr(opaque_ops.RUNNING, "attention", SimpleNamespace(overlaps=overlaps))

    def attention(*args, **kwargs):
        assert len(calls) == 1 - overlaps
        if not waits:
            raise ZeroDivisionError
        for _ in range(2):
            opaque_ops.run_meanwhile()
            assert len(calls) == 1
        return attend(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attention)
    block.proj_mlp.register_forward_hook(lambda *_: calls.append(1))
    if waits:
        for found, want in zip(block(*given), wanted, strict=True):
            assert_same_bits(found, want)
    else:
        with pytest.raises(ZeroDivisionError):
            block(*given)
    assert len(calls) == (waits or not overlaps) and opaque_ops.RUNNING.meanwhile is None


@pytest.mark.parametrize("batch", [1, 2])
def test_neighbouring_tokens_are_not_copied(batch):
    """As a block returns them; others are, whatever their strides."""
    both = number(batch, TEXT + IMAGE, WIDTH)
    text, image = both[:, :TEXT], both[:, TEXT:]
    found = cat_text_image(text, image)
    assert found.equal(both) and found.data_ptr() == both.data_ptr()
    wider, other = number(batch, TEXT + IMAGE + 1, WIDTH), number(batch, IMAGE, WIDTH, seed=1)
    pairs = [
        (text, other),
        (image, text),
        (text.clone(), image.clone()),
        (text[:, :-1], image),
        (wider[:, :TEXT], wider[:, TEXT:-1]),
        (text[:, :0], image),
    ]
    for first, second in pairs:
        assert cat_text_image(first, second).equal(torch.cat([first, second], dim=1))
    for no_text in (text[:, :0], image.new_empty(batch, 0, WIDTH)):
        assert cat_text_image(no_text, image) is image


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_an_activation_returns_is_written_once(dtype):
    """Values of the MLP next to those of attention, with the bits of both operators."""
    attended, made = number(2, IMAGE, WIDTH).to(dtype), number(2, IMAGE, 4 * WIDTH, seed=1).to(dtype)
    with MovedBytes() as theirs:
        wanted = torch.cat([attended, nn.functional.gelu(made, approximate="tanh")], dim=2)
    with MovedBytes() as ours:
        found = cat_with_gelu(attended, made, "tanh")
    assert_same_bits(found, wanted)
    assert ours.bytes < 0.8 * theirs.bytes
