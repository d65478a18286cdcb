"""What scripts/doctor.py looks at: one property a fact, read when a check first asks for it.

Tests give facts instead: Facts(shared_memory=64 << 20). A fact that cannot be read raises, which ends the
checks that need it and no other.
"""

import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import doctor_build
import doctor_copies
import doctor_processes
import doctor_room
import doctor_visible
import torch
import torch.cuda.nccl
from doctor_copies import Copies
from doctor_under_load import UnderLoad
from doctor_wheels import WHEELS, Wheel, is_installed, tried

from backend.client.auto import driver_query, measurements
from backend.client.cache_files import cache_folder
from backend.client.exit_report import SHARED_MEMORY
from backend.client.launching import dependencies, nccl_settings, rank_environment
from backend.hardware.gpu_kernels import has_kernels_for

ROOT = Path(__file__).resolve().parents[1]
#: Fields that nvidia-smi is asked for.
SMI_FIELDS = (
    *("index", "name", "driver_version", "compute_mode", "mig.mode.current"),
    *("pcie.link.width.current", "pcie.link.width.max", "pcie.link.gen.current", "pcie.link.gen.max"),
    *("power.limit", "temperature.gpu", "clocks.sm", "uuid"),
)
#: Variables that change what ranks and NCCL do.
VARIABLE_PREFIXES = (
    *("NCCL_", "TORCH_NCCL_", "CUDA_", "PYTORCH_", "OMP_NUM_THREADS", "HSA_", "PARALLEL_DIT_"),
    *("HIP_", "ROCR_", "RCCL_", "MIOPEN_", "FLASH_ATTENTION_"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
)
SECRETS = ("PARALLEL_DIT_TOKEN", "PARALLEL_DIT_ADDRESSES")  # no one else's business
SMI_SECONDS = 20.0
TIMED_OUT = f"nvidia-smi did not answer within {SMI_SECONDS:g} s"
#: What may wait for a lost GPU for ever; and its time, with torch's import.
ASKS_DRIVER = "import torch; torch.cuda.device_count(); torch.cuda.init()"
CUDA_SECONDS = 60.0


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as torch numbers it. Bytes; capability: (major, minor); uuid: empty where torch has
    none; arch: of AMD's its gfx name, else empty."""

    index: int
    name: str
    memory: int
    free: int
    capability: tuple[int, int]
    uuid: str = ""
    arch: str = ""


@dataclass(frozen=True)
class Torch:
    """What this torch was built with. ``cuda``, ``hip``: versions, empty without; ``archs``: sm_90, ...;
    ``nccl``: version, empty without."""

    version: str
    cuda: str
    hip: str
    archs: tuple[str, ...]
    nccl: str
    has_gloo: bool


class Facts:
    """Facts of this machine; keyword arguments replace them."""

    def __init__(self, **known):
        vars(self).update(known)

    def as_dict(self) -> dict:
        """Return what has been read so far, for JSON."""
        return finite(vars(self))

    @cached_property
    def python(self) -> tuple[int, int, int]:
        return sys.version_info[:3]

    @cached_property
    def platform(self) -> str:
        return sys.platform

    @cached_property
    def system(self) -> str:
        return platform.platform()

    @cached_property
    def unmet(self) -> list[str]:
        """Lines of requirements.txt that this Python lacks."""
        return dependencies.unmet_requirements()

    @cached_property
    def torch(self) -> Torch:
        nccl = ""
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "RCCL"
        has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        archs = () if self.hang else tuple(torch.cuda.get_arch_list())  # which asks the driver for GPUs
        versions = (torch.version.cuda or "", torch.version.hip or "")
        return Torch(torch.__version__, *versions, archs, nccl, has_gloo)

    @cached_property
    def smi(self) -> tuple[str, str]:
        """What nvidia-smi prints of SMI_FIELDS, and why it failed; both empty where there is none."""
        if shutil.which("nvidia-smi") is None:
            return "", ""
        command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            answer = driver_query.answer(command, SMI_SECONDS)
        except subprocess.TimeoutExpired:  # whose text begins with the whole command
            return "", TIMED_OUT
        except (OSError, subprocess.SubprocessError) as error:
            return "", f"nvidia-smi failed: {error}"[:200]
        if answer.returncode:
            said = " ".join((answer.stdout + answer.stderr).split())
            return "", f"nvidia-smi failed: {said[:200]}"
        return answer.stdout, ""

    @cached_property
    def driver(self) -> list[dict[str, str]]:
        """What nvidia-smi says of every GPU, by SMI_FIELDS; empty where it is not there, or fails."""
        rows = [[entry.strip() for entry in line.split(",")] for line in self.smi[0].splitlines()]
        return [dict(zip(SMI_FIELDS, row)) for row in rows if len(row) == len(SMI_FIELDS)]  # else a warning

    @property
    def visible_driver(self) -> list[dict[str, str]]:
        """The rows of ``driver`` that ranks can use: CUDA_VISIBLE_DEVICES may hide the others."""
        return doctor_visible.visible(self.driver, [gpu.uuid for gpu in self.gpus], self.variables)

    @cached_property
    def topology(self) -> str:
        """The matrix of links (of nvidia-smi NV#: NVLink, PIX, PHB, SYS: PCIe), for who reads the report."""
        commands = (["nvidia-smi", "topo", "-m"], ["rocm-smi", "--showtopo", "--showdriverversion"])
        command = next((each for each in commands if shutil.which(each[0])), None)
        return "" if command is None else driver_query.driver_says(command, SMI_SECONDS)

    @cached_property
    def build(self) -> dict[str, str]:
        """What else a report is read by (doctor_build.py)."""
        return doctor_build.build()

    @cached_property
    def hang(self) -> str:
        """Why this process may not ask the driver: nvidia-smi and torch in its own process time out."""
        if self.smi[1] != TIMED_OUT:
            return ""
        command = [sys.executable, "-c", ASKS_DRIVER]
        ended = doctor_processes.run(command, CUDA_SECONDS, Path(tempfile.gettempdir()))
        return f"CUDA did not start within {CUDA_SECONDS:g} s" if ended.code is None else ""

    @cached_property
    def cuda_error(self) -> str:
        """Why no GPU of those that torch counts can be used; empty where there is none, or they can. It
        counts by the driver's own library, which an old driver has, too."""
        if self.hang:
            return self.hang
        if not torch.cuda.device_count() and not self.smi[1]:  # it counts none where the driver fails
            return ""
        try:
            torch.cuda.init()
        except Exception as error:  # of several classes
            return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        return ""

    @cached_property
    def gpus(self) -> list[Gpu]:
        if self.cuda_error:
            return []
        indices = list(range(torch.cuda.device_count()))
        free = measurements.free_memory("cuda", indices) if indices else ()
        properties = [torch.cuda.get_device_properties(index) for index in indices]
        return [
            Gpu(
                *(index, each.name, each.total_memory, free[index], (each.major, each.minor)),
                uuid=measurements.gpu_uuid(index),
                arch=each.gcnArchName.partition(":")[0] if self.torch.hip else "",
            )
            for index, each in enumerate(properties)
        ]

    @cached_property
    def usable(self) -> list[int]:
        """Which of ``gpus`` torch has kernels for."""
        archs = self.torch.archs
        return [gpu.index for gpu in self.gpus if not archs or _is_built_for(gpu, archs)]

    def command_on(self, gpus: list[int]) -> str:
        """The command that runs --full on these GPUs alone."""
        names = (
            ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if self.torch.hip else (doctor_visible.VISIBLE,)
        )
        variable = next((name for name in names if self.variables.get(name)), names[0])
        visible = self.variables.get(variable, "")
        listed = visible.split(",") if visible else [str(gpu.index) for gpu in self.gpus]
        chosen = ",".join(listed[index] for index in gpus)
        return f"{variable}={chosen} python scripts/doctor.py --full"

    @cached_property
    def peers(self) -> list[list[bool]]:
        """May the GPU of a row read the memory of that of a column?"""
        indices = range(len(self.gpus))
        return [[a == b or torch.cuda.can_device_access_peer(a, b) for b in indices] for a in indices]

    @cached_property
    def copies(self) -> Copies:
        """Rates of copies between the usable GPUs, and from and to host memory; nothing on Windows, where no
        ranks run."""
        if self.platform == "win32":
            return Copies()
        free = {gpu.index: gpu.free for gpu in self.gpus if gpu.index in self.usable}
        if not free:
            return Copies()
        with UnderLoad() as seen:
            copies = doctor_copies.measured(free)
        self.driver_in_copies = seen.rows  # for who reads the report
        return copies

    @cached_property
    def way(self) -> str:
        """What NCCL is told since peer access failed when the machine was measured; else nothing."""
        return nccl_settings.words(nccl_settings.saved_way(os.environ, list(range(len(self.gpus)))))

    @cached_property
    def shared_memory(self) -> int | None:
        """Bytes of /dev/shm, None where there is none."""
        if not SHARED_MEMORY.exists():
            return None
        return shutil.disk_usage(SHARED_MEMORY).total

    @cached_property
    def free_shared_memory(self) -> int:
        """Bytes of /dev/shm that nothing takes."""
        return shutil.disk_usage(SHARED_MEMORY).free

    @cached_property
    def disks(self) -> dict[str, int]:
        """Free bytes where ranks keep sockets and logs, and measurements."""
        return {name: shutil.disk_usage(path).free for name, path in _places().items()}

    @cached_property
    def unwritable(self) -> list[str]:
        """Folders of ``disks`` in which this user can make no file."""
        return [name for name, path in _places().items() if not os.access(path, os.W_OK | os.X_OK)]

    @cached_property
    def is_temporary_in_memory(self) -> bool:
        """Whether files in the temporary folder take memory."""
        return doctor_room.lies_in_memory(Path(tempfile.gettempdir()))

    @cached_property
    def host_memory(self) -> int:
        """Bytes of host memory that programs may still take."""
        return measurements.free_memory("cpu", [])[0]

    @cached_property
    def cores(self) -> int:
        return rank_environment.cores()

    @cached_property
    def open_files(self) -> int | None:
        """How many files a process may open, None where nobody counts them."""
        return _limit("RLIMIT_NOFILE")

    @cached_property
    def locked_memory(self) -> int | None:
        """Bytes that a process may lock, -1 without a limit; None where there is no InfiniBand."""
        return _limit("RLIMIT_MEMLOCK") if any(Path("/sys/class/infiniband").glob("*")) else None

    @cached_property
    def loopback(self) -> str:
        """Why no socket listens on 127.0.0.1, empty where one does."""
        try:
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", 0))
                listener.listen(1)
        except OSError as error:
            return str(error)
        return ""

    @cached_property
    def variables(self) -> dict[str, str]:
        return {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(VARIABLE_PREFIXES) and name not in SECRETS
        }

    @cached_property
    def wheels(self) -> dict[str, Wheel]:
        """Installed packages of WHEELS. Each is imported by a process of its own: a broken one may end it."""
        here = [name for name in WHEELS if is_installed(name)]
        with ThreadPoolExecutor(max(1, self.cores)) as pool:
            return dict(zip(here, pool.map(tried, here)))


def _is_built_for(gpu: Gpu, archs: tuple[str, ...]) -> bool:
    """Return whether torch has kernels for a GPU, as ranks ask (backend/hardware/gpu_kernels.py)."""
    return gpu.arch in archs if gpu.arch else has_kernels_for(gpu.capability, archs)


def _places() -> dict[str, Path]:
    """Return the temporary folder, and of the cache folder what exists of it."""
    cache = cache_folder()
    while not cache.exists():
        cache = cache.parent
    return {"temporary folder": Path(tempfile.gettempdir()), "cache folder": cache}


def finite(value: Any) -> Any:
    """Return what JSON has of a value: numbers that are none become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return finite(vars(value))
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def _limit(name: str) -> int | None:
    """Return a limit of this process; None on Windows, which has none."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrlimit(getattr(resource, name))[0]
