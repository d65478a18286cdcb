"""An estimate of the activations of a rank.

It is the most of two moments. Inside a block: the streams, and what attention or the MLP makes of this rank's
tokens. A stage has some kinds of blocks alone, and holds what it received. Outside of the blocks: a few
tensors of the model's own first and last layers. Latents and rotary tables live through both. PipeFusion's
first steps compute all patches at once. Attention is taken to keep no scores. Cached keys, values and
modulation are counted in workload.py.

Of known families activations.json has what a token takes in both, as multiples of its width, fitted to dry
runs of released models (benchmarks/fit_activations.py). Of other classes the widths of
the layers are counted; against what 23 tiny families allocate that is between 0.75 and 1.45 times as much
(the counts below were chosen for that).
"""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..loading.checkpoint import Checkpoint
from ..parallel.block_cost import QUERY_LAYERS, Latents, is_attention, layer_tokens, query_width
from ..parallel.block_streams import BlockStructure
from ..parallel.sequence import whole_sequence
from ..planner.model_shape import Activations
from ..shares import relative_shares
from .workload import MeshPlace, Workload

#: Family -> the fields of Activations but latents and text_lacks, in tokens of its width; under BLOCKS each
#: list of blocks with less inside (BlockShape.activations).
FITTED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
BLOCKS = "blocks"
FIRST: MeshPlace = {"dp": 0, "cfg": 0, "pp": 0, "ring": 0, "ulysses": 0, "tp": 0}

#: Tensors of the width of a stream that live inside a block next to those of its layers: the stream itself,
#: its residual, and what is normed and modulated.
STREAMS = 5
#: The same outside of the blocks.
STREAMS_OUTSIDE = 4
#: Tensors of the width of the control inputs' states that live at once, in a block and outside.
CONTROLS = 2
#: Float32 tensors of the width of the queries that a rotary embedding makes.
ROTARY = 3
#: Float32 tensors of the size of the latent: noise, latent, predictions of two prompts, solver state.
LATENTS = 8
#: Tensors of queries, keys and values that ranks send and receive.
COMMUNICATED = 4
FLOAT32 = 4


def activation_bytes(work: Workload, place: MeshPlace) -> int:
    """Estimate the most activations of the rank at ``place``, of all samples of one prompt."""
    fitted = _fitted(work)
    if fitted is None:
        return _by_layers(work, place)
    config = work.config
    # multiples of an even share
    token_share = relative_shares(config.sp_degree, config.shares_of("ring", "ulysses"))[work.sp_rank(place)]
    matrix_share = relative_shares(config.tensor_parallel_degree, config.shares_of("tp"))[place["tp"]]
    blocks = work.blocks(place)
    carried = carried_streams(work.checkpoint, blocks) * width_bytes(work, work.request.controls)
    largest = max((block_share(work.checkpoint, index) for index in blocks), default=1.0)
    one_sample = fitted.on_rank(config, carried, token_share, matrix_share, largest)
    per_token = fitted.of_samples(config, work.batch, one_sample)
    return math.ceil(work.request.tokens * per_token)


def activations_of(work: Workload, two: Workload | None) -> Activations:
    """Return the activations of one rank for each token. ``two``: where two ranks cut matrices, or None."""
    fitted = _fitted(work)
    if fitted is not None:
        of_image = latent_bytes(work, image=1, joint=1)
        of_text = latent_bytes(work, image=0, joint=1 if work.sequence.text_position else 0)
        return replace(fitted, latents=of_image, text_lacks=of_image - of_text)
    tokens = work.request.tokens
    whole, half = (_by_layers(each, FIRST) for each in (work, two or work))
    cut = 2 * max(0, whole - half) / tokens
    heads = work.all_heads(FIRST) * work.head_size * work.dtype.itemsize
    latents = latent_bytes(work) / tokens
    return Activations(
        replicated=whole / tokens - cut - latents,
        cut=cut,
        communicated=COMMUNICATED * heads,
        buffered=COMMUNICATED * heads,
        outside=STREAMS_OUTSIDE * width_bytes(work, 0),
        latents=latents,
    )


def _fitted(work: Workload) -> Activations | None:
    """Return the activations that were fitted for a family; None for others."""
    if work.family.name not in FITTED:
        return None
    unit = width_bytes(work, 1)
    stored = FITTED[work.family.name]
    numbers = {name: number * unit for name, number in stored.items() if name != BLOCKS}
    controls = CONTROLS * (width_bytes(work, work.request.controls) - unit)
    numbers["replicated"] += controls
    numbers["outside"] += controls
    return Activations(**numbers, latents=latent_bytes(work) / max(1, work.request.tokens))


def block_share(checkpoint: Checkpoint, index: int) -> float:
    """Return the activations inside a block, as a share of those inside the block that has most."""
    blocks = FITTED.get(checkpoint.family.name, {}).get(BLOCKS, {})
    return blocks.get(checkpoint.block_names[index].rpartition(".")[0], 1.0)


def width_bytes(work: Workload, controls: int) -> int:
    """Return the bytes of a token between blocks, with the states of so many control inputs."""
    return work.family.blocks.hidden_width(work.checkpoint.config, controls=controls) * work.dtype.itemsize


def latent_bytes(work: Workload, image: int | None = None, joint: int | None = None) -> int:
    """Count the latents and rotary tables of a sample, which live through all layers: of so many ``image``
    and ``joint`` tokens, or of those of the request."""
    latent = work.family.latent
    config = work.checkpoint.config
    features = latent.channels(config) * math.prod(latent.patch(config))
    stored = LATENTS * (work.request.image_tokens if image is None else image) * features
    return FLOAT32 * (stored + 2 * (work.sequence.joint if joint is None else joint) * work.head_size)


def _by_layers(work: Workload, place: MeshPlace) -> int:
    """Estimate the activations of a rank from the widths of its layers."""
    sequence = work.sequence
    position = sequence.text_position
    uneven = work.config.shares_of("ring", "ulysses")
    shards = whole_sequence(sequence, work.sp_rank(place), work.config.sp_degree, uneven)
    own = shards.local
    nested = {name: shards.lengths(name)[shards.sp_rank] for name, _ in sequence.latents}
    text = len(own.text) if position else work.request.text_tokens
    stream = width_bytes(work, 0)
    controls = CONTROLS * (width_bytes(work, work.request.controls) - stream)
    names = [work.checkpoint.block_names[i] for i in work.blocks(place)]
    sizes = work.checkpoint.block_sizes
    kinds = {(name.rpartition(".")[0], sizes[name]): name for name in names}  # of blocks that are alike
    inside = [_live(work, name, place, own.stream, text, nested) for name in kinds.values()]
    within = max(inside, default=0) + (STREAMS * stream + controls) * (own.stream + text)
    within += carried_streams(work.checkpoint, work.blocks(place)) * stream * own.stream
    tokens = sequence.joint if position else work.request.image_tokens + text
    outside = (STREAMS_OUTSIDE * stream + controls) * tokens
    latents = latent_bytes(work)
    one = max(within, outside) + latents  # of all tokens here, not of each
    return math.ceil(Activations(latents=latents).of_samples(work.config, work.batch, one))


def carried_streams(checkpoint: Checkpoint, blocks: range) -> int:
    """Count the streams that live on a stage besides what its blocks make: those that wait at once for long
    skips to later blocks, and the one that it received from the stage before."""
    structure = BlockStructure.of(checkpoint.transformer, checkpoint.family)
    waiting = max((len(structure.crossing(index)) for index in blocks), default=0)
    return waiting + (blocks.start > 0)


def _live(work: Workload, name: str, place: MeshPlace, image: int, text: int, latents: Latents) -> int:
    """Count the bytes that live at once in a block, with so many tokens of the image stream, of text and of
    nested latents: its largest attention, or its largest MLP before and after the activation. Where one
    output layer follows both, attention and the MLP's values after the activation."""
    block = work.checkpoint.transformer.get_submodule(name)
    config = work.checkpoint.config
    itemsize = work.dtype.itemsize
    temporary = ROTARY * FLOAT32 + (COMMUNICATED * itemsize if work.config.sp_degree > 1 else 0)
    widths = {
        inner: query_width(module, work.family, config)
        for inner, module in block.named_modules()
        if is_attention(module)
    }
    attention: Counter[str] = Counter()
    mlps: Counter[str] = Counter()
    inputs: set[int] = set()
    outputs: set[int] = set()
    passing = layer_tokens(block, name.rpartition(".")[0], work.family)
    for inner, layer in block.named_modules():
        tokens = passing[inner].count(image, text, latents)
        weight = getattr(layer, "weight", None)
        if weight is None or weight.ndim < 2 or getattr(layer, "groups", 1) > 1 or not tokens:
            continue
        cut = work.cuts(place).get(f"{name}.{inner}")
        rows = len(weight) if cut is None else cut.features
        numbers = round(tokens * rows * work.family.blocks.flop_share(inner, config))
        owner = next((each for each in widths if inner.startswith(f"{each}.")), None)
        if owner is not None:
            attention[owner] += numbers * itemsize
            if inner.removeprefix(f"{owner}.") in QUERY_LAYERS:
                attention[owner] += tokens * widths[owner] * rows // len(weight) * temporary
        elif len(weight) >= weight.shape[1]:
            mlps[inner.rpartition(".")[0]] += numbers * itemsize
            outputs.add(len(weight))
        else:
            inputs.add(weight.shape[1])
    both = any(width + output in inputs for width in widths.values() for output in outputs)
    largest = max(attention.values(), default=0)
    mlp = max(mlps.values(), default=0)
    return largest + mlp if both else max(largest, 2 * mlp)
