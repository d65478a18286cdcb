"""What a queued graph says of a request before its sampler runs: constants of the nodes after a loader."""

from collections.abc import Iterator

from ...backend.planner.machine import Request
from ...backend.planner.model_shape import ModelShape
from .guidance import skips_negative

#: Pixels of the image in a latent pixel, by family, where they are not 8; and frames of a latent frame.
SPATIAL = {"flux2": 16, "flux3": 16, "hunyuan-image-2.1": 32, "hunyuan-video-1.5": 16, "ltxv": 32, "ltx2": 32}
SPATIAL |= {"sana": 32}
TEMPORAL = {"ltxv": 8, "ltx2": 8}
#: Assumed of what is linked and not known: an image, 20 steps, both prompts.
SIDE, FRAMES, STEPS, TEXT = 1024, 1, 20, 512
LOADER, LORA, MODEL = "LoadParallelDiT", "ParallelLoRA", "ParallelModel"


def fed_by(prompt: dict, key: str) -> Iterator[dict]:
    """Yield the sampler nodes and Parallel Models that the loader ``key`` feeds, through Parallel LoRAs."""
    for other, node in prompt.items():
        if node["inputs"].get("dit") != [key, 0]:
            continue
        if node["class_type"] == LORA:
            yield from fed_by(prompt, other)
        elif node["class_type"].startswith("ParallelSampler") or node["class_type"] == MODEL:
            yield node


def guidance_of(node: dict) -> tuple[float, str] | None:
    """Return cfg and sampler_name of a sampler node, None where one of them is linked."""
    cfg, sampler_name = (node["inputs"].get(name) for name in ("cfg", "sampler_name"))
    return (cfg, sampler_name) if isinstance(cfg, (int, float)) and isinstance(sampler_name, str) else None


def other_loaders(prompt: dict, key: str) -> list[dict]:
    """Return the inputs of the other loaders of a graph, whose models stay on the same ranks."""
    return [node["inputs"] for other, node in prompt.items() if other != key and node["class_type"] == LOADER]


def request_of_graph(prompt: dict, key: str, shape: ModelShape) -> Request:
    """Return the request of the first sampler that the loader ``key`` feeds, as far as constants tell it."""
    node = next(fed_by(prompt, key), {"class_type": "", "inputs": {}})
    latent = _linked(prompt, node["inputs"].get("latent_image"))
    space = SPATIAL.get(shape.family, 8)
    frames = 1 + (_number(latent, "length", FRAMES) - 1) // TEMPORAL.get(shape.family, 4)
    sides = (frames, _number(latent, "height", SIDE) // space, _number(latent, "width", SIDE) // space)
    guidance = guidance_of(node)
    drained = node["class_type"] == MODEL
    return Request(
        image_tokens=tokens_of(sides, shape.patch),
        text_tokens=TEXT,
        steps=_steps(prompt, node),
        prompts=1 if drained or (guidance and skips_negative(*guidance)) else 2,
        batch=_number(latent, "batch_size", 1),
        drained=drained,
    )


def tokens_of(sides: tuple[int, int, int], patch: tuple[int, int, int]) -> int:
    """Count the tokens of a latent (T, H, W)."""
    tokens = 1
    for side, size in zip(sides, patch):
        tokens *= max(1, -(-side // size))
    return tokens


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
