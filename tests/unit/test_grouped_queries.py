"""Attention with fewer keys and values than queries: what diffusers computes, with no copy of a head."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_krea2 import Krea2Attention
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock
from moved_bytes import MovedBytes
from tiny import write_checkpoint

from backend.loading.recognition import open_checkpoint
from backend.models import krea2, lumina2
from backend.models.common import grouped_attention as grouped
from backend.models.common.fewer_passes import apply_rotary_emb
from backend.models.common.replaced_classes import replace_classes
from backend.parallel.attention import attention_kernels
from backend.runtime import torch_version

TOKENS, HEADS, GROUPS, SIZE = 9, 8, 2, 16
WIDTH = HEADS * SIZE


def of_krea2():
    attention = Krea2Attention(WIDTH, HEADS, GROUPS)
    replace_classes(attention, krea2.REPLACED)
    angles = torch.randn(TOKENS, SIZE // 2).repeat_interleave(2, 1)
    return attention, krea2.Processor(), {"image_rotary_emb": (angles.cos(), angles.sin())}, None


def of_lumina2():
    attention = Lumina2TransformerBlock(WIDTH, HEADS, GROUPS, 8, 1.0, 1e-5).attn
    angles = torch.randn(1, TOKENS, SIZE // 2).expand(2, -1, -1)
    mask = torch.arange(TOKENS).expand(2, -1) < TOKENS - 2
    return attention, lumina2.Processor(), {"image_rotary_emb": torch.polar(angles**0, angles)}, mask


@pytest.mark.parametrize("groups", [HEADS, GROUPS])
def test_torchs_own_attention_is_given_whole_heads(groups, monkeypatch):
    """Where no attention of a request takes its place: few of its kernels take groups, and the one that is
    left on older GPUs, or with a mask, has all pairs of tokens in memory."""
    heads = []

    def torchs(query, key, value, *_, enable_gqa=False, **__):
        heads.append((key.shape[1], value.shape[1], enable_gqa))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", torchs)
    monkeypatch.setattr(grouped, "SDPA", torchs)
    query, key = torch.ones(1, HEADS, 2, 4), torch.ones(1, groups, 2, 4)
    grouped.grouped_attention(query, key, key)
    assert heads == [(HEADS, HEADS, False)]


@pytest.mark.parametrize("version, heads", [("2.8.0", HEADS), ("2.9.1", GROUPS)])
def test_a_cpu_kernel_that_knows_no_groups_is_given_whole_heads(version, heads, monkeypatch):
    """It would read keys by the number of the query's head."""
    given = []
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def kernel(q, k, v, *others, **named):
        given.append((k.shape[1], v.shape[1]))
        return flash(q, *(x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v)), *others, **named)

    monkeypatch.setattr(torch_version, "torch_version", lambda: version)
    aten = SimpleNamespace(_scaled_dot_product_flash_attention_for_cpu=kernel)
    monkeypatch.setattr(attention_kernels, "aten", aten)
    q, k = torch.randn(1, HEADS, 3, 8), torch.randn(1, GROUPS, 5, 8)
    attention_kernels.attend_lse("auto", q, k, k)
    assert given == [(heads, heads)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("made", [of_krea2, of_lumina2])
def test_attention_is_given_groups(made, dtype, monkeypatch):
    torch.manual_seed(0)
    attention, processor, given, mask = made()
    attention = attention.eval().requires_grad_(False).to(dtype)
    x = torch.randn(2, TOKENS, WIDTH).to(dtype)
    given |= {} if made is of_krea2 else {"encoder_hidden_states": x}
    masks = (None, mask)[: 1 if mask is None else 2]
    wanted = [attention(x, attention_mask=mask, **given) for mask in masks]
    sdpa, heads = F.scaled_dot_product_attention, []

    def attend(query, key, value, *others, **named):
        heads.append((query.shape[1], key.shape[1], value.shape[1]))
        return sdpa(query, key, value, *others, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    attention.set_processor(processor)
    found = [attention(x, attention_mask=mask, **given) for mask in masks]
    close = 1e-6 if dtype == torch.float32 else 0.01  # Krea 2 rounds between norm and rotation no more
    assert all(torch.allclose(out, want, atol=close) for out, want in zip(found, wanted, strict=True))
    assert heads == [(HEADS, GROUPS, GROUPS)] * len(masks)


def test_queries_are_normed_and_turned_in_one_float32_copy():
    """Rounded once, and 12 bytes a value fewer."""
    norm, x = (
        krea2.Norm(SIZE),
        torch.randn(2, TOKENS, HEADS, SIZE, generator=torch.Generator().manual_seed(0)),
    )
    angles = torch.linspace(0, 3, TOKENS * SIZE // 2).view(TOKENS, -1).repeat_interleave(2, 1)
    tables = angles.cos(), angles.sin()
    exact = apply_rotary_emb(norm(x.bfloat16().float()), tables, sequence_dim=1)
    errors, moved = [], []
    for turn in (krea2.normed_and_turned, lambda n, x, t: apply_rotary_emb(n(x), t, sequence_dim=1)):
        with torch.no_grad(), MovedBytes() as found:
            out = turn(norm, x.bfloat16(), tables)
        errors.append((out - exact).norm())
        moved.append(found.bytes / x.numel())
    assert errors[0] < 0.9 * errors[1] and moved[1] - moved[0] == pytest.approx(12, abs=1)


@pytest.mark.parametrize("family", ["krea2", "lumina2"])
def test_every_attention_of_a_model_is(family, tmp_path):
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "tiny.safetensors", family)))
    modules = [each for each in checkpoint.transformer.modules() if hasattr(each, "to_q")]
    ours = {"krea2": krea2, "lumina2": lumina2}[family].Processor
    assert len(modules) >= 4 and {type(each.processor) for each in modules} == {ours}
