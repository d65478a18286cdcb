"""Arithmetic of blocks in fewer passes: what diffusers' gives in float32, no less precise in 16 bits, and
fewer bytes."""

import copy
import sys
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import pytest
import torch
from diffusers.models import embeddings, normalization
from diffusers.models.transformers import (
    transformer_flux,
    transformer_krea2,
    transformer_qwenimage,
    transformer_qwenimage21,
)
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from moved_bytes import MovedBytes
from tolerance import assert_same_bits
from torch import nn

from backend.models import FAMILIES
from backend.models.common import adaptive_norms, fewer_passes, ltx2_blocks
from backend.models.common.wan_blocks import SelfAttention, WanBlock

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS, HEADS, SIZE = 33, 2, 32
WIDTH = HEADS * SIZE


def number(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (tokens, D), of which two neighbours are equal."""
    angles = number(TOKENS, SIZE // 2)
    return angles.cos().repeat_interleave(2, 1), angles.sin().repeat_interleave(2, 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sequence_dim", [1, 2])
def test_rotary_embedding_has_the_bits_of_diffusers(dtype, sequence_dim):
    x = number(32, TOKENS, HEADS, SIZE).to(dtype)
    x = x if sequence_dim == 1 else x.transpose(1, 2)
    before = x.clone()
    with MovedBytes() as ours:
        out = fewer_passes.apply_rotary_emb(x, tables(), sequence_dim=sequence_dim)
    with MovedBytes() as theirs:
        want = embeddings.apply_rotary_emb(x, tables(), sequence_dim=sequence_dim)
    assert torch.allclose(out, want, rtol=1e-6, atol=1e-6) and x.equal(before)
    assert ours.bytes < 0.6 * theirs.bytes


def test_rotary_embedding_of_halves_stays_diffusers_own():
    x = number(2, TOKENS, HEADS, SIZE)
    with fewer_passes.rotary():
        out = embeddings.apply_rotary_emb(x, tables(), use_real_unbind_dim=-2, sequence_dim=1)
    assert out.equal(fewer_passes.THEIRS(x, tables(), use_real_unbind_dim=-2, sequence_dim=1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", [embeddings, transformer_qwenimage, transformer_qwenimage21])
def test_graphs_multiply_no_complex_numbers(module, dtype):
    """Those of Lumina 2, Qwen-Image and Qwen-Image 2.1: a compiler would fuse nothing with them."""
    is_lumina = module is embeddings
    name = "apply_rotary_emb" if is_lumina else "apply_rotary_emb_qwen"
    angles = torch.polar(torch.ones(TOKENS, SIZE // 2), number(TOKENS, SIZE // 2))
    x, angles = number(1, TOKENS, HEADS, SIZE).to(dtype), angles[None] if is_lumina else angles
    want, graphs = getattr(module, name)(x, angles, use_real=False), []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    with fewer_passes.rotary():
        turn = torch.compile(getattr(module, name), fullgraph=True, backend=keep)
        out = turn(x, angles, use_real=False)
    assert torch.allclose(out.float(), want.float(), rtol=1e-6, atol=1e-6 if dtype == torch.float32 else 1e-2)
    values = [node.meta["example_value"] for node in graphs[0].graph.nodes if "example_value" in node.meta]
    made = [value for value in values if isinstance(value, torch.Tensor) and value.is_complex()]
    assert len(values) > 5 and all(value.numel() == angles.numel() for value in made)


def test_blocks_turn_by_it_while_a_request_runs_alone():
    with pytest.raises(ZeroDivisionError), fewer_passes.rotary():
        for module in (embeddings, transformer_flux):
            assert module.apply_rotary_emb is fewer_passes.apply_rotary_emb
        raise ZeroDivisionError
    assert embeddings.apply_rotary_emb is transformer_flux.apply_rotary_emb is fewer_passes.THEIRS


def modules_of_families() -> set[str]:
    """diffusers' modules of all transformers, and those of which a file of a family takes a name."""
    found = {getattr(diffusers, family.transformer).__module__ for family in FAMILIES.values()}
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("backend.models.")]
    for value in (value for module in ours for value in vars(module).values()):
        found.add(getattr(value, "__module__", None) or getattr(value, "__name__", ""))
    return {name for name in found if name.startswith("diffusers.models.transformers.")}


def test_no_module_of_a_family_turns_by_diffusers_function():
    callers = {
        name
        for name in modules_of_families()
        if getattr(sys.modules.get(name), "apply_rotary_emb", None) is fewer_passes.THEIRS
    }
    assert len(callers) > 4 and callers <= {*fewer_passes.CALLERS}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_krea_2s_attention_turns_in_fewer_bytes(dtype):
    torch.manual_seed(0)
    attention = transformer_krea2.Krea2Attention(WIDTH, HEADS, 1).eval().requires_grad_(False).to(dtype)
    x = number(2, TOKENS, WIDTH).to(dtype)
    with MovedBytes() as theirs:
        want = attention(x, image_rotary_emb=tables())
    with fewer_passes.rotary(), MovedBytes() as ours:
        out = attention(x, image_rotary_emb=tables())
    assert torch.allclose(out, want, rtol=1e-6, atol=1e-6)
    turned = x.numel() * (1 + 1 / HEADS)
    assert theirs.bytes - ours.bytes > 10 * turned


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_rms_norm_is_rounded_once(dtype, affine):
    norm = normalization.RMSNorm(SIZE, 1e-6, elementwise_affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
    exact = norm(number(TOKENS, SIZE).to(dtype).float())
    norm, x = norm.to(dtype), number(TOKENS, SIZE).to(dtype)
    theirs = (norm(x).float() - exact).norm()
    norm.__class__ = fewer_passes.RMSNorm
    out = norm(x)
    assert out.dtype == dtype and (out.float() - exact).norm() <= theirs + 1e-5 * exact.norm()


def test_a_norm_with_a_weight_of_another_type_is_diffusers_own():
    norm = normalization.RMSNorm(SIZE, 1e-6)
    x = number(TOKENS, SIZE).bfloat16()
    want = norm(x)
    norm.__class__ = fewer_passes.RMSNorm
    assert norm(x).equal(want) and want.dtype == torch.float32


#: Of queries, of a norm across heads, of more tokens than are normed at a time, and of none.
NORMED = [(1, TOKENS, HEADS, SIZE), (2, TOKENS, 7 * SIZE), (1, 700, 4, 128), (1, 0, HEADS, SIZE)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NORMED, ids=str)
def test_torchs_rms_norm_keeps_its_bits(shape, dtype, affine):
    """Also of what is not contiguous, and of numbers whose squares are none."""
    norm = nn.RMSNorm(shape[-1], 1e-6, elementwise_affine=affine).to(dtype)
    if affine:
        nn.init.normal_(norm.weight)
    x = number(*shape).to(dtype)
    x[:, :2] *= 1e30 if dtype == torch.float32 else 1
    every = (x, x.transpose(1, -2), x[..., ::2].repeat_interleave(2, -1), x.float())
    with torch.inference_mode():
        wanted = [norm(each) for each in every]
        norm.__class__ = fewer_passes.TorchRMSNorm
        for each, want in zip(every, wanted, strict=True):
            before = each.clone()
            assert_same_bits(norm(each), want)
            assert_same_bits(each, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_rms_norm_is_its_own_on_cpus_in_float32_alone(dtype, monkeypatch):
    """While a request runs: others, and graphs, have torch's operator."""
    theirs, called = torch.rms_norm, []
    monkeypatch.setattr(torch, "rms_norm", lambda *args: called.append(args) or theirs(*args))
    norm, x = nn.RMSNorm(SIZE, 1e-6).to(dtype), number(2, TOKENS, HEADS, SIZE).to(dtype)
    norm.__class__ = fewer_passes.TorchRMSNorm
    with torch.inference_mode():
        norm(x)
    assert len(called) == (dtype != torch.float32)
    norm(x).sum().backward()
    assert norm.weight.grad is not None


def wan_block() -> WanTransformerBlock:
    torch.manual_seed(0)
    return WanTransformerBlock(WIDTH, 2 * WIDTH, HEADS, cross_attn_norm=True).eval().requires_grad_(False)


def arguments(dtype: torch.dtype, *tokens: int, batch: int = 2) -> tuple:
    rotary = tuple(table[None, :, None] for table in tables())
    given = number(batch, TOKENS, WIDTH).to(dtype), number(batch, 7, WIDTH, seed=1).to(dtype)
    return *given, number(batch, *tokens, 6, WIDTH, seed=2).to(dtype), rotary


def ours(block: WanTransformerBlock) -> nn.Module:
    block = copy.deepcopy(block)
    block.__class__ = WanBlock
    block.attn1.set_processor(SelfAttention())
    return block


def by_levels(block: nn.Module, x, text, temb, rotary) -> tuple:
    """What a block of ours is given for modulation of each token (B, tokens, 6, D): a level for each."""
    vars(block)["levels"] = SimpleNamespace(modulation=temb.flatten(0, 1))
    return (
        x,
        text,
        torch.arange(temb.shape[:2].numel()).view(*temb.shape[:2], 1, 1).expand(-1, -1, 6, -1),
        rotary,
    )


@pytest.mark.parametrize("keeps_norms", [True, False], ids=["norms in float32", "norms too"])
@pytest.mark.parametrize("tokens", [(), (TOKENS,)], ids=["a timestep", "a timestep a token"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wans_block_is_no_less_precise(dtype, batch, tokens, keeps_norms):
    block = wan_block()
    given = arguments(dtype, *tokens, batch=batch)
    exact = block(*(x.float() if isinstance(x, torch.Tensor) else x for x in given))
    block.to(dtype)
    if keeps_norms:
        block.norm2.float()
    theirs = (block(*given).float() - exact).norm()
    block = ours(block)
    out = block(*(by_levels(block, *given) if tokens else given))
    assert out.dtype == dtype
    assert (out.float() - exact).norm() <= 1.1 * theirs + 1e-6 * exact.norm()


class Passes(nn.Module):
    """Stands for attention or MLP: what is left is norms, modulation and residuals."""

    def forward(self, x, *others):
        return x

    def set_processor(self, processor):
        pass


@pytest.mark.parametrize("batch, bytes", [(1, 30), (2, 38)])
def test_wans_block_moves_a_fourth_of_the_bytes(batch, bytes):
    block = wan_block().bfloat16()
    block.attn1, block.attn2, block.ffn = Passes(), Passes(), Passes()
    moved = []
    for each in (ours(block), block):
        x, text, temb, rotary = arguments(torch.bfloat16, batch=batch)
        x = x.repeat(1, 100, 1)
        with MovedBytes() as found:
            each(x, text, temb, rotary)
        moved.append(found.bytes / x.numel())
    assert moved == pytest.approx([bytes, 166], abs=2)


ADAPTIVE = {
    "before attention": (normalization.AdaLayerNormZero, (WIDTH,), "emb"),
    "of parallel blocks": (normalization.AdaLayerNormZeroSingle, (WIDTH,), "emb"),
    "the last": (normalization.AdaLayerNormContinuous, (WIDTH, WIDTH, False), "conditioning_embedding"),
}


@pytest.mark.parametrize("batch, bytes", [(1, 4), (2, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls, sizes, name", ADAPTIVE.values(), ids=list(ADAPTIVE))
def test_a_norm_and_its_modulation_are_one_pass(cls, sizes, name, dtype, batch, bytes):
    """Where all tokens are of one sample; others have their own scales."""
    torch.manual_seed(0)
    norm = cls(*sizes).requires_grad_(False)
    x, embedding = number(batch, 100 * TOKENS, WIDTH).to(dtype), number(batch, WIDTH, seed=1).to(dtype)
    exact, *_ = listed(norm(x.float(), **{name: embedding.float()}))
    norm.to(dtype)
    theirs, *others = listed(norm(x, **{name: embedding}))
    norm.__class__ = adaptive_norms.CLASSES[cls]
    with MovedBytes() as moved:
        out, *ours = listed(norm(x, **{name: embedding}))
    assert out.dtype == dtype and all(a.equal(b) for a, b in zip(ours, others, strict=True))
    assert (out.float() - exact).norm() <= 1.1 * (theirs.float() - exact).norm() + 1e-6 * exact.norm()
    assert moved.bytes / x.numel() == pytest.approx(bytes * dtype.itemsize / 2, rel=0.1)


def listed(found) -> tuple[torch.Tensor, ...]:
    """What a norm returns: a tensor, or several."""
    return found if isinstance(found, tuple) else (found,)


def test_audio_hears_video_by_three_tensors_of_each_tokens_level():
    """Scale, shift and gate; the block's other two of the same table are made before."""
    tokens, levels = torch.tensor([[0, 1, 1]]), torch.randn(2, 4 * WIDTH)
    block = SimpleNamespace(
        video=torch.randn(1, 3, WIDTH),
        audio=torch.randn(1, 3, WIDTH),
        times=((levels, tokens), (levels[:, :WIDTH], tokens)),
        video_a2v_cross_attn_scale_shift_table=torch.randn(5, WIDTH),
        get_mod_params=ltx2_blocks.LTX2Block.get_mod_params,
        audio_to_video_norm=torch.nn.Identity(),
    )
    table, heard = block.video_a2v_cross_attn_scale_shift_table, block.video + 0
    _, _, scale, shift = (table[:4] + levels.unflatten(1, (4, -1)))[tokens].unbind(2)
    gate = (table[4] + levels[:, :WIDTH])[tokens]
    want = (heard + gate * block.audio) * (1 + scale) + shift
    with torch.profiler.profile() as found:
        _, kwargs = ltx2_blocks.LTX2Block.listen(cast(Any, block), None, (), {})
    assert torch.allclose(kwargs["encoder_hidden_states"], want, atol=1e-5)
    assert sum(event.name == "aten::index" for event in found.events() or ()) == 3
