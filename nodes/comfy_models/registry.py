"""ComfyUI's own model object of a transformer family, without weights. With it ComfyUI's own code computes
everything around the transformer: schedules, latent scaling, the model's arguments from a CONDITIONING and
their defaults. A family is one entry of FAMILIES."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ...backend.protocol import Loaded, RefusedError
from ...backend.runtime.callbacks import always, no_entries, nothing, unchanged
from . import generic
from . import payloads as arguments
from .own_models import LATENT_FORMATS, Flux3, QwenImage21, Sana


@dataclass(frozen=True)
class ComfyFamily:
    """How ComfyUI builds a family from the diffusers config of its transformer.

    ``comfy_class``: name of the class in comfy.supported_models, or in OURS, or config -> name. ``needs``:
    keys that a CONDITIONING must have. ``zeros``: model arguments for which ComfyUI's model takes zeros where
    a CONDITIONING has None, and the entry of diffusers' config with their width. ``accepts``: keys of a
    CONDITIONING that most families refuse; ``refuses``: those that most do not. ``reads``: config ->
    attributes (dotted) of the transformer at which ComfyUI's model looks; ``shapes``: weights at whose shapes
    it looks. ``linear_shift``: ComfyUI builds the family with Flux's ModelSamplingFlux, but its workflows
    shift it with ModelSamplingAuraFlow.
    ``latents``: channels of every latent where the model denoises several at once. ``images``: it makes
    images, though its latent format is a video's.
    ``translate``: the arguments that ComfyUI's model makes -> those that the backend takes, or RefusedError.
    ``check_mask``: raises RefusedError for a noise mask that the loop on the ranks would treat otherwise than
    ComfyUI's.
    """

    comfy_class: str | Callable[[dict], str]
    needs: tuple[str, ...] = ()
    zeros: dict[str, str] = field(default_factory=dict)
    accepts: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()
    reads: Callable[[dict], dict] = no_entries
    shapes: tuple[str, ...] = ()
    linear_shift: bool = False
    latents: tuple[int, ...] = ()
    images: bool = False
    translate: Callable[[dict], dict] = unchanged
    check_mask: Callable[[torch.Tensor], None] = nothing

    def class_name(self, config: dict) -> str:
        """Return the name of ComfyUI's class for a transformer with this diffusers config."""
        return self.comfy_class if isinstance(self.comfy_class, str) else self.comfy_class(config)


#: Classes of models that ComfyUI does not have, or not in every version.
OURS = (
    {"Sana": Sana}
    | ({"Flux3": Flux3} if hasattr(comfy.supported_models, "Flux2") else {})
    | ({} if hasattr(comfy.supported_models, "QwenImage21") else {"QwenImage21": QwenImage21})
)


def _in_channels(config: dict) -> dict:
    """Return ComfyFamily.reads of models whose latent's channels ComfyUI's RenormCFG reads."""
    return {"in_channels": config["in_channels"]}


# Names of ComfyUI's classes that follow from several config entries.


def _flux_class(config: dict) -> str:
    if not config["guidance_embeds"]:
        return "FluxSchnell"
    return "FluxInpaint" if config["in_channels"] == 4 * 96 else "Flux"  # Fill: an image and a mask


def _wan_class(config: dict) -> str:
    if config.get("camera_channels"):
        return "WAN21_Camera" if config.get("image_dim") else "WAN22_Camera"
    if config["out_channels"] == 48:
        return "WAN22_T2V"
    if not config.get("image_dim"):
        return "WAN21_T2V"
    return {36: "WAN21_I2V", 48: "WAN21_FunControl2V"}.get(config["in_channels"], "WAN21_T2V")


def _hunyuan_video_class(config: dict) -> str:
    return {33: "HunyuanVideoI2V", 32: "HunyuanVideoSkyreelsI2V"}.get(config["in_channels"], "HunyuanVideo")


def _hunyuan_video15_class(config: dict) -> str:
    # super resolution has one of its own
    return "HunyuanVideo15_SR_Distilled" if config["in_channels"] == 98 else "HunyuanVideo15"


def _cogvideox_class(config: dict) -> str:
    if config["in_channels"] == config["out_channels"]:
        return "CogVideoX_T2V"
    return "CogVideoX_Inpaint" if config["in_channels"] == 48 else "CogVideoX_I2V"


def _pixart_class(config: dict) -> str:
    """Return the name of the class with a PixArt's latents: Alpha's has also the one of 512 pixels, which is
    not told the size. Its folder does not say whether it is told, as Sigma's do."""
    return "PixArtSigma" if config["use_additional_conditions"] is False else "PixArtAlpha"


#: Keys of a CONDITIONING that hold reference images of edit models.
REFERENCES = ("reference_latents",)


FAMILIES = {
    "flux": ComfyFamily(
        comfy_class=_flux_class,
        needs=("pooled_output",),
        zeros={"y": "pooled_projection_dim"},
        accepts=REFERENCES,
        reads=always({"patch_size": 2}),
    ),
    "chroma": ComfyFamily("Chroma", linear_shift=True),
    "sd3": ComfyFamily("SD3", needs=("pooled_output",)),
    "pixart": ComfyFamily(_pixart_class),
    "hunyuan-dit": ComfyFamily(
        lambda config: "HunyuanDiT1" if config["use_style_cond_and_image_meta_size"] else "HunyuanDiT",
        needs=("conditioning_mt5xl", "attention_mask", "attention_mask_mt5xl"),
    ),
    "hunyuan-video": ComfyFamily(_hunyuan_video_class, needs=("pooled_output",)),
    "hunyuan-video-1.5": ComfyFamily(
        _hunyuan_video15_class,
        needs=("pooled_output",),
        shapes=("img_in.proj.weight",),
        translate=arguments.hunyuan_video15,
    ),
    "hunyuan-image-2.1": ComfyFamily("HunyuanImage21"),
    "wan": ComfyFamily(_wan_class, accepts=REFERENCES, shapes=("patch_embedding.weight",)),
    "wan-vace": ComfyFamily("WAN21_Vace", translate=arguments.wan_vace, shapes=("patch_embedding.weight",)),
    "wan-animate": ComfyFamily("WAN22_Animate", shapes=("patch_embedding.weight",)),
    "cogvideox": ComfyFamily(
        _cogvideox_class,
        reads=lambda config: {
            "in_channels": config["in_channels"],
            "ofs_proj_dim": config.get("ofs_embed_dim"),
        },
    ),
    "ltxv": ComfyFamily("LTXV", translate=arguments.ltxv),
    "qwen-image": ComfyFamily("QwenImage", accepts=REFERENCES, linear_shift=True, images=True),
    "qwen-image-2.1": ComfyFamily(
        "QwenImage21",
        accepts=REFERENCES,
        translate=arguments.qwen_image21,
        reads=always({"reset_prefix_cache": nothing}),  # the ranks have their own cache
    ),
    "z-image": ComfyFamily("ZImage", reads=_in_channels),
    "krea2": ComfyFamily("Krea2", accepts=REFERENCES, images=True),
    "sana": ComfyFamily("Sana"),
    "hidream": ComfyFamily(
        "HiDream",
        needs=("pooled_output", "conditioning_llama3"),
        refuses=("concat_latent_image",),  # tokens of E1, which edits
    ),
    "kandinsky5": ComfyFamily(
        lambda config: "Kandinsky5" if config["visual_cond"] else "Kandinsky5Image",
        needs=("pooled_output",),
    ),
    "flux2": ComfyFamily("Flux2", accepts=REFERENCES),
    "flux3": ComfyFamily("Flux3", accepts=REFERENCES),
    "lumina2": ComfyFamily("Lumina2", reads=_in_channels),
    "ideogram4": ComfyFamily("Ideogram4"),
    "ltx2": ComfyFamily(
        "LTXAV",
        refuses=("concat_mask",),  # taken for a mask of both latents
        latents=(128, 8),
        translate=arguments.ltx2,
        reads=arguments.ltx2_transformer_attributes,
    ),
    "minimax-h3": ComfyFamily(
        "MiniMaxH3",
        latents=(24, 32),
        translate=arguments.minimax_h3,
        check_mask=arguments.check_minimax_mask,
        reads=lambda config: {
            "preprocess_text_embeds": unchanged,
            "patch_size": tuple(config["patch_size"]),
        },
    ),
}
FAMILIES["minimax-h3-curves"] = FAMILIES["minimax-h3"]


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
    model: Any = OURS.get(name) or getattr(comfy.supported_models, name, None)
    if model is None:
        raise RefusedError(
            f"this ComfyUI has no {name}, the class of models that the transformer is of, which came with "
            f"a later version; update ComfyUI."
        )
    return model


def family_named(loaded: Loaded) -> ComfyFamily:
    """Return a loaded transformer's entry, or a generic one; RefusedError for another version's family."""
    if loaded.info.get("generic"):
        return ComfyFamily(comfy_class="")
    if loaded.family not in FAMILIES:
        raise RefusedError(
            f"the transformer's family is {loaded.family}, which these nodes do not know; they know "
            f"{', '.join(FAMILIES)}."
        )
    return FAMILIES[loaded.family]


def _follow_folder(model_config: Any, config: dict):
    """Take the noise schedule and the scale of latents that a pipeline's folder states, where it does."""
    if config.get("schedule"):
        model_config.sampling_settings = generic.discrete_settings(**config["schedule"])
    if config.get("latent_scale"):
        model_config.latent_format.scale_factor = config["latent_scale"]


def weightless_patcher(
    loaded: Loaded,
    transformer: Callable[[torch.dtype, dict], torch.nn.Module] = ElsewhereModule,
    patcher=comfy.model_patcher.ModelPatcher,
) -> comfy.model_patcher.ModelPatcher:
    """Return ComfyUI's ModelPatcher around its model object for a loaded transformer. ``transformer``:
    (dtype, attributes) -> the module in the transformer's place; ``patcher``: ModelPatcher's class. Raises
    RefusedError for an unknown family."""
    family = family_named(loaded)
    config = loaded.info["config"]
    attributes = {}
    if loaded.info.get("generic"):
        model_config = generic.model_config(loaded.info["generic"])
    else:
        shapes = loaded.info["weights"].items()
        weights = {key: torch.empty(shape, device="meta") for key, shape in shapes}
        name = family.class_name(config)
        comfy_class = _supported_model(name)  # first: what a family reads may be newer than this ComfyUI
        attributes = family.reads(config) | {key: weights[key] for key in family.shapes}
        if name in OURS:
            unet_config = {"accepted": loaded.info["conditioning"]}
        else:  # what ComfyUI itself detects by names and shapes
            unet_config = comfy.model_detection.detect_unet_config(weights, "") or {}
        model_config = comfy_class({**unet_config, "disable_unet_model_creation": True})
        _follow_folder(model_config, config)
    if loaded.info["latent_format"] is not None:
        model_config.latent_format = LATENT_FORMATS[loaded.info["latent_format"]]()
    model = model_config.get_model({})
    model.diffusion_model = transformer(getattr(torch, loaded.info["dtype"]), attributes)
    # it runs elsewhere: ComfyUI need not make room for its activations
    model.memory_required = lambda *shapes, **more: 0
    management = comfy.model_management
    return patcher(model, management.get_torch_device(), management.unet_offload_device())
