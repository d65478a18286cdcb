"""What a queued graph says of a request before its sampler runs: constants of the nodes after a loader."""

from collections.abc import Iterator

from ...backend.client.pool import Wanted
from ...backend.planner.machine import Request, tokens_of
from ...backend.planner.model_shape import ModelShape
from .guidance import guidance_of, skips_negative
from .model_files import lora_size, wanted_of
from .queued import ancestors, loader_of, source, values

#: Assumed of what is linked and not known: an image or a video, 20 steps, both prompts.
IMAGE = {"width": 1024, "height": 1024, "length": 1}
VIDEO = {"width": 832, "height": 480, "length": 81}
STEPS, TEXT = 20, 512
#: Words in the names of inputs through which a latent comes: video before audio, latents before images.
LATENT = ("video_latent", "latent", "samples", "pixels", "image")
LOADER, MODEL, LORA = "LoadParallelDiT", "ParallelModel", "ParallelLoRA"


def other_loaders(prompt: dict, key: str) -> list[dict]:
    """Return the values of the other loaders of a graph, whose models stay on the same ranks."""
    others = [other for other, node in prompt.items() if other != key and node.get("class_type") == LOADER]
    return [values(prompt, other) for other in others]


def loaded_models(prompt: dict) -> set[Wanted]:
    """Return what the loaders of a graph load, as far as constants tell it."""
    found = (wanted_of(values(prompt, key)) for key in prompt if prompt[key].get("class_type") == LOADER)
    return {wanted for wanted in found if wanted}


def request_of_graph(prompt: dict, key: str, shape: ModelShape) -> Request:
    """Return the request of the first sampler that the loader ``key`` feeds, as far as constants tell it."""
    fed = [other for other, node in prompt.items() if _samples(node) and loader_of(prompt, other) == key]
    sampler = fed[0] if fed else ""
    node = prompt.get(sampler, {"class_type": "", "inputs": {}})
    latent = _latent(prompt, sampler)
    usual = VIDEO if shape.is_video else IMAGE
    length, height, width = (_number(latent, name, usual[name]) for name in ("length", "height", "width"))
    time, *space = shape.pixels
    sides = (1 + (length - 1) // time, height // space[0], width // space[1])
    guidance = guidance_of(node["inputs"])
    drained = node["class_type"] == MODEL
    return Request(
        image_tokens=tokens_of(sides, shape.patch),
        text_tokens=TEXT,
        steps=_steps(prompt, sampler),
        prompts=1 if drained or (guidance and skips_negative(*guidance)) else 2,
        batch=_number(latent, "batch_size", 1),
        drained=drained,
        loras=_lora_bytes(prompt) if shape.is_quantized else 0,
    )


def _lora_bytes(prompt: dict) -> int:
    """Bytes of all LoRAs of a graph, whose models are on the same ranks: a plain one takes about what its
    file does."""
    nodes = [values(prompt, key) for key, node in prompt.items() if node.get("class_type") == LORA]
    return sum(lora_size(inputs.get("lora_name", "")) for inputs in nodes if inputs.get("strength", 1.0))


def _samples(node: dict) -> bool:
    return node["class_type"].startswith("ParallelSampler") or node["class_type"] == MODEL


def _upstream(prompt: dict, node: str, words: tuple[str, ...]) -> Iterator[dict]:
    """Yield the inputs of a node and of those before it, along one link of each: of the inputs whose names
    have one of ``words``, those of the first word first."""
    seen = set()
    following = node
    while following in prompt and following not in seen:
        seen.add(following)
        inputs = prompt[following]["inputs"]
        yield inputs
        named = [name for word in words for name in inputs if word in name]
        found = (source(prompt, following, name) for name in named)
        following = next(filter(None, found), "")


def _latent(prompt: dict, sampler: str) -> dict:
    """Return what the nodes before a sampler's latent say of it, the nearest first: those that join video and
    audio, or another sampler, say nothing. For Parallel Model: before the first sampler of its MODEL."""
    if prompt.get(sampler, {}).get("class_type") == MODEL:
        others = [other for other in prompt if source(prompt, other, "latent_image")]
        sampler = next((other for other in others if sampler in ancestors(prompt, [other])), "")
    found: dict = {}
    for inputs in _upstream(prompt, sampler, LATENT):
        found = {**inputs, **found}
    return found


def _number(inputs: dict, name: str, default: int) -> int:
    value = inputs.get(name)
    return value if isinstance(value, int) and value > 0 else default


def _steps(prompt: dict, sampler: str) -> int:
    """The steps that a sampler makes, or those of the scheduler that gives it its sigmas."""
    inputs = prompt[sampler]["inputs"] if sampler else {}
    if "sigmas" in inputs:
        counts = (_number(each, "steps", 0) for each in _upstream(prompt, sampler, ("sigmas",)))
        return next(filter(None, counts), STEPS)
    steps = _number(inputs, "steps", STEPS)
    return max(1, min(_number(inputs, "end_at_step", steps), steps) - _number(inputs, "start_at_step", 0))
