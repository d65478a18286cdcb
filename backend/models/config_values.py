"""Functions of a transformer's configuration, for fields of Family whose values are data."""

from collections.abc import Callable, Mapping
from typing import Any

from ..runtime.callbacks import always

Config = Mapping[str, Any]
#: The share in Blocks.flop_shares of a layer that no token passes.
NO_SHARE = always(0)


def constant(time: int, height: int, width: int) -> Callable[[Config], tuple[int, int, int]]:
    """Return a function that returns these three numbers for every configuration."""
    return always((time, height, width))


def entries(**names: str) -> Callable[[Config], dict[str, int]]:
    """Return a function that returns the entries of a configuration with these ``names``, by keyword."""
    return lambda config: {keyword: config[name] for keyword, name in names.items()}
