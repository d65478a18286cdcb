"""LTX-2: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

from functools import wraps

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import PixArtAlphaTextProjection
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoAttnProcessor, LTX2VideoTransformerBlock, apply_interleaved_rotary_emb, apply_split_rotary_emb
from diffusers.pipelines.ltx2.connectors import LTX2ConnectorTransformer1d

#: Rows of a connected prompt, at least.
ROWS = 1024


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
