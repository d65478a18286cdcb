"""Blocks of LTX-2: how the engine joins their two streams; ComfyUI's order of cross-attention, streams
without tokens, and noise levels of single tokens."""

from functools import partial, wraps
from inspect import signature
from itertools import chain
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AdaLayerNormSingle,
    LTX2AudioVideoAttnProcessor,
    LTX2AudioVideoRotaryPosEmbed,
    LTX2VideoTransformer3DModel,
    LTX2VideoTransformerBlock,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)

from ..blocks import BlockAdapter
from ..family import Nested
from . import guide_weights
from .call_state import call_state
from .nested_output import NestedOutput
from .request_arguments import once
from .shape_only import join_latents
from .token_levels import distinct, levels_of, modulate_arriving

#: Audio: channels and frequencies of a latent, one moment of which is a token.
CHANNELS, FREQUENCIES = 8, 16
#: What ComfyUI calls the masks of the video's latent and of the audio's.
MASKS = ("denoise_mask", "audio_denoise_mask")
#: Moments of the spectrogram to one of the latent's, where the configuration does not tell; and what else of
#: it turns moments into seconds.
AUDIO_SCALE = 4
AUDIO_CLOCK = ("patch_size_t", "sampling_rate", "hop_length")
LATENTS = Nested(
    ("video", "audio"),
    patches=lambda config: ((1, 1, 1), (1, 1, FREQUENCIES)),
    channels=lambda config: (config["in_channels"], CHANNELS),
    order=(1, 0),
)
#: Arguments, and results, of a block: the tokens of each latent.
STREAMS = ("hidden_states", "audio_hidden_states")
#: Block arguments that have an entry for every token of video or of audio.
PER_TOKEN = {
    "video_rotary_emb": ("video", -2),
    "audio_rotary_emb": ("audio", -2),
    "ca_video_rotary_emb": ("video", -2),
    "ca_audio_rotary_emb": ("audio", -2),
    "temb": ("video", 1),
    "temb_audio": ("audio", 1),
    "temb_ca_scale_shift": ("video", 1),
    "temb_ca_audio_scale_shift": ("audio", 1),
}
#: Layer of a block -> whose tokens pass it. Keys and values between both are of the other one.
LATENT_LAYERS = {
    "audio_to_video_attn.to_[kv]": "audio",
    "video_to_audio_attn.to_[kv]": "video",
    "video_to_audio_attn*": "audio",
    "audio_to_video_attn*": "video",
    "audio_*": "audio",
    "*": "video",
}
#: Arguments of a block that Levels makes, in the order of LTX2Block.levels.
MODULATIONS = ("temb", "temb_audio", "temb_ca_scale_shift", "temb_ca_audio_scale_shift")


class VideoAndAudio(BlockAdapter):
    """Join video and audio, which have different widths, into one image stream: audio first, the narrower
    of them ending in zeros."""

    def image(self, blocks, call):
        return self.joined([call[name] for name in STREAMS])

    def image_arguments(self, blocks, call, image, tokens):
        return dict(zip(STREAMS, self.divided(call, image, tokens)))

    def returned(self, blocks, out):
        return {"text": None, "image": self.joined(out)}

    def result(self, blocks, call, streams, tokens):
        return tuple(self.divided(call, streams["image"], tokens))

    def unchanged(self, blocks, call):
        return tuple(call[name] for name in STREAMS)

    def leave(self, transformer, tokens):
        spans = {name: tokens.sequence.latent_span(name) for name in LATENTS.names}
        own = {name: tokens.local.image.within(span).indices for name, span in spans.items()}
        cast(Any, transformer).call.own = own

    def joined(self, latents):
        """Join the tokens (B, n, F) of video and audio into one tensor (B, N, F)."""
        return join_latents(latents, LATENTS.order)

    def divided(self, call, image, tokens):
        """Undo ``joined``, for all tokens or for this rank's."""
        names = [LATENTS.names[i] for i in LATENTS.order]
        sizes = [tokens.lengths(name)[tokens.sp_rank] for name in names]
        if image.shape[1] == tokens.sequence.image:
            sizes = [tokens.sequence.length_of(name) for name in names]
        pieces = dict(zip(LATENTS.order, image.split(sizes, dim=1)))
        return [pieces[i][..., : call[name].shape[2]] for i, name in enumerate(STREAMS)]


def audio_corners(config, moments, device):
    """Return (1, 1, moments, 2): where tokens of audio begin and end, in seconds, as diffusers' forward makes
    them at every step from arguments of these names."""
    stated = {name: config[f"audio_{name}"] for name in AUDIO_CLOCK if f"audio_{name}" in config}
    positions = LTX2AudioVideoRotaryPosEmbed(
        dim=0,
        scale_factors=(config.get("audio_scale_factor", AUDIO_SCALE),),
        causal_offset=config.get("causal_offset", 1),
        modality="audio",
        **stated,
    )
    return positions.prepare_audio_coords(1, moments, device)


class Attention(LTX2AudioVideoAttnProcessor):
    """LTX-2's attention, with 2.3's gate of every head; LTX-Video's within the video. A patch may hold no
    tokens of audio."""

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        attention_mask=None,
        query_rotary_emb=None,
        key_rotary_emb=None,
    ):
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q = attn.norm_q(attn.to_q(hidden_states))
        k = attn.norm_k(attn.to_k(source))
        v = attn.to_v(source)
        weighed = None
        if query_rotary_emb is not None:
            query_rotary_emb, weighed = guide_weights.divided(query_rotary_emb, attn.heads)
            rotate = apply_split_rotary_emb if attn.rope_type == "split" else apply_interleaved_rotary_emb
            q = rotate(q, query_rotary_emb) if q.shape[1] else q
            k = rotate(k, key_rotary_emb or query_rotary_emb) if k.shape[1] else k
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask = None if attention_mask is None else attention_mask[:, None]
        if weighed is None:
            out = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            out = guide_weights.attend_weighed(q, k, v, weighed)
        if attn.to_gate_logits is not None:
            out = out * 2.0 * attn.to_gate_logits(hidden_states).sigmoid().transpose(1, 2)[..., None]
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


class TwoOutputs(LTX2VideoTransformer3DModel):
    """diffusers' model, whose outputs for both latents are one tensor."""

    outputs: Any

    @wraps(LTX2VideoTransformer3DModel.forward)
    def forward(self, *args, **kwargs):
        return (self.outputs(super().forward(*args, **kwargs)),)


class Levels(LTX2AdaLayerNormSingle):
    """Compute modulation once per noise level, of which a mask has a few, and give blocks each token's index.

    A video of 1280 x 704 pixels and 121 frames has 14080 tokens, whose modulation is 9 x 4096 numbers each.
    call: what share_levels keeps. latent: whose tokens these are, as LATENTS names them. modulation,
    embedding: of the levels of the call under way.
    """

    call: Any
    latent: str
    modulation: Any
    embedding: Any

    def forward(self, timestep, added_cond_kwargs=None, batch_size=None, hidden_dtype=None):
        if timestep.numel() == batch_size:
            return super().forward(timestep, added_cond_kwargs, batch_size, hidden_dtype)
        levels, level_of_token = self.call.noise_levels[self.latent]
        found: Any = super().forward(levels, added_cond_kwargs, batch_size, hidden_dtype)
        self.modulation, self.embedding = found
        # that of one token: the last modulation is given each token's level (modulate_arriving)
        return level_of_token.reshape(-1, 1), self.embedding[:1].expand(batch_size, -1)

    def of(self, tokens):
        """Return what get_mod_params takes for ``tokens``, a block's slice of what ``forward`` returned."""
        return tokens if tokens.is_floating_point() else (self.modulation, tokens[..., 0])


def noise_levels(grid, cond, sigma, batch, factor):
    """Return what Levels takes of latents with a mask: the few levels times ``factor``, and each token's
    (B, tokens)."""
    of_latents = {}
    for part, latent, name in zip(grid.grids, LATENTS.names, MASKS):
        if name in cond:
            tokens = part.to_tokens(cond[name].float())[..., 0]
            levels, indices = levels_of(once(cond, name, partial(distinct, tokens)), sigma, batch)
            of_latents[latent] = (levels * factor, indices.view(batch, -1))
    return of_latents


def share_levels(transformer, modules):
    """Let the transformer's forward take ``noise_levels``: of each latent with a mask, what ``levels_of``
    returns. ``modules``: latent -> its Levels, the first of which embeds its timestep."""
    call = call_state(transformer, {"noise_levels": {}}, own={}, normed=None)
    transformer.call = call
    for latent, embeds in modules.items():
        for embed in embeds:
            embed.__class__ = Levels
            embed.call = call
            embed.latent = latent
            embed.modulation = embed.embedding = None
        prefix = "" if latent == LATENTS.names[0] else f"{latent}_"
        modulate_arriving(transformer, prefix, call, partial(_last_levels, embeds[0]))

    def release(*called):
        for embed in chain(*modules.values()):
            embed.modulation = embed.embedding = None

    transformer.register_forward_hook(release, always_call=True)


def _last_levels(embed):
    """Return what modulate_arriving asks for; ``embed``: a latent's embedder of the timestep."""
    if embed.embedding is None:
        return None
    _, level_of_token = embed.call.noise_levels[embed.latent]
    return embed.embedding, level_of_token[:, embed.call.own.get(embed.latent, slice(None))]


def join_outputs(transformer):
    """Join the outputs for both latents behind their last layers."""
    transformer.__class__ = TwoOutputs
    transformer.outputs = NestedOutput(LATENTS.order)


#: What a block takes, in order.
ARGUMENTS = tuple(signature(LTX2VideoTransformerBlock.forward).parameters)[1:]


class LTX2Block(LTX2VideoTransformerBlock):
    """Let audio attend to video that has already attended to audio, as in ComfyUI.

    In diffusers' block both attend to what came before either attention.
    """

    levels: Any
    times: Any
    video: Any
    audio: Any

    @wraps(LTX2VideoTransformerBlock.forward)
    def forward(self, *args, **call):
        call |= zip(ARGUMENTS, args)
        self.video = None  # of a call that ran out of memory
        self.audio = None
        for name, levels in zip(MODULATIONS, self.levels):
            call[name] = levels.of(call[name])
        self.times = call["temb_ca_scale_shift"], call["temb_ca_gate"]
        return super().forward(**call)

    @staticmethod
    def get_mod_params(scale_shift_table, temb, batch_size, first=0):
        """Return what diffusers' method does, for any number of tokens, and for a few levels of many; of its
        tensors those from ``first`` on."""
        count = len(scale_shift_table)
        if isinstance(temb, tuple):
            levels, tokens = temb
            if torch.compiler.is_compiling() or len(levels) <= tokens.numel():
                values = scale_shift_table.to(levels.device) + levels.unflatten(1, (count, -1))
                return tuple(each[tokens] for each in values.unbind(dim=1)[first:])
            temb = levels[tokens]  # a soft mask's levels are as many as the tokens of all ranks
        values = temb.unflatten(2, (count, temb.shape[2] // count))
        return (scale_shift_table[None, None].to(temb.device) + values).unbind(dim=2)[first:]

    def listen(self, attention, args, kwargs):
        """Hook before video_to_audio_attn: keys and values of the video as it is by now."""
        batch = self.video.shape[0]
        times, gates = self.times
        table = self.video_a2v_cross_attn_scale_shift_table
        (gate,) = self.get_mod_params(table[4:], gates, batch)
        scale, shift = self.get_mod_params(table[:4], times, batch, first=2)
        video = self.audio_to_video_norm(self.video + gate * self.audio) * (1 + scale) + shift
        self.video = None
        self.audio = None
        self.times = None
        return args, {**kwargs, "encoder_hidden_states": video}

    def keep_audio(self, attention, args, out):
        """Hook after audio_to_video_attn: keep what it adds to the video."""
        self.audio = out

    def keep_video(self, norm, args):
        """Hook before audio_to_video_norm: keep its first input of a call."""
        if self.video is None:
            self.video = args[0]

    def watch(self):
        """Store what listen needs."""
        self.audio_to_video_attn.register_forward_hook(self.keep_audio)
        self.audio_to_video_norm.register_forward_pre_hook(self.keep_video)
        self.video_to_audio_attn.register_forward_pre_hook(self.listen, with_kwargs=True)
        self.video = None


def highest(times, batch):
    """Return the highest noise level of every sample, (B,), of levels (B, tokens), (B,) or flattened."""
    return times.reshape(batch, -1).amax(dim=1)


def gate_by_highest_level(transformer, config):
    """Compute a stream's gate from the highest noise level of the other stream, as ComfyUI does for the whole
    batch, and this for each sample; diffusers uses the stream's own tokens."""
    factor = config["cross_attn_timestep_scale_multiplier"] / config["timestep_scale_multiplier"]
    for other, gate in (
        (transformer.audio_time_embed, transformer.av_cross_attn_video_a2v_gate),
        (transformer.time_embed, transformer.av_cross_attn_audio_v2a_gate),
    ):

        def note(module, args, kwargs, gate=gate):
            gate.highest = highest(args[0], kwargs["batch_size"])

        other.register_forward_pre_hook(note, with_kwargs=True)
        gate.register_forward_pre_hook(lambda module, args: (module.highest * factor,))
