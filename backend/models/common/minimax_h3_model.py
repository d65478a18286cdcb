"""MiniMax-H3's forward, of which the last layers see the latents' tokens alone."""

from typing import Any

import torch
from diffusers.models.modeling_utils import get_parameter_dtype
from diffusers.models.transformers import transformer_minimax_h3 as theirs

from .call_state import call_state
from .nested_output import NestedOutput
from .shape_only import has_values, shape_only


class Packed(theirs.MiniMaxH3Transformer3DModel):
    """diffusers' model, of which the last layers see the latents' tokens alone, each layer those of its
    latent: its own gives both every token of the sequence, in float32."""

    call: Any
    outputs: Any

    # its own arguments, which the family's file alone passes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states,
        audio_hidden_states,
        encoder_hidden_states,
        timestep,
        timestep_indices,
        token_tags,
        position_ids,
        video_indices,
        audio_indices,
        text_indices,
        latent_tokens,
        return_dict=True,
    ):
        """latent_tokens: (of audio, of video), which end the sequence."""
        rotary_emb = self.rope(position_ids)
        text = self.token_refiner(self.context_embedder(_as(self.context_embedder, encoder_hidden_states)))
        latents = (
            (audio_indices, self.audio_proj_in, audio_hidden_states),
            (video_indices, self.proj_in, hidden_states),
        )
        joint = self._joined((text_indices, text), latents, latent_tokens, len(position_ids))
        temb = self.time_embedder(_as(self.time_embedder, self.time_proj(timestep)))
        adaln_indices = timestep_indices * theirs.MINIMAX_H3_MODALITY_NUM + token_tags
        for block in self.transformer_blocks:
            joint = block(joint, temb, adaln_indices, rotary_emb)
        given = len(timestep_indices) - sum(latent_tokens)
        return self._end(joint[:, given:], temb, timestep_indices[given:], latent_tokens[0])

    def _joined(self, text, latents, own, count):
        """Return the sequence (B, count, D) of text, references and latents, ``own`` tokens of each latent at
        its end. Text and latents come after their places, latents before their layers and after their
        references. On a stage that is sent all of it, it is a shape alone."""
        places, given = text
        embedded = [layer(_as(layer, tokens)) for _, layer, tokens in latents]
        if not all(has_values(tokens) for tokens in (given, *embedded)):
            return shape_only(given, count)
        embedded = [tokens.to(given.dtype) for tokens in embedded]
        before = [tokens.shape[1] - length for tokens, length in zip(embedded, own)]
        if any(before):
            given = given.new_empty(len(given), count - sum(own), given.shape[2])
            given.index_copy_(1, places, text[1])
            for (where, *_), tokens, length in zip(latents, embedded, before):
                given.index_copy_(1, where[:length], tokens[:, :length])
        return torch.cat([given, *(tokens[:, length:] for tokens, length in zip(embedded, before))], dim=1)

    def _end(self, tokens, temb, times, audio_tokens):
        """Return the outputs of this rank's ``tokens`` of the latents, audio first."""
        own = self.call.own
        normed = _as(self.proj_out, self.norm_out(tokens, temb, times[own]))
        audio = len(range(audio_tokens)[own])
        return self.outputs([self.proj_out(normed[:, audio:]), self.audio_proj_out(normed[:, :audio])])


def _as(layer, x):
    """Return ``x`` in the type of a layer's weights, of which files have float32 and bf16."""
    return x.to(get_parameter_dtype(layer))


def end_with_own_tokens(transformer, order):
    """Give the last layers the tokens of their latents alone. ``order``: as the latents follow each other in
    the sequence."""
    transformer.__class__ = Packed
    transformer.call = call_state(transformer, own=slice(None))
    transformer.outputs = NestedOutput(order)
