"""What stands for a callback that nobody has given. Standard library only."""

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
