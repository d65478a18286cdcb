"""NCCL's settings for machines on which its own choice of links fails. The probe tries the WAYS in order; the
first that works is cached in a file, for ranks that start on two or more of these GPUs.

Two faults are known. GPUs whose driver promises peer access may hang or receive wrong bytes: with an IOMMU or
PCIe ACS switched on, and under some drivers (NCCL's troubleshooting guide; vLLM tests it before it uses it).
Without peer access, NCCL takes host memory from CUDA's virtual memory since 2.24. Containers, WSL and some
GeForce cards refuse that (NVIDIA/nccl issue 1838, pytorch/pytorch issue 152302).
"""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...hardware.device_memory import device_name
from .. import cache_files
from ..exit_report import lacks_shared_memory
from .interpreter import packages_changed

#: Variables of the environment that choose the GPUs, or the way that NCCL takes between them.
LINK_SETTINGS = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_CUMEM_HOST_ENABLE",
)
#: What NCCL is told, in the order in which it is tried: nothing, to use peer access over NVLink alone, to use
#: none, to share memory of the host as it did before 2.24, and to send through sockets.
WAYS = (
    {},
    {"NCCL_P2P_LEVEL": "NVL"},
    {"NCCL_P2P_DISABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
)
#: Kinds of cached files: of ways that hold, and of those that do until this process ends.
_LASTING, _PASSING = "nccl", "nccl-passing"
#: Names of GPUs -> place of their way in WAYS, and when it was saved (seconds since 1970).
Ways = dict[frozenset[str], tuple[int, float]]
#: The driver of NVIDIA's GPUs, and their places in the machine; absent on WSL and on others' machines.
DRIVER, GPUS_OF_DRIVER = Path("/proc/driver/nvidia/version"), Path("/proc/driver/nvidia/gpus")
#: On WSL a file of the driver's, which changes with it.
OF_WSL = Path("/usr/lib/wsl/lib/libcuda.so.1")


def link_key(environment: Mapping[str, str]) -> list:
    """Return what the links of this machine depend on: settings of ``environment``, torch, the driver, the
    slots of GPUs, and room in shared memory."""
    settings = [environment.get(name) for name in LINK_SETTINGS]
    slots = sorted(os.listdir(GPUS_OF_DRIVER)) if GPUS_OF_DRIVER.is_dir() else []
    return [settings, torch.__version__, packages_changed(), _driver(), slots, lacks_shared_memory()]


def _driver() -> str:
    try:
        return DRIVER.read_text().partition("\n")[0]
    except OSError:
        return str(OF_WSL.stat().st_mtime_ns) if OF_WSL.exists() else ""


def to_try(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the WAYS to try; none but the user's where ``environment`` says how."""
    has_own = any(environment.get(name) for way in WAYS for name in way)
    return [{}] if has_own else list(WAYS)


def gpu_names(gpus: Sequence[int]) -> list[str]:
    """Return the UUIDs of the GPUs that this process numbers ``gpus``: a scheduler gives the same numbers to
    other cards. The numbers themselves where torch does not say which cards these are, or they share one."""
    here = torch.cuda.device_count()
    names = [device_name(torch.device("cuda", index)) if index < here else "" for index in gpus]
    return names if all(names) and len({*names}) == len(names) else [str(index) for index in gpus]


def saved_way(environment: Mapping[str, str], gpus: list[int]) -> dict[str, str]:
    """Return the way that probes found for groups of GPUs of which at least two are among ``gpus``; empty
    where NCCL's own choice works, or none has run. One that passes counts until the same GPUs, or these
    among others, have been measured anew, by another process too."""
    lasting = _ways(environment)
    ways = {group: way for group, (way, _) in lasting.items()}
    for group, (way, seconds) in _ways(environment, _PASSING).items():
        anew = [after for later, (_, after) in lasting.items() if group <= later]
        if seconds > max(anew, default=0.0):
            ways[group] = way
    if not ways:
        return WAYS[0]
    # a group with slices of one card is under its numbers, though some of it may have names of their own
    names = {*gpu_names(gpus), *map(str, gpus)}
    return WAYS[max((way for group, way in ways.items() if len(group & names) > 1), default=0)]


def save_way(environment: Mapping[str, str], gpus: list[int], way: dict[str, str], passes: bool = False):
    """Have all ranks that start on two or more of ``gpus`` use ``way``; where it ``passes``, until this
    process ends."""
    group = frozenset(gpu_names(gpus))
    kind = _PASSING if passes else _LASTING
    ways = _ways(environment, kind)
    if not passes:  # those of cards that torch could not tell apart then
        ways.pop(frozenset(map(str, gpus)), None)
    ways[group] = (WAYS.index(way), time.time())
    put = cache_files.keep if passes else cache_files.write
    put(kind, link_key(environment), {",".join(sorted(group)): way for group, way in ways.items()})


def words(way: Mapping[str, str]) -> str:
    """Return a way as it is written in a shell."""
    return " ".join(f"{name}={value}" for name, value in way.items())


def _ways(environment: Mapping[str, str], kind: str = _LASTING) -> Ways:
    """Return what save_way has written."""
    return cache_files.read(kind, link_key(environment), _parsed) or {}


def _parsed(values: dict) -> Ways:
    """Read a file of ways. Raises ValueError or TypeError of what is no such thing."""
    ways = {frozenset(group.split(",")): (int(way), float(when)) for group, (way, when) in values.items()}
    if any(not 0 <= way < len(WAYS) for way, _ in ways.values()):
        raise ValueError("not one of WAYS")
    return ways
