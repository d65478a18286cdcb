"""Stable Diffusion 3 and 3.5 (medium, large) of Stability AI: 24 or 38 joint blocks, the first 13 of 3.5
medium with a second attention over the image alone."""

from .blocks import APART, Blocks
from .common.tensor_plans import TEXT_LAYERS
from .family import Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import Layout, blocks_of


def forward_args(config, grid, latent, sigma, cond):
    """A latent padded to whole tokens; timesteps run to 1000."""
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        pooled_projections=cond["y"],
        timestep=sigma.expand(latent.shape[0]) * 1000,
    )


def refusal(config, grid, cond):
    """The position table ends."""
    most = config["pos_embed_max_size"]
    return (
        None
        if max(grid.counts) <= most
        else f"the latent is {grid.counts[1]} x {grid.counts[2]} tokens, but this model knows {most} a "
        f"side; make it smaller."
    )


def config_from_shapes(shapes):
    """Arguments of SD3Transformer2DModel; heads are 64 wide."""
    hidden = shapes["x_embedder.proj.weight"][0]
    patch = shapes["x_embedder.proj.weight"][2]
    layers = blocks_of(shapes, "joint_blocks")
    return dict(
        sample_size=128,
        patch_size=patch,
        in_channels=shapes["x_embedder.proj.weight"][1],
        out_channels=shapes["final_layer.linear.weight"][0] // patch**2,
        num_layers=layers,
        attention_head_dim=64,
        num_attention_heads=hidden // 64,
        caption_projection_dim=hidden,
        joint_attention_dim=shapes["context_embedder.weight"][1],
        pooled_projection_dim=shapes["y_embedder.mlp.0.weight"][1],
        pos_embed_max_size=round(shapes["pos_embed"][1] ** 0.5),
        dual_attention_layers=tuple(
            i for i in range(layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in shapes
        ),
        qk_norm="rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in shapes else None,
    )


FILE_BLOCK = "joint_blocks.{}"
BLOCK = "transformer_blocks.{}"
LAYOUT = Layout(
    signature=(
        "x_embedder.proj.weight",
        "pos_embed",
        "joint_blocks.0.x_block.attn.qkv.weight",
        "context_embedder.weight",
        "y_embedder.mlp.0.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
    swapped=("norm_out.linear", "transformer_blocks.{last}.norm1_context.linear"),
    names={
        "pos_embed": "pos_embed.pos_embed",
        "x_embedder.proj": "pos_embed.proj",
        "context_embedder": "context_embedder",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        f"{FILE_BLOCK}.x_block.adaLN_modulation.1": f"{BLOCK}.norm1.linear",
        f"{FILE_BLOCK}.context_block.adaLN_modulation.1": f"{BLOCK}.norm1_context.linear",
        f"{FILE_BLOCK}.x_block.attn.qkv": f"{BLOCK}.attn.to_q {BLOCK}.attn.to_k {BLOCK}.attn.to_v",
        f"{FILE_BLOCK}.context_block.attn.qkv": f"{BLOCK}.attn.add_q_proj {BLOCK}.attn.add_k_proj "
        f"{BLOCK}.attn.add_v_proj",
        f"{FILE_BLOCK}.x_block.attn.ln_q": f"{BLOCK}.attn.norm_q",
        f"{FILE_BLOCK}.x_block.attn.ln_k": f"{BLOCK}.attn.norm_k",
        f"{FILE_BLOCK}.context_block.attn.ln_q": f"{BLOCK}.attn.norm_added_q",
        f"{FILE_BLOCK}.context_block.attn.ln_k": f"{BLOCK}.attn.norm_added_k",
        f"{FILE_BLOCK}.x_block.attn.proj": f"{BLOCK}.attn.to_out.0",
        f"{FILE_BLOCK}.context_block.attn.proj": f"{BLOCK}.attn.to_add_out",
        f"{FILE_BLOCK}.x_block.attn2.qkv": f"{BLOCK}.attn2.to_q {BLOCK}.attn2.to_k {BLOCK}.attn2.to_v",
        f"{FILE_BLOCK}.x_block.attn2.proj": f"{BLOCK}.attn2.to_out.0",
        f"{FILE_BLOCK}.x_block.attn2.ln_q": f"{BLOCK}.attn2.norm_q",
        f"{FILE_BLOCK}.x_block.attn2.ln_k": f"{BLOCK}.attn2.norm_k",
        f"{FILE_BLOCK}.x_block.mlp.fc1": f"{BLOCK}.ff.net.0.proj",
        f"{FILE_BLOCK}.x_block.mlp.fc2": f"{BLOCK}.ff.net.2",
        f"{FILE_BLOCK}.context_block.mlp.fc1": f"{BLOCK}.ff_context.net.0.proj",
        f"{FILE_BLOCK}.context_block.mlp.fc2": f"{BLOCK}.ff_context.net.2",
    },
)
FAMILY = Family(
    name="sd3",
    transformer="SD3Transformer2DModel",
    latent=Latent(frames=False),
    io=ModelIO(arguments=forward_args),
    blocks=Blocks(
        lists={"transformer_blocks": APART},
        returns=("text", "image"),
        text="encoder_hidden_states",
        text_position="last",
        attention=("joint", "image"),
        text_layers=TEXT_LAYERS,
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "y"),
        required=("c_crossattn", "y"),
        widths=lambda config: {
            "c_crossattn": config["joint_attention_dim"],
            "y": config["pooled_projection_dim"],
        },
        refusal=refusal,
    ),
    cache=Cache(modulation=("norm1.linear", "norm1_context.linear")),
    layout=LAYOUT,
)
