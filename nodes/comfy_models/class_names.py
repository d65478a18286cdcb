"""Names of ComfyUI's classes that follow from several entries of a diffusers config."""


def flux_class(config: dict) -> str:
    """Return the name of ComfyUI's class: Fill, which is given an image and a mask, has one of its own."""
    if not config["guidance_embeds"]:
        return "FluxSchnell"
    return "FluxInpaint" if config["in_channels"] == 4 * 96 else "Flux"


def wan_class(config: dict) -> str:
    """Return the name of ComfyUI's class for a Wan model."""
    if config.get("camera_channels"):
        return "WAN21_Camera" if config.get("image_dim") else "WAN22_Camera"
    if config["out_channels"] == 48:
        return "WAN22_T2V"
    if not config.get("image_dim"):
        return "WAN21_T2V"
    return {36: "WAN21_I2V", 48: "WAN21_FunControl2V"}.get(config["in_channels"], "WAN21_T2V")


def hunyuan_video_class(config: dict) -> str:
    """Return the name of ComfyUI's class for a HunyuanVideo model."""
    return {33: "HunyuanVideoI2V", 32: "HunyuanVideoSkyreelsI2V"}.get(config["in_channels"], "HunyuanVideo")


def hunyuan_video15_class(config: dict) -> str:
    """Return the name of ComfyUI's class for a HunyuanVideo 1.5: super resolution has one of its own."""
    return "HunyuanVideo15_SR_Distilled" if config["in_channels"] == 98 else "HunyuanVideo15"


def cogvideox_class(config: dict) -> str:
    """Return the name of ComfyUI's class for a CogVideoX model."""
    if config["in_channels"] == config["out_channels"]:
        return "CogVideoX_T2V"
    return "CogVideoX_Inpaint" if config["in_channels"] == 48 else "CogVideoX_I2V"


def pixart_class(config: dict) -> str:
    """Return the name of the class with a PixArt's latents: Alpha's has also the one of 512 pixels, which is
    not told the size. Its folder does not say whether it is told, as Sigma's do."""
    return "PixArtSigma" if config["use_additional_conditions"] is False else "PixArtAlpha"
