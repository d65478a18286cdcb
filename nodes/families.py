"""ComfyUI's own model object of a transformer family, without weights.

With it ComfyUI's own code computes everything around the transformer: schedules, latent scaling, the model's arguments
from a CONDITIONING and their defaults. A family is one entry of FAMILIES.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Callable

import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch

from ..backend.protocol import Loaded, RefusedError
from . import generic
from .flux3 import Flux3
from .latent_formats import LATENT_FORMATS
from .qwen_image21 import QwenImage21
from .sana import Sana


@dataclass(frozen=True)
class Family:
    """How ComfyUI builds a family from the diffusers config of its transformer.

    ``comfy_class``: config -> name of the class in comfy.supported_models, or in OURS. ``unet_config``: config -> ComfyUI's own.
    ``needs``: keys that a CONDITIONING must have. ``zeros``: model arguments for which ComfyUI's model takes zeros where a
    CONDITIONING has None, and the entry of unet_config with their width. ``accepts``: keys of a CONDITIONING that most families refuse.
    ``reads``: config -> attributes (dotted) of the transformer at which ComfyUI's model looks. ``linear_shift``: ComfyUI builds the family with Flux's
    ModelSamplingFlux, but its workflows shift it with ModelSamplingAuraFlow. ``latents``: channels of every latent where the
    model denoises several at once. ``pictures``: it makes pictures, though its latent format is a video's. ``translate``: the arguments that ComfyUI's model makes -> those that the backend takes, or RefusedError.
    """

    comfy_class: Callable[[dict], str]
    unet_config: Callable[[dict], dict]
    needs: tuple[str, ...] = ()
    zeros: dict[str, str] = field(default_factory=dict)
    accepts: tuple[str, ...] = ()
    reads: Callable[[dict], dict] = lambda config: {}
    linear_shift: bool = False
    latents: tuple[int, ...] = ()
    pictures: bool = False
    translate: Callable[[dict], dict] = lambda arguments: arguments


def _flux(config: dict) -> dict:
    return {
        "image_model": "flux", "patch_size": 2, "theta": 10000, "mlp_ratio": 4.0, "qkv_bias": True,
        "in_channels": config["in_channels"] // 4,  # diffusers counts the 2 x 2 latent cells of a token
        "out_channels": (config["out_channels"] or config["in_channels"]) // 4,
        "guidance_embed": config["guidance_embeds"],
        "vec_in_dim": config["pooled_projection_dim"],
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": config["num_attention_heads"] * config["attention_head_dim"],
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]),
    }


def _hidden(config: dict) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def _sd3(config: dict) -> dict:
    return {
        "in_channels": config["in_channels"], "out_channels": config["out_channels"], "patch_size": config["patch_size"], "depth": config["num_layers"],
        "adm_in_channels": config["pooled_projection_dim"], "pos_embed_max_size": config["pos_embed_max_size"], "qk_norm": "rms" if config["qk_norm"] else None,
        "input_size": None, "num_patches": config["pos_embed_max_size"] ** 2, "pos_embed_scaling_factor": None, "x_block_self_attn_layers": list(config["dual_attention_layers"]),
        "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": config["joint_attention_dim"], "out_features": config["caption_projection_dim"]}},
    }


def _wan(config: dict) -> dict:
    return {
        "image_model": "wan2.1", "model_type": "i2v" if config.get("image_dim") else "t2v", "dim": _hidden(config), "in_dim": config["in_channels"], "out_dim": config["out_channels"],
        "num_heads": config["num_attention_heads"], "ffn_dim": config["ffn_dim"], "num_layers": config["num_layers"], "patch_size": list(config["patch_size"]), "freq_dim": config["freq_dim"],
        "window_size": [-1, -1], "qk_norm": True, "cross_attn_norm": config["cross_attn_norm"], "eps": 1e-6,
    }


def _wan_class(config: dict) -> str:
    if config["out_channels"] == 48:
        return "WAN22_T2V"
    return "WAN21_I2V" if config.get("image_dim") and config["in_channels"] == 36 else "WAN21_T2V"


def _hunyuan_video(config: dict) -> dict:
    patch = [config["patch_size_t"], config["patch_size"], config["patch_size"]]
    return {
        "image_model": "hunyuan_video", "in_channels": config["in_channels"], "out_channels": config["out_channels"], "patch_size": patch, "axes_dim": list(config["rope_axes_dim"]),
        "context_in_dim": config["text_embed_dim"], "hidden_size": _hidden(config), "num_heads": config["num_attention_heads"], "depth": config["num_layers"],
        "depth_single_blocks": config.get("num_single_layers", 0), "vec_in_dim": config.get("pooled_projection_dim"), "guidance_embed": config.get("guidance_embeds", False),
        "mlp_ratio": 4.0, "theta": 256, "qkv_bias": True, "meanflow": False, "byt5": "text_embed_2_dim" in config,
    }


def _hunyuan_video_class(config: dict) -> str:
    return {33: "HunyuanVideoI2V", 32: "HunyuanVideoSkyreelsI2V"}.get(config["in_channels"], "HunyuanVideo")


def _hunyuan_video15(config: dict) -> dict:
    return {**_hunyuan_video(config), "use_cond_type_embedding": True, "vision_in_dim": config["image_embed_dim"], "meanflow_sum": True}


def _hunyuan_dit(config: dict) -> dict:
    old = config["use_style_cond_and_image_meta_size"]
    return {
        "image_model": "hydit1" if old else "hydit", "depth": config["num_layers"], "hidden_size": config["hidden_size"], "text_states_dim": config["cross_attention_dim"],
        "text_states_dim_t5": config["cross_attention_dim_t5"], **({"size_cond": True, "use_style_cond": True} if old else {}),
    }


def _is_pixart_alpha(config: dict) -> bool:
    given = config["use_additional_conditions"]
    return config["sample_size"] == 128 if given is None else given


def _pixart(config: dict) -> dict:
    alpha = _is_pixart_alpha(config)
    return {
        "image_model": "pixart_alpha" if alpha else "pixart_sigma", "num_heads": config["num_attention_heads"], "patch_size": config["patch_size"], "hidden_size": _hidden(config),
        "in_channels": config["in_channels"], "depth": config["num_layers"], "caption_channels": config["caption_channels"], "model_max_length": 120 if alpha else 300, "micro_condition": alpha,
    }


def _cogvideox(config: dict) -> dict:
    return {
        "image_model": "cogvideox", **{key: config[key] for key in ("num_attention_heads", "attention_head_dim", "time_embed_dim", "num_layers", "in_channels", "patch_size", "text_embed_dim",
                                                                   "use_learned_positional_embeddings", "use_rotary_positional_embeddings")},
        **{key: config[key] for key in ("patch_size_t", "ofs_embed_dim") if config.get(key)},
    }


def _qwen_image(config: dict) -> dict:
    return {
        "image_model": "qwen_image", "in_channels": config["in_channels"], "num_layers": config["num_layers"], "attention_head_dim": config["attention_head_dim"],
        "num_attention_heads": config["num_attention_heads"], "joint_attention_dim": config["joint_attention_dim"], "axes_dims_rope": list(config["axes_dims_rope"]),
    }


def _qwen_image21(config: dict) -> dict:
    return {"image_model": "qwen_image21", **{key: config[key] for key in (
        "in_channels", "out_channels", "num_layers", "attention_head_dim", "num_attention_heads", "context_in_dim", "mlp_ratio", "axes_dims_rope")}}


def _z_image(config: dict) -> dict:
    return {
        "image_model": "lumina2", "patch_size": 2, "in_channels": config["in_channels"], "dim": config["dim"], "cap_feat_dim": config["cap_feat_dim"], "n_layers": config["n_layers"],
        "n_heads": config["n_heads"], "n_kv_heads": config["n_kv_heads"], "qk_norm": True, "axes_dims": list(config["axes_dims"]), "axes_lens": list(config["axes_lens"]), "rope_theta": 256.0,
        "ffn_dim_multiplier": 8.0 / 3.0, "z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32,
    }


def _chroma(config: dict) -> dict:
    return {
        "image_model": "chroma", "patch_size": 2, "theta": 10000, "mlp_ratio": 4.0, "qkv_bias": True, "txt_ids_dims": [], "vec_in_dim": None,
        "in_channels": config["in_channels"], "out_channels": config.get("out_channels") or config["in_channels"], "context_in_dim": config["joint_attention_dim"],
        "hidden_size": _hidden(config), "num_heads": config["num_attention_heads"], "depth": config["num_layers"], "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]), "in_dim": config["approximator_num_channels"], "out_dim": _hidden(config), "hidden_dim": config["approximator_hidden_dim"],
        "n_layers": config["approximator_layers"],
    }


def _krea2(config: dict) -> dict:
    return {
        "image_model": "krea2", "features": _hidden(config), "channels": config["in_channels"] // 4, "patch": 2, "layers": config["num_layers"], "heads": config["num_attention_heads"],
        "kvheads": config["num_key_value_heads"], "txtlayers": config["num_text_layers"], "txtdim": config["text_hidden_dim"],
    }


def _ltxv(config: dict) -> dict:
    return {"image_model": "ltxv", "num_layers": config["num_layers"], "attention_head_dim": config["attention_head_dim"], "cross_attention_dim": config["cross_attention_dim"]}


def _kandinsky5(config: dict) -> dict:
    channels = config["in_visual_dim"] * (2 if config["visual_cond"] else 1) + bool(config["visual_cond"])
    return {
        "image_model": "kandinsky5", **{key: config[key] for key in ("model_dim", "time_dim", "ff_dim", "num_text_blocks", "num_visual_blocks", "in_text_dim", "in_text_dim2")},
        "axes_dims": list(config["axes_dims"]), "visual_embed_dim": channels * 4, **({} if config["visual_cond"] else {"rope_scale_factor": [1.0, 1.0, 1.0]}),
    }


def _hidream(config: dict) -> dict:
    return {"image_model": "hidream", **{key: config[key] for key in (
        "patch_size", "in_channels", "out_channels", "num_layers", "num_single_layers", "attention_head_dim", "num_attention_heads", "caption_channels", "text_emb_dim", "num_routed_experts",
        "num_activated_experts", "axes_dims_rope", "max_resolution")}}


def _minimax_h3(config: dict) -> dict:
    return {
        "image_model": "minimax_h3", "num_layers": config["num_layers"], "token_refiner_num_layers": config["num_refiner_layers"], "hidden_size": config["hidden_size"], "latents_dim": config["in_channels"],
        "audio_latents_dim": config["audio_in_channels"], "attention_head_dim": config["attention_head_dim"], "num_attention_heads": config["num_attention_heads"], "ffn_hidden_size": config["ffn_dim"],
        "text_dim": config["text_dim"], "timestep_input_dim": config["freq_dim"], "time_embed_hidden_size": config["time_embed_hidden_dim"], "time_embed_dim": config["time_embed_dim"],
        "rope_inv_freq_len": config["rope_freq_dim"], **({"adaln_curve_grid": config["curve_points"]} if "curve_points" in config else {}),
    }


def _flux2(config: dict) -> dict:
    return {
        "image_model": "flux2", "patch_size": 1, "theta": 2000, "mlp_ratio": config["mlp_ratio"], "qkv_bias": False, "ops_bias": False, "global_modulation": True, "mlp_silu_act": True, "vec_in_dim": None, "txt_ids_dims": [3],
        "in_channels": config["in_channels"], "out_channels": config["out_channels"] or config["in_channels"], "guidance_embed": config["guidance_embeds"], "context_in_dim": config["joint_attention_dim"],
        "hidden_size": _hidden(config), "num_heads": config["num_attention_heads"], "depth": config["num_layers"], "depth_single_blocks": config["num_single_layers"], "axes_dim": list(config["axes_dims_rope"]),
        "default_ref_method": "index", "ref_index_scale": 10.0,
    }


def _lumina2(config: dict) -> dict:
    return {
        "image_model": "lumina2", "patch_size": config["patch_size"], "in_channels": config["in_channels"], "dim": config["hidden_size"], "cap_feat_dim": config["cap_feat_dim"], "n_layers": config["num_layers"],
        "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_kv_heads"], "qk_norm": True, "axes_dims": list(config["axes_dim_rope"]), "axes_lens": [300, 512, 512], "rope_theta": 10000.0, "ffn_dim_multiplier": 4.0,
    }


def _ideogram4(config: dict) -> dict:
    return {
        "image_model": "ideogram4",
        **{key: config[key] for key in ("in_channels", "num_layers", "attention_head_dim", "num_attention_heads", "intermediate_size", "adaln_dim", "llm_features_dim")},
    }


def _ltx2(config: dict) -> dict:
    return {"image_model": "ltxav", **{key: config[key] for key in (
        "num_layers", "attention_head_dim", "cross_attention_dim", "audio_attention_head_dim", "audio_cross_attention_dim", "caption_channels") if key in config}}


def _mark_unfinished(config: dict):
    """In place of ComfyUI's connectors, which are on the ranks: a prompt that they have yet to finish, where its width does not tell, with a feature more."""
    return lambda states, unprocessed=False: torch.nn.functional.pad(states, (0, 1)) if unprocessed and not config["use_prompt_embeddings"] else states


def _ltx2_arguments(arguments: dict) -> dict:
    text = arguments["c_crossattn"]
    marked = {"c_crossattn": text[..., :-1], "unprocessed_ltxav_embeds": True} if text.shape[2] % 2 else {}
    frames = arguments.get("generated_keyframes")
    made = {"generated_keyframes": torch.tensor([[frames["first_latent_frame"], frames["num_keyframes"]]])} if frames else {}
    return {**_ltxv_arguments({**arguments, **marked}), **made}


#: Rows of ComfyUI's MiniMax-H3 layout that are given and not denoised -> video (0) or sound (2).
_MINIMAX_GIVEN = {"cond": 0, "ref_img": 0, "cond_audio": 2, "ref_audio": 2}
#: What else its payload holds: the backend knows it by itself, or it is in the layout.
_MINIMAX_KNOWN = {"seed", "audio_scale", "layout", "text_token_tags", "keyframes", "refs", "cond_video_latents", "cond_audio_latents", "visual_cond_noise_aug", "audio_cond_noise_aug"}


def _minimax_h3_arguments(arguments: dict) -> dict:
    """ComfyUI's payload as tensors: the rows of keyframes and references by its own model's code, their places by its layout, and which rows of text are pictures."""
    if {"denoise_mask", "audio_denoise_mask"} & arguments.keys():
        raise RefusedError("latent_image has a noise mask, with which MiniMax-H3 denoises rows at times of their own; the ranks do not run that: remove the mask, or sample with KSampler and an ordinary MODEL.")
    payload, found = arguments.get("minimax_payload", {}), {key: value for key, value in arguments.items() if key != "minimax_payload"}
    further = sorted(payload.keys() - _MINIMAX_KNOWN)
    if further:
        raise RefusedError(f"the prompt carries {', '.join(further)}, which the ranks do not know; remove the node that sets it, or sample with KSampler and an ordinary MODEL.")
    tags, layout = payload.get("text_token_tags"), payload.get("layout")
    if tags is not None and (tags != 1).any():
        found["text_tags"] = tags.reshape(1, -1)
    given = [(start, stop, _MINIMAX_GIVEN[kind]) for start, stop, kind in layout.segments if kind in _MINIMAX_GIVEN] if layout else []
    if not given:
        return found
    from comfy.ldm.minimax import model

    own = SimpleNamespace(patch_size=(1, 2, 2))
    rows = {"given_video": model.MiniMaxH3Model._cond_video_rows(own, payload, "cpu"), "given_audio": model.MiniMaxH3Model._cond_audio_rows(own, payload, "cpu")}
    times = [payload.get("visual_cond_noise_aug", model.VISUAL_COND_TIMESTEP), payload.get("audio_cond_noise_aug", model.AUDIO_COND_TIMESTEP)]
    audio = next(start for start, _, kind in layout.segments if kind == "audio")
    return {
        **found, **{name: value[None] for name, value in rows.items() if value is not None}, "given_times": torch.tensor([times]), "origin": layout.position_ids[audio, 0],
        "given_tags": torch.cat([torch.full((stop - start,), tag) for start, stop, tag in given])[None], "given_positions": torch.cat([layout.position_ids[start:stop] for start, stop, _ in given])[None]}


def _ltxv_arguments(arguments: dict) -> dict:
    """Without what changes nothing: guides that are attended to as they are, and frames that only later versions mark."""
    guides = arguments.get("guide_attention_entries", [])
    plain = all(guide["strength"] == 1.0 and guide.get("pixel_mask") is None for guide in guides)
    dropped = ("generated_keyframes", *(["guide_attention_entries"] if plain else []))
    return {key: value for key, value in arguments.items() if key not in dropped}


def _qwen_image21_arguments(arguments: dict) -> dict:
    """The places of the references as a tensor, the same for every sample."""
    return arguments | ({"image_slots": torch.tensor([arguments["image_slots"]], dtype=torch.long)} if "image_slots" in arguments else {})


#: Classes of models that ComfyUI does not have, or not in every version.
OURS = {"Sana": Sana, "Flux3": Flux3} | ({} if hasattr(comfy.supported_models, "QwenImage21") else {"QwenImage21": QwenImage21})
#: Keys of a CONDITIONING with which models are given a picture as further channels, and with which edit models are given theirs.
IMAGE_TO_VIDEO = ("concat_latent_image", "concat_mask")
REFERENCES = ("reference_latents",)

FAMILIES = {
    "flux": Family(
        comfy_class=lambda config: "Flux" if config["guidance_embeds"] else "FluxSchnell",
        unet_config=_flux,
        needs=("pooled_output",),
        zeros={"y": "vec_in_dim"},
        accepts=IMAGE_TO_VIDEO + REFERENCES,
        reads=lambda config: {"patch_size": 2},
    ),
    "chroma": Family(lambda config: "Chroma", _chroma, linear_shift=True),
    "sd3": Family(lambda config: "SD3", _sd3, needs=("pooled_output",)),
    "pixart": Family(lambda config: "PixArtAlpha" if _is_pixart_alpha(config) else "PixArtSigma", _pixart),
    "hunyuan-dit": Family(
        lambda config: "HunyuanDiT1" if config["use_style_cond_and_image_meta_size"] else "HunyuanDiT", _hunyuan_dit,
        needs=("conditioning_mt5xl", "attention_mask", "attention_mask_mt5xl")),
    "hunyuan-video": Family(_hunyuan_video_class, _hunyuan_video, needs=("pooled_output",), accepts=IMAGE_TO_VIDEO),
    "hunyuan-video-1.5": Family(
        lambda config: "HunyuanVideo15", _hunyuan_video15, needs=("pooled_output",), accepts=IMAGE_TO_VIDEO,
        reads=lambda config: {"img_in.proj.weight": torch.empty(_hidden(config), config["in_channels"], device="meta")}),
    "wan": Family(
        _wan_class, _wan, accepts=IMAGE_TO_VIDEO,
        reads=lambda config: {"patch_embedding.weight": torch.empty(_hidden(config), config["in_channels"], device="meta")}),
    "cogvideox": Family(
        lambda config: "CogVideoX_T2V" if config["in_channels"] == config["out_channels"] else "CogVideoX_I2V", _cogvideox, accepts=IMAGE_TO_VIDEO[:1],
        reads=lambda config: {"in_channels": config["in_channels"], "ofs_proj_dim": config.get("ofs_embed_dim")}),
    "ltxv": Family(lambda config: "LTXV", _ltxv, accepts=IMAGE_TO_VIDEO[1:], translate=_ltxv_arguments),
    "qwen-image": Family(lambda config: "QwenImage", _qwen_image, accepts=REFERENCES, linear_shift=True, pictures=True),
    "qwen-image-2.1": Family(
        lambda config: "QwenImage21", _qwen_image21, accepts=REFERENCES, translate=_qwen_image21_arguments,
        reads=lambda config: {"reset_prefix_cache": lambda enabled: None}),             # it is on the ranks what it is
    "z-image": Family(lambda config: "ZImage", _z_image),
    "krea2": Family(lambda config: "Krea2", _krea2, accepts=REFERENCES, pictures=True),
    "sana": Family(lambda config: "Sana", lambda config: {"image_model": "sana"}),
    "hidream": Family(lambda config: "HiDream", _hidream, needs=("pooled_output", "conditioning_llama3")),
    "kandinsky5": Family(lambda config: "Kandinsky5" if config["visual_cond"] else "Kandinsky5Image", _kandinsky5, needs=("pooled_output",), accepts=IMAGE_TO_VIDEO[1:]),
    "flux2": Family(lambda config: "Flux2", _flux2, accepts=REFERENCES),
    "flux3": Family(lambda config: "Flux3", lambda config: {"image_model": "flux3"}, accepts=REFERENCES),
    "lumina2": Family(lambda config: "Lumina2", _lumina2),
    "ideogram4": Family(lambda config: "Ideogram4", _ideogram4),
    "ltx2": Family(
        lambda config: "LTXAV", _ltx2, latents=(128, 8), translate=_ltx2_arguments, reads=lambda config: {"preprocess_text_embeds": _mark_unfinished(config)}),
    **dict.fromkeys(("minimax-h3", "minimax-h3-curves"), Family(
        lambda config: "MiniMaxH3", _minimax_h3, latents=(24, 32), translate=_minimax_h3_arguments,
        reads=lambda config: {"preprocess_text_embeds": lambda states: states, "patch_size": tuple(config["patch_size"])})),
}


class ElsewhereModule(torch.nn.Module):
    """Stands where ComfyUI expects the transformer, whose weights are on the ranks."""

    def __init__(self, dtype: torch.dtype, attributes: dict):
        """``dtype``: in which the ranks compute; ComfyUI rounds some prompts to it. ``attributes``: dotted names that ComfyUI reads -> values."""
        super().__init__()
        self.dtype = dtype
        for name, value in attributes.items():
            *path, leaf = name.split(".")
            where = self
            for part in path:
                where.__dict__.setdefault(part, SimpleNamespace())
                where = where.__dict__[part]
            where.__dict__[leaf] = value


def _supported_model(name: str):
    found = OURS.get(name) or getattr(comfy.supported_models, name, None)
    if found is None:
        raise RefusedError(f"this ComfyUI has no {name}, the class of models that the transformer is of, which came with a later version; update ComfyUI.")
    return found


def family_named(loaded: Loaded) -> Family:
    """The entry of a loaded transformer, or that of one that the backend recognised by its structure; RefusedError for a family of another version."""
    if loaded.info.get("generic"):
        return Family(comfy_class=lambda config: "", unet_config=lambda config: {})
    if loaded.family not in FAMILIES:
        raise RefusedError(f"the transformer's family is {loaded.family}, which these nodes do not know; they know {', '.join(FAMILIES)}.")
    return FAMILIES[loaded.family]


def weightless_patcher(loaded: Loaded, transformer=ElsewhereModule, patcher=comfy.model_patcher.ModelPatcher) -> comfy.model_patcher.ModelPatcher:
    """ComfyUI's ModelPatcher around its model object for a loaded transformer; RefusedError for an unknown family.

    ``transformer``: (dtype, attributes) -> the module in the transformer's place; ``patcher``: ModelPatcher's class.
    """
    family, config = family_named(loaded), loaded.info["config"]
    if loaded.info.get("generic"):
        model_config = generic.model_config(loaded.info["generic"])
    else:
        model_config = _supported_model(family.comfy_class(config))({**family.unet_config(config), "disable_unet_model_creation": True})
    if loaded.info["latent_format"] is not None:
        model_config.latent_format = LATENT_FORMATS[loaded.info["latent_format"]]()
    model = model_config.get_model({})
    model.diffusion_model = transformer(getattr(torch, loaded.info["dtype"]), family.reads(config))
    model.memory_required = lambda *shapes, **more: 0  # it runs elsewhere: ComfyUI need not make room for its activations
    management = comfy.model_management
    return patcher(model, management.get_torch_device(), management.unet_offload_device())
