"""Reference images of a queued graph's prompt, whose tokens go through the model with the latent's."""

from dataclasses import replace

from ...backend.planner.machine import Sides
from .latent_sizes import GraphSizes, LatentSize
from .queued_graph import source, upstream

#: Words in the names of inputs through which a sampler's positive prompt comes.
PROMPT = ("guider", "positive", "cond1", "conditioning")
REFERENCE = "ReferenceLatent"
#: Encoders of a prompt that give the images linked to them as references too, where a VAE is linked -> MEGA
#: pixels that they scale each to; 0: about the latent's size.
ENCODERS = {"TextEncodeQwenImageEdit": 1.0, "TextEncodeQwenImageEditPlus": 1.0, "TextEncodeQwenImage21": 0.0}


def references(graph: dict, sampler: str, pixels: Sides, latent: LatentSize) -> list[Sides]:
    """Return (T, H, W) of the references of a sampler's positive prompt, for a model whose latent has a value
    for so many ``pixels``; one whose size takes a run is as large as the ``latent``."""
    sizes = GraphSizes(graph, pixels, replace(latent, length=1))
    given = []
    for key, _ in upstream(graph, sampler, PROMPT):
        kind = graph[key].get("class_type", "")
        if kind == REFERENCE:
            origin = source(graph, key, "latent")
            given += [sizes.of(origin)] if origin else []
        if kind in ENCODERS and source(graph, key, "vae"):
            images = [source(graph, key, name) for name in graph[key]["inputs"] if "image" in name]
            encoded = [sizes.of(image) for image in images if image]
            megapixels = ENCODERS[kind]
            given += [size.with_megapixels(megapixels) for size in encoded] if megapixels else encoded
    return [sizes.sides(size) for size in given]
