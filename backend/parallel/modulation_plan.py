"""Which embeddings a request's modulation is computed from, and when."""

from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass
class ModulationPlan:
    """The modulation of a request: embeddings (rows, D), and (prompt, evaluation) -> the row of each sample.
    at_once: evaluations of a chunk (0: as many as fit). computed: evaluations before this one are cached."""

    embeddings: Tensor
    rows: Mapping[tuple[str, int], tuple[int, ...]]
    evaluations: int
    at_once: int = 0
    computed: int = 0

    def chunk(self, first: int, most: int) -> tuple[int, list[int]]:
        """Choose evaluations from ``first`` on, one at least, that need at most ``most`` rows together;
        return where they end, and their rows. With ``at_once``, as many as that says."""
        needed = [
            set(chain(*(rows for (_, evaluation), rows in self.rows.items() if evaluation == index)))
            for index in range(first, self.evaluations)
        ]
        chosen = set[int]()
        end = first
        for rows in needed[: self.at_once or None]:
            if chosen and not self.at_once and len(chosen | rows) > most:
                break
            chosen |= rows
            end += 1
        return end, sorted(chosen)
