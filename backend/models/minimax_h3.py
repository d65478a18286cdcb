"""MiniMax-H3: 50 blocks over one stream of text, stereo audio and video; both latents are denoised at once, each on a noise schedule of its own."""

import torch

from ..loading.layout import Layout, blocks_of
from .plans import COMMON
from .spec import Family, Nested

#: Flow shift of the video's and of the audio's schedule; the solvers step both on the video's, the audio scaled by their ratio.
SHIFT, AUDIO_SHIFT = 12.0, 3.0
#: Video frames of the latent frames, which repeat, and steps of the audio's clock (40 Hz) a video frame (24 Hz).
FRAMES, CLOCK = (1, 4, 4, 4, 4), 5.0 / 3.0
VIDEO, TEXT, AUDIO = range(3)


def audio_sigma(sigma):
    """The noise level of the audio where the video's is ``sigma``."""
    base = sigma / (SHIFT + sigma * (1.0 - SHIFT))
    return AUDIO_SHIFT * base / (1.0 + (AUDIO_SHIFT - 1.0) * base)


def carry(sigma):
    """The solvers' audio is the model's times the ratio of the two noise levels."""
    sigma, scale = sigma.clamp(min=1e-6), SHIFT / AUDIO_SHIFT
    audio, one = audio_sigma(sigma), torch.ones_like(sigma)
    return [(one, 0.0 * one, one), (audio / sigma, (1.0 - scale) * (audio / sigma), 1.0 + (scale - 1.0) * audio)]


def axis(length, other):
    """Positions along a side of the picture, in thirty-seconds of the square of its area."""
    ratio = length / (length * other) ** 0.5
    return (torch.arange(length, dtype=torch.float64) * (ratio / length) + (1.0 - ratio) / 2.0) * 32.0


def positions(grid, text):
    """(text + audio + video, 3): rows of text by their number; behind them on the same clock the audio, its channels at the picture's sides, and the video."""
    (frames, rows, columns), (_, channels, length) = (part.counts for part in grid.parts)
    y, x = axis(rows, columns), axis(columns, rows)
    spans = torch.tensor([CLOCK * FRAMES[i % len(FRAMES)] for i in range(frames)], dtype=torch.float64)
    clock = torch.cat([torch.zeros(1, dtype=torch.float64), spans[:-1].cumsum(0)]) + text
    heard = torch.arange(length, dtype=torch.float64) + text
    words = torch.arange(text, dtype=torch.float64)
    nought = torch.zeros(1, dtype=torch.float64)
    box = lambda *axes: torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    audio = [box(heard, nought, side[None]) for side in (x[0], x[-1])]
    return torch.cat([box(words, nought, nought), *audio, box(clock, y, x)]).float()


def forward_args(config, grid, latent, sigma, cond):
    """Times count from noise (0) to picture (1); text is at the video's."""
    (video, audio), text, sigma = grid.unpack(latent), cond["c_crossattn"], sigma.clamp(min=1e-6)
    kinds = [(TEXT, 0, text.shape[1]), (AUDIO, 1, grid.parts[1].tokens), (VIDEO, 0, grid.parts[0].tokens)]
    each = lambda value: torch.cat([torch.full((kind[2],), kind[value], device=latent.device) for kind in kinds])
    tags = each(0)
    rows = lambda tag: (tags == tag).nonzero()[:, 0]
    return dict(
        hidden_states=grid.parts[0].to_tokens(video), audio_hidden_states=grid.parts[1].to_tokens(audio), encoder_hidden_states=text,
        timestep=torch.stack([1.0 - sigma, 1.0 - audio_sigma(sigma)]), timestep_indices=each(1), token_tags=tags, position_ids=positions(grid, text.shape[1]).to(latent.device),
        video_indices=rows(VIDEO), audio_indices=rows(AUDIO), text_indices=rows(TEXT))


def refusal(config, grid, cond):
    """The audio's two channels stand at the sides of the picture."""
    channels = grid.parts[1].counts[1]
    return None if channels == 2 else f"the audio latent has {channels} channels of sound, but MiniMax-H3 makes stereo: shape (batch, {config['audio_in_channels']}, 2, time)."


def adjust(transformer, config):
    """Files hold the rotary frequencies, which diffusers computes."""
    transformer.rope.register_buffer("inv_freq", transformer.rope.inv_freq, persistent=True)


def config(shapes):
    """Arguments of MiniMaxH3Transformer3DModel."""
    head, first = shapes["blocks.0.attn.q_norm.weight"][0], shapes["time_embedder.proj_in.weight"]
    return dict(
        patch_size=(1, 2, 2), hidden_size=shapes["video_patch_proj.weight"][0], in_channels=shapes["video_patch_proj.weight"][1] // 4, audio_in_channels=shapes["audio_patch_proj.weight"][1],
        num_layers=blocks_of(shapes, "blocks"), num_refiner_layers=blocks_of(shapes, "token_refiner.blocks"), attention_head_dim=head,
        num_attention_heads=shapes["blocks.0.attn.qkv_proj.weight"][0] // (3 * head), ffn_dim=shapes["blocks.0.mlp.fc2.weight"][1], text_dim=shapes["condition_proj.weight"][1],
        freq_dim=first[1], time_embed_hidden_dim=first[0], time_embed_dim=shapes["time_embedder.proj_out.weight"][0], rope_freq_dim=shapes["rope.inv_freq"][0])


def block(theirs, ours):
    return {f"{theirs}.{{}}.attn.qkv_proj": " ".join(f"{ours}.{{}}.attn.to_{part}" for part in "qkv"), f"{theirs}.{{}}.attn.out_proj": f"{ours}.{{}}.attn.to_out.0",
            f"{theirs}.{{}}.attn.q_norm": f"{ours}.{{}}.attn.norm_q", f"{theirs}.{{}}.attn.k_norm": f"{ours}.{{}}.attn.norm_k",
            f"{theirs}.{{}}.mlp.fc1": f"{ours}.{{}}.ff.net.0.proj", f"{theirs}.{{}}.mlp.fc2": f"{ours}.{{}}.ff.net.2",
            **{f"{theirs}.{{}}.{name}": f"{ours}.{{}}.{name}" for name in ("norm1", "norm2", "adaln_proj.linear")}}


LAYOUT = Layout(
    signature=("video_patch_proj.weight", "audio_patch_proj.weight", "time_embedder.proj_in.weight", "token_refiner.blocks.0.attn.qkv_proj.weight", "blocks.0.adaln_proj.linear.weight", "final_layer.audio_out.weight"),
    absent=(),
    config=config,
    swapped=("transformer_blocks.{}.ff.net.0.proj", "token_refiner.refiner_blocks.{}.ff.net.0.proj"),
    names=block("blocks", "transformer_blocks") | block("token_refiner.blocks", "token_refiner.refiner_blocks") | {
        "video_patch_proj": "proj_in", "audio_patch_proj": "audio_proj_in", "condition_proj": "context_embedder", "time_embedder.proj_in": "time_embedder.linear_1", "time_embedder.proj_out": "time_embedder.linear_2",
        "final_layer.norm": "norm_out.norm", "final_layer.adaln_proj.linear": "norm_out.linear", "final_layer.video_out": "proj_out", "final_layer.audio_out": "audio_proj_out",
    },
)

FAMILY = Family(
    name="minimax-h3",
    transformer="MiniMaxH3Transformer3DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    joined=("transformer_blocks",),
    text_position="first",
    returns=("image",),
    per_token={"adaln_indices": ("joint", 0), "rotary_emb": ("joint", 0)},
    modulation=("adaln_proj.linear",),
    modulation_shared=True,
    float32=("proj_in.*", "audio_proj_in.*", "time_embedder.*", "proj_out.*", "audio_proj_out.*"),
    prompt_modules=("context_embedder", "token_refiner"),
    adjust=adjust,
    tp_plan={"*.ff.net.0.proj": "gated colwise", **COMMON},
    patch=lambda config: tuple(config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    nested=Nested(
        ("video", "audio"), patches=lambda config: (tuple(config["patch_size"]), (1, 1, 1)), channels=lambda config: (config["in_channels"], config["audio_in_channels"]),
        order=(1, 0), carry=carry),
    conditioning=("c_crossattn",),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["text_dim"]},
    width=lambda config: config["hidden_size"],
    refusal=refusal,
    forward_args=forward_args,
    output=lambda outputs, grid: -grid.join(list(outputs)),
    layout=LAYOUT,
)
