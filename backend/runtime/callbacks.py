"""What stands for a callback that nobody has given. Standard library only."""

from collections.abc import Callable
from typing import Any, TypeVar

Value = TypeVar("Value")


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, whatever it is called with."""


def never(*_: Any, **__: Any) -> bool:
    """Return False, whatever it is called with."""
    return False


def unchanged(value: Value) -> Value:
    """Return ``value`` itself."""
    return value


def always(value: Value) -> Callable[[Any], Value]:
    """Return a function of one argument that returns ``value``, whatever it is given."""
    return lambda given: value


def no_entries(given: object) -> dict[str, Any]:
    """Return an empty dict, where there is nothing to say of what is ``given``."""
    return {}
