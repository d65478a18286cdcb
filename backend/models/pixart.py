"""PixArt-alpha and PixArt-sigma: 28 blocks, noise prediction on a discrete schedule, the prompt read through
cross-attention."""

import torch
from diffusers.models.embeddings import get_2d_sincos_pos_embed

from .blocks import APART, Blocks
from .discrete_schedule import DiscreteSchedule
from .family import Cache, Conditioning, Family, Latent, ModelIO, Noise
from .key_layout import MLP, Layout, blocks_of, under


def prepare(transformer, grid):
    """ComfyUI scales the position table with the latent's size; diffusers keeps the trained one."""
    embed, (height, width) = transformer.pos_embed, grid.padded.shape[1:]
    middle = (height + width) // 2
    table = get_2d_sincos_pos_embed(
        embed.proj.out_channels,
        grid.counts[1:],
        interpolation_scale=max(round(middle / 64), 1),
        base_size=max(round(middle / 64) * 64 // embed.patch_size, 1),
        output_type="pt",
    )
    embed.pos_embed = table.float().unsqueeze(0).to(embed.pos_embed.device)
    embed.height, embed.width = grid.counts[1:]


def is_alpha(config):
    """Is the model told the image's size? Older folders do not say, and mean the large model."""
    uses_size = config["use_additional_conditions"]
    return config["sample_size"] == 128 if uses_size is None else uses_size


def forward_args(config, grid, latent, timestep, cond):
    """alpha is also told the image's size and aspect ratio."""
    batch, (height, width) = latent.shape[0], latent.shape[2:]
    size = cond.get("c_size", latent.new_tensor([[height * 8.0, width * 8.0]], dtype=torch.float32))
    ratio = cond.get("c_ar", latent.new_tensor([[height / width]], dtype=torch.float32))
    size = size.expand(batch, 2) if is_alpha(config) else None
    ratio = ratio.expand(batch, 1) if is_alpha(config) else None
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=timestep.expand(batch),
        added_cond_kwargs=dict(resolution=size, aspect_ratio=ratio),
    )


HEADS = 16


def config_from_shapes(shapes):
    """Arguments of PixArtTransformer2DModel."""
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    return dict(
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        in_channels=channels,
        out_channels=shapes["final_layer.linear.weight"][0] // patch**2,
        num_layers=blocks_of(shapes, "blocks"),
        cross_attention_dim=hidden,
        sample_size=128,
        patch_size=patch,
        caption_channels=shapes["y_embedder.y_proj.fc1.weight"][1],
        use_additional_conditions="csize_embedder.mlp.0.weight" in shapes,
    )


BLOCK = "transformer_blocks.{}"
TIME = "adaln_single.emb"
LAYOUT = Layout(
    signature=(
        "x_embedder.proj.weight",
        "t_block.1.weight",
        "y_embedder.y_proj.fc1.weight",
        "blocks.0.scale_shift_table",
        "blocks.0.cross_attn.kv_linear.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
    unread={
        "y_embedder.y_embedding": "the prompt of training without one; an empty prompt is encoded instead",
        "pos_embed": "the table of positions, which is computed for each size",
    },
    names={
        "x_embedder.proj": "pos_embed.proj",
        "t_block.1": "adaln_single.linear",
        "final_layer.linear": "proj_out",
        "final_layer.scale_shift_table": "scale_shift_table",
        **under("t_embedder", f"{TIME}.timestep_embedder", MLP),
        **under("csize_embedder", f"{TIME}.resolution_embedder", MLP),
        **under("ar_embedder", f"{TIME}.aspect_ratio_embedder", MLP),
        "y_embedder.y_proj.fc1": "caption_projection.linear_1",
        "y_embedder.y_proj.fc2": "caption_projection.linear_2",
        "blocks.{}.scale_shift_table": f"{BLOCK}.scale_shift_table",
        "blocks.{}.attn.qkv": f"{BLOCK}.attn1.to_q {BLOCK}.attn1.to_k {BLOCK}.attn1.to_v",
        "blocks.{}.attn.proj": f"{BLOCK}.attn1.to_out.0",
        "blocks.{}.cross_attn.q_linear": f"{BLOCK}.attn2.to_q",
        "blocks.{}.cross_attn.kv_linear": f"{BLOCK}.attn2.to_k {BLOCK}.attn2.to_v",
        "blocks.{}.cross_attn.proj": f"{BLOCK}.attn2.to_out.0",
        "blocks.{}.mlp.fc1": f"{BLOCK}.ff.net.0.proj",
        "blocks.{}.mlp.fc2": f"{BLOCK}.ff.net.2",
    },
)
SCHEDULE = DiscreteSchedule(0.0001, 0.02, "sqrt_linear")
FAMILY = Family(
    name="pixart",
    transformer="PixArtTransformer2DModel",
    latent=Latent(frames=False),
    noise=Noise(prediction="eps", schedule=lambda config: SCHEDULE),
    io=ModelIO(arguments=forward_args, prepare=prepare),
    blocks=Blocks(lists={"transformer_blocks": APART}, attention=("image", "cross")),
    conditioning=Conditioning(
        accepted=("c_crossattn", "c_size", "c_ar"),
        widths=lambda config: {"c_crossattn": config["caption_channels"]},
    ),
    cache=Cache(prompt_layers=("attn2.to_k", "attn2.to_v")),
    layout=LAYOUT,
)
