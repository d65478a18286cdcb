"""Conditioning nodes of images in a graph: BUILD(graph, positive, negative) -> (positive, negative,
latent)."""

import json

from graphs import Graph
from tiny import GOLDEN


def references(video: bool, method: str = "", negative: bool = False, batch: int = 1, channels: int = 16):
    """Two reference images of other sizes, one of odd sides; the latent's sides are odd too."""

    def build(g: Graph, positive, other):
        extra = (1,) if video else ()
        for shape, seed in (((11, 14), 2), ((8, 27), 3)):
            reference = g.latent(1, channels, *extra, *shape, seed=seed)
            positive = g.one("ReferenceLatent", conditioning=positive, latent=reference)
            other = g.one("ReferenceLatent", conditioning=other, latent=reference) if negative else other
        if method:
            positive = g.one(
                "FluxKontextMultiReferenceLatentMethod",
                conditioning=positive,
                reference_latents_method=method,
            )
        return positive, other, g.latent(batch, channels, *extra, 15, 18, empty=True)

    return build


def inpainting(g, positive, negative):
    mask = g.one("TestMask", width=128, height=104)
    return g.three(
        "InpaintModelConditioning",
        positive=positive,
        negative=negative,
        vae=g.vae(temporal=0),
        pixels=g.image(),
        mask=mask,
        noise_mask=True,
    )


def control(g, positive, negative):
    return g.three(
        "InstructPixToPixConditioning",
        positive=positive,
        negative=negative,
        vae=g.vae(temporal=0),
        pixels=g.image(136, 120),
    )


def layers(with_image: bool):
    """Qwen-Image-Layered's own latent; an image to be taken apart, or none."""

    def build(g, positive, negative):
        if with_image:
            reference = g.latent(1, 16, 1, 14, 18, seed=2)
            positive, negative = (
                g.one("ReferenceLatent", conditioning=prompt, latent=reference)
                for prompt in (positive, negative)
            )
        size = {"width": 144, "height": 112, "layers": 2, "batch_size": 2}
        return positive, negative, g.one("EmptyQwenImageLayeredLatentImage", **size)

    return build


def encoded(*sizes, shape=None):
    """Qwen-Image 2.1's own node: prompts with images of these sizes among their rows, and a latent of the
    first one's size unless its ``shape`` is told."""

    def build(g, positive, negative):
        clip = g.one("TestTextWithImages", file=str(GOLDEN / "qwen-image21__euler_simple.safetensors"))
        images = {
            f"images.image_{i}": g.image(width, height, seed=i) for i, (width, height) in enumerate(sizes, 1)
        }
        positive, negative, latent = g.three(
            "TextEncodeQwenImage21",
            clip=clip,
            vae=g.vae(64, 16, 0),
            prompt="a winter evening",
            negative_prompt="",
            resolution=128,
            **images,
        )
        return positive, negative, latent if shape is None else g.latent(*shape, empty=True)

    return build


def plain(*shape):
    return lambda g, positive, negative: (positive, negative, g.latent(*shape, empty=True))


def guided(build, guidance: float | None):
    """The positive prompt with this guidance, or with none; the negative one with ComfyUI's default."""

    def changed(g, positive, negative):
        positive = (
            g.one("FluxDisableGuidance", conditioning=positive)
            if guidance is None
            else g.one("FluxGuidance", conditioning=positive, guidance=guidance)
        )
        return build(g, positive, negative)

    return changed


def with_values(build, **values):
    """``values`` set on both prompts."""

    def changed(g, positive, negative):
        return build(
            g,
            *(
                g.one("TestConditioningValues", conditioning=prompt, values=json.dumps(values), rows=0)
                for prompt in (positive, negative)
            ),
        )

    return changed
