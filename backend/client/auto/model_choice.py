"""What a backend is asked to hold. Standard library only."""

from typing import NamedTuple


class ModelChoice(NamedTuple):
    """A file or folder, and how it is loaded (protocol.Load)."""

    path: str
    weight_dtype: str = "default"
    matmul: str = "auto"
