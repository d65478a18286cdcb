"""HunyuanVideo with a given first frame (image to video, v2 "replace"), whose tokens have a timestep of their
own: diffusers' image_condition_type "token_replace". The weights are text to video's, and only the request
shows which it is, so blocks and embeddings take both ways."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import CombinedTimestepTextProjEmbeddings
from diffusers.models.transformers import transformer_hunyuan_video as hunyuan

from ..blocks import BlockAdapter
from .adaptive_norms import AdaLayerNormContinuous, AdaLayerNormZero


def _parts(linear, embedding, first_embedding, count):
    """Return the parts (B, D) of the modulation by the request's timestep, and by the first frame's."""
    first = getattr(linear, "second", linear)  # where the layer is cached
    embeddings = (linear(F.silu(embedding)), first(F.silu(first_embedding)))
    return [each.chunk(count, dim=1) for each in embeddings]


class Norm(AdaLayerNormZero):
    def forward(self, x, emb: Any = None, replaced=None, count=0):
        if replaced is None:
            return super().forward(x, emb=emb)
        usual, first = _parts(self.linear, emb, replaced, 6)
        normed = self.norm(x)
        pieces = ((normed[:, :count], first), (normed[:, count:], usual))
        x = torch.cat([x * (1 + part[1][:, None]) + part[0][:, None] for x, part in pieces], dim=1)
        return x, *usual[2:], *first[2:]


class FirstFrameBlock(hunyuan.HunyuanVideoTokenReplaceTransformerBlock):
    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        freqs_cis=None,
        token_replace_emb=None,
        num_tokens=None,
    ):
        if token_replace_emb is None:
            return hunyuan.HunyuanVideoTransformerBlock.forward(
                cast(Any, self), hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis
            )
        count = num_tokens[0] if isinstance(num_tokens, tuple) else num_tokens
        return super().forward(
            hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis, token_replace_emb, count
        )


class SingleBlock(hunyuan.HunyuanVideoSingleTransformerBlock):
    """``frame_tokens``: how many tokens of text and of image are replaced, or one number for both: as
    ComfyUI, and unlike Tencent's code, this counts a frame's tokens from the text's first token on."""

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        image_rotary_emb=None,
        token_replace_emb=None,
        frame_tokens: Any = None,
    ):
        if token_replace_emb is None:
            return super().forward(
                hidden_states, encoder_hidden_states, temb, attention_mask, image_rotary_emb
            )
        tokens = hidden_states.shape[1]
        texts = encoder_hidden_states.shape[1]
        if not isinstance(frame_tokens, tuple):
            frame_tokens = min(frame_tokens, texts), max(0, frame_tokens - texts)
        text, image = frame_tokens
        device = hidden_states.device
        replaced = torch.cat(
            [torch.arange(tokens, device=device) < image, torch.arange(texts, device=device) < text]
        )[None, :, None]
        usual, first = _parts(self.norm.linear, temb, token_replace_emb, 3)

        def part(index: int) -> torch.Tensor:
            # shift, scale, gate, each where it is used: all three are as large as queries, keys and values
            return torch.where(replaced, first[index][:, None], usual[index][:, None])

        joined = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        x = self.norm.norm(joined) * (1 + part(1)) + part(0)
        read = self.attn(
            hidden_states=x[:, :tokens],
            encoder_hidden_states=x[:, tokens:],
            attention_mask=attention_mask,
            image_rotary_emb=image_rotary_emb,
        )
        both = torch.cat([torch.cat(read, dim=1), self.act_mlp(self.proj_mlp(x))], dim=2)
        x = joined + part(2) * self.proj_out(both)
        return x[:, :tokens], x[:, tokens:]


class Condition(hunyuan.HunyuanVideoConditionEmbedding):
    """``guidance`` (B,), or None without it; (B, 2) and (B, 1) where the first frame's timestep follows."""

    def forward(self, timestep, pooled_projection, guidance=None):
        if guidance is None or guidance.ndim == 1:
            return self.embedding(timestep, pooled_projection, guidance), None
        *given, frame = guidance.unbind(1)
        embedding = self.embedding(timestep, pooled_projection, *given)
        replaced = self.embedding(frame, pooled_projection, *given)
        # for cached layers and the last norm, which are given the embedding alone: no field of a tensor
        embedding.second = replaced  # pyright: ignore[reportAttributeAccessIssue]
        return embedding, replaced

    def embedding(self, timestep, pooled_projection, guidance=None):
        """Return what blocks are modulated by, (B, D)."""
        if guidance is None:
            return CombinedTimestepTextProjEmbeddings.forward(cast(Any, self), timestep, pooled_projection)
        return super().forward(timestep, pooled_projection, guidance)[0]


class LastNorm(AdaLayerNormContinuous):
    """The last norm, with a second modulation for the first frame's tokens. ``frame``: how many these are;
    ``tokens``: how many of them are in the call under way."""

    frame = 0
    tokens = 0

    def forward(self, x, embedding):
        replaced = getattr(embedding, "second", None)
        if replaced is None or self.tokens == 0:
            return super().forward(x, embedding)
        first = super().forward(x[:, : self.tokens], replaced)
        return torch.cat([first, super().forward(x[:, self.tokens :], embedding)], dim=1)


def patch_module(transformer, config):
    """Make every module that has two ways one of those above; their weights stay."""
    embed = transformer.time_text_embed
    embed.image_condition_type = None
    embed.__class__ = Condition
    transformer.norm_out.__class__ = LastNorm
    for block in transformer.transformer_blocks:
        block.__class__ = FirstFrameBlock
        block.norm1.__class__ = Norm
        block.norm1.emb = None
    for block in transformer.single_transformer_blocks:
        block.__class__ = SingleBlock


def prepare(transformer, grid):
    """Set how many tokens a frame has, which the last norm needs."""
    norm = transformer.norm_out
    norm.frame = norm.tokens = grid.counts[1] * grid.counts[2]


class FirstFrame(BlockAdapter):
    """num_tokens and frame_tokens count the first frame's tokens, which come first."""

    def cut(self, call, tokens):
        counted = {"num_tokens": ("image",), "frame_tokens": ("text", "image")}
        given = [name for name in counted if call.get(name) is not None]
        return {name: tokens.leading(call[name], counted[name]) for name in given}

    def leave(self, transformer, tokens):
        norm: Any = transformer.norm_out
        norm.tokens = tokens.leading(norm.frame, ("image",))[0]
