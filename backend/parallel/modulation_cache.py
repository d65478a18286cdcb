"""Work that is the same in every step, or for every patch of one, done once.

Two kinds of layers inside the blocks: modulation (adaLN), whose input depends on the timestep, guidance and
pooled prompt alone, and the keys and values of the prompt in cross-attention. A Memo stands in front of each.
Modulations of many model calls are one GEMM a layer, over the rows that differ: the samples of a batch mostly
share theirs, and where it is the time alone that decides, so do the prompts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.family import Family
from . import comm
from .mesh import Mesh
from .pipeline_stage import StagedBlock, positional_names
from .sequence import Span
from .stage_split import Stages

#: Calls of memoised layers since the request began, by kind: what tests count.
COMPUTED: Counter[str] = Counter()
#: Bytes of modulation that the stage which has most of it computes ahead at once.
AHEAD = 256 * 2**20


def rows_ahead(width: int, dtype: torch.dtype) -> int:
    """How many different rows of modulation are computed at once, where one has ``width`` numbers on the
    stage that has most; a model call's own always are."""
    return max(1, AHEAD // max(1, width * dtype.itemsize))


@dataclass
class Moment:
    """Where in a request the model is: guidance branch, model call, batch items. Shared by all memos of a
    model; None between requests.

    rows: (branch, model call) -> the rows of the memos' tables that belong to what blocks get then; those of
    the calls computed ahead.
    """

    branch: str | None = None
    evaluation: int = 0
    items: Span | None = None
    rows: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    indices: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def take(self, table: Tensor, branch: str, items: Span | None) -> Tensor:
        """The rows (items, features) of a ``table`` (rows, features) that belong to a branch's items, or to
        all, at this model call."""
        rows = self.rows[branch, self.evaluation]
        if (
            items is not None and len(set(rows[items.lo : items.hi])) == 1
        ):  # no copy; rows for all items are not samples, and a model may reshape them
            return table[rows[items.lo]].expand(len(items), -1)
        rows = rows if items is None else rows[items.lo : items.hi]
        if rows not in self.indices:
            self.indices[rows] = torch.tensor(rows, device=table.device)
        return table[self.indices[rows]]


class Memo(nn.Module):
    """Answers from memory what ``layer`` would compute again: kind "modulation" once a model call, "prompt"
    once a request. ``table``: modulation ahead."""

    def __init__(self, layer: nn.Module, kind: str, moment: Moment, shared: bool = False):
        """``shared``: what is computed ahead holds for all items of a batch."""
        super().__init__()
        self.layer, self.kind, self.moment, self.shared = layer, kind, moment, shared
        self.known: dict[tuple, Tensor] = {}
        self.table: Tensor | None = None

    def forward(self, x: Tensor, *further) -> Tensor:
        moment = self.moment
        if moment.branch is None:
            return self.layer(x, *further)
        if self.table is not None:
            return moment.take(self.table, moment.branch, None if self.shared else moment.items)
        key = (moment.branch, moment.items)
        if key not in self.known:
            COMPUTED[self.kind] += 1
            self.known[key] = self.layer(x, *further)
        return self.known[key]

    def second(self, x: Tensor) -> Tensor:
        """The layer's answer to a call's second embedding (Memos.modulate_ahead), which ``x`` is."""
        return (
            self.layer(x)
            if self.table is None
            else self.moment.take(self.table, _second(self.moment.branch), self.moment.items)
        )

    @property
    def features(self) -> int:
        """Width of the answers."""
        return _features(self.layer)

    @property
    def bytes(self) -> int:
        """Of what is remembered."""
        return sum(
            answer.numel() * answer.element_size()
            for answer in (*self.known.values(), *(() if self.table is None else (self.table,)))
        )

    def know(self, table: Tensor | None):
        """Keep the answers (rows, features) to the rows of Moment.rows, or (None) forget them."""
        COMPUTED[self.kind] += table is not None
        self.table = table


def _second(branch: str) -> str:
    """The name of a branch's second embeddings among Moment.rows."""
    return f"{branch}+"


def _features(layer: nn.Module) -> int:
    shard = getattr(layer, "shard", None)
    return layer.out_features if shard is None else sum(shard.widths) or sum(map(len, shard.outputs))


@dataclass
class Plan:
    """The modulation of a request: the different embeddings (rows, D), and (branch, model call) -> those of
    its items."""

    embeddings: Tensor
    rows: Mapping[tuple[str, int], tuple[int, ...]]
    calls: int
    computed: int = 0

    def chunk(self, first: int, most: int) -> tuple[int, list[int]]:
        """The model calls from ``first`` on that need at most ``most`` rows together, one call at least:
        where they end, and their rows."""
        needed = [
            set(chain(*(rows for (_, call), rows in self.rows.items() if call == index)))
            for index in range(first, self.calls)
        ]
        chosen, end = needed[0], first + 1
        while end < self.calls and len(chosen | needed[end - first]) <= most:
            chosen, end = chosen | needed[end - first], end + 1
        return end, sorted(chosen)


@dataclass
class Memos:
    """The memos of one model on this rank. ``home``: where modulation weights wait between requests;
    ``dtype``: theirs.

    A pipeline stage may hold modulation layers of other stages' blocks (parallel/split.py): ``lent[i]`` are
    those it computes for stage i of ``mesh.pp``, ``borrowed[i]`` the memos here whose layers stage i holds.
    ``width``: numbers of modulation on the stage that has most. ``most_bytes``: of modulation that were
    remembered at once since the request began, what tests compare with describe().
    """

    home: torch.device
    dtype: torch.dtype
    mesh: Mesh
    moment: Moment = field(default_factory=Moment)
    layers: list[Memo] = field(default_factory=list)
    lent: list[list[nn.Module]] = field(default_factory=list)
    borrowed: list[list[Memo]] = field(default_factory=list)
    width: int = 0
    plan: Plan | None = None
    most_bytes: int = 0

    @property
    def modulations(self) -> list[Memo]:
        return [layer for layer in self.layers if layer.kind == "modulation"]

    @property
    def held(self) -> list[Memo]:
        """Memos of modulation whose layers have their weights on this rank."""
        elsewhere = {memo for memos in self.borrowed for memo in memos}
        return [memo for memo in self.modulations if memo not in elsewhere]

    def go_home(self):
        """Move the modulation weights off the device, where that is asked for."""
        for layer in [*(memo.layer for memo in self.held), *chain(*self.lent)]:
            layer.to(self.home)

    def begin_request(self):
        """Forget the request before."""
        COMPUTED.clear()
        self.end_request()
        self.most_bytes = 0

    def end_request(self):
        """Answer nothing from memory until the next request."""
        self._forget_modulation()
        self.plan, self.moment.branch = None, None
        for layer in self.layers:
            layer.known.clear()

    def begin_call(self, call: int):
        """A model call starts: have its modulation ready where it is computed ahead. Collective over a
        pipeline's stages, and where tensor parallelism cuts the layers."""
        if self.plan is None:
            self._forget_modulation()
        elif call >= self.plan.computed:
            self._compute(call)

    def modulate_ahead(self, embeddings: dict[str, list[Tensor]]):
        """One GEMM a layer for as many model calls as fit into AHEAD; the others follow when they begin
        (begin_call). ``embeddings[branch][call]`` (B, D) is what blocks get then, with a second one of some
        rows as its attribute ``second`` where a model has two. Collective as begin_call."""
        seconds = {
            _second(branch): [each.second for each in calls]
            for branch, calls in embeddings.items()
            if hasattr(calls[0], "second")
        }
        each = {
            (branch, call): embedding
            for branch, calls in (embeddings | seconds).items()
            for call, embedding in enumerate(calls)
        }
        every = torch.cat(list(each.values()))
        _, same = torch.unique(every.float(), dim=0, return_inverse=True)  # CUDA's has no bf16
        same = comm.agreed(same, (self.mesh.tp, self.mesh.pp)).tolist()  # shapes below depend on it
        first: dict[int, int] = {}
        for row, name in enumerate(same):
            first.setdefault(name, row)
        numbers = {name: number for number, name in enumerate(first)}
        rows = iter([numbers[name] for name in same])
        calls = len(next(iter(embeddings.values())))
        self.plan = Plan(
            every[list(first.values())],
            {key: tuple(next(rows) for _ in embedding) for key, embedding in each.items()},
            calls,
        )
        self._compute(0)

    def _compute(self, first: int):
        """Compute modulation from model call ``first`` on."""
        plan = self.plan
        self._forget_modulation()
        plan.computed, chosen = plan.chunk(first, rows_ahead(self.width, self.dtype))
        places = {row: place for place, row in enumerate(chosen)}
        self.moment.rows = {
            key: tuple(places[row] for row in rows)
            for key, rows in plan.rows.items()
            if first <= key[1] < plan.computed
        }
        inputs = F.silu(plan.embeddings[chosen]).to(self.dtype)
        for memo in self.held:
            memo.know(self._computed(memo.layer, inputs))
        if self.lent:
            self._exchange(inputs)

    def _forget_modulation(self):
        self.most_bytes = max(self.most_bytes, sum(memo.bytes for memo in self.modulations))
        self.moment.rows, self.moment.indices = {}, {}
        for memo in self.modulations:
            memo.known.clear()
            memo.know(None)

    def _exchange(self, inputs: Tensor):
        parts = [
            torch.cat([self._computed(layer, inputs) for layer in layers], dim=-1)
            if layers
            else inputs.new_empty(0)
            for layers in self.lent
        ]
        shapes = [(len(inputs), sum(memo.features for memo in memos)) for memos in self.borrowed]
        for answers, memos in zip(comm.exchange(parts, shapes, self.mesh.pp, "modulation"), self.borrowed):
            for memo, answer in zip(memos, answers.split([memo.features for memo in memos], dim=-1)):
                memo.know(answer)

    def _computed(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        """Answers to ``inputs`` (rows, D); the layer's weights are back at home afterwards."""
        answers = layer.to(inputs.device)(inputs)
        layer.to(self.home)
        return answers


def remember(
    transformer: nn.Module,
    blocks: Sequence[str],
    family: Family,
    home: torch.device,
    dtype: torch.dtype,
    stages: Stages,
    mesh: Mesh,
) -> Memos:
    """Put a Memo in front of every layer of this rank's ``blocks``, and every module of the transformer, that
    the family names. ``stages`` on ``mesh.pp`` says which modulation layers are elsewhere; ``dtype`` is
    theirs. The same order on every rank."""
    widths = Counter()
    for name, stage in stages.owners.items():
        widths[stage] += _features(transformer.get_submodule(name))
    memos, found = Memos(home, dtype, mesh), {}
    wanted = [
        (f"{block}.", kind, patterns)
        for block in blocks
        for kind, patterns in (
            ("modulation", family.cache.modulation),
            ("prompt", family.cache.prompt_layers),
        )
    ]
    for prefix, kind, patterns in [*wanted, ("", "prompt", family.cache.prompt_modules)]:
        where = transformer.get_submodule(prefix.removesuffix("."))
        for name in [
            prefix + name
            for name, _ in where.named_modules()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
        ]:
            parent, leaf = transformer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            shared = not family.cache.modulation_per_sample
            found[name] = Memo(getattr(parent, leaf), kind, memos.moment, shared)
            setattr(parent, leaf, found[name])
    memos.layers = list(found.values())
    memos.width = max(widths.values(), default=sum(memo.features for memo in memos.modulations))
    if stages.holders != stages.owners:
        every = range(mesh.pp.size)
        memos.lent = [
            [
                transformer.get_submodule(name)
                for name in stages.lent(mesh.pp.rank)
                if stages.owners[name] == stage
            ]
            for stage in every
        ]
        memos.borrowed = [
            [found[name] for name in stages.lent(stage) if stages.owners[name] == mesh.pp.rank]
            for stage in every
        ]
    return memos


class _Captured(Exception):
    """Carries the arguments of the first block out of a forward that is not needed further."""

    def __init__(self, arguments: dict):
        super().__init__()
        self.arguments = arguments


def first_block_argument(transformer: nn.Module, family: Family, arguments: dict, name: str) -> Tensor:
    """What the transformer's own head makes of ``arguments`` and hands to its blocks as ``name``."""
    first = transformer.get_submodule(next(iter(family.blocks.lists)))[0]

    names = first.names if isinstance(first, StagedBlock) else positional_names(first)

    def capture(module, args, kwargs):
        raise _Captured(dict(zip(names, args)) | kwargs)

    handle = first.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        transformer(**arguments, return_dict=False)
    except _Captured as captured:
        return captured.arguments[name]
    finally:
        handle.remove()
    raise AssertionError("the transformer never reached its first block")
