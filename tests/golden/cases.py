"""The golden cases: what builds each model, and the shapes of one run's inputs."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from diffusers.loaders.single_file_utils import (
    convert_flux3_transformer_checkpoint_to_diffusers,
    convert_qwen_image21_transformer_checkpoint_to_diffusers,
)
from diffusers_models import Diffusers, DiffusersFlux3, DiffusersQwenImage21, flux3_file


@dataclass(frozen=True)
class Case:
    """comfy_class and unet_config build the model; latent and conditioning are shapes of one run's inputs (a
    list of latents is nested);
    constant: entries of the CONDITIONING that are no noise; elsewhere: a model that ComfyUI does not have, by
    ComfyUI's arguments; settings: those that are not SETTINGS; renamed: module's key -> file's; converted:
    the file's tensors -> the module's, where names are not all; stacked: two modules' keys -> the file's, of
    one tensor."""

    comfy_class: str
    unet_config: dict
    latent: tuple[int, ...] | list[tuple[int, ...]]
    conditioning: dict[str, tuple[int, ...]]
    constant: Callable[[], dict] = dict
    elsewhere: Callable[[], torch.nn.Module] | None = None
    settings: dict = field(default_factory=dict)
    renamed: Callable[[str], str] = lambda key: key
    converted: Callable[[dict], dict] | None = None
    stacked: tuple[str, str, str] | None = None


FLUX2 = {
    "image_model": "flux2",
    "patch_size": 1,
    "theta": 2000,
    "mlp_ratio": 3.0,
    "qkv_bias": False,
    "ops_bias": False,
    "global_modulation": True,
    "mlp_silu_act": True,
    "vec_in_dim": None,
    "txt_ids_dims": [3],
    "in_channels": 128,
    "out_channels": 128,
    "context_in_dim": 64,
    "hidden_size": 256,
    "num_heads": 4,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [16, 16, 16, 16],
    "default_ref_method": "index",
    "ref_index_scale": 10.0,
}


def scales(key: str) -> str:
    """Released files call the weights of these norms scales."""
    return key.replace("query_norm.weight", "query_norm.scale").replace("key_norm.weight", "key_norm.scale")


CASES = {
    "wan21-vace": Case(
        "WAN21_Vace",
        {
            "image_model": "wan2.1",
            "model_type": "vace",
            "dim": 512,
            "ffn_dim": 1024,
            "num_heads": 4,
            "num_layers": 4,
            "patch_size": [1, 2, 2],
            "freq_dim": 256,
            "window_size": [-1, -1],
            "qk_norm": True,
            "cross_attn_norm": True,
            "eps": 1e-6,
            "in_dim": 16,
            "out_dim": 16,
            "text_dim": 64,
            "vace_layers": 2,
            "vace_in_dim": 96,
        },
        (1, 16, 3, 16, 16),
        {"cross_attn": (1, 12, 64)},
    ),
    "qwen-image21": Case(
        "QwenImage21",
        {
            "image_model": "qwen_image21",
            "in_channels": 64,
            "out_channels": 64,
            "num_layers": 4,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "context_in_dim": 64,
            "mlp_ratio": 3,
            "axes_dims_rope": [4, 14, 14],
        },
        (1, 64, 8, 10),
        {"cross_attn": (1, 12, 64)},
        elsewhere=DiffusersQwenImage21,
        converted=convert_qwen_image21_transformer_checkpoint_to_diffusers,
        stacked=("gate_layer", "proj.", "gate_up"),
    ),
    "flux3": Case(
        "Flux3",
        {"image_model": "flux3"},
        (1, 128, 8, 9),
        {"cross_attn": (1, 12, 64)},
        elsewhere=DiffusersFlux3,
        renamed=flux3_file,
        converted=convert_flux3_transformer_checkpoint_to_diffusers,
    ),
    "ltx2": Case(
        "LTXAV",
        {
            "image_model": "ltxav",
            "num_layers": 3,
            "attention_head_dim": 8,
            "cross_attention_dim": 256,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 128,
            "caption_channels": 64,
            "connector_attention_head_dim": 16,
            "connector_num_attention_heads": 4,
            "connector_num_layers": 2,
            "causal_temporal_positioning": True,
            "use_middle_indices_grid": True,
            "rope_type": "split",
            "frequencies_precision": "float64",
        },
        [(1, 128, 3, 6, 5), (1, 8, 9, 16)],
        {"cross_attn": (1, 12, 64)},
        lambda: {"unprocessed_ltxav_embeds": torch.tensor(True)},
    ),
    "ltx23": Case(
        "LTXAV",
        {
            "image_model": "ltxav",
            "num_layers": 3,
            "attention_head_dim": 8,
            "cross_attention_dim": 256,
            "audio_attention_head_dim": 4,
            "audio_cross_attention_dim": 128,
            "connector_attention_head_dim": 32,
            "connector_num_attention_heads": 8,
            "audio_connector_attention_head_dim": 16,
            "audio_connector_num_attention_heads": 8,
            "connector_num_layers": 2,
            "causal_temporal_positioning": True,
            "use_middle_indices_grid": True,
            "rope_type": "split",
            "frequencies_precision": "float64",
            "apply_gated_attention": True,
            "connector_apply_gated_attention": True,
            "cross_attention_adaln": True,
            "caption_proj_before_connector": True,
            "caption_projection_first_linear": False,
        },
        [(1, 128, 3, 6, 5), (1, 8, 9, 16)],
        {"cross_attn": (1, 12, 384)},
        lambda: {"unprocessed_ltxav_embeds": torch.tensor(True)},
    ),
    "sana": Case(
        "Sana",
        {"image_model": "sana"},
        (1, 32, 7, 9),
        {"cross_attn": (1, 12, 64)},
        constant=lambda: {"attention_mask": (torch.arange(12) < 10).float()[None]},
        elsewhere=Diffusers,
    ),
    "hidream": Case(
        "HiDream",
        {
            "image_model": "hidream",
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "axes_dims_rope": [16, 8, 8],
            "caption_channels": [48, 64],
            "max_resolution": [128, 128],
            "in_channels": 16,
            "out_channels": 16,
            "llama_layers": [0, 1, 2, 3, 3],
            "num_layers": 2,
            "num_single_layers": 3,
            "num_routed_experts": 4,
            "num_activated_experts": 2,
            "patch_size": 2,
            "text_emb_dim": 32,
        },
        (1, 16, 16, 20),
        {"cross_attn": (1, 10, 48), "pooled_output": (1, 32), "conditioning_llama3": (1, 4, 13, 64)},
    ),
    "kandinsky5": Case(
        "Kandinsky5",
        {
            "image_model": "kandinsky5",
            "model_dim": 256,
            "axes_dims": [16, 24, 24],
            "time_dim": 128,
            "ff_dim": 512,
            "visual_embed_dim": 132,
            "in_text_dim": 64,
            "in_text_dim2": 48,
            "num_text_blocks": 2,
            "num_visual_blocks": 4,
        },
        (1, 16, 3, 12, 16),
        {"cross_attn": (1, 12, 64), "pooled_output": (1, 48)},
    ),
    "kandinsky5-image": Case(
        "Kandinsky5Image",
        {
            "image_model": "kandinsky5",
            "model_dim": 256,
            "axes_dims": [32, 48, 48],
            "rope_scale_factor": [1.0, 1.0, 1.0],
            "time_dim": 128,
            "ff_dim": 512,
            "visual_embed_dim": 64,
            "in_text_dim": 64,
            "in_text_dim2": 48,
            "num_text_blocks": 2,
            "num_visual_blocks": 4,
        },
        (1, 16, 16, 20),
        {"cross_attn": (1, 12, 64), "pooled_output": (1, 48)},
    ),
    "flux2-dev": Case(
        "Flux2",
        FLUX2 | {"guidance_embed": True},
        (1, 128, 8, 9),
        {"cross_attn": (1, 12, 64)},
        lambda: {"guidance": torch.tensor(4.0)},
        renamed=scales,
    ),
    "lumina2": Case(
        "Lumina2",
        {
            "image_model": "lumina2",
            "patch_size": 2,
            "in_channels": 16,
            "dim": 192,
            "cap_feat_dim": 64,
            "n_layers": 4,
            "qk_norm": True,
            "n_heads": 4,
            "n_kv_heads": 2,
            "axes_dims": [16, 16, 16],
            "axes_lens": [300, 512, 512],
            "rope_theta": 10000.0,
            "ffn_dim_multiplier": 4.0,
        },
        (1, 16, 15, 18),
        {"cross_attn": (1, 12, 64)},
        lambda: {"attention_mask": torch.ones(1, 12, dtype=torch.long)},
    ),
    "hunyuan-image21": Case(
        "HunyuanImage21",
        {
            "image_model": "hunyuan_video",
            "in_channels": 64,
            "out_channels": 64,
            "patch_size": [1, 1],
            "vec_in_dim": None,
            "axes_dim": [64, 64],
            "meanflow": False,
            "context_in_dim": 64,
            "hidden_size": 512,
            "mlp_ratio": 4.0,
            "num_heads": 4,
            "depth": 2,
            "depth_single_blocks": 2,
            "theta": 256,
            "qkv_bias": True,
            "byt5": True,
            "guidance_embed": False,
            "use_cond_type_embedding": False,
            "vision_in_dim": None,
            "meanflow_sum": False,
        },
        (1, 64, 9, 10),
        {"cross_attn": (1, 12, 64), "conditioning_byt5small": (1, 7, 1472)},
    ),
    "ideogram4": Case(
        "Ideogram4",
        {
            "image_model": "ideogram4",
            "in_channels": 128,
            "num_layers": 4,
            "num_attention_heads": 4,
            "attention_head_dim": 128,
            "intermediate_size": 512,
            "adaln_dim": 64,
            "llm_features_dim": 96,
        },
        (1, 128, 9, 10),
        {"cross_attn": (1, 12, 96)},
    ),
    "minimax-h3-curves": Case(
        "MiniMaxH3",
        {
            "image_model": "minimax_h3",
            "num_layers": 3,
            "token_refiner_num_layers": 1,
            "hidden_size": 256,
            "latents_dim": 24,
            "audio_latents_dim": 32,
            "attention_head_dim": 128,
            "num_attention_heads": 4,
            "ffn_hidden_size": 512,
            "text_dim": 64,
            "time_embed_dim": 6,
            "adaln_curve_grid": 33,
            "rope_inv_freq_len": 16,
        },
        [(1, 24, 2, 7, 10), (1, 32, 2, 9)],
        {"cross_attn": (1, 12, 64)},
    ),
    "minimax-h3__ancestral_13x18": Case(
        "MiniMaxH3",
        {
            "image_model": "minimax_h3",
            "num_layers": 4,
            "token_refiner_num_layers": 2,
            "hidden_size": 512,
            "latents_dim": 24,
            "audio_latents_dim": 32,
            "attention_head_dim": 128,
            "num_attention_heads": 4,
            "ffn_hidden_size": 1024,
            "text_dim": 64,
            "timestep_input_dim": 256,
            "time_embed_hidden_size": 512,
            "time_embed_dim": 256,
            "rope_inv_freq_len": 16,
        },
        [(1, 24, 3, 13, 18), (1, 32, 2, 15)],
        {"cross_attn": (1, 12, 64)},
        settings={"sampler": "euler_ancestral", "steps": 4, "seed": 7},
    ),
}
