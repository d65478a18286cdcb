"""Functions of a transformer's configuration, for fields of Family whose values are data."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Config = Mapping[str, Any]
Value = TypeVar("Value")


def always(value: Value) -> Callable[[Config], Value]:
    """Return a function that returns ``value`` for every configuration."""
    return lambda config: value


#: The share in Blocks.flop_shares of a layer that no token passes.
NO_SHARE = always(0)


def constant(time: int, height: int, width: int) -> Callable[[Config], tuple[int, int, int]]:
    """Return a function that returns these three numbers for every configuration."""
    return always((time, height, width))


def entries(**names: str) -> Callable[[Config], dict[str, int]]:
    """Return a function that returns the entries of a configuration with these ``names``, by keyword."""
    return lambda config: {keyword: config[name] for keyword, name in names.items()}


def no_entries(given: object) -> dict[str, Any]:
    """Return an empty dict, where a family has nothing to say."""
    return {}
