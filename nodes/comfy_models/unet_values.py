"""Entries of ComfyUI's unet_config, and names of ComfyUI's classes, that follow from several entries of a
diffusers config."""


def hidden(config: dict) -> int:
    """Return the width of a token."""
    return config["num_attention_heads"] * config["attention_head_dim"]


def out_channels(config: dict) -> int:
    """Return the channels of the prediction: those of the latent where the config names none."""
    return config.get("out_channels") or config["in_channels"]


def unpacked_in_channels(config: dict) -> int:
    """Return the latent's channels, where diffusers counts the 2 x 2 latent cells of a token."""
    return config["in_channels"] // 4


def unpacked_out_channels(config: dict) -> int:
    """Return the prediction's channels, where diffusers counts the 2 x 2 latent cells of a token."""
    return out_channels(config) // 4


def wan_model_type(config: dict) -> str:
    return "i2v" if config.get("image_dim") else "t2v"


def flux_class(config: dict) -> str:
    """Return the name of ComfyUI's class: Fill, which is given an image and a mask, has one of its own."""
    if not config["guidance_embeds"]:
        return "FluxSchnell"
    return "FluxInpaint" if unpacked_in_channels(config) == 96 else "Flux"


def vace_layers(config: dict) -> int:
    """Return the number of control blocks."""
    return len(config["vace_layers"])


def wan_class(config: dict) -> str:
    if config.get("camera_channels"):
        return "WAN21_Camera" if config.get("image_dim") else "WAN22_Camera"
    if config["out_channels"] == 48:
        return "WAN22_T2V"
    if not config.get("image_dim"):
        return "WAN21_T2V"
    return {36: "WAN21_I2V", 48: "WAN21_FunControl2V"}.get(config["in_channels"], "WAN21_T2V")


def hunyuan_video_class(config: dict) -> str:
    return {33: "HunyuanVideoI2V", 32: "HunyuanVideoSkyreelsI2V"}.get(config["in_channels"], "HunyuanVideo")


def cogvideox_class(config: dict) -> str:
    if config["in_channels"] == config["out_channels"]:
        return "CogVideoX_T2V"
    return "CogVideoX_Inpaint" if config["in_channels"] == 48 else "CogVideoX_I2V"


def hunyuan_video_patch(config: dict) -> list[int]:
    return [config["patch_size_t"], config["patch_size"], config["patch_size"]]


def is_pixart_alpha(config: dict) -> bool:
    """Return whether a PixArt is Alpha: one whose config does not say has latents of 128 x 128."""
    explicit = config["use_additional_conditions"]
    return config["sample_size"] == 128 if explicit is None else explicit


def is_of_pixart_alpha(config: dict) -> bool:
    """Return whether a PixArt has Alpha's latents: also the one of 512 pixels, which is not told the size.
    Its folder does not say whether it is told, as Sigma's do."""
    return config["use_additional_conditions"] is not False


def pixart_class(config: dict) -> str:
    return "PixArtAlpha" if is_of_pixart_alpha(config) else "PixArtSigma"


def pixart_image_model(config: dict) -> str:
    return "pixart_alpha" if is_of_pixart_alpha(config) else "pixart_sigma"


def pixart_text_length(config: dict) -> int:
    return 120 if is_of_pixart_alpha(config) else 300


def sd3_text_embedder(config: dict) -> dict:
    widths = {"in_features": config["joint_attention_dim"], "out_features": config["caption_projection_dim"]}
    return {"target": "torch.nn.Linear", "params": widths}


def sd3_norm(config: dict) -> str | None:
    return "rms" if config["qk_norm"] else None


def sd3_positions(config: dict) -> int:
    return config["pos_embed_max_size"] ** 2


def kandinsky5_image_channels(config: dict) -> int:
    """Return the input width of the image embedder: of videos the latent, a first frame and its mask."""
    channels = config["in_visual_dim"]
    return 4 * (2 * channels + 1 if config["visual_cond"] else channels)


def first_hunyuan_dit(config: dict) -> dict:
    """Return what HunyuanDiT 1.1 has more than 1.2; ComfyUI calls them two models."""
    if not config["use_style_cond_and_image_meta_size"]:
        return {}
    return {"image_model": "hydit1", "size_cond": True, "use_style_cond": True}


def kandinsky5_scale(config: dict) -> dict:
    """Return the scale of positions that Kandinsky 5's models of single images have, by channels or width."""
    is_video = config["visual_cond"] and config["model_dim"] != 2560
    return {} if is_video else {"rope_scale_factor": [1.0, 1.0, 1.0]}


def minimax_h3_curves(config: dict) -> dict:
    """Return what MiniMax-H3 with curves of its modulation has more."""
    return {"adaln_curve_grid": config["curve_points"]} if "curve_points" in config else {}
