"""Attention with fewer keys and values than queries: what diffusers computes, with no copy of a head."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_krea2 import Krea2Attention
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock
from tiny import write_checkpoint

from backend.loading.recognition import open_checkpoint
from backend.models import krea2, lumina2

TOKENS, HEADS, GROUPS, SIZE = 9, 8, 2, 16
WIDTH = HEADS * SIZE


def of_krea2():
    attention = Krea2Attention(WIDTH, HEADS, GROUPS)
    angles = torch.randn(TOKENS, SIZE // 2).repeat_interleave(2, 1)
    return attention, krea2.Processor(), {"image_rotary_emb": (angles.cos(), angles.sin())}, None


def of_lumina2():
    attention = Lumina2TransformerBlock(WIDTH, HEADS, GROUPS, 8, 1.0, 1e-5).attn
    angles = torch.randn(1, TOKENS, SIZE // 2).expand(2, -1, -1)
    mask = torch.arange(TOKENS).expand(2, -1) < TOKENS - 2
    return attention, lumina2.Processor(), {"image_rotary_emb": torch.polar(angles**0, angles)}, mask


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
    assert all(out.equal(want) for out, want in zip(found, wanted, strict=True))
    assert heads == [(HEADS, GROUPS, GROUPS)] * len(masks)


@pytest.mark.parametrize("family", ["krea2", "lumina2"])
def test_every_attention_of_a_model_is(family, tmp_path):
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "tiny.safetensors", family)))
    modules = [each for each in checkpoint.transformer.modules() if hasattr(each, "to_q")]
    ours = {"krea2": krea2, "lumina2": lumina2}[family].Processor
    assert len(modules) >= 4 and {type(each.processor) for each in modules} == {ours}
