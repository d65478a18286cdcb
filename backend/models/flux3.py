"""Flux.3 of Black Forest Labs, with reference images: blocks for image, references and text, each alone,
then 28 over all; references and text are the same at every step."""

import torch

from .blocks import APART, IMAGE_ONLY, Blocks
from .common import references
from .common.tensor_plans import COMMON
from .config_values import constant, entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import IN_OUT, NORM_SPELLINGS, Layout, blocks_of, under

#: Positions count half a token along the image's sides.
POSITION_SCALE = 0.5


def patch_module(transformer, config):
    """Compute modulation once per stream; diffusers does it once per token."""
    single = transformer.single_stream_modulations
    for layer in (*transformer.early_stream_modulations.values(), single.txt):
        layer.register_forward_pre_hook(lambda layer, args: (args[0][:, :1],))
    transformer.norm_out.register_forward_pre_hook(lambda norm, args: (args[0], args[1][:, :1]))
    for layer in (single.image, single.image_cond):  # their tokens are put one after the other
        layer.forward = lambda temb, own=layer.forward: own(temb[:, :1]).expand(-1, temb.shape[1], -1)


def positions(grid, number, device):
    """Return (tokens, 4) of (0, y, x, number); number: 0 for the latent, -1, -2, ... for references."""
    places = references.positions(grid, device=device) * POSITION_SCALE
    return torch.nn.functional.pad(places, (0, 1), value=number)


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Positions of text are (0, 0, 0, number)."""
    batch = tokens.shape[0]
    device = tokens.device
    text = cond["c_crossattn"]
    grids = references.grids(grid, cond)
    numbers = torch.arange(text.shape[1], device=device)[:, None]
    arguments = dict(
        hidden_states=tokens,
        encoder_hidden_states=text,
        timestep=sigma.expand(batch),
        img_ids=positions(grid, 0, device),
        txt_ids=torch.nn.functional.pad(numbers, (3, 0)),
    )
    if grids:
        arguments["image_cond_hidden_states"] = torch.cat(references.tokens(grid, cond), dim=1)
        ids = [positions(one, -i, device) for i, one in enumerate(grids, 1)]
        arguments["image_cond_ids"] = torch.cat(ids)
    return arguments


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None: distilled models are told to which noise level a step
    leads, which no solver here tells them."""
    if config["flow_map"]:
        return "the model is a step-distilled Flux.3 (flow_map), which is not supported; use another Flux.3."
    return references.refusal(config, grid, cond)


def config_from_shapes(shapes):
    """Return the arguments of Flux3Transformer2DModel; RoPE has four equal axes."""
    hidden = shapes["emb_in.image.weight"][0]
    head = shapes["single_blocks.0.norm.query_norm.scale"][0]
    axis = head // 4 // 2 * 2
    return dict(
        in_channels=shapes["emb_in.image.weight"][1],
        cond_in_channels=shapes["emb_in.image_cond.weight"][1],
        num_layers=blocks_of(shapes, "content_mode_blocks.image"),
        num_single_layers=blocks_of(shapes, "single_blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["single_blocks.0.q_proj.weight"][0] // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
        timestep_channels=shapes["time_in.in_layer.weight"][1],
        mlp_ratio=shapes["single_blocks.0.mlp_out.weight"][1] / hidden,
        axes_dims_rope=(head - 3 * axis, axis, axis, axis),
        flow_map="ref_time_in.in_layer.weight" in shapes,
    )


BLOCK = {
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_proj": "attn.to_v",
    "attn_out": "attn.to_out.0",
    "norm.query_norm.scale": "attn.norm_q.weight",
    "norm.key_norm.scale": "attn.norm_k.weight",
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
LAYOUT = Layout(
    signature=(
        "emb_in.image.weight",
        "txt_in.weight",
        "early_stream_modulations.image.lin.weight",
        "content_mode_blocks.image.0.q_proj.weight",
        "txt_mode_blocks.0.q_proj.weight",
        "single_blocks.0.q_proj.weight",
    ),
    config=config_from_shapes,
    swapped=("norm_out.linear",),
    spellings=NORM_SPELLINGS,
    names={
        **under("content_mode_blocks.image.{}", "mode_blocks.image.{}", BLOCK),
        **under("content_mode_blocks.image_cond.{}", "mode_blocks.image_cond.{}", BLOCK),
        **under("txt_mode_blocks.{}", "txt_mode_blocks.{}", BLOCK),
        **under("single_blocks.{}", "single_transformer_blocks.{}", BLOCK),
        "emb_in.image": "x_embedders.image",
        "emb_in.image_cond": "x_embedders.image_cond",
        "txt_in": "context_embedder",
        **under("time_in", "timestep_embedder", IN_OUT),
        **under("ref_time_in", "target_timestep_embedder", IN_OUT),
        **{
            f"{phase}_stream_modulations.{mode}.lin": f"{phase}_stream_modulations.{mode}.linear"
            for phase in ("early", "single")
            for mode in ("image", "image_cond", "txt")
        },
        "final_layer.image.linear": "proj_out",
        "final_layer.image.adaLN_modulation.1": "norm_out.linear",
    },
)
STEP_MODULES = (
    "time_proj",
    "timestep_embedder",
    "*_stream_modulations.image.linear",
    "norm_out.act_fn",
    "norm_out.linear",
)
FAMILY = Family(
    name="flux3",
    transformer="Flux3Transformer2DModel",
    latent=Latent(patch=constant(1, 1, 1), frames=False, pixels=constant(1, 16, 16)),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"mode_blocks.image": IMAGE_ONLY, "single_transformer_blocks": APART},
        returns=("text", "image"),
        text="encoder_hidden_states",
        text_position="first",
        values=(("attn.to_v",),),
        per_token={"image_rotary_emb": ("joint", 0), "temb_mod": ("image", 1)},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "ref_latents"),
        widths=entries(c_crossattn="joint_attention_dim"),
        context_tokens=references.token_count,
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=(
            "context_embedder",
            "pos_embed",
            "txt_mode_blocks.[0-9]",
            "x_embedders.image_cond",
            "mode_blocks.image_cond.[0-9]",
            "*_stream_modulations.txt.linear",  # of what is given, whose timestep is 0
            "*_stream_modulations.image_cond.linear",
        ),
        step_modules=STEP_MODULES,
        image_modules=("x_embedders.image",),
        token_modules=("x_embedders.image",),
    ),
    build=Build(float32=("*.norm_q.weight", "*.norm_k.weight"), patch_module=patch_module),
    tensor_plan={"*.linear_in": "gated colwise", "*.linear_out": "rowwise", **COMMON},
    layout=LAYOUT,
)
