"""What a queued graph says of a request before its sampler runs: constants of the nodes after a loader."""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ...backend.client.model_choice import ModelChoice
from ...backend.lora_bytes import LoraBytes
from ...backend.planner.machine import RequestEstimate, tokens_of
from ...backend.planner.model_shape import ModelShape
from .guidance import guidance_of, skips_negative
from .model_files import lora_size, model_choice_of
from .queued_graph import ancestors, constants, loader_of, source, values

#: Assumed of what is linked and not known: an image or a video, 20 steps, both prompts.
IMAGE = {"width": 1024, "height": 1024, "length": 1}
VIDEO = {"width": 832, "height": 480, "length": 81}
STEPS, TEXT = 20, 512
#: Words in the names of inputs through which a latent comes: video before audio, latents before images.
LATENT = ("video_latent", "latent", "samples", "pixels", "image")
LOADER, MODEL, SAMPLERS = "LoadParallelDiT", "ParallelModel", "ParallelSampler"
#: Nodes that add a LoRA -> their input of its strength; all but the first count on Parallel Model alone.
LORAS = {
    "ParallelLoRA": "strength",
    "LoraLoader": "strength_model",
    "LoraLoaderModelOnly": "strength_model",
    "LoraLoaderBypass": "strength_model",
    "LoraLoaderBypassModelOnly": "strength_model",
}
#: Its first output has the steps up to its input ``step``, the second one those after it.
SPLIT = "SplitSigmas"
#: Numbers in a text of sigmas, as ComfyUI's ManualSigmas reads them.
SIGMA = re.compile(r"[-+]?(?:\d*\.*\d+)")


def other_loaders(graph: dict, key: str) -> list[dict]:
    """Return the values of the other loaders of a graph, whose models stay on the same ranks."""
    others = [other for other, node in graph.items() if other != key and node.get("class_type") == LOADER]
    return [values(graph, other) for other in others]


def loaded_models(graph: dict) -> set[ModelChoice]:
    """Return what the loaders of a graph load, as far as constants tell it."""
    found = (model_choice_of(values(graph, key)) for key in graph if graph[key].get("class_type") == LOADER)
    return {choice for choice in found if choice}


def unnamed(models: list[ModelChoice], graph: dict) -> ModelChoice | None:
    """Return the first of some models that no loader of a graph loads."""
    needed = loaded_models(graph) if models else set()
    return next((model for model in models if model not in needed), None)


def request_of_graph(graph: dict, key: str, shape: ModelShape) -> RequestEstimate:
    """Return the request of the first sampler that the loader ``key`` feeds, and those of its others as
    ``then``, as far as constants tell them."""
    fed = [other for other, node in graph.items() if _samples(node) and loader_of(graph, other) == key]
    fed = [other for other in fed if not _is_for_a_schedule(graph, other)]
    fed.sort(key=partial(_is_model, graph))
    first, *others = (_request_of(graph, key, sampler, shape) for sampler in fed or [""])
    return replace(first, then=tuple(others))


def _request_of(graph: dict, loader: str, sampler: str, shape: ModelShape) -> RequestEstimate:
    drained = _is_model(graph, sampler)
    sampler = _sampler_of(graph, sampler) if drained else sampler
    inputs = constants(graph, sampler)
    latent = _latent(graph, sampler)
    usual = VIDEO if shape.is_video else IMAGE
    length, height, width = (
        _number(latent, name, default=usual[name]) for name in ("length", "height", "width")
    )
    time, *space = shape.pixels
    sides = (1 + (length - 1) // time, height // space[0], width // space[1])
    guidance = guidance_of(inputs)
    loras, others = _lora_bytes(graph, loader) if shape.is_quantized else (LoraBytes(), LoraBytes())
    return RequestEstimate(
        image_tokens=tokens_of(sides, shape.patch),
        text_tokens=TEXT,
        steps=_steps(graph, sampler, inputs),
        prompts=1 if (skips_negative(*guidance) if guidance else drained) else 2,
        batch=_number(latent, "batch_size", default=1),
        drained=drained,
        loras=loras,
        other_loras=others,
    )


def _lora_bytes(graph: dict, loader: str) -> tuple[LoraBytes, LoraBytes]:
    """Return the bytes of the LoRAs of a loader's model, and of those of others, which are on the same
    ranks."""
    own = others = LoraBytes()
    for key, node in graph.items():
        strength = LORAS.get(node.get("class_type", ""))
        inputs = constants(graph, key)
        loaders = _loaders_of(graph, key) if strength and inputs.get(strength, 1.0) else set()
        size = lora_size(inputs.get("lora_name", "")) if loaders else LoraBytes()
        if loader in loaders:
            own = own.and_of(size)
        else:
            others = others.and_of(size)
    return own, others


def _loaders_of(graph: dict, lora: str) -> set[str | None]:
    """Return the loaders to whose transformers on the ranks a node's LoRA is added."""
    if source(graph, lora, "dit"):
        return {loader_of(graph, lora)}
    model = source(graph, lora, "model")
    models = [key for key in ancestors(graph, [model]) if _is_model(graph, key)] if model else []
    return {loader_of(graph, key) for key in models}


def _samples(node: dict) -> bool:
    return node["class_type"].startswith(SAMPLERS) or node["class_type"] == MODEL


def _is_model(graph: dict, key: str) -> bool:
    return graph.get(key, {}).get("class_type") == MODEL


def _is_for_a_schedule(graph: dict, key: str) -> bool:
    """Return whether a Parallel Model is there for the schedule of a sampler on the ranks alone."""
    sampler = graph.get(_sampler_of(graph, key), {}) if _is_model(graph, key) else {}
    return sampler.get("class_type", "").startswith(SAMPLERS)


def _sampler_of(graph: dict, model: str) -> str:
    """Return the first sampler of the MODEL of a Parallel Model; an empty word where there is none."""
    others = [other for other in graph if source(graph, other, "latent_image")]
    return next((other for other in others if model in ancestors(graph, [other])), "")


def _upstream(graph: dict, node: str, words: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield a node and those before it, along one link of each, and the number of the output that is linked:
    of the inputs whose names have one of ``words``, those of the first word first."""
    seen = set()
    output = 0
    while node in graph and node not in seen:
        seen.add(node)
        yield node, output
        inputs = graph[node]["inputs"]
        named = [name for word in words for name in inputs if word in name]
        linked = (inputs[name] for name in named if source(graph, node, name))
        node, output = next(linked, ("", 0))


def _latent(graph: dict, sampler: str) -> dict:
    """Return what the nodes before a sampler's latent say of it, the nearest first: those that join video and
    audio, or another sampler, say nothing."""
    known: dict = {}
    for key, _ in _upstream(graph, sampler, LATENT):
        known = {**constants(graph, key), **known}
    return known


def _number(inputs: dict, name: str, default: int) -> int:
    value = inputs.get(name)
    return value if isinstance(value, int) and value > 0 else default


def _steps(graph: dict, sampler: str, inputs: dict) -> int:
    """Return the steps that a sampler with these ``inputs`` makes, or those of the sigmas that it is
    given."""
    if source(graph, sampler, "sigmas"):
        return _scheduled(graph, sampler) or STEPS
    steps = _number(inputs, "steps", default=STEPS)
    return max(
        1,
        min(_number(inputs, "end_at_step", default=steps), steps)
        - _number(inputs, "start_at_step", default=0),
    )


def _scheduled(graph: dict, sampler: str) -> int:
    """Count the steps of a sampler's sigmas, from the node that makes them to it; 0 where that takes a
    run."""
    steps = 0
    for key, output in reversed(list(_upstream(graph, sampler, ("sigmas",)))):
        inputs = constants(graph, key)
        text = inputs.get("sigmas")
        listed = len(SIGMA.findall(text)) - 1 if isinstance(text, str) else 0
        steps = _number(inputs, "steps", default=max(listed, 0)) or steps
        if graph[key].get("class_type") == SPLIT:
            first = min(_number(inputs, "step", default=0), steps)
            steps = steps - first if output else first or steps
    return steps
