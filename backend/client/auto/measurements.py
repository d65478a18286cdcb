"""What the planner has to know, measured by processes of our own and cached: rates, shapes, free memory."""

import math
import os
import subprocess
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

import torch

from ...config import ConfigError, ParallelConfig
from ...hardware.device_memory import host_bytes, host_free, is_unified, unified_free
from ...planner.machine import RESERVE, Machine
from ...planner.model_shape import ModelShape
from ...protocol import BackendError
from ...runtime.torch_version import host_compiler, installed
from .. import cache_files, status
from ..launching.interpreter import installed_at, packages_changed, ranks_python
from ..launching.nccl_settings import gpu_names, link_key
from ..launching.rank_environment import driver_name
from ..pool import Backend
from . import driver_query
from .model_choice import ModelChoice
from .preflight import least_capability, read_shape, stamp
from .probe_process import MAX_SECONDS, Check, measured_rates

#: Part of a GPU's memory that is free where nothing tells how much is.
USABLE = 0.9
#: What nvidia-smi is asked for.
SMI_FIELDS = ("index", "uuid", "memory.free")
SMI_SECONDS = 20.0


def machine_rates(
    device: str,
    indices: list[int],
    check: Check,
    show: Callable[[str], None],
    longest: float = MAX_SECONDS,
) -> Machine:
    """Return the rates of the devices ``indices`` ("cpu": so many ranks), measured once for each choice of
    them, in ``longest`` seconds at most; once a process where others seem to have used one, or have filled
    /dev/shm. ``check`` is called ten times a second and may raise; ``show`` gets a line. Raises
    UnmeasuredError."""

    def measure() -> dict:
        show(f"measuring the links of {len(indices)} ranks, once for this machine")
        listed = ",".join(map(str, indices)) if device == "cuda" else ""
        config = ParallelConfig(ulysses_degree=len(indices), gpus=listed)
        return measured_rates(config, device, check, show, longest)

    key = _machine_key(device, indices)
    return cache_files.read_or_measure("machine", key, measure, Machine.from_dict, attrgetter("lasts"))


def is_measured(device: str, indices: list[int]) -> bool:
    """Return whether the rates of these devices are known."""
    return cache_files.read("machine", _machine_key(device, indices), Machine.from_dict) is not None


_shapes: dict[ModelShape, ModelShape] = {}


def model_shape(
    choice: ModelChoice, device: str, indices: list[int], check: Check, show: Callable[[str], None]
) -> ModelShape:
    """Return the shape of a transformer on the devices ``indices``, read once for each state of its file and
    of what decides how it is computed. ``check``, ``show`` as above. Raises RefusedError and BackendError."""

    def measure() -> dict:
        show("reading the model's headers")
        return read_shape(choice, device, indices, check)

    key = _shape_key(choice, device, indices)
    shape = cache_files.read_or_measure("shape", key, measure, ModelShape.from_dict)
    # one object for all that are equal: the planner looks up by it a thousand times
    return _shapes.setdefault(shape, shape)


def shapes_of_first(
    choices: tuple[ModelChoice, ...],
    device: str,
    indices: list[int],
    whole: tuple[ModelShape, ...],
    check: Check,
    show: Callable[[str], None],
) -> tuple[tuple[ModelShape, ...], ...]:
    """Return the shapes of transformers on the first of the devices ``indices``, on the first two, and so on,
    of which the least capability decides; ``whole``: those on all. Empty where all are these. Arguments and
    errors as above."""
    by_capability = {least_capability(device, indices): whole}
    of_first = []
    for ranks in range(1, len(indices) + 1):
        first = indices[:ranks]
        capability = least_capability(device, first)
        if capability not in by_capability:
            shapes = (model_shape(each, device, first, check, show) for each in choices)
            by_capability[capability] = tuple(shapes)
        of_first.append(by_capability[capability])
    return tuple(of_first) if len(by_capability) > 1 else ()


def known(choice: ModelChoice, device: str, indices: list[int]) -> tuple[ModelShape, Machine] | None:
    """Return a model's shape and the rates of these devices where both were measured before."""
    shape = cache_files.read("shape", _shape_key(choice, device, indices), ModelShape.from_dict)
    machine = cache_files.read("machine", _machine_key(device, indices), Machine.from_dict)
    return None if shape is None or machine is None else (shape, machine)


def load_rate(choice: ModelChoice, device: str) -> float:
    """Return the bytes/s at which all ranks together read a model's file last; 0 where they never have."""
    return cache_files.read("load", _file_key(choice, device), _load_rate) or 0.0


def _load_rate(values: dict) -> float:
    rate = float(values["bytes_per_second"])
    if not 0 < rate < math.inf:
        raise ValueError(f"the rate of a load is {rate}")
    return rate


def note_load_rate(choice: ModelChoice, device: str, ranks: list[dict]):
    """Keep the rate of a load, from the reports of its ranks (loading/load_report.py). The page cache counts:
    of a model that is read because host memory has no room for it, little is there."""
    read = sum(rank["bytes_read"] for rank in ranks)
    rate = read / max(1e-6, *(rank["seconds"] for rank in ranks))
    if read and rate != load_rate(choice, device):
        cache_files.write("load", _file_key(choice, device), {"bytes_per_second": rate})


def _machine_key(device: str, indices: list[int]) -> list:
    names = [torch.cuda.get_device_name(index) for index in indices] if device == "cuda" else []
    cards = gpu_names(indices) if device == "cuda" else []
    return [device, indices, names, cards, *link_key(os.environ), os.cpu_count(), *_kernels_key()]


def _kernels_key() -> list:
    """Return what native products depend on: comfy-kitchen here, and where the ranks have other packages."""
    return [installed("comfy-kitchen"), ranks_python(), packages_changed()]


def _file_key(choice: ModelChoice, device: str) -> list:
    return [*choice, device, stamp(Path(choice.path))]


def _shape_key(choice: ModelChoice, device: str, indices: list[int]) -> list:
    """Return what types, kernels, sharding, rings and compiled blocks depend on, too: GPUs, packages here, a
    compiler, and the ranks' Python, where one that is broken may be installed again."""
    versions = [torch.__version__, torch.version.cuda, *_kernels_key()]
    versions += [installed("yunchang"), installed("triton"), host_compiler(), installed_at(ranks_python())]
    return [*_file_key(choice, device), least_capability(device, indices), *versions]


#: GPU -> bytes of it that this process gives back when a rank needs them, of each allocator that it has. The
#: nodes add ComfyUI's. Torch counts 0 before it has a context, and makes none for it.
HELD: list[Callable[[int], int]] = [torch.cuda.memory_reserved]


def free_memory(device: str, indices: list[int], unknown: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the free bytes of each GPU, where this process gives back what it holds; "cpu": of the host.
    ``unknown``: what to return of GPUs of which the driver says nothing, by default what is usual. Raises
    ConfigError where the environment lists other GPUs by now. Of a GPU whose memory is the host's it says
    nothing, or counts the page cache as taken."""
    if device == "cpu":
        return (host_free(swap=False),)
    free_by_gpu = _free_bytes_by_driver()
    free_bytes = []
    for index, usual in zip(indices, unknown or usual_memory(device, indices)):
        free = free_by_gpu.get(gpu_uuid(index), free_by_gpu.get(driver_name(os.environ, index)))
        if is_unified(index):
            # weights that leave for a rank go to the host, which is the same memory
            cached = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
            free = unified_free() + cached
            # HIP's own limit on it is not known without a context
            most = usual if torch.version.hip else torch.cuda.get_device_properties(index).total_memory
            free_bytes.append(min(free, most))
        else:
            free_bytes.append(usual if free is None else free + sum(held(index) for held in HELD))
    return tuple(free_bytes)


def free_now(known: tuple[int, ...], devices: list[int], running: Backend) -> tuple[int, ...]:
    """Return the bytes of each of ``devices`` that are free or our ranks'. Others may have taken memory or
    given it back since ``known``, which is the least while a request runs: its memory is not counted yet."""
    try:
        ranks = status.report(running).ranks
        # GPU -> bytes that our rank has there
        held = {
            gpu: max(rank["weight_bytes"], rank["device_bytes"])
            for gpu, rank in zip(running.config.gpu_indices, ranks)
        }
        own = [held.get(gpu, 0) for gpu in devices]
        # last: what counts where the driver says nothing
        now = free_memory("cuda", devices, [was - size for was, size in zip(known, own)])
    except (BackendError, ConfigError):
        return known
    least = tuple(free + size for free, size in zip(now, own))
    if running.is_busy:
        return tuple(map(max, known, least))
    # of the CUDA context and libraries of a rank no allocator knows: plans leave RESERVE for them
    most = (size + (RESERVE if gpu in held else 0) for gpu, size in zip(devices, least))
    # what was known, unless it lies outside of what can be now
    return tuple(max(low, min(was, high)) for was, low, high in zip(known, least, most))


def unified_among(device: str, indices: list[int]) -> tuple[int, ...]:
    """Return the places in ``indices`` of GPUs whose memory is the host's: no weights wait there."""
    if device == "cpu":
        return ()
    return tuple(place for place, index in enumerate(indices) if is_unified(index))


def usual_memory(device: str, indices: list[int]) -> tuple[int, ...]:
    """Return the bytes of each GPU, or of the host, that are free where nobody else needs much."""
    if device == "cpu":
        return (int(host_bytes() * USABLE),)
    return tuple(int(torch.cuda.get_device_properties(each).total_memory * USABLE) for each in indices)


def gpu_uuid(index: int) -> str:
    """Return the bare_uuid of the GPU that torch numbers ``index``; empty where it has none. On mixed GPUs
    CUDA numbers the fastest first and nvidia-smi the first slot: their indices are of different cards."""
    return bare_uuid(str(getattr(torch.cuda.get_device_properties(index), "uuid", "")))


def bare_uuid(uuid: str) -> str:
    """Return a UUID without nvidia-smi's prefix, which torch leaves out, in lower case."""
    return uuid.lower().removeprefix("gpu-")


def _free_bytes_by_driver() -> dict[str, int]:
    """Return index, UUID and bare UUID of each GPU -> free bytes; empty where nvidia-smi is none or hangs."""
    query = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = driver_query.answer(query, SMI_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return {}
    if answer.returncode:
        return {}
    free_bytes = {}
    for line in answer.stdout.splitlines():
        entries = [entry.strip() for entry in line.split(",")]
        if len(entries) != len(SMI_FIELDS):
            continue  # a warning of the driver
        index, uuid, free = entries
        if free.isdecimal():
            free_bytes |= dict.fromkeys((index, uuid, bare_uuid(uuid)), int(free) * 1024**2)
    return free_bytes
