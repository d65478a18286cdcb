"""Variants of models that make or edit an image; Variant says what an entry holds."""

import torch
from variant_parts import (
    GUIDANCE,
    METHOD,
    REFERENCES,
    SPLICED,
    VIDEO_REFERENCES,
    WIDE_REFERENCES,
    Variant,
    randn,
    wider,
)

DUAL = {
    f"joint_blocks.{i}.x_block.{name}": shape
    for i in range(2)
    for name, shape in (
        ("attn2.qkv.weight", (768, 256)),
        ("attn2.qkv.bias", (768,)),
        ("attn2.proj.weight", (256, 256)),
        ("attn2.proj.bias", (256,)),
        ("attn2.ln_q.weight", (64,)),
        ("attn2.ln_k.weight", (64,)),
        ("adaLN_modulation.1.weight", (2304, 256)),
        ("adaLN_modulation.1.bias", (2304,)),
    )
}


#: PixArt-alpha's size embedders need a width that 3 divides.
ALPHA = {
    **wider("pixart-sigma", 8, 9),
    "t_embedder.mlp.0.weight": (288, 256),
    "y_embedder.y_embedding": (120, 64),
    **{
        f"{name}.mlp.{i}.{leaf}": shape
        for name in ("csize_embedder", "ar_embedder")
        for i, leaf, shape in (
            (0, "weight", (96, 256)),
            (0, "bias", (96,)),
            (2, "weight", (96, 96)),
            (2, "bias", (96,)),
        )
    },
}

#: Edits, inpainting and distilled models of Flux, Qwen-Image and Krea.
IMAGE_VARIANTS = {
    "flux-kontext": Variant("flux-dev", arguments=REFERENCES, negative={"c_crossattn": randn(1, 7, 64)}),
    "flux-kontext-uxo": Variant("flux-dev", arguments=REFERENCES | METHOD["uxo"]),
    "flux-fill": Variant(
        "flux-dev",
        {"img_in.weight": (256, 384)},
        "FluxInpaint",
        {"in_channels": 96},
        arguments={"c_concat": randn(1, 80, 16, 16)},
    ),
    "flux-canny": Variant(
        "flux-dev",
        {"img_in.weight": (256, 128)},
        "Flux",
        {"in_channels": 32},
        arguments={"c_concat": randn(1, 16, 16, 16)},
    ),
    "flux-schnell": Variant("flux-dev", GUIDANCE, "FluxSchnell", {"guidance_embed": False}),
    "flux2-edit-zero": Variant("flux2-dev", arguments=WIDE_REFERENCES | METHOD["index_timestep_zero"]),
    "flux2-edit": Variant("flux2-dev", arguments=WIDE_REFERENCES, negative={"ref_latents.1": None}),
    "flux3-edit": Variant("flux3", arguments=WIDE_REFERENCES, negative={"ref_latents.1": None}),
    "qwen-image-edit": Variant(
        "qwen-image", arguments=VIDEO_REFERENCES, negative={"c_crossattn": randn(1, 7, 64)}
    ),
    "qwen-image-edit-zero": Variant(
        "qwen-image",
        arguments=VIDEO_REFERENCES | METHOD["index_timestep_zero"],
        negative={"c_crossattn": randn(1, 7, 64)},
    ),
    "qwen-image-edit-2511": Variant(
        "qwen-image",
        {"__index_timestep_zero__": (0,)},
        "QwenImage",
        {"default_ref_method": "index_timestep_zero"},
        arguments=VIDEO_REFERENCES,
    ),
    "qwen-image-layered": Variant(
        "qwen-image",
        {"time_text_embed.addition_t_embedding.weight": (2, 256)},
        "QwenImage",
        {"use_additional_t_cond": True, "default_ref_method": "negative_index"},
        latent=(1, 16, 3, 12, 14),
        arguments=VIDEO_REFERENCES,
        negative={"c_crossattn": randn(1, 7, 64)},
    ),
    "qwen-image21-edit": Variant(
        "qwen-image21",
        arguments=SPLICED | {"image_slots": torch.tensor([[3, 3]])},
        negative={"c_crossattn": randn(1, 7, 64), "ref_latents.1": None, "image_slots": torch.tensor([[5]])},
    ),
    "qwen-image21-odd": Variant(
        "qwen-image21",
        latent=(1, 64, 7, 9),
        arguments={"ref_latents.0": randn(1, 64, 5, 3), "image_slots": torch.tensor([[4]])},
        negative={"c_crossattn": randn(1, 7, 64)},
    ),
    "krea2-edit": Variant("krea2", arguments=VIDEO_REFERENCES | METHOD["index"]),
    "krea2-style": Variant("krea2", arguments=VIDEO_REFERENCES | METHOD["index_timestep_zero"]),
}

#: PixArt, Hunyuan-DiT and Stable Diffusion 3.5.
OLDER_IMAGE_VARIANTS = {
    "pixart-alpha": Variant(
        "pixart-sigma",
        ALPHA,
        "PixArtAlpha",
        {"image_model": "pixart_alpha", "hidden_size": 288, "model_max_length": 120, "micro_condition": True},
    ),
    "hunyuan-dit-1.1": Variant(
        "hunyuan-dit",
        {"extra_embedder.0.weight": (1024, 2816), "style_embedder.weight": (1, 256)},
        "HunyuanDiT1",
        {"image_model": "hydit1", "size_cond": True, "use_style_cond": True},
    ),
    "sd3.5-medium": Variant("sd3", DUAL, "SD3", {"x_block_self_attn_layers": [0, 1]}),
}
