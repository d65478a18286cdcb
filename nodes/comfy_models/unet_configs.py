"""The diffusers config of a transformer as ComfyUI's own unet_config: a table with one entry a family."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from . import unet_values as values


def nothing(config: dict) -> dict:
    return {}


@dataclass(frozen=True)
class UnetConfig:
    """Call it with a diffusers config to get ComfyUI's unet_config of the same transformer.

    ``fixed``: entries that all transformers of the family share. ``names``: what is copied, separated by
    spaces: a name that both have, or COMFYUI=DIFFUSERS. ``optional``: names that both have, left out where
    diffusers has None or nothing. ``computed``: ComfyUI's name -> a function of the whole config. ``extra``:
    a function of the config that gives further entries.
    """

    fixed: dict[str, Any]
    names: str = ""
    optional: str = ""
    computed: dict[str, Callable[[dict], Any]] = field(default_factory=dict)
    extra: Callable[[dict], dict] = nothing

    def __call__(self, config: dict) -> dict:
        found = dict(self.fixed)
        for entry in self.names.split():
            name, _, source = entry.partition("=")
            found[name] = config[source or name]
        for name in self.optional.split():
            if config.get(name) is not None:
                found[name] = config[name]
        for name, function in self.computed.items():
            found[name] = function(config)
        return found | self.extra(config)


#: What Flux and the families of its layout call the same things.
_FLUX_NAMES = (
    "context_in_dim=joint_attention_dim num_heads=num_attention_heads depth=num_layers "
    "depth_single_blocks=num_single_layers axes_dim=axes_dims_rope "
)
_FLUX_FIXED = {"patch_size": 2, "theta": 10000, "mlp_ratio": 4.0, "qkv_bias": True}
_HUNYUAN_VIDEO_NAMES = (
    "in_channels out_channels axes_dim=rope_axes_dim context_in_dim=text_embed_dim "
    "num_heads=num_attention_heads depth=num_layers "
)
_HUNYUAN_VIDEO_FIXED = dict(image_model="hunyuan_video", mlp_ratio=4.0, theta=256, qkv_bias=True)
_WIDTH = {"hidden_size": values.hidden}
#: Family -> its entry.
UNET_CONFIGS = {
    "flux": UnetConfig(
        {"image_model": "flux", **_FLUX_FIXED},
        names=_FLUX_NAMES + "guidance_embed=guidance_embeds vec_in_dim=pooled_projection_dim",
        computed={
            **_WIDTH,
            "in_channels": values.unpacked_in_channels,
            "out_channels": values.unpacked_out_channels,
        },
    ),
    "chroma": UnetConfig(
        {"image_model": "chroma", **_FLUX_FIXED, "txt_ids_dims": [], "vec_in_dim": None},
        names=_FLUX_NAMES + "in_channels in_dim=approximator_num_channels "
        "hidden_dim=approximator_hidden_dim n_layers=approximator_layers",
        computed={**_WIDTH, "out_channels": values.out_channels, "out_dim": values.hidden},
    ),
    "sd3": UnetConfig(
        {"input_size": None, "pos_embed_scaling_factor": None},
        names="in_channels out_channels patch_size pos_embed_max_size depth=num_layers "
        "adm_in_channels=pooled_projection_dim x_block_self_attn_layers=dual_attention_layers",
        computed={
            "qk_norm": values.sd3_norm,
            "num_patches": values.sd3_positions,
            "context_embedder_config": values.sd3_text_embedder,
        },
    ),
    "pixart": UnetConfig(
        {},
        names="patch_size in_channels caption_channels num_heads=num_attention_heads depth=num_layers",
        computed={
            **_WIDTH,
            "image_model": values.pixart_image_model,
            "model_max_length": values.pixart_text_length,
            "micro_condition": values.is_pixart_alpha,
        },
    ),
    "hunyuan-dit": UnetConfig(
        {"image_model": "hydit"},
        names="hidden_size depth=num_layers text_states_dim=cross_attention_dim "
        "text_states_dim_t5=cross_attention_dim_t5",
        extra=values.first_hunyuan_dit,
    ),
    "hunyuan-video": UnetConfig(
        {**_HUNYUAN_VIDEO_FIXED, "byt5": False, "meanflow": False},
        names=_HUNYUAN_VIDEO_NAMES + "depth_single_blocks=num_single_layers "
        "vec_in_dim=pooled_projection_dim guidance_embed=guidance_embeds",
        computed={**_WIDTH, "patch_size": values.hunyuan_video_patch},
    ),
    "hunyuan-video-1.5": UnetConfig(
        {
            **_HUNYUAN_VIDEO_FIXED,
            "byt5": True,
            "depth_single_blocks": 0,
            "vec_in_dim": None,
            "guidance_embed": False,
            "use_cond_type_embedding": True,
            "meanflow_sum": True,
        },
        names=_HUNYUAN_VIDEO_NAMES + "vision_in_dim=image_embed_dim meanflow=use_meanflow",
        computed={**_WIDTH, "patch_size": values.hunyuan_video_patch},
    ),
    "hunyuan-image-2.1": UnetConfig(
        {
            **_HUNYUAN_VIDEO_FIXED,
            "byt5": True,
            "vec_in_dim": None,
            "use_cond_type_embedding": False,
            "vision_in_dim": None,
            "meanflow_sum": False,
        },
        names=_HUNYUAN_VIDEO_NAMES + "patch_size depth_single_blocks=num_single_layers "
        "guidance_embed=guidance_embeds meanflow=use_meanflow",
        computed=_WIDTH,
    ),
    "wan": UnetConfig(
        {"image_model": "wan2.1", "window_size": [-1, -1], "qk_norm": True, "eps": 1e-6},
        names="ffn_dim num_layers patch_size freq_dim cross_attn_norm in_dim=in_channels "
        "out_dim=out_channels num_heads=num_attention_heads",
        computed={"model_type": values.wan_model_type, "dim": values.hidden},
    ),
    "cogvideox": UnetConfig(
        {"image_model": "cogvideox"},
        names="num_attention_heads attention_head_dim time_embed_dim num_layers in_channels patch_size "
        "text_embed_dim use_learned_positional_embeddings use_rotary_positional_embeddings",
        optional="patch_size_t ofs_embed_dim",
    ),
    "ltxv": UnetConfig({"image_model": "ltxv"}, "num_layers attention_head_dim cross_attention_dim"),
    "qwen-image": UnetConfig(
        {"image_model": "qwen_image"},
        "in_channels num_layers attention_head_dim num_attention_heads joint_attention_dim axes_dims_rope",
    ),
    "qwen-image-2.1": UnetConfig(
        {"image_model": "qwen_image21"},
        "in_channels out_channels num_layers attention_head_dim num_attention_heads context_in_dim "
        "mlp_ratio axes_dims_rope",
    ),
    "z-image": UnetConfig(
        {
            "image_model": "lumina2",
            "patch_size": 2,
            "qk_norm": True,
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8.0 / 3.0,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        },
        "in_channels dim cap_feat_dim n_layers n_heads n_kv_heads axes_dims axes_lens",
    ),
    "krea2": UnetConfig(
        {"image_model": "krea2", "patch": 2},
        names="layers=num_layers heads=num_attention_heads kvheads=num_key_value_heads "
        "txtlayers=num_text_layers txtdim=text_hidden_dim",
        computed={"features": values.hidden, "channels": values.unpacked_in_channels},
    ),
    "sana": UnetConfig({"image_model": "sana"}),
    "hidream": UnetConfig(
        {"image_model": "hidream"},
        "patch_size in_channels out_channels num_layers num_single_layers attention_head_dim "
        "num_attention_heads caption_channels text_emb_dim num_routed_experts num_activated_experts "
        "axes_dims_rope max_resolution",
    ),
    "kandinsky5": UnetConfig(
        {"image_model": "kandinsky5"},
        "model_dim time_dim ff_dim num_text_blocks num_visual_blocks in_text_dim in_text_dim2 axes_dims",
        computed={"visual_embed_dim": values.kandinsky5_image_channels},
        extra=values.kandinsky5_scale,
    ),
    "flux2": UnetConfig(
        {
            "image_model": "flux2",
            "patch_size": 1,
            "theta": 2000,
            "qkv_bias": False,
            "ops_bias": False,
            "global_modulation": True,
            "mlp_silu_act": True,
            "vec_in_dim": None,
            "txt_ids_dims": [3],
            "default_ref_method": "index",
            "ref_index_scale": 10.0,
        },
        names=_FLUX_NAMES + "in_channels mlp_ratio guidance_embed=guidance_embeds",
        computed={**_WIDTH, "out_channels": values.out_channels},
    ),
    "flux3": UnetConfig({"image_model": "flux3"}),
    "lumina2": UnetConfig(
        {
            "image_model": "lumina2",
            "qk_norm": True,
            "axes_lens": [300, 512, 512],
            "rope_theta": 10000.0,
            "ffn_dim_multiplier": 4.0,
        },
        "patch_size in_channels cap_feat_dim dim=hidden_size n_layers=num_layers "
        "n_heads=num_attention_heads n_kv_heads=num_kv_heads axes_dims=axes_dim_rope",
    ),
    "ideogram4": UnetConfig(
        {"image_model": "ideogram4"},
        "in_channels num_layers attention_head_dim num_attention_heads intermediate_size adaln_dim "
        "llm_features_dim",
    ),
    "ltx2": UnetConfig(
        {"image_model": "ltxav"},
        names="num_layers attention_head_dim cross_attention_dim audio_attention_head_dim "
        "audio_cross_attention_dim",
        optional="caption_channels",
    ),
    "minimax-h3": UnetConfig(
        {"image_model": "minimax_h3"},
        names="num_layers hidden_size attention_head_dim num_attention_heads text_dim time_embed_dim "
        "token_refiner_num_layers=num_refiner_layers latents_dim=in_channels "
        "audio_latents_dim=audio_in_channels ffn_hidden_size=ffn_dim timestep_input_dim=freq_dim "
        "time_embed_hidden_size=time_embed_hidden_dim rope_inv_freq_len=rope_freq_dim",
        extra=values.minimax_h3_curves,
    ),
}
UNET_CONFIGS["wan-vace"] = replace(
    UNET_CONFIGS["wan"],
    fixed=UNET_CONFIGS["wan"].fixed | {"model_type": "vace"},
    names=UNET_CONFIGS["wan"].names + " text_dim vace_in_dim=vace_in_channels",
    computed={"dim": values.hidden, "vace_layers": values.vace_layers},
)
UNET_CONFIGS["wan-animate"] = replace(
    UNET_CONFIGS["wan"],
    fixed=UNET_CONFIGS["wan"].fixed | {"model_type": "animate"},
    computed={"dim": values.hidden},
)
UNET_CONFIGS["minimax-h3-curves"] = UNET_CONFIGS["minimax-h3"]
