"""What a queued graph says of a request before its sampler runs: constants of the nodes after a loader."""

from ...backend.client.pool import Wanted
from ...backend.planner.machine import Request, tokens_of
from ...backend.planner.model_shape import ModelShape
from .guidance import guidance_of, skips_negative
from .model_files import lora_size, wanted_of
from .queued import loader_of, values

#: Assumed of what is linked and not known: an image, 20 steps, both prompts.
SIDE, FRAMES, STEPS, TEXT = 1024, 1, 20, 512
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
    fed = [node for other, node in prompt.items() if loader_of(prompt, other) == key]
    node = next((each for each in fed if _samples(each)), {"class_type": "", "inputs": {}})
    latent = _linked(prompt, node["inputs"].get("latent_image"))
    time, *space = shape.pixels
    frames = 1 + (_number(latent, "length", FRAMES) - 1) // time
    height, width = (_number(latent, name, SIDE) // side for name, side in zip(("height", "width"), space))
    guidance = guidance_of(node["inputs"])
    drained = node["class_type"] == MODEL
    return Request(
        image_tokens=tokens_of((frames, height, width), shape.patch),
        text_tokens=TEXT,
        steps=_steps(prompt, node),
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


def _linked(prompt: dict, link) -> dict:
    """The inputs of the node at the other end of a link."""
    return prompt.get(link[0], {"inputs": {}})["inputs"] if isinstance(link, list) else {}


def _number(inputs: dict, name: str, default: int) -> int:
    value = inputs.get(name)
    return value if isinstance(value, int) and value > 0 else default


def _steps(prompt: dict, node: dict) -> int:
    """The steps that a sampler makes, or those of the scheduler that gives it its sigmas."""
    inputs = node["inputs"]
    if "sigmas" in inputs:
        return _number(_linked(prompt, inputs["sigmas"]), "steps", STEPS)
    steps = _number(inputs, "steps", STEPS)
    return max(1, min(_number(inputs, "end_at_step", steps), steps) - _number(inputs, "start_at_step", 0))
