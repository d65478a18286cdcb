"""Qwen-Image of Alibaba: 60 joint blocks in the released size; text first, rotary tables for image and text."""

from ..loading.layout import Layout, blocks_of
from .spec import Family


def forward_args(config, grid, latent, sigma, cond):
    """Latents travel packed 2x2; diffusers multiplies the timestep by 1000 itself."""
    batch = latent.shape[0]
    return dict(
        hidden_states=grid.to_tokens(latent), encoder_hidden_states=cond["c_crossattn"], encoder_hidden_states_mask=cond.get("attention_mask"),
        timestep=sigma.expand(batch), img_shapes=[[grid.counts]] * batch)


def config(shapes):
    """Arguments of QwenImageTransformer2DModel; RoPE axes are (16, 56, 56)/128 of the head size."""
    hidden, head = shapes["img_in.weight"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    axis = 56 * head // 128 // 2 * 2
    return dict(
        patch_size=2, in_channels=shapes["img_in.weight"][1], out_channels=shapes["proj_out.weight"][0] // 4, num_layers=blocks_of(shapes, "transformer_blocks"),
        attention_head_dim=head, num_attention_heads=hidden // head, joint_attention_dim=shapes["txt_in.weight"][1], axes_dims_rope=(head - 2 * axis, axis, axis))


LAYOUT = Layout(
    signature=("img_in.weight", "txt_norm.weight", "txt_in.weight", "transformer_blocks.0.img_mod.1.weight", "transformer_blocks.0.attn.norm_q.weight", "proj_out.weight"),
    # Edit 2511 marks its reference images, Layered adds a time condition
    absent=("__index_timestep_zero__", "time_text_embed.addition_t_embedding.weight"),
    config=config,
    names={},           # the file has diffusers' names
)

FAMILY = Family(
    name="qwen-image",
    transformer="QwenImageTransformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    text="encoder_hidden_states",
    text_position="first",
    text_mask="encoder_hidden_states_mask",
    text_needs_a_row=True,
    returns=("text", "image"),
    modulation=("img_mod.1", "txt_mod.1"),
    per_token={"image_rotary_emb": (("image", "text"), 0)},
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"] // config["patch_size"] ** 2,
    conditioning=("c_crossattn", "attention_mask"),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
)
