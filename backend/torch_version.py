"""What the installed torch can do, where that decides what is refused or chosen; standard library only."""

from functools import cache
from importlib import metadata

#: torch from which FSDP2 shards frozen integers, as which quantized weights are stored; before, their
#: parameters are made to require gradients, which fails (pytorch/pytorch#177844).
SHARDS_INTEGERS = (2, 12)


@cache
def torch_version() -> str:
    """Return the version of the installed torch."""
    return metadata.version("torch")


def has_torch(*version: int) -> bool:
    """Return whether torch is of this version or a later one."""
    installed = torch_version().split(".")[:2]
    return tuple(int(number) for number in installed) >= version


def shards_integers() -> bool:
    """Return whether weights that are stored as integers can be sharded."""
    return has_torch(*SHARDS_INTEGERS)
