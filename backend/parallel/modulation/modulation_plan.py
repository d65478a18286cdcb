"""Which embeddings a request's modulation is computed from, and when."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

#: Up to this many embeddings are compared pairwise; more are sorted, which takes a GPU about 1 ms.
FEW = 64


def equal_rows(every: Tensor) -> Tensor:
    """Return a group (n,) for each of the rows (n, D): rows of one group are equal."""
    if len(every) > FEW:
        return torch.unique(every.float(), dim=0, return_inverse=True)[1]  # CUDA's has no bf16
    equal = (every[:, None] == every).all(-1)
    return equal.fill_diagonal_(True).byte().argmax(1)  # NaN equals nothing


@dataclass(frozen=True)
class Chunk:
    """Evaluations before ``end`` whose modulation is computed at once. chosen: the rows of embeddings that
    they need; rows: (prompt, evaluation) -> for each sample its place among ``chosen``."""

    end: int
    chosen: tuple[int, ...]
    rows: Mapping[tuple[str, int], tuple[int, ...]]


@dataclass
class ModulationPlan:
    """The modulation of a request: embeddings (rows, D), and (prompt, evaluation) -> the row of each sample.

    most: rows that a chunk has at most, where one evaluation needs no more. at_once: evaluations of a chunk
    (0: as many as fit). computed: evaluations before this one are cached. chunks: by their first evaluation.
    indices: rows and places of all chunks on the device, so that no later chunk copies its own there while
    the model runs.
    """

    embeddings: Tensor
    rows: Mapping[tuple[str, int], tuple[int, ...]]
    evaluations: int
    most: int
    at_once: int = 0
    computed: int = 0
    chunks: dict[int, Chunk] = field(init=False)
    indices: dict[tuple[int, ...], Tensor] = field(init=False)

    def __post_init__(self):
        needed = [set[int]() for _ in range(self.evaluations)]
        for (_, evaluation), rows in self.rows.items():
            needed[evaluation].update(rows)
        self.chunks = {}
        first = 0
        while first < self.evaluations:
            self.chunks[first] = self._chunk(first, needed)
            first = self.chunks[first].end
        self.indices = self._indices()

    def _chunk(self, first: int, needed: list[set[int]]) -> Chunk:
        """Choose evaluations from ``first`` on, one at least, that need at most ``most`` rows together. With
        ``at_once``, as many as that says."""
        last = first + self.at_once if self.at_once else len(needed)
        chosen = set[int]()
        end = first
        for rows in needed[first:last]:
            if chosen and not self.at_once and len(chosen | rows) > self.most:
                break
            chosen |= rows
            end += 1
        ordered = tuple(sorted(chosen))
        places = {row: place for place, row in enumerate(ordered)}
        rows = {
            key: tuple(places[row] for row in each)
            for key, each in self.rows.items()
            if first <= key[1] < end
        }
        return Chunk(end, ordered, rows)

    def embeddings_of(self, chunk: Chunk) -> Tensor:
        """Return what a chunk's modulation is computed from, (rows, D)."""
        return self.embeddings if len(self.chunks) == 1 else self.embeddings[self.indices[chunk.chosen]]

    def _indices(self) -> dict[tuple[int, ...], Tensor]:
        """Bring places, and rows where chunks have a part of them, to the device in one copy."""
        places = chain.from_iterable(chunk.rows.values() for chunk in self.chunks.values())
        chosen = [chunk.chosen for chunk in self.chunks.values()] if len(self.chunks) > 1 else []
        different = list(dict.fromkeys(chain(chosen, places)))
        flat = torch.tensor(list(chain(*different)), device=self.embeddings.device)
        return dict(zip(different, flat.split([len(each) for each in different])))
