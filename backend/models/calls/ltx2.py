"""LTX-2, 2.3 and 2.5: the arguments of its forward, what it refuses and what is changed in diffusers'
modules."""

from functools import wraps

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.models.transformers.transformer_ltx2 import (
    LTX2AdaLayerNormSingle,
    LTX2AudioVideoAttnProcessor,
    LTX2VideoTransformerBlock,
    apply_interleaved_rotary_emb,
    apply_split_rotary_emb,
)
from diffusers.pipelines.ltx2.connectors import LTX2ConnectorTransformer1d
from torch import nn

from . import ltxv
from .ltxv import corners, guides, times

#: Rows of a connected prompt, at least.
ROWS = 1024
#: What ComfyUI calls the masks of the video's latent and of the sound's.
MASKS = ("denoise_mask", "audio_denoise_mask")


class Attention(LTX2AudioVideoAttnProcessor):
    """LTX-2's attention, with 2.3's gate of every head, for any number of rows, none included: a patch may
    hold no sound."""

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
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source)), attn.to_v(source)
        if query_rotary_emb is not None:
            rotate = apply_split_rotary_emb if attn.rope_type == "split" else apply_interleaved_rotary_emb
            q, k = (
                rotate(x, emb) if x.shape[1] else x
                for x, emb in ((q, query_rotary_emb), (k, key_rotary_emb or query_rotary_emb))
            )
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, None if attention_mask is None else attention_mask[:, None]
        )
        if attn.to_gate_logits is not None:
            out = out * 2.0 * attn.to_gate_logits(hidden_states).sigmoid().transpose(1, 2)[..., None]
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


class Levels(LTX2AdaLayerNormSingle):
    """The modulation of each noise level once, where rows have levels of their own: a mask has a few, and
    video of 1280 x 704 pixels and 121 frames 14080 rows, of 9 x 4096 numbers each. Blocks are given which
    level a row has."""

    def forward(self, timestep, added_cond_kwargs=None, batch_size=None, hidden_dtype=None):
        if timestep.numel() == batch_size:
            return super().forward(timestep, added_cond_kwargs, batch_size, hidden_dtype)
        levels, rows = timestep.unique(return_inverse=True)
        self.modulation, embedding = super().forward(levels, added_cond_kwargs, batch_size, hidden_dtype)
        return rows[:, None], embedding[rows]

    def of(self, rows):
        """What get_mod_params takes for a block's ``rows`` of what forward gave, (B, rows, features)."""
        return rows if rows.is_floating_point() else (self.modulation, rows[..., 0])


class Block(LTX2VideoTransformerBlock):
    """Sound hears the video after the video has heard the sound, as in ComfyUI; diffusers' block lets both
    hear what was before."""

    @wraps(LTX2VideoTransformerBlock.forward)
    def forward(
        self,
        hidden_states,
        audio_hidden_states,
        encoder_hidden_states,
        audio_encoder_hidden_states,
        temb,
        temb_audio,
        temb_ca_scale_shift,
        temb_ca_audio_scale_shift,
        temb_ca_gate,
        *args,
        **kwargs,
    ):
        temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift = (
            levels.of(rows)
            for levels, rows in zip(
                self.levels, (temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift)
            )
        )
        self.times = temb_ca_scale_shift, temb_ca_gate
        return super().forward(
            hidden_states,
            audio_hidden_states,
            encoder_hidden_states,
            audio_encoder_hidden_states,
            temb,
            temb_audio,
            temb_ca_scale_shift,
            temb_ca_audio_scale_shift,
            temb_ca_gate,
            *args,
            **kwargs,
        )

    @staticmethod
    def get_mod_params(scale_shift_table, temb, batch_size):
        """As diffusers', for any number of rows, and for a few levels of many."""
        if isinstance(temb, tuple):
            levels, rows = temb
            return tuple(
                values[rows]
                for values in (
                    scale_shift_table.to(levels.device) + levels.unflatten(1, (len(scale_shift_table), -1))
                ).unbind(dim=1)
            )
        return (
            scale_shift_table[None, None].to(temb.device)
            + temb.unflatten(2, (len(scale_shift_table), temb.shape[2] // len(scale_shift_table)))
        ).unbind(dim=2)

    def listen(self, attention, args, kwargs):
        """Hook before video_to_audio_attn: keys and values of the video as it is by now."""
        batch, (times, gates), table = (
            self.video.shape[0],
            self.times,
            self.video_a2v_cross_attn_scale_shift_table,
        )
        (gate,) = self.get_mod_params(table[4:], gates, batch)
        scale, shift = self.get_mod_params(table[:4], times, batch)[2:]
        video = self.audio_to_video_norm(self.video + gate * self.heard) * (1 + scale) + shift
        self.video = self.heard = self.times = None
        return args, {**kwargs, "encoder_hidden_states": video}

    def watch(self):
        """Keep what listen needs."""
        self.audio_to_video_attn.register_forward_hook(lambda module, args, out: setattr(self, "heard", out))
        self.audio_to_video_norm.register_forward_pre_hook(
            lambda module, args: None if self.video is not None else setattr(self, "video", args[0])
        )
        self.video_to_audio_attn.register_forward_pre_hook(self.listen, with_kwargs=True)
        self.video = None


def finish(connector, prompt):
    """What the connector makes of a prompt (B, rows, width) that it has yet to finish, which comes with a
    feature more, of zeros; of others nothing."""
    if prompt.shape[2] == connector.inner_dim:
        return prompt
    rows, registers = prompt.shape[1], connector.num_learnable_registers
    spare = -(-max(ROWS, rows) // registers) * registers - rows
    known = torch.arange(rows + spare, device=prompt.device) < rows
    return connector(
        F.pad(prompt[..., :-1], (0, 0, 0, spare)),
        torch.where(known, 0.0, -10000.0).to(prompt.dtype).expand(prompt.shape[0], 1, 1, -1),
    )[0]


class Prompt(PixArtAlphaTextProjection):
    """LTX-2's projection of a prompt, behind its connector."""

    def forward(self, prompt):
        return super().forward(finish(self.connector, prompt))


class Unprojected(nn.Module):
    """The connector alone, in the projection's place: 2.3's prompts have the blocks' width."""

    def forward(self, prompt):
        return finish(self.connector, prompt)


def hear_the_loudest(transformer, config):
    """A stream's gate to the other goes by the highest noise level among the other's rows, as in ComfyUI
    (there among those of the whole batch); diffusers' by its own rows'."""
    factor = config["cross_attn_timestep_scale_multiplier"] / config["timestep_scale_multiplier"]
    for heard, gate in (
        (transformer.audio_time_embed, transformer.av_cross_attn_video_a2v_gate),
        (transformer.time_embed, transformer.av_cross_attn_audio_v2a_gate),
    ):
        heard.register_forward_pre_hook(
            lambda module, args, kwargs, gate=gate: setattr(
                gate, "loudest", highest(args[0], kwargs["batch_size"])
            ),
            with_kwargs=True,
        )
        gate.register_forward_pre_hook(lambda module, args: (module.loudest * factor,))


def highest(times, batch):
    """(B, tokens), (B,) or flattened -> the highest noise level of every sample, (B,)."""
    return times.reshape(batch, -1).amax(dim=1)


def adjust(transformer, config):
    """ComfyUI's order of hearing and its gates, attention for any number of rows, modulation of each noise
    level once, and the connectors."""
    hear_the_loudest(transformer, config)
    levels = (
        transformer.time_embed,
        transformer.audio_time_embed,
        transformer.av_cross_attn_video_scale_shift,
        transformer.av_cross_attn_audio_scale_shift,
    )
    for embed in levels:
        embed.__class__ = Levels
    for block in transformer.transformer_blocks:
        block.__class__, block.levels = Block, levels
        block.watch()
        block.perturbed_attn = False
        for name in (
            "attn1",
            "attn2",
            "audio_to_video_attn",
            "audio_attn1",
            "audio_attn2",
            "video_to_audio_attn",
        ):
            getattr(block, name).set_processor(Attention())
    for name, sizes in zip(("caption_projection", "audio_caption_projection"), config.get("connectors", ())):
        if config["use_prompt_embeddings"]:
            getattr(transformer, name).__class__ = Prompt
        else:
            setattr(transformer, name, Unprojected())
            transformer.register_to_config(use_prompt_embeddings=True)
        getattr(transformer, name).connector = LTX2ConnectorTransformer1d(**{"rope_type": "split", **sizes})


def variant(config):
    """Keys and values of 2.3's prompt depend on the noise level."""
    return (
        {"prompt_only": ()}
        if config["cross_attn_mod"] and config.get("use_prompt_adaln_single", True)
        else {}
    )


def widths(config):
    """(features of a prompt that the connectors have yet to finish, of the video's and the sound's part of a
    finished one)."""
    if config["use_prompt_embeddings"]:
        return config["caption_channels"], (config["caption_channels"],) * 2
    parts = config["cross_attention_dim"], config["audio_cross_attention_dim"]
    return sum(parts), parts


def is_finished(config, cond):
    """Has the prompt been through the connectors? LTX-2's width tells; 2.3's is the same before and behind
    them."""
    return not cond.get("unprocessed_ltxav_embeds", False) and cond["c_crossattn"].shape[2] == sum(
        widths(config)[1]
    )


def single_frames(grid, cond, device):
    """(1, tokens, 1): 1 for tokens of a single frame of pixels, which 2.5 marks: the first frame's, and those
    of keyframes to be made ((1, 2): the first of them, and how many), not guides'."""
    frames, size = grid.counts[0], grid.counts[1] * grid.counts[2]
    marks = torch.zeros(frames, device=device)
    marks[0] = 1.0
    marks = marks.repeat_interleave(size)
    marks[grid.tokens - guides(cond) :] = 0.0
    first, count = cond["generated_keyframes"][0].long().tolist() if "generated_keyframes" in cond else (0, 0)
    marks[first * size : (first + count) * size] = 1.0
    return marks.view(1, -1, 1)


def forward_args(config, grid, latent, sigma, cond):
    """A finished prompt is the video's and the sound's; LTX-2's that is not is both."""
    (video, audio), text, mask, batch = (
        grid.unpack(latent),
        cond["c_crossattn"],
        cond.get("attention_mask"),
        latent.shape[0],
    )
    prompts = text.split(widths(config)[1], dim=2) if text.shape[2] == sum(widths(config)[1]) else [text] * 2
    prompts = prompts if is_finished(config, cond) else [F.pad(prompt, (0, 1)) for prompt in prompts]
    levels = [
        times(part, cond.get(name), sigma, batch) * config["timestep_scale_multiplier"]
        for part, name in zip(grid.parts, MASKS)
    ]
    places = torch.stack([corners(grid.parts[0], cond, latent.device, True, side) for side in (0, 1)], dim=3)
    marks = (
        {"video_keyframes_mask": single_frames(grid.parts[0], cond, latent.device)}
        if config.get("use_keyframes_abs_pos_embedding")
        else {}
    )
    return dict(
        hidden_states=grid.parts[0].to_tokens(video),
        audio_hidden_states=grid.parts[1].to_tokens(audio),
        encoder_hidden_states=prompts[0],
        audio_encoder_hidden_states=prompts[1],
        encoder_attention_mask=mask,
        audio_encoder_attention_mask=mask,
        timestep=levels[0],
        audio_timestep=levels[1],
        sigma=highest(levels[0], batch),
        audio_sigma=highest(levels[1], batch),
        video_coords=places.expand(batch, -1, -1, -1),
        audio_num_frames=grid.parts[1].counts[1],
        **marks,
    )


def refusal(config, grid, cond):
    """What a prompt, masks and guides must be."""
    width, (unfinished, parts) = cond["c_crossattn"].shape[2], widths(config)
    if width not in (unfinished, sum(parts)):
        known = " or ".join(map(str, sorted({unfinished, sum(parts)})))
        return (
            f"c_crossattn has width {width}, but this LTX-2 model takes {known}; encode the prompt "
            f"with the text encoder of the same version."
        )
    finished = is_finished(config, cond)
    if not finished and not config.get("connectors"):
        return (
            f"the prompt has not been through the connectors (width {width}), and a diffusers folder "
            f"of the transformer alone has none; choose the pipeline's folder, or ComfyUI's single "
            f"file."
        )
    if not finished and "attention_mask" in cond:
        return (
            "attention_mask is set for a prompt that the connectors have yet to finish, which lets "
            "them have all rows; encode it with LTX-2's text encoder, which sends none."
        )
    return ltxv.refusal(config, grid.parts[0], cond)
