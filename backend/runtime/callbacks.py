"""What stands for a callback that nobody has given. Standard library only."""

from typing import Any


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, whatever it is called with."""
