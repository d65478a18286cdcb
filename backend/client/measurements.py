"""What the planner has to know, measured by processes of our own and kept: the rates of this machine, the
shape of a model, and the memory that is free. Imports neither ComfyUI nor torch.distributed."""

import hashlib
import json
import logging
import math
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from ..config import ParallelConfig
from ..device_memory import UNKNOWN, host_bytes, host_free
from ..planner.machine import Machine
from ..planner.model_shape import ModelShape
from ..protocol import BackendError
from .agent_command import agent_command
from .cache_folder import cache_folder
from .pack import require_same_pack
from .pool import Wanted
from .preflight import read_shape, stamp
from .private_folder import PrivateFolder
from .rank_environment import PACK, driver_name, sanitized_environment

#: Changes where what is kept has another meaning.
VERSION = 10
#: A machine that takes longer than this to measure is not going to.
LONGEST_SECONDS = 300.0
#: An agent needs this long at most to end ranks that hang.
END_SECONDS = 8.0
#: Part of a GPU's memory that is free where nothing tells how much is.
USABLE = 0.9

#: Variables of the environment that choose the GPUs, or the way that NCCL takes between them.
LINK_SETTINGS = ("CUDA_VISIBLE_DEVICES", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE")

#: Where a measurement would be -> what could not be written there.
_unwritten: dict[Path, str] = {}
#: What nvidia-smi is asked for.
SMI_FIELDS = ("index", "uuid", "memory.free")

Check = Callable[[], None]
Measured = TypeVar("Measured")


class UnmeasuredError(BackendError):
    """The ranks that measure this machine failed. why: in words; remedy: what to try, empty where the doctor
    is to say it."""

    def __init__(self, why: str, remedy: str = ""):
        self.why = why
        self.remedy = remedy
        first = remedy or "run python scripts/doctor.py, which says what is wrong with GPUs and links"
        super().__init__(
            f"Auto could not measure this machine ({why}); {first}, or set the degrees of Parallel Config by "
            f"hand (method manual)."
        )


def machine_rates(
    device: str,
    indices: list[int],
    check: Check,
    show: Callable[[str], None],
    longest: float = LONGEST_SECONDS,
) -> Machine:
    """Return the rates of the devices ``indices`` ("cpu": so many ranks), measured once for each choice of
    them, in ``longest`` seconds at most. ``check`` is called ten times a second and may raise; ``show`` gets
    a line. Raises UnmeasuredError."""

    def measure() -> dict:
        show(f"measuring the links of {len(indices)} ranks, once for this machine")
        config = ParallelConfig(ulysses_degree=len(indices))
        listed = ",".join(map(str, indices)) if device == "cuda" else ""
        private = PrivateFolder()
        try:
            out = private.path / "rates.json"
            probe = ["-m", "backend.probe", "--store", str(private.path / "store"), "--device", device]
            command = [*agent_command(len(indices), private.path), *probe, "--out", str(out)]
            _run(command, replace(config, gpus=listed), device, check, longest, private.inherited)
            return json.loads(out.read_text())
        finally:
            private.close()

    return _kept("machine", _machine_key(device, indices), measure, Machine.from_dict)


def model_shape(wanted: Wanted, device: str, check: Check, show: Callable[[str], None]) -> ModelShape:
    """Return the shape of a transformer, read once for each state of its file. ``check`` and ``show`` as
    above. Raises RefusedError where it cannot be loaded, and BackendError."""

    def measure() -> dict:
        show("reading the model's headers")
        return read_shape(*wanted, device, check)

    return _kept("shape", _shape_key(wanted, device), measure, ModelShape.from_dict)


def known(wanted: Wanted, device: str, indices: list[int]) -> tuple[ModelShape, Machine] | None:
    """Return a model's shape and the rates of these devices where both were measured before."""
    shape = _read_kept("shape", _shape_key(wanted, device), ModelShape.from_dict)
    machine = _read_kept("machine", _machine_key(device, indices), Machine.from_dict)
    return None if shape is None or machine is None else (shape, machine)


def load_rate(wanted: Wanted, device: str) -> float:
    """Return the bytes/s at which all ranks together read a model's file when they last did; 0 where they
    never have."""
    return _read_kept("load", _shape_key(wanted, device), _rate_in) or 0.0


def remember_load(wanted: Wanted, device: str, ranks: list[dict]):
    """Keep the rate of a load, from the reports of its ranks (loading/load_report.py). The page cache counts:
    of a model that is read because host memory has no room for it, little is there."""
    read = sum(rank["bytes_read"] for rank in ranks)
    rate = read / max(1e-6, *(rank["seconds"] for rank in ranks))
    if read and rate != load_rate(wanted, device):
        _keep("load", _shape_key(wanted, device), {"bytes_per_second": rate})


def _rate_in(values: dict) -> float:
    rate = float(values["bytes_per_second"])
    if not 0 < rate < math.inf:
        raise ValueError("a rate is a positive number")
    return rate


def _machine_key(device: str, indices: list[int]) -> list:
    names = [torch.cuda.get_device_name(index) for index in indices] if device == "cuda" else []
    settings = [os.environ.get(name) for name in LINK_SETTINGS]
    return [device, indices, names, settings, torch.__version__, os.cpu_count()]


def _shape_key(wanted: Wanted, device: str) -> list:
    return [*wanted, device, stamp(Path(wanted[0]))]


def held_by_torch(index: int) -> int:
    """Count what torch's allocator has of a GPU in this process."""
    return torch.cuda.memory_reserved(index) if torch.cuda.is_initialized() else 0


#: GPU -> bytes of it that this process gives back when a rank needs them, of each allocator that it has. The
#: nodes add ComfyUI's.
HELD = [held_by_torch]


def free_memory(device: str, indices: list[int]) -> tuple[int, ...]:
    """Return the free bytes of each GPU, where this process gives back what it holds; "cpu": of the host.
    Raises ConfigError where the environment lists other GPUs by now."""
    if device == "cpu":
        return (host_memory(),)
    told = _told_by_driver()
    found = []
    for index, usual in zip(indices, usual_memory(device, indices)):
        free = told.get(_uuid(index), told.get(driver_name(os.environ, index)))
        found.append(usual if free is None else free + sum(held(index) for held in HELD))
    return tuple(found)


def usual_memory(device: str, indices: list[int]) -> tuple[int, ...]:
    """Return the bytes of each GPU, or of the host, that are free where nobody else needs much."""
    if device == "cpu":
        return (int(host_bytes() * USABLE),)
    return tuple(int(torch.cuda.get_device_properties(each).total_memory * USABLE) for each in indices)


def _kept(kind: str, key: list, measure: Callable[[], dict], read: Callable[[dict], Measured]) -> Measured:
    """Return what ``read`` makes of the kept measurement, or of a new one, which is kept."""
    before = _read_kept(kind, key, read)
    if before is not None:
        return before
    found = measure()
    _keep(kind, key, found)
    return read(found)


def _keep(kind: str, key: list, found: dict):
    path = _path(kind, key)
    written = json.dumps(found)
    try:
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(written)
        new.replace(path)
        _unwritten.pop(path, None)
    except OSError as error:  # the disk is full
        if not _unwritten:
            logging.warning("parallel-dit: measurements are kept until ComfyUI ends, since %s.", error)
        _unwritten[path] = written


def _read_kept(kind: str, key: list, read: Callable[[dict], Measured]) -> Measured | None:
    path = _path(kind, key)
    try:
        return read(json.loads(_unwritten.get(path) or path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # there is none, or it is not ours


def _path(kind: str, key: list) -> Path:
    name = hashlib.sha256(json.dumps([VERSION, *key]).encode()).hexdigest()[:24]
    return cache_folder() / f"{kind}-{name}.json"


def _run(
    command: list[str],
    config: ParallelConfig,
    device: str,
    check: Check,
    longest: float = LONGEST_SECONDS,
    held: tuple[int, ...] = (),
):
    """Run a process of the backend to its end; it ends with us, by the pipe that is its standard input, and
    keeps the descriptors ``held``. Raises UnmeasuredError with its last words where it fails."""
    require_same_pack()
    environment = sanitized_environment(dict(os.environ), config, device)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=PACK,  # whatever is called backend where we run is not ours
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=held,
        )
        try:
            deadline = time.monotonic() + longest
            while process.poll() is None and time.monotonic() < deadline:
                check()
                time.sleep(0.1)
            hangs = process.poll() is None
        finally:
            _end(process)
        if hangs:
            raise UnmeasuredError(f"its ranks did not answer within {longest:.0f} s", hang_remedy(device))
        if process.returncode:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines()
            last = next((line for line in lines if "Error" in line), f"code {process.returncode}")[:300]
            raise UnmeasuredError(last)


def _end(process: subprocess.Popen):
    """End an agent and its ranks: close their pipe, then ask, then kill what is left."""
    assert process.stdin is not None  # it was opened as a pipe
    process.stdin.close()
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def hang_remedy(device: str) -> str:
    """Say what to try where ranks do not answer; empty on the CPU, where nothing is known to hang."""
    if device != "cuda":
        return ""
    return (
        "GPUs that cannot reach each other's memory hang so in NCCL: set NCCL_P2P_DISABLE=1, or switch IOMMU "
        "and ACS off in the BIOS, and see that /dev/shm has room"
    )


def _uuid(index: int) -> str:
    """Return the UUID of the GPU that torch numbers ``index``, as _bare does; empty where torch has none.
    CUDA numbers the fastest GPU first and nvidia-smi the first slot, so their indices are different cards on
    a machine of mixed GPUs."""
    return _bare(str(getattr(torch.cuda.get_device_properties(index), "uuid", "")))


def _bare(uuid: str) -> str:
    """Return a UUID without nvidia-smi's prefix, which torch leaves out, in lower case."""
    return uuid.lower().removeprefix("gpu-")


def _told_by_driver() -> dict[str, int]:
    """Return index, UUID and bare UUID of each GPU -> free bytes, empty where there is no nvidia-smi."""
    query = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in answer.splitlines():
        entries = [entry.strip() for entry in line.split(",")]
        if len(entries) != len(SMI_FIELDS):
            continue  # a warning of the driver
        index, uuid, free = entries
        if free.isdecimal():
            found |= dict.fromkeys((index, uuid, _bare(uuid)), int(free) * 1024**2)
    return found


def host_memory() -> int:
    """Return the bytes of host memory that programs may still take, within a container's limit."""
    free = host_free(swap=False)
    return int(host_bytes() * USABLE) if free == UNKNOWN else free
