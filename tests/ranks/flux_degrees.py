"""The combinations of degrees that ranks/matrix.py runs. Data alone."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from backend.config import ParallelConfig

AXES = (
    "cfg_degree",
    "pipefusion_degree",
    "ulysses_degree",
    "ring_degree",
    "data_parallel_degree",
    "tensor_parallel_degree",
)
#: Combinations of 8 ranks: (cfg, pipefusion, ulysses, ring, data, tensor).
OF_EIGHT = (
    (1, 2, 2, 2, 1, 1),
    (1, 4, 1, 2, 1, 1),
    (1, 2, 4, 1, 1, 1),
    (2, 4, 1, 1, 1, 1),
    (2, 2, 2, 1, 1, 1),
    (2, 1, 2, 2, 1, 1),
    (1, 1, 4, 2, 1, 1),
    (1, 2, 2, 1, 1, 2),
    (1, 2, 1, 2, 1, 2),
    (2, 1, 2, 1, 1, 2),
    (2, 2, 1, 1, 2, 1),
    (1, 1, 2, 2, 2, 1),
    (1, 2, 1, 1, 2, 2),
)


def of_degrees(degrees: Iterable[int]) -> ParallelConfig:
    """The configuration of these degrees, in the order of AXES."""
    fields: dict[str, Any] = dict(zip(AXES, degrees))
    return ParallelConfig(**fields)


def configurations(world: int) -> list[ParallelConfig]:
    """Every combination of degrees that fills ``world`` ranks (those OF_EIGHT), and the other ways to hold
    weights."""
    if world == 8:
        found = [of_degrees(degrees) for degrees in OF_EIGHT]
        found += [
            ParallelConfig(tensor_parallel_degree=4, split_scheme="2d", cfg_degree=2),
            ParallelConfig(tensor_parallel_degree=4, split_scheme="2d", ulysses_degree=2),
            ParallelConfig(tensor_parallel_degree=4, split_scheme="2d", pipefusion_degree=2),
        ]
        return in_order(found)
    sizes = [
        [
            d
            for d in range(1, world + 1)
            if world % d == 0
            and (axis != "cfg_degree" or d <= 2)
            and (axis != "tensor_parallel_degree" or 8 % d == 0)
        ]
        for axis in AXES
    ]
    products = [of_degrees(degrees) for degrees in itertools.product(*sizes)]
    found = [config for config in products if config.world_size == world]
    schemes = [
        ParallelConfig(tensor_parallel_degree=world, split_scheme=scheme)
        for scheme in ("row", "column", "2d")
    ]
    sharded = [
        replace(config, shard_weights=True)
        for config in found
        if config.pipefusion_degree == config.tensor_parallel_degree == 1
        and config.sp_degree * config.data_parallel_degree > 1
    ]
    return in_order(found) + schemes + sharded


def in_order(configs: list[ParallelConfig]) -> list[ParallelConfig]:
    """Those of the same weights behind each other."""
    return sorted(
        configs,
        key=lambda config: (
            config.split_scheme,
            config.tensor_parallel_degree,
            config.pipefusion_degree,
            config.sp_degree,
        ),
    )
