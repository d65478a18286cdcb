"""The size of a latent before its graph runs: what nodes between its source and a sampler make of it."""

import math
import re
from dataclasses import dataclass, replace

from ...backend.planner.machine import Sides
from .number_expressions import MEGA
from .queued_graph import constants, positive, source, upstream

#: Words in the names of inputs through which a latent comes: video before audio, latents before images.
LATENT = ("video_latent", "latent", "samples", "pixels", "image", "input")
#: Inputs of ComfyUI's nodes that keep the ratio of the sides, by what they give: a factor of both sides,
#: MEGA pixels, the longer side, the shorter one.
FACTOR = ("scale_by", "resize_type.multiplier")
MEGAPIXELS = ("megapixels", "resize_type.megapixels")
LONGER = ("largest_size", "resize_type.longer_size")
SHORTER = ("resize_type.shorter_size",)
#: Words before ``width`` and ``height`` in the inputs of nodes that have them.
RESIZED, PADDED = "resize_type.", "target_"
PADDED_SIDES = {"target_width", "target_height"}
#: LatentUpscale makes a latent value of so many of its pixels, whatever the model, and has so many at least.
UPSCALE_PIXELS, MIN_UPSCALE = 8, 64
#: Hands on the sides of an image.
MEASURE = "GetImageSize"
#: Nodes that put the samples of all their latents into one.
BATCHES = ("LatentBatch", "BatchLatentsNode")
#: What names of upscaling models have: x2, 4x, x1.5.
TIMES = re.compile(r"(?<![\d.])(\d(?:\.\d)?)x(?!\d)|x(\d(?:\.\d)?)(?!\d)", re.IGNORECASE)


@dataclass(frozen=True)
class LatentSize:
    """Pixels a side, frames and samples of a latent, or of the images that become one."""

    width: int
    height: int
    length: int
    batch: int = 1

    def scaled(self, factor: float) -> "LatentSize":
        """Return it with ``factor`` times the pixels a side."""
        width, height = (max(1, round(side * factor)) for side in (self.width, self.height))
        return replace(self, width=width, height=height)

    def with_megapixels(self, megapixels: float) -> "LatentSize":
        """Return it with so many pixels in the same ratio."""
        return self.scaled(self.factor_for(megapixels))

    def factor_for(self, megapixels: float) -> float:
        """Return how many times the pixels a side make so many pixels."""
        return math.sqrt(megapixels * MEGA / (self.width * self.height))


class GraphSizes:
    """Sizes that a queued graph gives its latents, for a model whose latent has a value for so many
    ``pixels`` (T, H, W); ``usual``: of a source that does not tell its own."""

    def __init__(self, graph: dict, pixels: Sides, usual: LatentSize):
        self.graph = graph
        self.pixels = pixels
        self.usual = usual
        self._known: dict[str, LatentSize] = {}

    def of(self, node: str, seen: frozenset[str] = frozenset()) -> LatentSize:
        """Return the size after a node; of a sampler that of its latent. ``seen``: nodes after it, for a
        cycle, which ComfyUI itself refuses."""
        chain: list[str] = []
        size = self.usual
        for key, _ in upstream(self.graph, node, LATENT):
            if key in self._known:
                size = self._known[key]
                break
            chain.append(key)
        for index, key in reversed(list(enumerate(chain))):
            if key not in seen:
                size = self._known[key] = self._after(key, size, seen | {*chain[: index + 1]})
        return size

    def sides(self, size: LatentSize) -> Sides:
        """Return (T, H, W) of the latent of this size."""
        time, *space = self.pixels
        height, width = (max(1, side // each) for side, each in zip((size.height, size.width), space))
        return (1 + (size.length - 1) // time, height, width)

    def with_latent(self, size: LatentSize, height: int, width: int) -> LatentSize:
        """Return a size whose latent has so many values a side, at least one."""
        _, rows, columns = self.pixels
        return replace(size, height=max(1, height) * rows, width=max(1, width) * columns)

    def _after(self, key: str, size: LatentSize, seen: frozenset[str]) -> LatentSize:
        """Return what a node makes of the size of its input."""
        kind = self.graph[key].get("class_type", "")
        inputs = constants(self.graph, key) | self._measured(key, seen)
        if kind in BATCHES:
            return self._joined(key, size, seen)
        changed = self._after_kind(kind, key, size, inputs)
        if changed is not None:
            return changed
        ratio = _by_ratio(inputs, size)
        return size.scaled(ratio) if ratio else _with_own(inputs, size)

    def _after_kind(self, kind: str, key: str, size: LatentSize, inputs: dict) -> LatentSize | None:
        """Return what a node makes of a size whose output does not follow from the names of its inputs alone;
        None of other nodes."""
        match kind:
            case "LatentUpscale":
                return _resized_latent(self, size, inputs)
            case "LatentUpscaleBy":
                return _latent_scaled(self, size, _number(inputs, FACTOR) or 1.0)
            case "ResizeImagesByLongerEdge" | "ResizeImagesByShorterEdge":
                return _to_edge(size, inputs)
            case "LTXVLatentUpsampler":
                return _upsampled_ltx(self, size, self._model_name(key))
            case "ImageUpscaleWithModel":
                return size.scaled(_model_factor(self._model_name(key), 1.0))
            case "FluxKontextImageScale":
                return size.with_megapixels(1.0)
            case "RepeatLatentBatch" | "RepeatImageBatch":
                return replace(size, batch=size.batch * positive(inputs, "amount", default=1))
            case "LatentFromBatch":  # its ``length`` counts samples, not frames
                return replace(size, batch=min(size.batch, positive(inputs, "length", default=size.batch)))
        return None

    def _measured(self, key: str, seen: frozenset[str]) -> dict[str, int]:
        """Return the inputs of a node that are linked to a side of GetImageSize."""
        found = {}
        for name, value in self.graph[key]["inputs"].items():
            origin = source(self.graph, key, name)
            if not origin or origin in seen or self.graph[origin].get("class_type") != MEASURE:
                continue
            size, output = self.of(origin, seen), value[1]
            if output in (0, 1):
                found[name] = (size.width, size.height)[output]
        return found

    def _joined(self, key: str, size: LatentSize, seen: frozenset[str]) -> LatentSize:
        """Return the size of the first of a node's latents, with the samples of all."""
        linked = [source(self.graph, key, name) for name in self.graph[key]["inputs"]]
        _, *others = [each for each in linked if each] or [""]
        more = sum(self.of(each, seen).batch for each in others if each not in seen)
        return replace(size, batch=size.batch + more)

    def _model_name(self, key: str) -> str:
        model = source(self.graph, key, "upscale_model")
        name = constants(self.graph, model).get("model_name") if model else ""
        return name if isinstance(name, str) else ""


def _with_own(inputs: dict, size: LatentSize) -> LatentSize:
    """Return the size with the sides that a node gives; a side of 0 follows from the ratio."""
    prefix = ""
    if "resize_type" in inputs:
        prefix = RESIZED
    elif PADDED_SIDES & inputs.keys():
        prefix = PADDED
    width, height = _given_sides(inputs, prefix)
    if prefix == RESIZED:  # it has the one side that it sets
        width, height = width or 0, height or 0
    if width and height == 0:
        height = max(1, round(width * size.height / size.width))
    if height and width == 0:
        width = max(1, round(height * size.width / size.height))
    layers = positive(inputs, "layers", default=0)  # next to the whole image, of Qwen-Image-Layered
    return LatentSize(
        width=width or size.width,
        height=height or size.height,
        length=positive(inputs, "length", default=1 + layers if layers else size.length),
        batch=positive(inputs, "batch_size", default=size.batch),
    )


def _given_sides(inputs: dict, prefix: str = "") -> tuple[int | None, int | None]:
    """Return the width and the height that a node is given; None of one that takes a run."""
    given = (inputs.get(f"{prefix}{name}") for name in ("width", "height"))
    width, height = (max(0, side) if isinstance(side, int) else None for side in given)
    return width, height


def _by_ratio(inputs: dict, size: LatentSize) -> float | None:
    """Return how many times the sides of an input a node gives its output; None where it does not tell."""
    sides = (size.width, size.height)
    for names, before in ((FACTOR, 1), (LONGER, max(sides)), (SHORTER, min(sides))):
        given = _number(inputs, names)
        if given:
            return given / before
    megapixels = _number(inputs, MEGAPIXELS)
    return size.factor_for(megapixels) if megapixels else None


def _number(inputs: dict, names: tuple[str, ...]) -> float:
    """Return the first of these inputs that is a number above 0; 0 where none is."""
    given = (inputs.get(name) for name in names)
    return next((each for each in given if isinstance(each, int | float) and each > 0), 0.0)


def _model_factor(name: str, default: float) -> float:
    """Return the factor in the name of an upscaling model."""
    factor = TIMES.search(name)
    return float(factor[1] or factor[2]) if factor else default


def _latent_scaled(sizes: GraphSizes, size: LatentSize, factor: float) -> LatentSize:
    """Return a size whose latent has ``factor`` times the values a side."""
    _, height, width = sizes.sides(size)
    return sizes.with_latent(size, round(height * factor), round(width * factor))


def _resized_latent(sizes: GraphSizes, size: LatentSize, inputs: dict) -> LatentSize:
    """Return the size after LatentUpscale, whose sides are pixels of latents that have 8 a value."""
    _, rows, columns = sizes.sides(size)
    width, height = _given_sides(inputs)
    if not (width or height):
        return size
    if width == 0:
        width = round(columns * max(MIN_UPSCALE, height or 0) / rows)
    if height == 0:
        height = round(rows * max(MIN_UPSCALE, width or 0) / columns)
    if height is not None:
        rows = max(MIN_UPSCALE, height) // UPSCALE_PIXELS
    if width is not None:
        columns = max(MIN_UPSCALE, width) // UPSCALE_PIXELS
    return sizes.with_latent(size, rows, columns)


def _to_edge(size: LatentSize, inputs: dict) -> LatentSize:
    """Return the size after a node that gives the longer or the shorter side, and rounds the other down."""
    longer, shorter = (positive(inputs, name, default=0) for name in ("longer_edge", "shorter_edge"))
    edge = longer or shorter
    if not edge:
        return size
    width, height = size.width, size.height
    sets_width = width > height if longer else width < height
    if sets_width:
        return replace(size, width=edge, height=max(1, int(height * (edge / width))))
    return replace(size, width=max(1, int(width * (edge / height))), height=edge)


def _upsampled_ltx(sizes: GraphSizes, size: LatentSize, model: str) -> LatentSize:
    """Return the size after a model that doubles the sides, or the frames."""
    factor = _model_factor(model, 2.0)
    if "temporal" in model:  # the first frame stays one
        return replace(size, length=1 + round((size.length - 1) * factor))
    return _latent_scaled(sizes, size, factor)
