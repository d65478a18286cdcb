"""Z-Image (turbo) of Alibaba: 30 blocks over one stream of image and text, both padded to multiples of 32
tokens, after two refiner blocks for each."""

from operator import itemgetter

import torch
from diffusers.models.transformers.transformer_z_image import FeedForward

from .blocks import IMAGE_ONLY, JOINED, Blocks
from .config_values import NO_SHARE, constant, entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import Layout, blocks_of, under

#: Text and image are padded to a multiple of this many tokens.
MULTIPLE = 32


def patch_module(transformer, config):
    """Set the widths that the file has; diffusers fixes them at those of the released size."""
    if "feed_forward_width" not in config:
        return
    for block in (*transformer.noise_refiner, *transformer.context_refiner, *transformer.layers):
        block.feed_forward = FeedForward(config["dim"], config["feed_forward_width"])
    layers = transformer.t_embedder.mlp
    layers[0] = torch.nn.Linear(layers[0].in_features, config["time_width"])
    layers[2] = torch.nn.Linear(config["time_width"], layers[2].out_features)


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward: lists of samples, each with a time axis. The timestep counts from
    noise (0) to image (1)."""
    return dict(
        x=list(grid.pad(latent).unsqueeze(2)),
        t=(1.0 - sigma).expand(latent.shape[0]),
        cap_feats=list(cond["c_crossattn"]),
    )


def count_text_tokens(cond):
    """Count the tokens of the padded prompt."""
    return -(-cond["c_crossattn"].shape[1] // MULTIPLE) * MULTIPLE


def padding(config, grid, cond):
    """Count the tokens that pad the image: the engine takes them for references."""
    return -grid.tokens % MULTIPLE


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. Position tables have an end. The text, padded, comes
    first, and the image stands after it."""
    most = tuple(config["axes_lens"])
    text = count_text_tokens(cond)
    needed = (text + 2, *grid.counts[1:])  # diffusers counts text from 1 and puts the image at text + 1
    if all(a <= b for a, b in zip(needed, most)):
        return None
    return (
        f"{text} tokens of text and {needed[1]} x {needed[2]} tokens are more than this "
        f"Z-Image's position tables of {most} hold; shorten the prompt or make the latent smaller."
    )


def config_from_shapes(shapes):
    """Return arguments of ZImageTransformer2DModel, and feed_forward_width and time_width, which it does not
    take: they are for patch_module. RoPE axes are (32, 48, 48)/128 of the head size. The model holds position
    tables of these lengths."""
    dim = shapes["layers.0.attention_norm1.weight"][0]
    head = shapes["layers.0.attention.q_norm.weight"][0]
    axis = 48 * head // 128 // 2 * 2
    queries = shapes["layers.0.attention.qkv.weight"][0] - 2 * shapes["layers.0.attention.out.weight"][1]
    return dict(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=shapes["x_embedder.weight"][1] // 4,
        dim=dim,
        n_layers=blocks_of(shapes, "layers"),
        n_refiner_layers=blocks_of(shapes, "noise_refiner"),
        n_heads=queries // head,
        n_kv_heads=queries // head,
        cap_feat_dim=shapes["cap_embedder.0.weight"][0],
        axes_dims=[head - 2 * axis, axis, axis],
        axes_lens=[4096, 1024, 1024],
        feed_forward_width=shapes["layers.0.feed_forward.w1.weight"][0],
        time_width=shapes["t_embedder.mlp.0.weight"][0],
    )


ATTENTION = {"qkv": "to_q to_k to_v", "out": "to_out.0", "q_norm": "norm_q", "k_norm": "norm_k"}
LAYOUT = Layout(
    signature=(
        "x_embedder.weight",
        "cap_embedder.1.weight",
        "x_pad_token",
        "cap_pad_token",
        "noise_refiner.0.attention.qkv.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaLN_modulation.0.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
    names={
        **under("noise_refiner.{}.attention", "noise_refiner.{}.attention", ATTENTION),
        **under("context_refiner.{}.attention", "context_refiner.{}.attention", ATTENTION),
        **under("layers.{}.attention", "layers.{}.attention", ATTENTION),
        "x_embedder": "all_x_embedder.2-1",
        "final_layer.linear": "all_final_layer.2-1.linear",
        "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
        "x_pad_token": "x_pad_token",
        "cap_pad_token": "cap_pad_token",
    },
    reshaped=("x_pad_token", "cap_pad_token"),  # GGUF files have no leading dimension of 1
    unread={"norm_final.weight": "a norm that Lumina 2 has, too, and that nothing uses"},
)
ONLY = {
    "siglip_feat_dim": (None, "Z-Image Omni"),
    "all_patch_size": ((2,), "a Z-Image of other patches"),
    "all_f_patch_size": ((1,), "a Z-Image of other patches"),
}
FAMILY = Family(
    name="z-image",
    transformer="ZImageTransformer2DModel",
    latent=Latent(patch=constant(1, 2, 2), frames=False),
    io=ModelIO(
        arguments=forward_args,
        output=lambda output, grid: -grid.padded.to_tokens(torch.stack(output).squeeze(2)),
    ),
    blocks=Blocks(
        output_layer="all_final_layer.2-1",
        lists={"noise_refiner": IMAGE_ONLY, "layers": JOINED},
        image="x",
        text_position="last",
        values=(("attention.to_v",),),
        flop_shares={"adaLN_modulation.*": NO_SHARE},
        per_token={"freqs_cis": ("joint", 1)},
        heads=itemgetter("n_heads"),
        head_size=lambda config: config["dim"] // config["n_heads"],
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "num_tokens", "attention_mask", "clip_text_pooled"),
        widths=entries(c_crossattn="cap_feat_dim"),
        ignored=("num_tokens", "attention_mask", "clip_text_pooled"),
        count_text_tokens=count_text_tokens,
        context_tokens=padding,
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("cap_embedder", "context_refiner.[0-9]"),
        step_modules=("t_embedder", "all_final_layer.*.adaLN_modulation"),
        image_modules=("all_x_embedder.*",),
    ),
    build=Build(patch_module=patch_module, only=ONLY),
    layout=LAYOUT,
)
