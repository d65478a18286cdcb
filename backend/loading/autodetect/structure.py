"""How a transformer's blocks are taken apart, by their arguments and results (block_trace.py), with a
self-check.

Streams are found by identity, as in diffusers' TransformerBlockRegistry: what one block returns is the tensor
that the next one takes. Which tokens they have is found by running two sizes of latent and prompt.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...models.blocks import APART, JOINED
from ...models.family import Family
from ...models.latent_tokens import TokenGrid
from ...parallel import mesh
from ...parallel.attention.kv_buffers import KVBuffers
from ...parallel.pipeline_stage import Stage, model_output
from ...parallel.sequence import SequenceLengths, Span, patches
from ...parallel.step_context import StepContext
from .block_trace import RecordedBlock, Trace

#: Patches of the self-check: a first, an inner and a last one.
PATCHES = 3


class CannotCut(Exception):
    """Raised when the sequence of a class cannot be cut; the message says why."""


def structure(small: Trace, large: Trace, sizes: list[tuple[int, int]], another: Callable[[], Trace]) -> dict:
    """Return fields of Blocks, from forwards of two sizes. ``flop_shares`` is a tuple here: the layers that
    no token passes (fallback.py gives each a share of 0). Raises CannotCut where they are of no known form.

    sizes: (image tokens, text tokens) of the two; another: runs the small one with another latent.
    """
    calls = list(zip(small.blocks, large.blocks))
    kinds = {call.list_name: _streams(call, again, sizes) for call, again in calls}
    lists = [
        name for name, streams in kinds.items() if "joint" in streams or {"image", "text"} <= set(streams)
    ]
    lists = lists or [name for name, streams in kinds.items() if "image" in streams]
    if not lists:
        raise CannotCut("no list of blocks passes tokens of the latent from one to the next")
    calls = [pair for pair in calls if pair[0].list_name in lists]
    joined = tuple(name for name in lists if "joint" in kinds[name])
    apart = [name for name in lists if name not in joined]
    streams = kinds[apart[0]] if apart else {"image": kinds[joined[0]]["joint"]}
    same_names = all(kinds[name] == streams for name in apart)
    if not same_names or any(kinds[name]["joint"] != streams["image"] for name in joined):
        raise CannotCut("its lists of blocks name their arguments differently")
    texts = bool(joined) or "text" in streams
    return dict(
        lists={name: JOINED if name in joined else APART for name in lists},
        image=streams["image"],
        text=streams.get("text"),
        returns=_returns(calls, streams, apart),
        text_position=_text_position(small, another(), sizes[0]) if texts else None,
        attention=_attention(calls, sizes),
        **_layers(calls, sizes),
        per_token=_per_token(calls, streams, sizes, texts),
    )


def _streams(call: RecordedBlock, again: RecordedBlock, sizes) -> dict[str, str]:
    """Return kind of stream -> argument, of the 3-dimensional ones that the block returns in that shape."""
    shapes = {tuple(output.shape) for output in call.outputs if isinstance(output, Tensor)}
    streams = {}
    for name, value in call.arguments.items():
        if isinstance(value, Tensor) and value.ndim == 3 and tuple(value.shape) in shapes:
            kind = _kind((value.shape[1], again.arguments[name].shape[1]), sizes)
            if kind:
                streams.setdefault(kind, name)
    return streams


def _kind(tokens: tuple[int, int], sizes) -> str | None:
    """Return what a pair of sizes counts in the two traced runs; the model may add tokens to a prompt."""
    (image, text), (image2, text2) = sizes
    if tokens == (image, image2):
        return "image"
    if tokens[0] - text == tokens[1] - text2 >= 0:
        return "text"
    if tokens[0] - image - text == tokens[1] - image2 - text2 >= 0:
        return "joint"
    return None


def _returns(calls, streams, apart) -> tuple[str, ...]:
    """Return the order in which blocks that keep text apart return their streams."""
    for call, _ in calls:
        if call.list_name in apart:
            shapes = {tuple(call.arguments[name].shape): kind for kind, name in streams.items()}
            outputs = [output for output in call.outputs if isinstance(output, Tensor)]
            kinds = [shapes.get(tuple(output.shape)) for output in outputs]
            if sorted(kinds, key=str) != sorted(streams, key=str):
                counts = f"{len(call.outputs)} values where {len(streams)} streams come in"
                raise CannotCut(f"its blocks return {counts}")
            return tuple(kind for kind in kinds if kind)  # none is None: they are the streams' kinds
    return ("image",)


def _attention(calls, sizes) -> tuple[str, ...]:
    """Return the kinds of a block's attention calls, the same in every block."""
    kinds = {
        tuple(_attention_kind(tokens, again, sizes) for tokens, again in zip(call.attention, other.attention))
        for call, other in calls
    }
    if kinds == {()}:
        raise CannotCut("its blocks do not attend through scaled_dot_product_attention alone")
    if len(kinds) > 1:
        raise CannotCut("its blocks attend in different ways")
    return kinds.pop()


def _attention_kind(tokens, again, sizes):
    query, key = (_kind((tokens[i], again[i]), sizes) for i in (0, 1))
    if query == key and query in ("image", "joint"):
        return query
    if query == "image" and key == "text":
        return "cross"
    what = f"a block attends from {tokens[0]} tokens to {tokens[1]}"
    raise CannotCut(f"{what}, which is neither the latent, nor latent and prompt, nor the prompt")


def _layers(calls, sizes) -> dict:
    """Return the layers of a block that only text tokens pass, and those that no tokens pass."""
    kinds: dict[str, set] = {}
    for call, again in calls:
        for name, tokens in call.layers.items():
            for pair in zip(tokens, again.layers[name]):
                kinds.setdefault(name, set()).add("none" if pair == (1, 1) else _kind(pair, sizes))
    return dict(
        text_layers=tuple(name for name, passing in kinds.items() if passing == {"text"}),
        flop_shares=tuple(name for name, passing in kinds.items() if passing == {"none"}),
    )


def _per_token(calls, streams, sizes, texts) -> dict:
    """Return arguments, besides streams and masks, with an entry for every token -> kind and dimension."""
    arguments = {}
    for call, again in calls:
        masks = {mask.data_ptr() for mask in call.masks}
        for name, value in call.arguments.items():
            tensors = _listed(value)
            others = _listed(again.arguments[name])
            if name in streams.values() or not all(isinstance(tensor, Tensor) for tensor in tensors):
                continue
            if any(tensor.data_ptr() in masks for tensor in tensors):
                continue
            places = [_place(tensor.shape, other.shape, sizes) for tensor, other in zip(tensors, others)]
            counted = [place for place in places if place]
            if counted:
                if len(counted) < len(places) or len({dim for _, dim in counted}) > 1:
                    raise CannotCut(f"its blocks take {name!r}, of which only some tensors count every token")
                kinds = tuple(kind for kind, _ in counted)
                arguments[name] = (kinds if len(set(kinds)) > 1 else kinds[0], counted[0][1])
    if not texts:  # the prompt itself is whole on every rank
        arguments = {name: place for name, place in arguments.items() if place[0] != "text"}
    return arguments


def _listed(value) -> list | tuple:
    return value if isinstance(value, (tuple, list)) else [value]


def _place(shape, other, sizes):
    """Return (kind, dimension) of the first dimension that counts tokens, or None."""
    for dim, (a, b) in enumerate(zip(shape, other)):
        kind = _kind((a, b), sizes) if a != b else None
        if kind:
            return kind, dim
    return None


def _text_position(small: Trace, other: Trace, size) -> str:
    """Return where text is among the first attention's keys: those that another latent does not change."""
    changed = (small.keys != other.keys).any(dim=-1).any(dim=1)[0].tolist()
    image = [True] * size[0]
    text = [False] * (len(changed) - size[0])
    if changed == text + image:
        return "first"
    if changed == image + text:
        return "last"
    raise CannotCut("tokens of the prompt and of the latent are mixed in its attention")


# ---------------------------------------------------------------------- self-check
def check_cut(transformer: nn.Module, cut: Family, grid: TokenGrid, arguments: dict):
    """Check that each patch alone against full K/V buffers equals the full forward. Raises CannotCut."""
    lists = {name: list(getattr(transformer, name)) for name in cut.blocks.lists}
    total = sum(map(len, lists.values()))
    with torch.inference_mode():
        reference = cut.io.output(model_output(transformer, arguments), grid)
        stage = Stage(transformer, cut, mesh.single(), range(total))
        buffers = KVBuffers(1)
        stage.begin_request("auto", buffers)
        stage.attention.install()
        try:
            lengths = SequenceLengths(text=0, image=grid.tokens, text_position=None)
            spans = [None, *(tokens.image for tokens in patches(lengths, PATCHES))]
            for span in spans:
                buffers.begin_evaluation(0.0)
                tokens = slice(None) if span is None else span.indices
                context = StepContext(
                    prompt="positive",
                    evaluation=0,
                    sample_span=Span(0, 1),
                    image=span,
                    with_text=span in (None, spans[1]),
                )
                output = cut.io.output(stage.forward(arguments, context, grid.tokens), grid)
                error = ((output - reference)[:, tokens].norm() / reference[:, tokens].norm()).item()
                if not error < 1e-4:
                    which = f"tokens {tokens.start or 0} to {tokens.stop or grid.tokens} computed alone"
                    raise CannotCut(f"a self-check failed: {which} are {error:.1e} from the full forward")
        except (RuntimeError, TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
            raise CannotCut(f"a self-check failed ({type(error).__name__}: {error})") from error
        finally:
            stage.attention.uninstall()
            for name, blocks in lists.items():  # without their wrappers again
                setattr(transformer, name, nn.ModuleList(blocks))
