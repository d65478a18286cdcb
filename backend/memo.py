"""Work that is the same in every step, or for every patch of one, done once.

Two kinds of layers inside the blocks: modulation (adaLN), whose input depends on the timestep, guidance and pooled prompt alone, and the keys and
values of the prompt in cross-attention. A Memo stands in front of each. Modulations of all steps are one GEMM a layer at the start of a request.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .mesh import Axis
from .models.spec import Family
from .parallel import comm
from .parallel.rows import Span
from .parallel.split import Stages
from .parallel.stage import StagedBlock, positional_names

#: Calls of memoised layers since the request began, by kind: what tests count.
COMPUTED: Counter[str] = Counter()


@dataclass
class Moment:
    """Where in a request the model is: guidance branch, model call, batch items. Shared by all memos of a model; None between requests."""

    branch: str | None = None
    evaluation: int = 0
    items: Span | None = None


class Memo(nn.Module):
    """Answers from memory what ``layer`` would compute again: kind "modulation" once a model call, "prompt" once a request."""

    def __init__(self, layer: nn.Module, kind: str, moment: Moment, shared: bool = False):
        """``shared``: what is computed ahead holds for all items of a batch."""
        super().__init__()
        self.layer, self.kind, self.moment, self.shared = layer, kind, moment, shared
        self.known: dict[tuple, Tensor] = {}

    def forward(self, x: Tensor, *further) -> Tensor:
        moment = self.moment
        if moment.branch is None:
            return self.layer(x, *further)
        call = moment.evaluation if self.kind == "modulation" else None
        whole = self.known.get((moment.branch, call, None))
        if whole is not None:
            return whole if self.shared else whole[moment.items.lo: moment.items.hi]
        key = (moment.branch, call, moment.items)
        if key not in self.known:
            COMPUTED[self.kind] += 1
            self.known[key] = self.layer(x, *further)
        return self.known[key]

    def second(self, x: Tensor) -> Tensor:
        """The layer's answer to a call's second embedding (Memos.modulate_ahead), which ``x`` is."""
        whole = self.known.get((self.moment.branch and f"{self.moment.branch}+", self.moment.evaluation, None))
        return self.layer(x) if whole is None else whole[self.moment.items.lo: self.moment.items.hi]

    @property
    def features(self) -> int:
        """Width of the answers."""
        shard = getattr(self.layer, "shard", None)
        return self.layer.out_features if shard is None else sum(shard.widths) or sum(map(len, shard.outputs))

    def know(self, branch: str, answers: Tensor):
        """Keep the answers (calls, B, features) to every model call of a branch."""
        COMPUTED[self.kind] += 1
        for call, answer in enumerate(answers):
            self.known[branch, call, None] = answer


@dataclass
class Memos:
    """The memos of one model on this rank. ``home``: where modulation weights wait between requests; ``dtype``: theirs.

    A pipeline stage may hold modulation layers of other stages' blocks (parallel/split.py): ``lent[i]`` are those it computes for stage i of ``axis``,
    ``borrowed[i]`` the memos here whose layers stage i holds.
    """

    home: torch.device
    dtype: torch.dtype
    moment: Moment = field(default_factory=Moment)
    layers: list[Memo] = field(default_factory=list)
    axis: Axis | None = None
    lent: list[list[nn.Module]] = field(default_factory=list)
    borrowed: list[list[Memo]] = field(default_factory=list)

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

    def end_request(self):
        """Answer nothing from memory until the next request."""
        self.moment.branch = None
        for layer in self.layers:
            layer.known.clear()

    def modulate_ahead(self, branch: str, embeddings: list[Tensor]):
        """One GEMM a layer for all model calls of a branch; ``embeddings[i]`` (B, D) is what blocks get at call i, with a second one of some rows as its
        attribute ``second`` where a model has two. Collective over a pipeline's stages."""
        if hasattr(embeddings[0], "second"):
            self.modulate_ahead(f"{branch}+", [embedding.second for embedding in embeddings])
        inputs = F.silu(torch.stack(embeddings)).to(self.dtype)
        for memo in self.held:
            memo.know(branch, self._computed(memo.layer, inputs))
        if self.axis is not None:
            self._exchange(branch, inputs)

    def _exchange(self, branch: str, inputs: Tensor):
        parts = [torch.cat([self._computed(layer, inputs) for layer in layers], dim=-1) if layers else inputs.new_empty(0) for layers in self.lent]
        shapes = [(*inputs.shape[:-1], sum(memo.features for memo in memos)) for memos in self.borrowed]
        for answers, memos in zip(comm.exchange(parts, shapes, self.axis, "modulation"), self.borrowed):
            for memo, answer in zip(memos, answers.split([memo.features for memo in memos], dim=-1)):
                memo.know(branch, answer)

    def _computed(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        """Answers to ``inputs`` (calls, B, D); the layer's weights are back at home afterwards."""
        answers = layer.to(inputs.device)(inputs)
        layer.to(self.home)
        return answers


def remember(transformer: nn.Module, blocks: Sequence[str], family: Family, home: torch.device, dtype: torch.dtype, stages: Stages, axis: Axis) -> Memos:
    """Put a Memo in front of every layer of this rank's ``blocks``, and every module of the transformer, that the family names. ``stages`` on ``axis`` says
    which modulation layers are elsewhere; ``dtype`` is theirs. The same order on every rank."""
    memos, found = Memos(home, dtype), {}
    wanted = [(f"{block}.", kind, patterns) for block in blocks for kind, patterns in (("modulation", family.modulation), ("prompt", family.prompt_only))]
    for prefix, kind, patterns in [*wanted, ("", "prompt", family.prompt_modules)]:
        where = transformer.get_submodule(prefix.removesuffix("."))
        for name in [prefix + name for name, _ in where.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)]:
            parent, leaf = transformer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            found[name] = Memo(getattr(parent, leaf), kind, memos.moment, family.modulation_shared)
            setattr(parent, leaf, found[name])
    memos.layers = list(found.values())
    if stages.holders != stages.owners:
        memos.axis, every = axis, range(axis.size)
        memos.lent = [[transformer.get_submodule(name) for name in stages.lent(axis.rank) if stages.owners[name] == stage] for stage in every]
        memos.borrowed = [[found[name] for name in stages.lent(stage) if stages.owners[name] == axis.rank] for stage in every]
    return memos


class _Captured(Exception):
    """Carries the arguments of the first block out of a forward that is not needed further."""

    def __init__(self, arguments: dict):
        super().__init__()
        self.arguments = arguments


def first_block_argument(transformer: nn.Module, family: Family, arguments: dict, name: str) -> Tensor:
    """What the transformer's own head makes of ``arguments`` and hands to its blocks as ``name``."""
    first = transformer.get_submodule(family.block_lists[0])[0]

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
