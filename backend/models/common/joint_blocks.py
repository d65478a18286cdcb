"""Blocks of Flux.1, Qwen-Image and Z-Image in fewer passes over activations (fewer_passes.py): a norm and its
modulation are one where all tokens are of one sample, a gate and its residual one. Where no rank has text, as
in PipeFusion's later patches, nothing of it is called. Compiled blocks keep diffusers' form. Arguments that
no family gives are refused: further ones of attention (joint_attention_kwargs), Z-Image's mask of noise
(Omni's)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_flux, transformer_qwenimage, transformer_z_image
from torch import Tensor, nn

from ...runtime.opaque_ops import Meanwhile
from . import references, token_mixing
from .fewer_passes import adapted, gated, modulated, rms_scaled

#: Why blocks refuse what these forwards would not read.
NO_MORE = "no family gives attention further arguments (joint_attention_kwargs)"


class FluxBlock(transformer_flux.FluxTransformerBlock):
    """A block of two streams; its norms before attention are modulated by themselves (adaptive_norms.py)."""

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        image_rotary_emb: Any = None,
        joint_attention_kwargs=None,
    ):
        assert not joint_attention_kwargs, NO_MORE
        if torch.compiler.is_compiling():
            streams = super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb)
            return all_within_range(*streams)
        text = encoder_hidden_states
        of_text: list[Tensor] = []
        image, gate, *of_image = self.norm1(hidden_states, emb=temb)
        if token_mixing.has_text():
            change, text_gate, *of_text = self.norm1_context(text, emb=temb)
            image, change = self.attn(
                hidden_states=image, encoder_hidden_states=change, image_rotary_emb=image_rotary_emb
            )
            text = gated(text, change, text_gate[:, None])
            del change
        else:
            # as fewer_passes.rotary has replaced it in diffusers' module
            function = transformer_flux.apply_rotary_emb  # pyright: ignore[reportPrivateImportUsage]
            turn = partial(function, freqs_cis=image_rotary_emb, sequence_dim=1)
            image = _attended(self.attn, image, self.attn.head_dim, turn)
        image = gated(hidden_states, image, gate[:, None])  # attention's output is gone before the MLP
        image = _mlp(image, self.norm2, self.ff, *of_image)  # first, as by the graph of a rank that compiles
        if of_text:
            text = within_range(_mlp(text, self.norm2_context, self.ff_context, *of_text))
        return text, within_range(image)


class FluxSingleBlock(transformer_flux.FluxSingleTransformerBlock):
    """A block whose attention and MLP have one input."""

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        image_rotary_emb=None,
        joint_attention_kwargs=None,
    ):
        assert not joint_attention_kwargs, NO_MORE
        if torch.compiler.is_compiling():
            streams = super().forward(hidden_states, encoder_hidden_states, temb, image_rotary_emb)
            return all_within_range(*streams)
        x = cat_text_image(encoder_hidden_states, hidden_states)
        normed, gate = self.norm(x, emb=temb)
        with Meanwhile(self.proj_mlp, normed) as mlp:
            attended = self.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb)
        # nothing else refers to what is joined: it is gone once it is multiplied
        change = self.proj_out(cat_with_gelu(attended, mlp.take(), self.act_mlp.approximate))
        x = within_range(gated(x, change, gate[:, None]))
        text = encoder_hidden_states.shape[1]
        return x[:, :text], x[:, text:]


class QwenBlock(transformer_qwenimage.QwenImageTransformerBlock):
    """A block of two streams. With ``modulate_index`` (B, image tokens), which is not 0 for references, these
    are at timestep 0 (Edit 2511's method): temb (2B, D) has theirs after the others'."""

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        encoder_hidden_states_mask,
        temb,
        image_rotary_emb: Any = None,
        joint_attention_kwargs=None,
        modulate_index: Any = None,
    ):
        assert not joint_attention_kwargs, NO_MORE
        self.zero_cond_t = modulate_index is not None  # whether temb has both, which the call decides
        if torch.compiler.is_compiling():
            streams = hidden_states, encoder_hidden_states, encoder_hidden_states_mask
            given = temb, image_rotary_emb, None, modulate_index
            return all_within_range(*super().forward(*streams, *given))
        modulation = self.img_mod(temb).unflatten(-1, (6, -1))
        of_references = None
        if modulate_index is not None:
            of_references = modulate_index[0] != 0
            temb = temb.chunk(2)[0]  # text's timestep is that of the other tokens
        part = references.of_tokens(modulation, of_references, scales=(1, 4))
        text = encoder_hidden_states
        of_text: list[Tensor] = []
        change = modulated(self.img_norm1, hidden_states, part(1), part(0))
        if token_mixing.has_text():
            text_shift, text_scale, text_gate, *of_text = self.txt_mod(temb).chunk(6, dim=-1)
            change, text_change = self.attn(
                hidden_states=change,
                encoder_hidden_states=adapted(self.txt_norm1, text, text_shift, text_scale),
                encoder_hidden_states_mask=encoder_hidden_states_mask,
                image_rotary_emb=image_rotary_emb,
            )
            text = gated(text, text_change, text_gate[:, None])
            del text_change
        else:
            function = transformer_qwenimage.apply_rotary_emb_qwen
            turn = partial(function, freqs_cis=image_rotary_emb[0], use_real=False)
            change = _attended(self.attn, change, self.attn.inner_dim // self.attn.heads, turn)
        image = gated(hidden_states, change, part(2))
        del change
        change = self.img_mlp(modulated(self.img_norm2, image, part(4), part(3)))
        image = gated(image, change, part(5))
        del change
        if of_text:  # after the image, as by the graph of a rank that compiles: all send in one order
            text = within_range(_mlp(text, self.txt_norm2, self.txt_mlp, *of_text))
        return text, within_range(image)


class ZImageBlock(transformer_z_image.ZImageTransformerBlock):
    """A block of one stream; refiners of the prompt have no modulation and stay diffusers' own."""

    def forward(
        self,
        x,
        attn_mask,
        freqs_cis,
        adaln_input=None,
        noise_mask=None,
        adaln_noisy=None,
        adaln_clean=None,
    ):
        of_omni = noise_mask, adaln_noisy, adaln_clean
        assert all(each is None for each in of_omni), "the mask of noise and its modulations are Omni's"
        if torch.compiler.is_compiling() or not self.modulation:
            return super().forward(x, attn_mask, freqs_cis, adaln_input)
        scale, gate, ff_scale, ff_gate = self.adaLN_modulation(adaln_input)[:, None].chunk(4, dim=2)
        normed = rms_scaled(self.attention_norm1, x, 1 + scale)
        attended = self.attention(normed, attention_mask=attn_mask, freqs_cis=freqs_cis)
        x = gated(x, self.attention_norm2(attended), gate.tanh())
        made = self.feed_forward(rms_scaled(self.ffn_norm1, x, 1 + ff_scale))
        return gated(x, self.ffn_norm2(made), ff_gate.tanh())


#: diffusers' class -> ours.
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    transformer_flux.FluxTransformerBlock: FluxBlock,
    transformer_flux.FluxSingleTransformerBlock: FluxSingleBlock,
    transformer_qwenimage.QwenImageTransformerBlock: QwenBlock,
    transformer_z_image.ZImageTransformerBlock: ZImageBlock,
}


def _mlp(x: Tensor, norm: nn.LayerNorm, mlp: nn.Module, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    return gated(x, mlp(adapted(norm, x, shift, scale)), gate[:, None])


def _attended(attn: Any, x: Tensor, head_size: int, turn: Callable[[Tensor], Any]) -> Tensor:
    """Return the attention's output for image tokens alone, of which x is the input, as diffusers' processors
    make it; ``turn``: rotary embedding."""

    def heads_of(layer: nn.Module) -> Tensor:
        return layer(x).unflatten(-1, (-1, head_size))

    query = turn(attn.norm_q(heads_of(attn.to_q))).transpose(1, 2)
    key = turn(attn.norm_k(heads_of(attn.to_k))).transpose(1, 2)
    out = F.scaled_dot_product_attention(query, key, heads_of(attn.to_v).transpose(1, 2))
    return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))


def cat_text_image(text: Tensor, image: Tensor) -> Tensor:
    """Concatenate the tokens of text (B, T, D) and image (B, S, D). Nothing is copied if both are parts of
    one tensor, as the block before returns them, or there is no text, as in PipeFusion's later patches."""
    batch, count, width = text.shape
    if not count:  # such a tensor has no address that could tell
        return image
    tokens = count + image.shape[1]
    strides = (tokens * width, width, 1)
    follows = image.data_ptr() == text.data_ptr() + count * width * text.itemsize
    same = text.untyped_storage().data_ptr() == image.untyped_storage().data_ptr()
    if same and follows and text.stride() == image.stride() == strides:
        return text.as_strided((batch, tokens, width), strides)
    return torch.cat([text, image], dim=1)


def cat_with_gelu(attended: Tensor, made: Tensor, approximate: str) -> Tensor:
    """Concatenate ``attended`` (B, S, D) and the GELU of ``made`` (B, S, M) to (B, S, D + M). The GELU writes
    into the result."""
    width = attended.shape[2]
    both = made.new_empty(*made.shape[:2], width + made.shape[2])
    both[..., :width] = attended
    torch.ops.aten.gelu.out(made, approximate=approximate, out=both[..., width:])
    return both


def all_within_range(*streams: Tensor) -> tuple[Tensor, ...]:
    """Return within_range of each."""
    return tuple(map(within_range, streams))


def within_range(x: Tensor) -> Tensor:
    """Return x with float16's infinities as its largest numbers, and what is none as 0, as ComfyUI does: an
    infinity that meets a norm, or its opposite in a sum of tensor parallelism, is no number."""
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x
