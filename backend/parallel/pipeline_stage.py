"""One rank's part of a transformer: the model's own forward with its blocks wrapped.

Every rank calls the same forward. Blocks of other stages pass their input through, so that shapes are known
without handshakes; rows are cut once, at block 0; the first local block receives, the last local block sends
and ends the forward; behind the last block the model's own tail sees the full token set, of which only the
rows of this forward carry values. (Generic form of PipeFusion, arXiv 2405.14430.)
"""

import inspect
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.blocks import IMAGE_ONLY, JOINED
from ..models.family import Family
from .attention_hook import Attention, LayerCall
from .comm import Pipe
from .kv_buffers import KVBuffers
from .mesh import Mesh
from .sequence import Rows, Sequence, Span


def model_output(transformer: nn.Module, family: Family, arguments: dict) -> Tensor | tuple:
    """What a transformer returns, all of it where the latents are nested: of diffusers' classes some return a
    tuple, others the tensor itself."""
    output = transformer(**arguments, return_dict=False)
    return output if isinstance(output, Tensor) or family.latent.nested else output[0]


class StageDone(Exception):
    """This rank's blocks have run and their output is on its way to the next stage: the rest of the forward
    is not ours."""


@dataclass
class Forward:
    """One forward under way: which rows of which guidance branch and batch items. ``image``: rows of the
    latent, None for every row; ``with_text``: with the rows that ride with patch 0, of text and context.
    ``tokens``, ``context``: rows of the whole latent, and behind them in the image stream;
    ``fresh``, ``parts``: see Sequence."""

    branch: str
    items: Span
    image: Span | None = None
    with_text: bool = True
    tokens: int = 0
    fresh: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    context: int = 0
    rows: Rows | None = None
    skips: dict[int, Tensor] = field(default_factory=dict)
    cuts: dict = field(default_factory=dict)

    @property
    def keys(self) -> list[tuple[str, int]]:
        """(branch, item) of every item."""
        return [(self.branch, item) for item in range(self.items.lo, self.items.hi)]


class Stage:
    """Wraps ``transformer``'s blocks for this rank's place on the mesh. Blocks outside ``blocks`` may be
    absent (meta tensors): they never run."""

    def __init__(self, transformer: nn.Module, family: Family, mesh: Mesh, blocks: range):
        self.family, self.adapter, self.blocks = family, family.blocks.adapter, blocks
        self.join(mesh)
        self.current: Forward | None = None
        self.sequences: dict[str, Sequence] = {}
        self.known: set[tuple[str, int]] = set()  # branch and item whose text has run (Cache.static_text)
        self.like: Tensor | None = None
        self.transformer = transformer
        self.total = 0
        self.joined: list[bool] = []
        self.skip_sources: list[int | None] = []
        for name, kind in family.blocks.lists.items():
            modules = transformer.get_submodule(name)
            for i, block in enumerate(modules):
                modules[i] = StagedBlock(self, self.total, block)
                self.joined.append(kind == JOINED)
                self.total += 1
        self.skip_sources = [self.adapter.skip_source(i, self.total) for i in range(self.total)]
        self.entry = sum(
            len(transformer.get_submodule(name))
            for name, kind in family.blocks.lists.items()
            if kind == IMAGE_ONLY
        )  # the block at which text enters

    def join(self, mesh: Mesh):
        """Talk over the groups of ``mesh``, on which this rank's place in the pipeline is the same."""
        self.mesh, self.attention = mesh, Attention(mesh)
        self.pipe = Pipe(mesh.pp.group, "pipeline") if mesh.pp.size > 1 else None

    def leave(self):
        """Give the transformer its own blocks back, all of which are here."""
        for name in self.family.blocks.lists:
            modules = self.transformer.get_submodule(name)
            for i, wrapped in enumerate(modules):
                modules[i] = wrapped.block

    def begin_request(self, kernel: str, buffers: KVBuffers | None):
        """Forget the request before; ``buffers`` where stale keys and values will be read."""
        self.attention.begin_request(kernel, buffers)
        self.sequences.clear()
        self.known.clear()
        self.like = None

    def drain(self):
        """Wait for every send and receive under way."""
        if self.pipe:
            self.pipe.drain()

    def expect(self, forward: Forward) -> bool:
        """Post the receive of a forward to come, if its size is known by now; else False: then none after it
        may be posted before it."""
        known = self.like is not None and forward.branch in self.sequences
        if known:
            self.post(forward, self.like)
        return known

    def post(self, forward: Forward, like: Tensor):
        """Post the receive of a forward; ``like`` is an activation (B, rows, D) of this request."""
        if self.pipe and not self.mesh.pp.first:
            rows = self._rows(forward, self.sequences[forward.branch])
            width = like.shape[2] * (1 + len(self._crossing(self.blocks.start)))
            self.pipe.post(
                (len(forward.items), sum(self._received(rows)), width),
                like.dtype,
                like.device,
                self.mesh.pp.neighbour(-1),
            )

    def forward(self, arguments: dict, forward: Forward) -> Tensor | tuple | None:
        """The transformer's output with the rows of ``forward`` filled (other rows are undefined), or None on
        all but the last stage."""
        self.current = forward
        forward.fresh = self.adapter.per_block_text(arguments)
        try:
            return model_output(self.transformer, self.family, arguments)
        except StageDone:
            return None
        finally:
            self.current = None
            self.known |= set(forward.keys) if self.family.cache.static_text else set()

    # ------ what the wrapped blocks do, in this order
    def run_block(self, index: int, block: nn.Module | None, names: list[str], args: tuple, kwargs: dict):
        """Stand in for block ``index``; ``names`` are its positional parameters. Returns what the block
        returns."""
        call = dict(zip(names, args)) | kwargs
        streams = self._streams(index, call)
        if index in (0, self.entry):
            self.current.parts = self.adapter.latents(call)
            streams = self._enter(index, streams)
        if index == self.blocks.start and self.pipe and not self.mesh.pp.first:
            streams = self._receive(streams)
        if index in self.blocks:
            streams = self._run(index, block, call, streams)
            if index in self.skip_sources:
                self.current.skips[index] = streams["image"]
        if self.current.fresh:
            streams["text"] = streams["text"][:, : self.current.rows.kept]
        if index == self.blocks.stop - 1 and self.pipe and not self.mesh.pp.last:
            self._send(streams)
            raise StageDone
        if index == self.total - 1:
            streams = self._leave(streams)
        elif index == self.entry - 1:
            return self._whole(streams["image"])
        elif self.joined[index] != self.joined[index + 1]:
            streams["image"] = self.adapter.between_lists(streams["image"], self._whole)
        return self._result(index, call, streams)

    def _result(self, index, call, streams):
        """What the block ``index`` itself would return."""
        if self.joined[index]:
            return self._join(streams)
        if index < self.entry:
            return streams["image"]
        return self.adapter.result(self.family.blocks, call, streams, self.current.rows)

    def _streams(self, index, call):
        """The image and text rows of a block's arguments; a joined block has both in one."""
        blocks, rows, enters = self.family.blocks, self.current.rows, index in (0, self.entry)
        if self.joined[index]:
            both, known = call[blocks.image], self.current.tokens + self.current.context
            text_rows = both.shape[1] - known if enters else rows.kept + rows.sequence.fresh
            streams = self._split(both, text_rows)
        else:
            text = call[blocks.text] if blocks.text and index >= self.entry else None
            streams = {"image": self.adapter.image(blocks, call), "text": text}
        return streams if enters else self._own(streams)

    def _own(self, streams):
        """This rank's rows of what the model hands over whole: image rows between block lists, and fresh
        text."""
        rows, text, image = self.current.rows, streams["text"], streams["image"]
        share, fresh = rows.local, rows.sequence.text - rows.sequence.fresh
        image = image if image.shape[1] == share.stream else self._mine(image)
        if rows.sequence.fresh:
            lo, hi = (max(row, fresh) - fresh + rows.kept for row in (share.text.lo, share.text.hi))
            text = torch.cat([text[:, : rows.kept], text[:, lo:hi]], dim=1)
        return {"text": text, "image": image}

    def _mine(self, image):
        """This rank's rows of the whole image stream."""
        share, tokens = self.current.rows.local, self.current.rows.sequence.image
        latent, context = (
            image[:, share.image.lo : share.image.hi],
            image[:, tokens + share.context.lo : tokens + share.context.hi],
        )
        return torch.cat([latent, context], dim=1) if len(share.context) else latent

    def _split(self, joined, text_rows):
        if self.family.blocks.text_position == "first":
            return {"text": joined[:, :text_rows], "image": joined[:, text_rows:]}
        return {
            "image": joined[:, : joined.shape[1] - text_rows],
            "text": joined[:, joined.shape[1] - text_rows :],
        }

    def _join(self, streams):
        return torch.cat(
            [streams["text"], streams["image"]]
            if self.family.blocks.text_position == "first"
            else [streams["image"], streams["text"]],
            dim=1,
        )

    def _enter(self, index, streams):
        text, image, forward = streams["text"], streams["image"], self.current
        context = forward.context if index == self.entry else 0  # it comes with the text
        sequence = Sequence(
            0 if text is None else text.shape[1],
            image.shape[1] - context,
            self.family.blocks.text_position,
            forward.fresh,
            forward.parts,
            context,
        )
        self.sequences[forward.branch] = sequence
        forward.rows = self._rows(forward, sequence)
        span = forward.rows.local.text
        return {"image": self._mine(image), "text": None if text is None else text[:, span.lo : span.hi]}

    def _rows(self, forward, sequence):
        given = forward.with_text and not self.known.issuperset(forward.keys)
        text, context = (Span(0, count if given else 0) for count in (sequence.text, sequence.context))
        return Rows(
            sequence,
            text,
            forward.image or Span(0, sequence.image),
            self.mesh.sp.rank,
            self.mesh.sp.size,
            context,
        )

    def _run(self, index, block, call, streams):
        forward, family = self.current, self.family
        dummy = family.blocks.needs_text_token and not self.joined[index] and streams["text"].shape[1] == 0
        if dummy:
            text = streams["text"]
            streams = {**streams, "text": text.new_zeros(text.shape[0], 1, text.shape[2])}
        self._give(index, call, streams, dummy)
        self.attention.call = LayerCall(
            index,
            forward.branch,
            forward.rows,
            family.blocks.attention,
            slice(forward.items.lo, forward.items.hi),
            dummy,
            family.cache.static_text,
            self.adapter.take_text_mask(call),
        )
        out = block(**call)
        self.attention.call = None
        if self.joined[index]:
            return self._split(out, streams["text"].shape[1])
        if index < self.entry:
            return {"text": None, "image": out}
        streams = self.adapter.returned(family.blocks, out)
        if dummy and streams["text"] is not None:
            return {**streams, "text": streams["text"][:, :0]}
        return streams

    def _give(self, index, call, streams, dummy):
        """Put the streams into a block's arguments, and cut what else has a row per token."""
        forward, blocks = self.current, self.family.blocks
        if self.joined[index]:
            call[blocks.image] = self._join(streams)
        else:
            call |= self.adapter.image_arguments(blocks, call, streams["image"], forward.rows)
            if blocks.text and index >= self.entry:
                call[blocks.text] = streams["text"]
        if not forward.rows.is_everything:
            for name, (kind, dim, *dims) in blocks.per_token.items():
                if name in call and (not dims or call[name].ndim == dims[0]):
                    call[name] = self._cut(call[name], kind, dim, dummy)
            call |= self.adapter.cut(call, forward.rows)
        if self.skip_sources[index] is not None:
            call[self.adapter.skip_argument] = forward.skips.pop(self.skip_sources[index])

    def _cut(self, value, kind, dim, stand_in):
        """This rank's rows of a per-token argument, one row where one stands for all; the same object comes
        to every block, so cuts are kept for the forward."""
        if value is None:
            return None
        if isinstance(value, (tuple, list)):
            kinds = kind if isinstance(kind, tuple) else [kind] * len(value)
            return type(value)(self._cut(part, kind, dim, stand_in) for part, kind in zip(value, kinds))
        if (value.shape[dim] == 1 or value.stride(dim) == 0) and self.current.rows.sequence.rows_of(kind) > 1:
            return value.narrow(dim, 0, 1)
        kept = self.current.cuts.get((id(value), kind, dim, stand_in))
        if kept is None:
            positions = self.current.rows.local_positions(kind).to(value.device)
            if stand_in and kind != "image":
                positions = F.pad(
                    positions, (1, 0) if self.family.blocks.text_position == "first" else (0, 1)
                )
            kept = self.current.cuts[id(value), kind, dim, stand_in] = (
                value,
                value.index_select(dim, positions),
            )
        return kept[1]

    def _receive(self, streams):
        text, image = streams["text"], streams["image"]
        if not self.pipe.posted:
            self.post(self.current, image)
        both, *skips = self.pipe.take().chunk(1 + len(self._crossing(self.blocks.start)), dim=2)
        self.current.skips = dict(zip(self._crossing(self.blocks.start), skips))
        self.like = both
        if text is None:
            return {"image": both, "text": None}
        kept, received = self._received(self.current.rows)
        context = image[:, received:]
        return {
            "text": torch.cat([both[:, :kept], text[:, kept:]], dim=1),
            "image": torch.cat([both[:, kept:], context], dim=1) if context.shape[1] else both[:, kept:],
        }

    def _received(self, rows):
        """(rows of text, rows of the image stream) that come from the stage before: the latent's alone where
        text and context enter with this one's first block."""
        return (
            (rows.kept, rows.local.stream) if self.blocks.start > self.entry else (0, len(rows.local.image))
        )

    def _send(self, streams):
        text, image = streams["text"], streams["image"]
        both = image if text is None else torch.cat([text, image], dim=1)
        skips = [self.current.skips[source] for source in self._crossing(self.blocks.stop)]
        self.pipe.send(torch.cat([both, *skips], dim=2) if skips else both, self.mesh.pp.neighbour(1))

    def _crossing(self, boundary):
        """Blocks before ``boundary`` whose output a block behind it takes as a long skip: it travels with the
        activation, feature by feature."""
        return [source for source in self.skip_sources[boundary:] if source is not None and source < boundary]

    def _leave(self, streams):
        rows = self.current.rows
        if rows.is_everything:
            return streams
        text = streams["text"]
        if text is not None and self.joined[self.entry]:  # the model counts on the text that it handed in
            text = self._whole_text(text)
        elif text is not None:
            text = self.adapter.text_after_blocks(text, self._whole_text)
        return {"image": self._whole(streams["image"]), "text": text}

    def _whole_text(self, text):
        """As many tokens of text as the model handed in, without values."""
        return text.new_zeros(text.shape[0], self.current.rows.sequence.text, text.shape[2])

    def _whole(self, image):
        """The image stream of the sequence, of which this forward's rows of the latent carry values."""
        rows = self.current.rows
        if rows.is_everything:
            return image
        full, span = image.new_zeros(image.shape[0], rows.sequence.stream, image.shape[2]), rows.local.image
        full[:, span.lo : span.hi] = image[:, : len(span)]
        return full


def positional_names(block: nn.Module) -> list[str]:
    """Names of the parameters that a block may be given by position."""
    parameters = inspect.signature(block.forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


class StagedBlock(nn.Module):
    """A block of the transformer, or the place of one that lives on another stage."""

    def __init__(self, stage: Stage, index: int, block: nn.Module):
        super().__init__()
        self.names = positional_names(block)
        self.index = index
        self.block = block if index in stage.blocks else None
        self.stage, self.original = (
            [stage],
            [block],
        )  # in lists: neither the stage nor a block without weights is a submodule

    def __getattr__(self, name):
        """What a model's forward reads of its blocks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.original[0], name)

    def forward(self, *args, **kwargs):
        return self.stage[0].run_block(self.index, self.block, self.names, args, kwargs)
