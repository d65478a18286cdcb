"""Queued graphs of an image, with nodes between its latent and a sampler."""

from dataclasses import replace

from published import FLUX

#: Latents of images: 8 pixels a value, 16 a token.
IMAGES = replace(FLUX, family="flux", pixels=(1, 8, 8), patch=(1, 2, 2))


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def after(*nodes: dict, **others: dict) -> dict:
    """The graph of an image of 1024 x 512 with these nodes, each linked to the one before it by its input
    that is None, between its latent and a second sampler."""
    graph = {
        "1": node("LoadParallelDiT", model_name="a"),
        "0": node("EmptySD3LatentImage", width=1024, height=512, batch_size=1),
        **others,
    }
    last = "0"
    for index, each in enumerate(nodes):
        key = f"between {index}"
        inputs = {name: [last, 0] if value is None else value for name, value in each["inputs"].items()}
        graph[key] = {**each, "inputs": inputs}
        last = key
    graph["sampler"] = node("ParallelSampler", dit=["1", 0], latent_image=[last, 0])
    return graph
