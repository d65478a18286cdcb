"""Which packages are installed, and what torch can do, where that decides what is refused or chosen; standard
library only."""

import importlib.util
import os
import re
import shutil
from functools import cache
from importlib import metadata
from pathlib import Path

#: torch from which FSDP2 shards frozen integers, as which quantized weights are stored; before, their
#: parameters are made to require gradients, which fails (pytorch/pytorch#177844).
SHARDS_INTEGERS = (2, 12)
#: torch from which FSDP2 gathers frozen parameters of several types together (pytorch/pytorch#154103);
#: before, the first forward fails.
SHARDS_SEVERAL_TYPES = (2, 8)


@cache
def torch_version() -> str:
    """Return the version of the installed torch, also of one without a distribution (its dist-info). Raises
    PackageNotFoundError without torch."""
    return installed("torch") or _written_version()


def _written_version() -> str:
    """Return the version in torch's own files: without an import of torch, which takes seconds."""
    found = importlib.util.find_spec("torch")
    file = Path(found.origin or "").with_name("version.py") if found else None
    text = file.read_text() if file and file.is_file() else ""
    version = re.search(r"""^__version__ = ['"](.+?)['"]""", text, re.MULTILINE)
    if version is None:
        raise metadata.PackageNotFoundError("torch")
    return version[1]


def has_torch(*version: int) -> bool:
    """Return whether torch is of this version or a later one."""
    here = torch_version().split(".")[:2]
    return tuple(int(number) for number in here) >= version


def installed(package: str) -> str:
    """Return the version of an installed package; empty where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def host_compiler() -> str:
    """Return the C compiler with which Triton builds what starts its kernels; empty where there is none."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""


def unshardable(is_quantized: bool, keeps_float32: bool) -> tuple[str, str] | None:
    """Say which weights this torch cannot shard, and which version can; None where it can shard all.
    ``keeps_float32``: some weights of a block stay in float32, whatever the others are."""
    if is_quantized and not has_torch(*SHARDS_INTEGERS):
        return "the quantized weights", "{}.{}".format(*SHARDS_INTEGERS)
    if keeps_float32 and not has_torch(*SHARDS_SEVERAL_TYPES):
        what = "the weights of several types (some stay in float32)"
        return what, "{}.{}".format(*SHARDS_SEVERAL_TYPES)
    return None
