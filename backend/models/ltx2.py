"""LTX-2 of Lightricks: 48 blocks over video and sound, two streams of different width that attend to themselves, to the prompt and to each other.

The prompt is Gemma's, behind a projection in the text encoder's file; the connectors that finish it are in this one, as in ComfyUI.
"""

import json
from functools import wraps

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor, LTX2VideoTransformerBlock, apply_interleaved_rotary_emb, apply_split_rotary_emb
from diffusers.pipelines.ltx2.connectors import LTX2ConnectorTransformer1d

from ..loading.layout import Layout, blocks_of
from .plans import COMMON
from .spec import Family, Nested

HEADS = 32
#: Sound: channels and frequencies of a latent, one moment of which is a token.
CHANNELS, FREQUENCIES = 8, 16
#: Rows of a connected prompt, at least; heads of the released connectors, by their width, and of smaller ones.
ROWS, CONNECTOR_HEADS, SMALL_CONNECTOR_HEADS = 1024, {3840: 30}, 4


class Attention(LTX2AudioVideoAttnProcessor):
    """LTX-2's attention, for any number of rows, none included: a patch may hold no sound."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, query_rotary_emb=None, key_rotary_emb=None):
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(source)), attn.to_v(source)
        if query_rotary_emb is not None:
            rotate = apply_split_rotary_emb if attn.rope_type == "split" else apply_interleaved_rotary_emb
            q, k = (rotate(x, emb) if x.shape[1] else x for x, emb in ((q, query_rotary_emb), (k, key_rotary_emb or query_rotary_emb)))
        q, k, v = (x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, None if attention_mask is None else attention_mask[:, None])
        return attn.to_out[0](out.transpose(1, 2).flatten(2))


class Block(LTX2VideoTransformerBlock):
    """Sound hears the video after the video has heard the sound, as in ComfyUI; diffusers' block lets both hear what was before."""

    @wraps(LTX2VideoTransformerBlock.forward)
    def forward(self, hidden_states, audio_hidden_states, encoder_hidden_states, audio_encoder_hidden_states, temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift, temb_ca_gate, *args, **kwargs):
        self.times = temb_ca_scale_shift, temb_ca_gate
        return super().forward(
            hidden_states, audio_hidden_states, encoder_hidden_states, audio_encoder_hidden_states, temb, temb_audio, temb_ca_scale_shift, temb_ca_audio_scale_shift, temb_ca_gate, *args, **kwargs)

    def listen(self, attention, args, kwargs):
        """Hook before video_to_audio_attn: keys and values of the video as it is by now."""
        batch, (times, gates), table = self.video.shape[0], self.times, self.video_a2v_cross_attn_scale_shift_table
        gate, = self.get_mod_params(table[4:], gates, batch)
        scale, shift = self.get_mod_params(table[:4], times, batch)[2:]
        video = self.audio_to_video_norm(self.video + gate * self.heard) * (1 + scale) + shift
        self.video = self.heard = self.times = None
        return args, {**kwargs, "encoder_hidden_states": video}

    def watch(self):
        """Keep what listen needs."""
        self.audio_to_video_attn.register_forward_hook(lambda module, args, out: setattr(self, "heard", out))
        self.audio_to_video_norm.register_forward_pre_hook(lambda module, args: None if self.video is not None else setattr(self, "video", args[0]))
        self.video_to_audio_attn.register_forward_pre_hook(self.listen, with_kwargs=True)
        self.video = None


class Prompt(PixArtAlphaTextProjection):
    """The projection of a prompt; one that its connector has yet to finish comes with a feature more, of zeros."""

    def forward(self, prompt):
        if prompt.shape[2] > self.linear_1.in_features:
            prompt = prompt[..., :-1]
            rows, registers = prompt.shape[1], self.connector.num_learnable_registers
            spare = -(-max(ROWS, rows) // registers) * registers - rows
            known = torch.arange(rows + spare, device=prompt.device) < rows
            prompt = self.connector(F.pad(prompt, (0, 0, 0, spare)), torch.where(known, 0.0, -10000.0).to(prompt.dtype).expand(prompt.shape[0], 1, 1, -1))[0]
        return super().forward(prompt)


def adjust(transformer, config):
    """ComfyUI's order of hearing, attention for any number of rows, and the connectors."""
    for block in transformer.transformer_blocks:
        block.__class__ = Block
        block.watch()
        for name in ("attn1", "attn2", "audio_to_video_attn", "audio_attn1", "audio_attn2", "video_to_audio_attn"):
            getattr(block, name).set_processor(Attention())
    for projection, sizes in zip((transformer.caption_projection, transformer.audio_caption_projection), config.get("connectors", ())):
        projection.__class__ = Prompt
        projection.connector = LTX2ConnectorTransformer1d(**sizes, rope_type="split")


def forward_args(config, grid, latent, sigma, cond):
    """A prompt of twice the width is finished: the video's and the sound's."""
    (video, audio), text, (frames, height, width) = grid.unpack(latent), cond["c_crossattn"], grid.parts[0].counts
    finished = text.shape[2] == 2 * config["caption_channels"]
    prompts = text.chunk(2, dim=2) if finished else [F.pad(text, (0, 1))] * 2
    mask, times = cond.get("attention_mask"), sigma.expand(latent.shape[0]) * config["timestep_scale_multiplier"]
    return dict(
        hidden_states=grid.parts[0].to_tokens(video), audio_hidden_states=grid.parts[1].to_tokens(audio), encoder_hidden_states=prompts[0], audio_encoder_hidden_states=prompts[1],
        encoder_attention_mask=mask, audio_encoder_attention_mask=mask, timestep=times, sigma=times, num_frames=frames, height=height, width=width,
        fps=float(cond["frame_rate"].reshape(-1)[0]) if "frame_rate" in cond else 25.0, audio_num_frames=grid.parts[1].counts[1])


def refusal(config, grid, cond):
    """What a prompt must be."""
    if config.get("gated_attn") or config.get("cross_attn_mod") or not config.get("use_prompt_embeddings", True):
        return "this is LTX-2.3 or later, which is not supported here; use LTX-2."
    width, caption = cond["c_crossattn"].shape[2], config["caption_channels"]
    if width not in (caption, 2 * caption):
        return f"c_crossattn has width {width}, but this LTX-2 model takes {caption}, or {2 * caption} behind its connectors; encode the prompt with LTX-2's text encoder."
    if width == caption and not config.get("connectors"):
        return f"the prompt has not been through the connectors (width {width}), and a diffusers folder of the transformer has none; load ComfyUI's single file."
    if "attention_mask" in cond and width == caption:
        return "attention_mask is set for a prompt that the connectors have yet to finish, which lets them have all rows; encode it with LTX-2's text encoder, which sends none."
    return None


def config(shapes):
    """Arguments of LTX2VideoTransformer3DModel. What no shape tells is as in the released files, which tell it in their header."""
    (hidden, channels), (audio, heard) = shapes["patchify_proj.weight"], shapes["audio_patchify_proj.weight"]
    return dict(
        in_channels=channels, out_channels=shapes["proj_out.weight"][0], num_attention_heads=HEADS, attention_head_dim=hidden // HEADS, cross_attention_dim=shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        audio_in_channels=heard, audio_out_channels=shapes["audio_proj_out.weight"][0], audio_num_attention_heads=HEADS, audio_attention_head_dim=audio // HEADS,
        audio_cross_attention_dim=shapes["transformer_blocks.0.audio_attn2.to_k.weight"][1], num_layers=blocks_of(shapes, "transformer_blocks"), caption_channels=shapes["caption_projection.linear_1.weight"][1],
        rope_type="split", rope_double_precision=True, timestep_scale_multiplier=1000, cross_attn_timestep_scale_multiplier=1,
        connectors=[connector(shapes, f"{kind}_embeddings_connector") for kind in ("video", "audio")])


def connector(shapes, name):
    """Arguments of LTX2ConnectorTransformer1d."""
    registers, width = shapes[f"{name}.learnable_registers"]
    heads = CONNECTOR_HEADS.get(width, SMALL_CONNECTOR_HEADS)
    return dict(num_attention_heads=heads, attention_head_dim=width // heads, num_layers=blocks_of(shapes, f"{name}.transformer_1d_blocks"), num_learnable_registers=registers)


def metadata(strings):
    """Lightricks' own configuration."""
    told = json.loads(strings.get("config", "{}")).get("transformer", {})
    found = {"rope_type": told.get("rope_type"), "cross_attn_timestep_scale_multiplier": told.get("av_ca_timestep_scale_multiplier"), "timestep_scale_multiplier": told.get("timestep_scale_multiplier")}
    found["rope_double_precision"] = told["frequencies_precision"] == "float64" if "frequencies_precision" in told else None
    return {name: value for name, value in found.items() if value is not None}


block, cross = "transformer_blocks.{}", "av_cross_attn"
TIMES = {
    "adaln_single": "time_embed", "audio_adaln_single": "audio_time_embed", "av_ca_video_scale_shift_adaln_single": f"{cross}_video_scale_shift", "av_ca_audio_scale_shift_adaln_single": f"{cross}_audio_scale_shift",
    "av_ca_a2v_gate_adaln_single": f"{cross}_video_a2v_gate", "av_ca_v2a_gate_adaln_single": f"{cross}_audio_v2a_gate"}
CONNECTORS = {"video_embeddings_connector": "caption_projection.connector", "audio_embeddings_connector": "audio_caption_projection.connector"}
PARTS = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ff.net.0.proj", "ff.net.2")
LAYOUT = Layout(
    signature=("patchify_proj.weight", "audio_patchify_proj.weight", "audio_adaln_single.linear.weight", "caption_projection.linear_1.weight", "transformer_blocks.0.audio_to_video_attn.q_norm.weight", "audio_embeddings_connector.learnable_registers"),
    absent=("prompt_adaln_single.linear.weight", "transformer_blocks.0.attn1.to_gate_logits.weight", "keyframes_abs_pos_embedding"),         # 2.3 and 2.5
    config=config,
    metadata=metadata,
    names={
        "patchify_proj": "proj_in", "audio_patchify_proj": "audio_proj_in",
        **{f"{theirs}.{leaf}": f"{ours}.{leaf}" for theirs, ours in TIMES.items() for leaf in ("linear", "emb.timestep_embedder.linear_1", "emb.timestep_embedder.linear_2")},
        **{f"{block}.{attention}.{theirs}": f"{block}.{attention}.{ours}" for attention in ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn") for theirs, ours in (("q_norm", "norm_q"), ("k_norm", "norm_k"))},
        f"{block}.scale_shift_table_a2v_ca_video": f"{block}.video_a2v_cross_attn_scale_shift_table", f"{block}.scale_shift_table_a2v_ca_audio": f"{block}.audio_a2v_cross_attn_scale_shift_table",
        **{f"{theirs}.learnable_registers": f"{ours}.learnable_registers" for theirs, ours in CONNECTORS.items()},
        **{f"{theirs}.transformer_1d_blocks.{{}}.{part}": f"{ours}.transformer_blocks.{{}}.{part}" for theirs, ours in CONNECTORS.items() for part in PARTS},
        **{f"{theirs}.transformer_1d_blocks.{{}}.attn1.{a}": f"{ours}.transformer_blocks.{{}}.attn1.{b}" for theirs, ours in CONNECTORS.items() for a, b in (("q_norm", "norm_q"), ("k_norm", "norm_k"))},
    },
)

FAMILY = Family(
    name="ltx2",
    transformer="LTX2VideoTransformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    streams=("hidden_states", "audio_hidden_states"),
    returns=("image",),
    attention=("video", "audio", "cross", "cross", ("video", "audio"), ("audio", "video")),
    per_token={"video_rotary_emb": ("video", -2), "audio_rotary_emb": ("audio", -2), "ca_video_rotary_emb": ("video", -2), "ca_audio_rotary_emb": ("audio", -2)},
    prompt_only=("attn2.to_k", "attn2.to_v", "audio_attn2.to_k", "audio_attn2.to_v"),
    prompt_modules=("caption_projection", "audio_caption_projection"),
    adjust=adjust,
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    nested=Nested(("video", "audio"), patches=lambda config: ((1, 1, 1), (1, 1, FREQUENCIES)), channels=lambda config: (config["in_channels"], CHANNELS), order=(1, 0)),
    conditioning=("c_crossattn", "attention_mask", "frame_rate"),
    required=("c_crossattn",),
    widths=lambda config: {},
    clean_inpaint=True,
    refusal=refusal,
    forward_args=forward_args,
    output=lambda outputs, grid: grid.join(list(outputs)),
    tp_plan=COMMON,
    per_feature=("video_rotary_emb", "audio_rotary_emb", "ca_video_rotary_emb", "ca_audio_rotary_emb"),
    layout=LAYOUT,
)
