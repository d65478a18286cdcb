"""Flux.3 of Black Forest Labs, text to image: blocks for the image alone and for the text alone, then 28 over both; the text's part is the same at every step."""

import torch

from ..loading.layout import Layout, blocks_of
from .plans import COMMON
from .spec import Family

#: Positions count half a token along the picture's sides.
POSITION_SCALE = 0.5


def adjust(transformer, config):
    """Without the parts for reference images; and modulation, which diffusers computes for every row, once for all rows."""
    for parts in (transformer.x_embedders, transformer.early_stream_modulations, transformer.single_stream_modulations, transformer.mode_blocks):
        del parts["image_cond"]
    one_row = lambda layer, args: (args[0][:, :1],)
    for layer in (*transformer.early_stream_modulations.values(), *transformer.single_stream_modulations.values(), transformer.norm_out.linear):
        layer.register_forward_pre_hook(one_row)


def forward_args(config, grid, latent, sigma, cond):
    """Positions are (0, y, x, 0), and (0, 0, 0, number) for text."""
    batch, device, text = latent.shape[0], latent.device, cond["c_crossattn"]
    image = torch.stack(torch.meshgrid(*[torch.arange(count, device=device) for count in grid.counts], indexing="ij"), dim=-1).reshape(-1, 3) * POSITION_SCALE
    rows = torch.arange(text.shape[1], device=device)[:, None]
    return dict(
        hidden_states=grid.to_tokens(latent), encoder_hidden_states=text, timestep=sigma.expand(batch),
        img_ids=torch.nn.functional.pad(image, (0, 1)), txt_ids=torch.nn.functional.pad(rows, (3, 0)))


def refusal(config, grid, cond):
    """Distilled models are told to which noise level a step leads, which no solver here tells them."""
    return "the model is a step-distilled Flux.3 (flow_map), which is not supported; use the undistilled one." if config["flow_map"] else None


def config(shapes):
    """Arguments of Flux3Transformer2DModel; RoPE has four equal axes."""
    hidden, head = shapes["emb_in.image.weight"][0], shapes["single_blocks.0.norm.query_norm.scale"][0]
    axis = head // 4 // 2 * 2
    return dict(
        in_channels=shapes["emb_in.image.weight"][1], cond_in_channels=shapes["emb_in.image.weight"][1], num_layers=blocks_of(shapes, "content_mode_blocks.image"), num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head, num_attention_heads=shapes["single_blocks.0.q_proj.weight"][0] // head, joint_attention_dim=shapes["txt_in.weight"][1], timestep_channels=shapes["time_in.in_layer.weight"][1],
        mlp_ratio=shapes["single_blocks.0.mlp_out.weight"][1] / hidden, axes_dims_rope=(head - 3 * axis, axis, axis, axis), flow_map="ref_time_in.in_layer.weight" in shapes)


def block(theirs, ours):
    pairs = {"q_proj": "attn.to_q", "k_proj": "attn.to_k", "v_proj": "attn.to_v", "attn_out": "attn.to_out.0", "norm.query_norm.scale": "attn.norm_q.weight", "norm.key_norm.scale": "attn.norm_k.weight",
             "mlp_in": "ff.linear_in", "mlp_out": "ff.linear_out"}
    return {f"{theirs}.{{}}.{name}": f"{ours}.{{}}.{target}" for name, target in pairs.items()}


LAYOUT = Layout(
    signature=("emb_in.image.weight", "txt_in.weight", "early_stream_modulations.image.lin.weight", "content_mode_blocks.image.0.q_proj.weight", "txt_mode_blocks.0.q_proj.weight", "single_blocks.0.q_proj.weight"),
    absent=(),
    config=config,
    swapped=("norm_out.linear",),
    spellings=(("query_norm.weight", "query_norm.scale"), ("key_norm.weight", "key_norm.scale")),
    names=block("content_mode_blocks.image", "mode_blocks.image") | block("txt_mode_blocks", "txt_mode_blocks") | block("single_blocks", "single_transformer_blocks") | {
        "emb_in.image": "x_embedders.image", "txt_in": "context_embedder", "time_in.in_layer": "timestep_embedder.linear_1", "time_in.out_layer": "timestep_embedder.linear_2",
        "ref_time_in.in_layer": "target_timestep_embedder.linear_1", "ref_time_in.out_layer": "target_timestep_embedder.linear_2",
        **{f"{phase}_stream_modulations.{mode}.lin": f"{phase}_stream_modulations.{mode}.linear" for phase in ("early", "single") for mode in ("image", "txt")},
        "final_layer.image.linear": "proj_out", "final_layer.image.adaLN_modulation.1": "norm_out.linear",
    },
)

FAMILY = Family(
    name="flux3",
    transformer="Flux3Transformer2DModel",
    prediction="flow",
    block_lists=("mode_blocks.image", "single_transformer_blocks"),
    image_first=("mode_blocks.image",),
    text="encoder_hidden_states",
    text_position="first",
    returns=("text", "image"),
    per_token={"image_rotary_emb": ("joint", 0)},
    float32=("*.norm_q.weight", "*.norm_k.weight"),
    prompt_modules=("context_embedder", "txt_mode_blocks.[0-9]"),
    adjust=adjust,
    tp_plan={"*.linear_in": "gated colwise", "*.linear_out": "rowwise", **COMMON},
    patch=lambda config: (1, 1, 1),
    latent_channels=lambda config: config["in_channels"],
    conditioning=("c_crossattn",),
    required=("c_crossattn",),
    widths=lambda config: {"c_crossattn": config["joint_attention_dim"]},
    refusal=refusal,
    forward_args=forward_args,
    output=lambda output, grid: output,
    layout=LAYOUT,
)
