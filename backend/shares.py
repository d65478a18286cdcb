"""Shares of the work of ranks that differ in speed ("60,40"), and what they divide. Standard library only."""

import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from .errors import ConfigError

#: Shares whose ratio is nearer to 1 than this are equal: nothing is divided so finely.
EQUAL = 1.001


def parsed(text: str) -> tuple[float, ...]:
    """Read ``ParallelConfig.shares``; () for an empty text. ConfigError for anything but positive numbers."""
    with suppress(ValueError):
        shares = tuple(float(entry) for entry in text.split(",")) if text.strip() else ()
        if all(math.isfinite(share) and share > 0 for share in shares):
            return shares
    raise ConfigError(
        f"shares is {text!r:.200}, which is not a list of positive numbers. Write one for each GPU, like "
        f'"60,40", or leave it empty for equal shares.'
    )


def written(shares: Sequence[float]) -> str:
    """Write shares as per cent, with as many digits as matter."""
    whole = sum(shares)
    return ",".join(f"{100 * share / whole:.3g}" for share in shares)


@lru_cache(maxsize=1024)
def axis_shares(
    shares: tuple[float, ...], sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...]
) -> tuple[float, ...]:
    """Add up the ``shares`` of all ranks with the same index on ``axes``, in their order; () if those are
    equal. ``sizes``: (axis, ranks) of the mesh, slowest first."""
    if not shares:
        return ()
    names = [name for name, _ in sizes]
    by_index: dict[tuple[int, ...], float] = {}
    for share, place in zip(shares, itertools.product(*(range(size) for _, size in sizes))):
        index = tuple(place[names.index(axis)] for axis in axes)
        by_index[index] = by_index.get(index, 0.0) + share
    sums = tuple(by_index[index] for index in sorted(by_index))
    return sums if max(sums) > EQUAL * min(sums) else ()


def grid_shares(shares: tuple[float, ...], rows: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Add up the shares of ranks that stand in so many ``rows``: of every row, and of every column."""
    if not shares:
        return (), ()
    sizes = (("row", rows), ("column", len(shares) // rows))
    return axis_shares(shares, sizes, ("row",)), axis_shares(shares, sizes, ("column",))


def shard_edges(total: int, count: int, shares: Sequence[float] = ()) -> list[int]:
    """Return where each of ``count`` shards of ``total`` things begins, and the end: equal shards whose sizes
    differ by at most one, or shards by ``shares``, none empty where there are enough things."""
    if not shares:
        return [total * index // count for index in range(count + 1)]
    whole = sum(shares)
    least = int(total >= count)
    edges = [0]
    for index, upto in enumerate(itertools.accumulate(shares[:-1]), 1):
        edge = max(round(total * upto / whole), edges[-1] + least)
        edges.append(min(edge, total - least * (count - index)))
    return [*edges, total]


def shard_sizes(total: int, count: int, shares: Sequence[float] = ()) -> list[int]:
    """Return how many things each shard of ``shard_edges`` has."""
    return [end - start for start, end in itertools.pairwise(shard_edges(total, count=count, shares=shares))]


def relative_shares(count: int, shares: Sequence[float] = ()) -> list[float]:
    """Return each of ``count`` shares as a multiple of an equal one."""
    whole = sum(shares)
    return [share * count / whole for share in shares] if shares else [1.0] * count
