"""Of which methods and hybrids, on how many ranks, benchmarks/dry_run.py makes dry runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from released_sizes import DISTILLED

from backend.config import ParallelConfig

RANKS = (2, 4, 8, 16)
#: Of hybrids: on fewer ranks one of their methods would have a degree of 1.
HYBRID_RANKS = (4, 8, 16)
THREE_WAY_RANKS = (8, 16)


@dataclass(frozen=True)
class Method:
    """A way to use a number of ranks. degree: which is as large as the ``fixed`` ones leave it. shards: FSDP.
    ranks: of how many there are dry runs."""

    degree: str
    fixed: dict[str, int] = field(default_factory=dict)
    shards: bool = False
    ranks: tuple[int, ...] = RANKS

    def config(self, ranks: int) -> ParallelConfig:
        """Configure so many ranks. Raises ConfigError."""
        degrees: dict[str, Any] = {**self.fixed, self.degree: ranks // math.prod(self.fixed.values())}
        return replace(ParallelConfig(), shard_weights=self.shards, **degrees).validate()

    @property
    def prompts(self) -> int:
        """Count the prompts of a request that is run: one on each CFG rank."""
        return self.fixed.get("cfg_degree", 1)

    @property
    def batch(self) -> int:
        """Count the samples of a request that is run: one on each replica."""
        return self.fixed.get("data_parallel_degree", 1)

    def suits(self, family: str) -> bool:
        """Return whether a golden family's released model takes as many prompts."""
        return self.prompts == 1 or family not in DISTILLED

    def places(self, ranks: int) -> Iterator[int]:
        """Yield the ranks of which there are dry runs: the last, whose share is the uneven one, and of most
        stages the same one of the first and of the middle stage, which send to the next."""
        config = self.config(ranks)
        stages = config.pipefusion_degree
        of_a_stage = config.sp_degree * config.tensor_parallel_degree
        if stages > 1 and ranks == max(self.ranks):
            yield from (ranks - 1 - of_a_stage * (stages - 1 - stage) for stage in (0, stages // 2))
        yield ranks - 1


METHODS = {
    "ulysses": Method("ulysses_degree"),
    "ring": Method("ring_degree"),
    "tensor parallel": Method("tensor_parallel_degree"),
    "pipefusion": Method("pipefusion_degree"),
    "cfg x ulysses": Method("ulysses_degree", {"cfg_degree": 2}),
    "fsdp": Method("ulysses_degree", shards=True),
    "ulysses x ring": Method("ulysses_degree", {"ring_degree": 2}, ranks=HYBRID_RANKS),
    "pipefusion x ulysses": Method("pipefusion_degree", {"ulysses_degree": 2}, ranks=HYBRID_RANKS),
    "cfg x pipefusion": Method("pipefusion_degree", {"cfg_degree": 2}, ranks=HYBRID_RANKS),
    "data parallel x ulysses": Method("ulysses_degree", {"data_parallel_degree": 2}, ranks=HYBRID_RANKS),
    "pipefusion x ring": Method("pipefusion_degree", {"ring_degree": 2}, ranks=HYBRID_RANKS),
    "tensor parallel x ulysses": Method("ulysses_degree", {"tensor_parallel_degree": 2}, ranks=HYBRID_RANKS),
    "pipefusion x tensor parallel": Method(
        "pipefusion_degree", {"tensor_parallel_degree": 2}, ranks=HYBRID_RANKS
    ),
    "cfg x pipefusion x ulysses": Method(
        "pipefusion_degree", {"cfg_degree": 2, "ulysses_degree": 2}, ranks=THREE_WAY_RANKS
    ),
    "cfg x ulysses x ring": Method(
        "ulysses_degree", {"cfg_degree": 2, "ring_degree": 2}, ranks=THREE_WAY_RANKS
    ),
    "data parallel x pipefusion x ulysses": Method(
        "pipefusion_degree", {"data_parallel_degree": 2, "ulysses_degree": 2}, ranks=THREE_WAY_RANKS
    ),
    "pipefusion x ulysses x ring": Method(
        "pipefusion_degree", {"ulysses_degree": 2, "ring_degree": 2}, ranks=THREE_WAY_RANKS
    ),
}
#: Those of which scripts/scaling_page.py projects seconds: of hybrids it shows what ``method: auto`` takes.
PROJECTED = tuple(name for name, method in METHODS.items() if method.ranks == RANKS)
