"""The diffusers config of a transformer as ComfyUI's own unet_config, one function a family, and what the
names of ComfyUI's classes follow from."""


def flux(config: dict) -> dict:
    return {
        "image_model": "flux",
        "patch_size": 2,
        "theta": 10000,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
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


def hidden(config: dict) -> int:
    return config["num_attention_heads"] * config["attention_head_dim"]


def sd3(config: dict) -> dict:
    return {
        "in_channels": config["in_channels"],
        "out_channels": config["out_channels"],
        "patch_size": config["patch_size"],
        "depth": config["num_layers"],
        "adm_in_channels": config["pooled_projection_dim"],
        "pos_embed_max_size": config["pos_embed_max_size"],
        "qk_norm": "rms" if config["qk_norm"] else None,
        "input_size": None,
        "num_patches": config["pos_embed_max_size"] ** 2,
        "pos_embed_scaling_factor": None,
        "x_block_self_attn_layers": list(config["dual_attention_layers"]),
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {
                "in_features": config["joint_attention_dim"],
                "out_features": config["caption_projection_dim"],
            },
        },
    }


def wan(config: dict) -> dict:
    return {
        "image_model": "wan2.1",
        "model_type": "i2v" if config.get("image_dim") else "t2v",
        "dim": hidden(config),
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "num_heads": config["num_attention_heads"],
        "ffn_dim": config["ffn_dim"],
        "num_layers": config["num_layers"],
        "patch_size": list(config["patch_size"]),
        "freq_dim": config["freq_dim"],
        "window_size": [-1, -1],
        "qk_norm": True,
        "cross_attn_norm": config["cross_attn_norm"],
        "eps": 1e-6,
    }


def wan_class(config: dict) -> str:
    if config["out_channels"] == 48:
        return "WAN22_T2V"
    return "WAN21_I2V" if config.get("image_dim") and config["in_channels"] == 36 else "WAN21_T2V"


def hunyuan_video(config: dict) -> dict:
    patch = [config["patch_size_t"], config["patch_size"], config["patch_size"]]
    return {
        "image_model": "hunyuan_video",
        "in_channels": config["in_channels"],
        "out_channels": config["out_channels"],
        "patch_size": patch,
        "axes_dim": list(config["rope_axes_dim"]),
        "context_in_dim": config["text_embed_dim"],
        "hidden_size": hidden(config),
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config.get("num_single_layers", 0),
        "vec_in_dim": config.get("pooled_projection_dim"),
        "guidance_embed": config.get("guidance_embeds", False),
        "mlp_ratio": 4.0,
        "theta": 256,
        "qkv_bias": True,
        "meanflow": False,
        "byt5": "text_embed_2_dim" in config,
    }


def hunyuan_video_class(config: dict) -> str:
    return {33: "HunyuanVideoI2V", 32: "HunyuanVideoSkyreelsI2V"}.get(config["in_channels"], "HunyuanVideo")


def hunyuan_video15(config: dict) -> dict:
    return {
        **hunyuan_video(config),
        "use_cond_type_embedding": True,
        "vision_in_dim": config["image_embed_dim"],
        "meanflow_sum": True,
    }


def hunyuan_image21(config: dict) -> dict:
    return {
        **hunyuan_video({**config, "patch_size_t": 1}),
        "patch_size": list(config["patch_size"]),
        "vec_in_dim": None,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
    }


def hunyuan_dit(config: dict) -> dict:
    old = config["use_style_cond_and_image_meta_size"]
    return {
        "image_model": "hydit1" if old else "hydit",
        "depth": config["num_layers"],
        "hidden_size": config["hidden_size"],
        "text_states_dim": config["cross_attention_dim"],
        "text_states_dim_t5": config["cross_attention_dim_t5"],
        **({"size_cond": True, "use_style_cond": True} if old else {}),
    }


def is_pixart_alpha(config: dict) -> bool:
    given = config["use_additional_conditions"]
    return config["sample_size"] == 128 if given is None else given


def pixart(config: dict) -> dict:
    alpha = is_pixart_alpha(config)
    return {
        "image_model": "pixart_alpha" if alpha else "pixart_sigma",
        "num_heads": config["num_attention_heads"],
        "patch_size": config["patch_size"],
        "hidden_size": hidden(config),
        "in_channels": config["in_channels"],
        "depth": config["num_layers"],
        "caption_channels": config["caption_channels"],
        "model_max_length": 120 if alpha else 300,
        "micro_condition": alpha,
    }


def cogvideox(config: dict) -> dict:
    return {
        "image_model": "cogvideox",
        **{
            key: config[key]
            for key in (
                "num_attention_heads",
                "attention_head_dim",
                "time_embed_dim",
                "num_layers",
                "in_channels",
                "patch_size",
                "text_embed_dim",
                "use_learned_positional_embeddings",
                "use_rotary_positional_embeddings",
            )
        },
        **{key: config[key] for key in ("patch_size_t", "ofs_embed_dim") if config.get(key)},
    }


def qwen_image(config: dict) -> dict:
    return {
        "image_model": "qwen_image",
        "in_channels": config["in_channels"],
        "num_layers": config["num_layers"],
        "attention_head_dim": config["attention_head_dim"],
        "num_attention_heads": config["num_attention_heads"],
        "joint_attention_dim": config["joint_attention_dim"],
        "axes_dims_rope": list(config["axes_dims_rope"]),
    }


def qwen_image21(config: dict) -> dict:
    return {
        "image_model": "qwen_image21",
        **{
            key: config[key]
            for key in (
                "in_channels",
                "out_channels",
                "num_layers",
                "attention_head_dim",
                "num_attention_heads",
                "context_in_dim",
                "mlp_ratio",
                "axes_dims_rope",
            )
        },
    }


def z_image(config: dict) -> dict:
    return {
        "image_model": "lumina2",
        "patch_size": 2,
        "in_channels": config["in_channels"],
        "dim": config["dim"],
        "cap_feat_dim": config["cap_feat_dim"],
        "n_layers": config["n_layers"],
        "n_heads": config["n_heads"],
        "n_kv_heads": config["n_kv_heads"],
        "qk_norm": True,
        "axes_dims": list(config["axes_dims"]),
        "axes_lens": list(config["axes_lens"]),
        "rope_theta": 256.0,
        "ffn_dim_multiplier": 8.0 / 3.0,
        "z_image_modulation": True,
        "time_scale": 1000.0,
        "pad_tokens_multiple": 32,
    }


def chroma(config: dict) -> dict:
    return {
        "image_model": "chroma",
        "patch_size": 2,
        "theta": 10000,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
        "txt_ids_dims": [],
        "vec_in_dim": None,
        "in_channels": config["in_channels"],
        "out_channels": config.get("out_channels") or config["in_channels"],
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": hidden(config),
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]),
        "in_dim": config["approximator_num_channels"],
        "out_dim": hidden(config),
        "hidden_dim": config["approximator_hidden_dim"],
        "n_layers": config["approximator_layers"],
    }


def krea2(config: dict) -> dict:
    return {
        "image_model": "krea2",
        "features": hidden(config),
        "channels": config["in_channels"] // 4,
        "patch": 2,
        "layers": config["num_layers"],
        "heads": config["num_attention_heads"],
        "kvheads": config["num_key_value_heads"],
        "txtlayers": config["num_text_layers"],
        "txtdim": config["text_hidden_dim"],
    }


def ltxv(config: dict) -> dict:
    return {
        "image_model": "ltxv",
        "num_layers": config["num_layers"],
        "attention_head_dim": config["attention_head_dim"],
        "cross_attention_dim": config["cross_attention_dim"],
    }


def kandinsky5(config: dict) -> dict:
    channels = config["in_visual_dim"] * (2 if config["visual_cond"] else 1) + bool(config["visual_cond"])
    return {
        "image_model": "kandinsky5",
        **{
            key: config[key]
            for key in (
                "model_dim",
                "time_dim",
                "ff_dim",
                "num_text_blocks",
                "num_visual_blocks",
                "in_text_dim",
                "in_text_dim2",
            )
        },
        "axes_dims": list(config["axes_dims"]),
        "visual_embed_dim": channels * 4,
        **({} if config["visual_cond"] else {"rope_scale_factor": [1.0, 1.0, 1.0]}),
    }


def hidream(config: dict) -> dict:
    return {
        "image_model": "hidream",
        **{
            key: config[key]
            for key in (
                "patch_size",
                "in_channels",
                "out_channels",
                "num_layers",
                "num_single_layers",
                "attention_head_dim",
                "num_attention_heads",
                "caption_channels",
                "text_emb_dim",
                "num_routed_experts",
                "num_activated_experts",
                "axes_dims_rope",
                "max_resolution",
            )
        },
    }


def minimax_h3(config: dict) -> dict:
    return {
        "image_model": "minimax_h3",
        "num_layers": config["num_layers"],
        "token_refiner_num_layers": config["num_refiner_layers"],
        "hidden_size": config["hidden_size"],
        "latents_dim": config["in_channels"],
        "audio_latents_dim": config["audio_in_channels"],
        "attention_head_dim": config["attention_head_dim"],
        "num_attention_heads": config["num_attention_heads"],
        "ffn_hidden_size": config["ffn_dim"],
        "text_dim": config["text_dim"],
        "timestep_input_dim": config["freq_dim"],
        "time_embed_hidden_size": config["time_embed_hidden_dim"],
        "time_embed_dim": config["time_embed_dim"],
        "rope_inv_freq_len": config["rope_freq_dim"],
        **({"adaln_curve_grid": config["curve_points"]} if "curve_points" in config else {}),
    }


def flux2(config: dict) -> dict:
    return {
        "image_model": "flux2",
        "patch_size": 1,
        "theta": 2000,
        "mlp_ratio": config["mlp_ratio"],
        "qkv_bias": False,
        "ops_bias": False,
        "global_modulation": True,
        "mlp_silu_act": True,
        "vec_in_dim": None,
        "txt_ids_dims": [3],
        "in_channels": config["in_channels"],
        "out_channels": config["out_channels"] or config["in_channels"],
        "guidance_embed": config["guidance_embeds"],
        "context_in_dim": config["joint_attention_dim"],
        "hidden_size": hidden(config),
        "num_heads": config["num_attention_heads"],
        "depth": config["num_layers"],
        "depth_single_blocks": config["num_single_layers"],
        "axes_dim": list(config["axes_dims_rope"]),
        "default_ref_method": "index",
        "ref_index_scale": 10.0,
    }


def lumina2(config: dict) -> dict:
    return {
        "image_model": "lumina2",
        "patch_size": config["patch_size"],
        "in_channels": config["in_channels"],
        "dim": config["hidden_size"],
        "cap_feat_dim": config["cap_feat_dim"],
        "n_layers": config["num_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_kv_heads"],
        "qk_norm": True,
        "axes_dims": list(config["axes_dim_rope"]),
        "axes_lens": [300, 512, 512],
        "rope_theta": 10000.0,
        "ffn_dim_multiplier": 4.0,
    }


def ideogram4(config: dict) -> dict:
    return {
        "image_model": "ideogram4",
        **{
            key: config[key]
            for key in (
                "in_channels",
                "num_layers",
                "attention_head_dim",
                "num_attention_heads",
                "intermediate_size",
                "adaln_dim",
                "llm_features_dim",
            )
        },
    }


def ltx2(config: dict) -> dict:
    return {
        "image_model": "ltxav",
        **{
            key: config[key]
            for key in (
                "num_layers",
                "attention_head_dim",
                "cross_attention_dim",
                "audio_attention_head_dim",
                "audio_cross_attention_dim",
                "caption_channels",
            )
            if key in config
        },
    }
