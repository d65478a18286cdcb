"""What a queued graph says of a request before its sampler runs: constants of the nodes after a loader."""

import re
from dataclasses import dataclass, replace
from functools import partial

from ...backend.client.auto.model_choice import ModelChoice
from ...backend.parallel.stage_split import TEXT_TOKENS
from ...backend.planner.machine import RequestEstimate, Sides
from ...backend.planner.model_shape import ModelShape
from ...backend.quantization.lora_bytes import LoraBytes
from ..graph.graph_references import references
from ..graph.latent_sizes import GraphSizes, LatentSize
from ..graph.queued_graph import ancestors, constants, loader_of, positive, source, upstream, values
from .guidance import guidance_of, skips_negative
from .model_files import lora_size, model_choice_of
from .request_estimate import request_estimate

#: Assumed of what is linked and not known: an image or a video, 20 steps, both prompts.
IMAGE, VIDEO = LatentSize(1024, 1024, 1), LatentSize(832, 480, 81)
STEPS = 20
LOADER, MODEL, SAMPLERS = "LoadParallelDiT", "ParallelModel", "ParallelSampler"
#: Nodes that add a LoRA -> their input of its strength; all but the first count on Parallel Model alone.
LORAS = {
    "ParallelLoRA": "strength",
    "LoraLoader": "strength_model",
    "LoraLoaderModelOnly": "strength_model",
    "LoraLoaderBypass": "strength_model",
    "LoraLoaderBypassModelOnly": "strength_model",
}
#: Nodes whose first output has the first steps, the second one the others: the one up to its input ``step``,
#: the other one all but the part ``denoise``.
SPLIT, SPLIT_BY_PART = "SplitSigmas", "SplitSigmasDenoise"
#: Numbers in a text of sigmas, as ComfyUI's ManualSigmas reads them.
SIGMA = re.compile(r"[-+]?(?:\d*\.*\d+)")
#: Inputs of a sampler that its steps follow from.
STEP_INPUTS = ("steps", "start_at_step", "end_at_step")


@dataclass(frozen=True)
class GraphRequest:
    """The request of a sampler as constants of its graph tell it.

    size: of its latent, in pixels. sides: (T, H, W) of that latent. references: those of reference latents.
    cfg: None where it is linked, so that prompts (1 or 2 of a call) are assumed. drained: each step is a call
    of its own, as under Parallel Model. has_size, has_steps: the graph tells them; else they are assumed.
    """

    size: LatentSize
    sides: Sides
    steps: int
    prompts: int
    cfg: float | None = None
    drained: bool = False
    references: tuple[Sides, ...] = ()
    has_size: bool = False
    has_steps: bool = False

    def estimate(self, shape: ModelShape) -> RequestEstimate:
        """Return the request as the planner counts it for a model of this shape, without LoRAs."""
        about = RequestEstimate(
            text_tokens=TEXT_TOKENS,
            steps=self.steps,
            prompts=self.prompts,
            batch=self.size.batch,
            drained=self.drained,
        )
        return request_estimate(shape, self.sides, self.references, about)


def loaded_models(graph: dict, besides: str = "") -> set[ModelChoice]:
    """Return what the loaders of a graph load, but for the one ``besides``, as far as constants tell it."""
    loaders = [key for key, node in graph.items() if node.get("class_type") == LOADER and key != besides]
    found = (model_choice_of(values(graph, key)) for key in loaders)
    return {choice for choice in found if choice}


def unnamed(models: list[ModelChoice], graph: dict) -> ModelChoice | None:
    """Return the first of some models that no loader of a graph loads."""
    needed = loaded_models(graph) if models else set()
    return next((model for model in models if model not in needed), None)


def request_of_graph(graph: dict, key: str, shape: ModelShape) -> RequestEstimate:
    """Return the request of the first sampler that the loader ``key`` feeds, and those of its others as
    ``then``, as far as constants tell them."""
    loras, others = _lora_bytes(graph, key) if shape.is_quantized else (LoraBytes(), LoraBytes())
    requests = requests_of_graph(graph, key, shape.pixels)
    estimates = (each.estimate(shape) for each in requests)
    first, *further = (replace(each, loras=loras, other_loras=others) for each in estimates)
    return replace(first, then=tuple(further))


def requests_of_graph(graph: dict, key: str, pixels: Sides) -> list[GraphRequest]:
    """Return the requests of the samplers that the loader ``key`` feeds, those of Parallel Model last; a
    usual one where it feeds none. ``pixels``: frames, and pixels along each side, of a value of its latent.
    """
    fed = [other for other, node in graph.items() if _is_sampler(node) and loader_of(graph, other) == key]
    fed = [other for other in fed if not _is_for_a_schedule(graph, other)]
    fed.sort(key=partial(_is_model, graph))
    return [_request_of(graph, sampler, pixels) for sampler in fed or [""]]


def _request_of(graph: dict, sampler: str, pixels: Sides) -> GraphRequest:
    drained = _is_model(graph, sampler)
    sampler = _sampler_of(graph, sampler) if drained else sampler
    inputs = constants(graph, sampler)
    usual = VIDEO if pixels[0] > 1 else IMAGE
    sizes = GraphSizes(graph, pixels, usual)
    size = sizes.of(sampler)
    guidance = guidance_of(inputs)
    has_one_prompt = skips_negative(*guidance) if guidance else drained
    prompts = 1 if has_one_prompt else 2
    return GraphRequest(
        size=size,
        sides=sizes.sides(size),
        steps=_steps(graph, sampler, inputs),
        prompts=prompts,
        cfg=guidance[0] if guidance else None,
        drained=drained,
        references=tuple(references(graph, sampler, pixels, size)),
        has_size=size == GraphSizes(graph, pixels, _another(usual)).of(sampler),
        has_steps=_has_steps(graph, sampler, inputs),
    )


def _another(size: LatentSize) -> LatentSize:
    """Return a size of another ratio and, of videos, length: what it changes is not told by the graph."""
    length = size.length if size.length == 1 else 2 * size.length - 1
    return replace(size, width=2 * size.width, height=3 * size.height, length=length)


def _lora_bytes(graph: dict, loader: str) -> tuple[LoraBytes, LoraBytes]:
    """Return the bytes of the LoRAs of a loader's model, and of those of others on the same ranks."""
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


def _is_sampler(node: dict) -> bool:
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


def _steps(graph: dict, sampler: str, inputs: dict) -> int:
    """Return the steps that a sampler with these ``inputs`` makes, or those of its sigmas."""
    if source(graph, sampler, "sigmas"):
        return _scheduled(graph, sampler) or STEPS
    steps = positive(inputs, "steps", default=STEPS)
    first = positive(inputs, "start_at_step", default=0)
    end = positive(inputs, "end_at_step", default=steps)
    return max(1, min(end, steps) - first)


def _has_steps(graph: dict, sampler: str, inputs: dict) -> bool:
    """Return whether the graph tells the steps that a sampler with these constant ``inputs`` makes."""
    if source(graph, sampler, "sigmas"):
        return _scheduled(graph, sampler) > 0
    given = graph.get(sampler, {}).get("inputs", {})
    return "steps" in inputs and all(name in inputs for name in STEP_INPUTS if name in given)


def _scheduled(graph: dict, sampler: str) -> int:
    """Count the steps of a sampler's sigmas, from the node that makes them on; 0 where that takes a run."""
    steps = 0
    for key, output in reversed(list(upstream(graph, sampler, ("sigmas",)))):
        inputs = constants(graph, key)
        text = inputs.get("sigmas")
        listed = len(SIGMA.findall(text)) - 1 if isinstance(text, str) else 0
        steps = positive(inputs, "steps", default=max(listed, 0)) or steps
        first = _first_half(graph[key].get("class_type"), inputs, steps)
        if first is not None:
            half = steps - first if output else first
            steps = half or steps
    return steps


def _first_half(kind: str | None, inputs: dict, steps: int) -> int | None:
    """Count the steps that a node with these ``inputs`` puts into the first of its two schedules; None where
    it does not split them."""
    if kind == SPLIT:
        return min(positive(inputs, "step", default=0), steps)
    part = inputs.get("denoise") if kind == SPLIT_BY_PART else None
    return steps - round(steps * part) if isinstance(part, int | float) else None
