"""The ParallelDemoLoader node: text encoder and VAE of the demo model, which have no weights."""

import torch
from comfy_api.latest import io

from ..demo import shapes
from .host.schema import schema


class DemoTextEncoder:
    """What CLIPTextEncode and CLIPTextEncodeFlux ask of a CLIP."""

    def tokenize(self, text: str, **options) -> dict:
        """Return the text itself, under the names of both encoders."""
        return {"l": text, "t5xxl": text}

    def encode_from_tokens_scheduled(self, tokens: dict, add_dict: dict | None = None, **options) -> list:
        """Return the CONDITIONING of one prompt: text (1, T, E) and ``pooled_output`` (1, E)."""
        text_1TE, pooled_1E = shapes.encode_prompt(tokens["t5xxl"])
        return [[text_1TE, {"pooled_output": pooled_1E, **(add_dict or {})}]]


class DemoVAE:
    """What VAEDecode and VAEEncode ask of a VAE."""

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        """Decode a latent (B, 16, H, W) in VAE units -> image (B, 8 H, 8 W, 3) in [0, 1]."""
        return shapes.decode(latent)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode an image (B, 8 H, 8 W, 3) in [0, 1] -> latent (B, 16, H, W) in VAE units."""
        return shapes.encode(pixels)


class ParallelDemoLoader(io.ComfyNode):
    """Make CLIP and VAE objects for the demo model, so that its graph has the shape of a real one."""

    @classmethod
    def define_schema(cls):
        return schema(
            "demo",
            "parallel demo",
            node_id="ParallelDemoLoader",
            display_name="Parallel Demo Loader",
            description='Text encoder and VAE for the demo model shapes-flux, which paints prompts like "a '
            'red circle left of a blue square on black".',
            inputs=[],
            outputs=[
                io.Clip.Output(display_name="clip", tooltip="For CLIP Text Encode."),
                io.Vae.Output(display_name="vae", tooltip="For VAE Decode and VAE Encode."),
            ],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(DemoTextEncoder(), DemoVAE())
