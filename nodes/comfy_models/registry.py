"""ComfyUI's own model object of a transformer family, without weights.

With it ComfyUI's own code computes everything around the transformer: schedules, latent scaling, the model's
arguments from a CONDITIONING and their defaults. A family is one entry of FAMILIES.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ...backend.protocol import Loaded, RefusedError
from . import generic
from . import payloads as arguments
from .flux3 import Flux3
from .latent_formats import LATENT_FORMATS
from .qwen_image21 import QwenImage21
from .sana import Sana
from .unet_configs import UNET_CONFIGS
from .unet_values import hidden, hunyuan_video_class, is_pixart_alpha, wan_class


@dataclass(frozen=True)
class Family:
    """How ComfyUI builds a family from the diffusers config of its transformer.

    ``comfy_class``: config -> name of the class in comfy.supported_models, or in OURS. ``unet_config``:
    config -> ComfyUI's own.
    ``needs``: keys that a CONDITIONING must have. ``zeros``: model arguments for which ComfyUI's model takes
    zeros where a CONDITIONING has None, and the entry of unet_config with their width. ``accepts``: keys of a
    CONDITIONING that most families refuse.
    ``reads``: config -> attributes (dotted) of the transformer at which ComfyUI's model looks.
    ``linear_shift``: ComfyUI builds the family with Flux's ModelSamplingFlux, but its workflows shift it with
    ModelSamplingAuraFlow. ``latents``: channels of every latent where the
    model denoises several at once. ``images``: it makes images, though its latent format is a video's.
    ``translate``: the arguments that ComfyUI's model makes -> those that the backend takes, or RefusedError.
    """

    comfy_class: Callable[[dict], str]
    unet_config: Callable[[dict], dict]
    needs: tuple[str, ...] = ()
    zeros: dict[str, str] = field(default_factory=dict)
    accepts: tuple[str, ...] = ()
    reads: Callable[[dict], dict] = lambda config: {}
    linear_shift: bool = False
    latents: tuple[int, ...] = ()
    images: bool = False
    translate: Callable[[dict], dict] = lambda arguments: arguments


#: Classes of models that ComfyUI does not have, or not in every version.
OURS = {"Sana": Sana, "Flux3": Flux3} | (
    {} if hasattr(comfy.supported_models, "QwenImage21") else {"QwenImage21": QwenImage21}
)
#: Keys of a CONDITIONING that hold an image as further channels, and reference images of edit models.
IMAGE_TO_VIDEO = ("concat_latent_image", "concat_mask")
REFERENCES = ("reference_latents",)

FAMILIES = {
    "flux": Family(
        comfy_class=lambda config: "Flux" if config["guidance_embeds"] else "FluxSchnell",
        unet_config=UNET_CONFIGS["flux"],
        needs=("pooled_output",),
        zeros={"y": "vec_in_dim"},
        accepts=IMAGE_TO_VIDEO + REFERENCES,
        reads=lambda config: {"patch_size": 2},
    ),
    "chroma": Family(lambda config: "Chroma", UNET_CONFIGS["chroma"], linear_shift=True),
    "sd3": Family(lambda config: "SD3", UNET_CONFIGS["sd3"], needs=("pooled_output",)),
    "pixart": Family(
        lambda config: "PixArtAlpha" if is_pixart_alpha(config) else "PixArtSigma", UNET_CONFIGS["pixart"]
    ),
    "hunyuan-dit": Family(
        lambda config: "HunyuanDiT1" if config["use_style_cond_and_image_meta_size"] else "HunyuanDiT",
        UNET_CONFIGS["hunyuan-dit"],
        needs=("conditioning_mt5xl", "attention_mask", "attention_mask_mt5xl"),
    ),
    "hunyuan-video": Family(
        hunyuan_video_class, UNET_CONFIGS["hunyuan-video"], needs=("pooled_output",), accepts=IMAGE_TO_VIDEO
    ),
    "hunyuan-video-1.5": Family(
        lambda config: "HunyuanVideo15",
        UNET_CONFIGS["hunyuan-video-1.5"],
        needs=("pooled_output",),
        accepts=IMAGE_TO_VIDEO,
        reads=lambda config: {
            "img_in.proj.weight": torch.empty(hidden(config), config["in_channels"], device="meta")
        },
    ),
    "hunyuan-image-2.1": Family(lambda config: "HunyuanImage21", UNET_CONFIGS["hunyuan-image-2.1"]),
    "wan": Family(
        wan_class,
        UNET_CONFIGS["wan"],
        accepts=IMAGE_TO_VIDEO,
        reads=lambda config: {
            "patch_embedding.weight": torch.empty(hidden(config), config["in_channels"], device="meta")
        },
    ),
    "cogvideox": Family(
        lambda config: (
            "CogVideoX_T2V" if config["in_channels"] == config["out_channels"] else "CogVideoX_I2V"
        ),
        UNET_CONFIGS["cogvideox"],
        accepts=IMAGE_TO_VIDEO[:1],
        reads=lambda config: {
            "in_channels": config["in_channels"],
            "ofs_proj_dim": config.get("ofs_embed_dim"),
        },
    ),
    "ltxv": Family(
        lambda config: "LTXV", UNET_CONFIGS["ltxv"], accepts=IMAGE_TO_VIDEO[1:], translate=arguments.ltxv
    ),
    "qwen-image": Family(
        lambda config: "QwenImage",
        UNET_CONFIGS["qwen-image"],
        accepts=REFERENCES,
        linear_shift=True,
        images=True,
    ),
    "qwen-image-2.1": Family(
        lambda config: "QwenImage21",
        UNET_CONFIGS["qwen-image-2.1"],
        accepts=REFERENCES,
        translate=arguments.qwen_image21,
        reads=lambda config: {"reset_prefix_cache": lambda enabled: None},
    ),  # it is on the ranks what it is
    "z-image": Family(lambda config: "ZImage", UNET_CONFIGS["z-image"]),
    "krea2": Family(lambda config: "Krea2", UNET_CONFIGS["krea2"], accepts=REFERENCES, images=True),
    "sana": Family(lambda config: "Sana", UNET_CONFIGS["sana"]),
    "hidream": Family(
        lambda config: "HiDream", UNET_CONFIGS["hidream"], needs=("pooled_output", "conditioning_llama3")
    ),
    "kandinsky5": Family(
        lambda config: "Kandinsky5" if config["visual_cond"] else "Kandinsky5Image",
        UNET_CONFIGS["kandinsky5"],
        needs=("pooled_output",),
        accepts=IMAGE_TO_VIDEO[1:],
    ),
    "flux2": Family(lambda config: "Flux2", UNET_CONFIGS["flux2"], accepts=REFERENCES),
    "flux3": Family(lambda config: "Flux3", UNET_CONFIGS["flux3"], accepts=REFERENCES),
    "lumina2": Family(lambda config: "Lumina2", UNET_CONFIGS["lumina2"]),
    "ideogram4": Family(lambda config: "Ideogram4", UNET_CONFIGS["ideogram4"]),
    "ltx2": Family(
        lambda config: "LTXAV",
        UNET_CONFIGS["ltx2"],
        latents=(128, 8),
        translate=arguments.ltx2,
        reads=lambda config: {"preprocess_text_embeds": arguments.mark_unfinished(config)},
    ),
    **dict.fromkeys(
        ("minimax-h3", "minimax-h3-curves"),
        Family(
            lambda config: "MiniMaxH3",
            UNET_CONFIGS["minimax-h3"],
            latents=(24, 32),
            translate=arguments.minimax_h3,
            reads=lambda config: {
                "preprocess_text_embeds": lambda states: states,
                "patch_size": tuple(config["patch_size"]),
            },
        ),
    ),
}


class ElsewhereModule(torch.nn.Module):
    """Takes the place where ComfyUI expects the transformer, whose weights are on the ranks."""

    def __init__(self, dtype: torch.dtype, attributes: dict):
        """``dtype``: in which the ranks compute; ComfyUI rounds some prompts to it. ``attributes``: dotted
        names that ComfyUI reads -> values."""
        super().__init__()
        self.dtype = dtype
        for name, value in attributes.items():
            *path, leaf = name.split(".")
            where = self
            for part in path:
                where.__dict__.setdefault(part, SimpleNamespace())
                where = where.__dict__[part]
            where.__dict__[leaf] = value


def _supported_model(name: str) -> Callable[[dict], Any]:
    found: Any = OURS.get(name) or getattr(comfy.supported_models, name, None)
    if found is None:
        raise RefusedError(
            f"this ComfyUI has no {name}, the class of models that the transformer is of, which came with "
            f"a later version; update ComfyUI."
        )
    return found


def family_named(loaded: Loaded) -> Family:
    """Return the entry of a loaded transformer, or that of one that the backend recognised by its structure;
    RefusedError for a family of another version."""
    if loaded.info.get("generic"):
        return Family(comfy_class=lambda config: "", unet_config=lambda config: {})
    if loaded.family not in FAMILIES:
        raise RefusedError(
            f"the transformer's family is {loaded.family}, which these nodes do not know; they know "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[loaded.family]


def weightless_patcher(
    loaded: Loaded,
    transformer: Callable[[torch.dtype, dict], torch.nn.Module] = ElsewhereModule,
    patcher=comfy.model_patcher.ModelPatcher,
) -> comfy.model_patcher.ModelPatcher:
    """ComfyUI's ModelPatcher around its model object for a loaded transformer; RefusedError for an unknown
    family.

    ``transformer``: (dtype, attributes) -> the module in the transformer's place; ``patcher``: ModelPatcher's
    class.
    """
    family = family_named(loaded)
    config = loaded.info["config"]
    if loaded.info.get("generic"):
        model_config = generic.model_config(loaded.info["generic"])
    else:
        model_config = _supported_model(family.comfy_class(config))(
            {**family.unet_config(config), "disable_unet_model_creation": True}
        )
    if loaded.info["latent_format"] is not None:
        model_config.latent_format = LATENT_FORMATS[loaded.info["latent_format"]]()
    model = model_config.get_model({})
    model.diffusion_model = transformer(getattr(torch, loaded.info["dtype"]), family.reads(config))
    model.memory_required = lambda *shapes, **more: (
        0
    )  # it runs elsewhere: ComfyUI need not make room for its activations
    management = comfy.model_management
    return patcher(model, management.get_torch_device(), management.unet_offload_device())
