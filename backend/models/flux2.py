"""Flux.2 of Black Forest Labs (dev, klein): double- and single-stream blocks that share their modulation; no pooled prompt, latents of 128 channels."""

import torch

from ..loading.layout import Layout, blocks_of
from .plans import COMMON
from .spec import Family


def forward_args(config, grid, latent, sigma, cond):
    """Positions are (0, y, x, 0), and (0, 0, 0, number) for text. diffusers multiplies timestep and guidance by 1000 itself."""
    batch, device, text = latent.shape[0], latent.device, cond["c_crossattn"]
    image = torch.stack(torch.meshgrid(*[torch.arange(count, device=device) for count in grid.counts], indexing="ij"), dim=-1).reshape(-1, 3)
    rows = torch.arange(text.shape[1], device=device)[:, None]
    guidance = cond["guidance"].reshape(-1).expand(batch) if config["guidance_embeds"] and "guidance" in cond else None
    return dict(
        hidden_states=grid.to_tokens(latent), encoder_hidden_states=text, timestep=sigma.expand(batch), guidance=guidance,
        img_ids=torch.nn.functional.pad(image, (0, 1)), txt_ids=torch.nn.functional.pad(rows, (3, 0)))


def config(shapes):
    """Arguments of Flux2Transformer2DModel; RoPE has four equal axes."""
    hidden, head = shapes["img_in.weight"][0], shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    axis = head // 4 // 2 * 2
    return dict(
        in_channels=shapes["img_in.weight"][1], out_channels=shapes["final_layer.linear.weight"][0], num_layers=blocks_of(shapes, "double_blocks"), num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head, num_attention_heads=hidden // head, joint_attention_dim=shapes["txt_in.weight"][1], timestep_guidance_channels=shapes["time_in.in_layer.weight"][1],
        mlp_ratio=shapes["double_blocks.0.img_mlp.2.weight"][1] / hidden, guidance_embeds="guidance_in.in_layer.weight" in shapes, axes_dims_rope=(head - 3 * axis, axis, axis, axis))


double, single = "transformer_blocks.{}", "single_transformer_blocks.{}"
LAYOUT = Layout(
    signature=("img_in.weight", "txt_in.weight", "double_stream_modulation_img.lin.weight", "single_stream_modulation.lin.weight", "double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"),
    absent=("vector_in.in_layer.weight",),
    config=config,
    swapped=("norm_out.linear",),
    spellings=(("query_norm.weight", "query_norm.scale"), ("key_norm.weight", "key_norm.scale")),
    names={
        "img_in": "x_embedder", "txt_in": "context_embedder",
        **{f"{theirs}_in.{layer}_layer": f"time_guidance_embed.{ours}.linear_{i}" for theirs, ours in (("time", "timestep_embedder"), ("guidance", "guidance_embedder")) for i, layer in ((1, "in"), (2, "out"))},
        **{f"{name}.lin": f"{name}.linear" for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")},
        "double_blocks.{}.img_attn.qkv": f"{double}.attn.to_q {double}.attn.to_k {double}.attn.to_v",
        "double_blocks.{}.txt_attn.qkv": f"{double}.attn.add_q_proj {double}.attn.add_k_proj {double}.attn.add_v_proj",
        "double_blocks.{}.img_attn.norm.query_norm.scale": f"{double}.attn.norm_q.weight", "double_blocks.{}.img_attn.norm.key_norm.scale": f"{double}.attn.norm_k.weight",
        "double_blocks.{}.txt_attn.norm.query_norm.scale": f"{double}.attn.norm_added_q.weight", "double_blocks.{}.txt_attn.norm.key_norm.scale": f"{double}.attn.norm_added_k.weight",
        "double_blocks.{}.img_attn.proj": f"{double}.attn.to_out.0", "double_blocks.{}.txt_attn.proj": f"{double}.attn.to_add_out",
        "double_blocks.{}.img_mlp.0": f"{double}.ff.linear_in", "double_blocks.{}.img_mlp.2": f"{double}.ff.linear_out",
        "double_blocks.{}.txt_mlp.0": f"{double}.ff_context.linear_in", "double_blocks.{}.txt_mlp.2": f"{double}.ff_context.linear_out",
        "single_blocks.{}.linear1": f"{single}.attn.to_qkv_mlp_proj", "single_blocks.{}.linear2": f"{single}.attn.to_out",
        "single_blocks.{}.norm.query_norm.scale": f"{single}.attn.norm_q.weight", "single_blocks.{}.norm.key_norm.scale": f"{single}.attn.norm_k.weight",
        "final_layer.linear": "proj_out", "final_layer.adaLN_modulation.1": "norm_out.linear",
    },
)

FAMILY = Family(
    name="flux2",
    transformer="Flux2Transformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks", "single_transformer_blocks"),
    joined=("single_transformer_blocks",),
    text="encoder_hidden_states",
    text_position="first",
    counts_text=True,
    returns=("text", "image"),
    per_token={"image_rotary_emb": ("joint", 0)},
    text_layers=("attn.add_*", "attn.to_add_out", "ff_context*"),
    tp_plan={"*.linear_in": "gated colwise", "*.linear_out": "rowwise", "*.to_qkv_mlp_proj": "packed colwise", "single_transformer_blocks.*.to_out": "rowwise behind attention", "single_transformer_blocks.*.norm_?": None, **COMMON},
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    conditioning=("c_crossattn", "guidance", "y"),         # ComfyUI sends a pooled prompt where there is one, the model has no use for it
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
)
