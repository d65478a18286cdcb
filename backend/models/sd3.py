"""Stable Diffusion 3 and 3.5 (medium, large) of Stability AI: 24 or 38 joint blocks, the first 13 of 3.5
medium with a second attention over the image alone."""

from .blocks import APART, Blocks
from .common.adaptive_norms import LAST_MODULATION
from .common.tensor_plans import TEXT_LAYERS
from .config_values import entries
from .family import FP16_OR_BF16, Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import MLP, Layout, blocks_of, under


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward: a latent padded to whole tokens; timesteps run to 1000."""
    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        pooled_projections=cond["y"],
        timestep=sigma.expand(latent.shape[0]) * 1000,
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. The position table ends."""
    most = config["pos_embed_max_size"]
    if max(grid.counts) <= most:
        return None
    _, height, width = grid.counts
    return f"the latent is {height} x {width} tokens, but this model knows {most} a side; make it smaller."


def config_from_shapes(shapes):
    """Return the arguments of SD3Transformer2DModel; heads are 64 wide."""
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    layers = blocks_of(shapes, "joint_blocks")
    return dict(
        sample_size=128,
        patch_size=patch,
        in_channels=channels,
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


BLOCK = {
    "x_block.adaLN_modulation.1": "norm1.linear",
    "x_block.mlp.fc1": "ff.net.0.proj",
    "x_block.mlp.fc2": "ff.net.2",
    "context_block.adaLN_modulation.1": "norm1_context.linear",
    "context_block.mlp.fc1": "ff_context.net.0.proj",
    "context_block.mlp.fc2": "ff_context.net.2",
}
ATTENTION = {"qkv": "to_q to_k to_v", "ln_q": "norm_q", "ln_k": "norm_k", "proj": "to_out.0"}
TEXT_ATTENTION = {
    "qkv": "add_q_proj add_k_proj add_v_proj",
    "ln_q": "norm_added_q",
    "ln_k": "norm_added_k",
    "proj": "to_add_out",
}
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
        **under("t_embedder", "time_text_embed.timestep_embedder", MLP),
        **under("y_embedder", "time_text_embed.text_embedder", MLP),
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        **under("joint_blocks.{}", "transformer_blocks.{}", BLOCK),
        **under("joint_blocks.{}.x_block.attn", "transformer_blocks.{}.attn", ATTENTION),
        **under("joint_blocks.{}.x_block.attn2", "transformer_blocks.{}.attn2", ATTENTION),
        **under("joint_blocks.{}.context_block.attn", "transformer_blocks.{}.attn", TEXT_ATTENTION),
    },
)
FAMILY = Family(
    name="sd3",
    transformer="SD3Transformer2DModel",
    latent=Latent(frames=False),
    io=ModelIO(arguments=forward_args),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"transformer_blocks": APART},
        returns=("text", "image"),
        text="encoder_hidden_states",
        text_position="last",
        attention=("joint", "image"),
        count_attention_calls=lambda block: 1 if block.attn2 is None else 2,
        values=(("attn.to_v", "attn.add_v_proj"), ("attn2.to_v",)),
        text_layers=TEXT_LAYERS,
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "y"),
        required=("c_crossattn", "y"),
        widths=entries(c_crossattn="joint_attention_dim", y="pooled_projection_dim"),
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("context_embedder",),
        step_modules=("time_text_embed", *LAST_MODULATION),
        image_modules=("pos_embed",),
        token_modules=("pos_embed.proj",),
        modulation=("norm1.linear", "norm1_context.linear"),
    ),
    build=Build(dtypes=FP16_OR_BF16),
    layout=LAYOUT,
)
