"""Work that is the same in every step, or for every patch of one, done once.

Two kinds of layers inside the blocks: modulation (adaLN), whose input depends on the timestep, guidance and pooled prompt alone, and the keys and
values of the prompt in cross-attention. A Memo stands in front of each. Modulations of all steps are one GEMM a layer at the start of a request.
"""

from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models.spec import Family
from .parallel.rows import Span
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

    def compute_ahead(self, branch: str, inputs: Tensor, home: torch.device):
        """Fill the answers of every model call of a branch; ``inputs`` (calls, B, D). The weights are back at ``home`` afterwards."""
        COMPUTED[self.kind] += 1
        for call, answer in enumerate(self.layer.to(inputs.device)(inputs.to(next(self.layer.parameters()).dtype))):
            self.known[branch, call, None] = answer
        self.layer.to(home)


@dataclass
class Memos:
    """The memos of one model on this rank. ``home``: where modulation weights wait between requests."""

    home: torch.device
    moment: Moment = field(default_factory=Moment)
    layers: list[Memo] = field(default_factory=list)

    @property
    def modulations(self) -> list[Memo]:
        return [layer for layer in self.layers if layer.kind == "modulation"]

    def go_home(self):
        """Move the modulation weights off the device, where that is asked for."""
        for layer in self.modulations:
            layer.layer.to(self.home)

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
        """One GEMM a layer for all model calls of a branch; ``embeddings[i]`` (B, D) is what blocks get at call i."""
        inputs = F.silu(torch.stack(embeddings))
        for layer in self.modulations:
            layer.compute_ahead(branch, inputs, self.home)


def remember(transformer: nn.Module, blocks: dict[str, nn.Module], family: Family, home: torch.device) -> Memos:
    """Put a Memo in front of every layer of ``blocks`` (name -> block), and every module of the transformer, that the family names."""
    memos = Memos(home)
    wanted = [(block, kind, patterns) for block in blocks.values() for kind, patterns in (("modulation", family.modulation), ("prompt", family.prompt_only))]
    for where, kind, patterns in [*wanted, (transformer, "prompt", family.prompt_modules)]:
        names = [name for name, _ in where.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        for name in names:
            parent, leaf = where.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            memo = Memo(getattr(parent, leaf), kind, memos.moment, family.modulation_shared)
            setattr(parent, leaf, memo)
            memos.layers.append(memo)
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
