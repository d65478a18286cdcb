"""What the recipes of workflows have in common: negative prompts, loaders of text encoders, empty latents and
settings of the sampler."""

BAD = "blurry, low quality, distorted, watermark"
BAD_VIDEO = "blurry, static, overexposed, distorted hands, watermark"


def clip(*names: str, **more) -> tuple[str, dict]:
    """A loader of so many text encoders."""
    if len(names) == 1:
        return "CLIPLoader", {"clip_name": names[0], "device": "default", **more}
    more |= {"device": "default"} if len(names) == 2 else {}
    return {2: "DualCLIPLoader", 3: "TripleCLIPLoader", 4: "QuadrupleCLIPLoader"}[len(names)], {
        f"clip_name{i}": name for i, name in enumerate(names, 1)
    } | more


def image_latent(
    width: int = 1024, height: int = 1024, kind: str = "EmptySD3LatentImage"
) -> tuple[str, dict]:
    return kind, {"width": width, "height": height, "batch_size": 1}


def video(width: int, height: int, length: int, kind: str = "EmptyHunyuanLatentVideo") -> tuple[str, dict]:
    return kind, {"width": width, "height": height, "length": length, "batch_size": 1}


def solve(
    steps: int, cfg: float, sampler: str = "euler", scheduler: str = "simple", shift: float = 0.0
) -> dict:
    return {
        "steps": steps,
        "cfg": cfg,
        "sampler_name": sampler,
        "scheduler": scheduler,
        "denoise": 1.0,
        "shift": shift,
    }
