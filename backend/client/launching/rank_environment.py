"""The environment of an agent and its ranks: ours, without what another launcher or ComfyUI has set."""

import os
import sys
from collections.abc import Mapping

import torch

from ...config import ConfigError, ParallelConfig
from ...hardware.cgroup_limits import cpu_limit
from ...hardware.device_memory import FIXED_SEGMENTS
from ...protocol.heartbeats import MAX_COLLECTIVE_SECONDS
from ...quantization.dequantized_cache import rank_variables
from ...runtime.torch_version import has_torch
from ..cache_files import cache_folder
from . import allocator, nccl_settings
from .interpreter import PACK, inherited, ranks_python

#: Device -> bytes from which glibc maps a block by itself, and unused bytes at the end of its heap that go
#: back. Sizes that are set stay: glibc raises its own to 32 MB, as blocks are freed, and smaller blocks then
#: leave gaps, by which ranks grew by 0.6 MB per 100 requests (benchmarks/soak.py). On the CPU, where tensors
#: come from malloc, to map each anew costs 265,000 page faults a step, a seventh of its time. There the size
#: is the largest that glibc takes, and gaps go back when a model leaves (device_memory.release).
_MALLOC = {
    "cuda": {"MALLOC_MMAP_THRESHOLD_": str(2**18), "MALLOC_TRIM_THRESHOLD_": str(2**18)},
    "cpu": {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)},
}
#: What another launcher, or ComfyUI for its own process, may have set and a fresh group must not inherit.
_DROPPED = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *allocator.NAMES,
    *("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    *("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
    # DETAIL sends batched messages one by one, each rank its own first
    "TORCH_DISTRIBUTED_DEBUG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    # where another launcher's ranks meet: every communicator of ours would meet there
    "NCCL_COMM_ID",
    # the host waits for each receive, which PipeFusion posts before what its peer waits for: none goes on
    "CUDA_LAUNCH_BLOCKING",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    # another process group of torch 2.14, whose streams and order of messages nothing here was checked with
    "TORCH_DIST_USE_NCCL2",
    # another function than the one that the attention hook replaces (sampling/model_runner.py)
    *("DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_ATTN_CHECKS"),
    # of this process as a client of other backends, not for those that it starts
    *("PARALLEL_DIT_TOKEN", "PARALLEL_DIT_ADDRESSES"),
    # of torchrun, which knows other programs' levels by other names ("debug")
    "LOGLEVEL",
}
#: Processes in which a rank compiles kernels, which are started before the first one: as many as torch's own
#: rule allows (decide_compile_threads of torch/_inductor/config.py).
MAX_COMPILE_THREADS = 32
_DROPPED_PREFIXES = ("ROLE_", "MASTER_", "TORCHELASTIC_", "PET_")
#: What lists the GPUs that a process sees: of torch for ROCm the first one that is set counts, and torch for
#: CUDA knows the last alone. ComfyUI sets both.
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def closed_doors(parent: dict, interface: str = "lo") -> dict:
    """Return settings under which agent and ranks of one machine listen on no network, and those of several
    machines on ``interface`` alone (torchrun's store listens on all: docs/security.md).

    The agent opens no TCPStore for its ranks: they meet in a file (rendezvous_flags). gloo listens on
    loopback. NCCL finds its peers through a socket too, on the first network interface unless told; data
    still goes over NVLink, PCIe or shared memory. Its status service (RAS) would answer anybody on this
    machine: off. NCCL's two settings keep the values that ``parent`` has.
    """
    doors = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if sys.platform == "linux":
        doors["GLOO_SOCKET_IFNAME"] = interface
        # "=": eth1 alone, where NCCL would take eth10 too
        doors["NCCL_SOCKET_IFNAME"] = parent.get("NCCL_SOCKET_IFNAME", f"={interface}")
    doors["NCCL_RAS_ENABLE"] = parent.get("NCCL_RAS_ENABLE", "0")
    return doors


def driver_name(parent: Mapping[str, str], index: int) -> str:
    """Return the driver's name of the GPU that this process numbers ``index``, by the list of visible GPUs in
    the environment ``parent``. Raises ConfigError where that has no such GPU: torch read it when it began."""
    for variable in _VISIBLE if torch.version.hip else _VISIBLE[1:]:
        if visible := parent.get(variable):
            names = visible.split(",")
            if index < len(names):
                return names[index].strip()
            raise ConfigError(
                f"GPU {index} is wanted, but {variable} is {visible!r:.200}, which something has "
                f"changed since this process began to use its GPUs; start ComfyUI with it, and let no node "
                f"set it."
            )
    return str(index)


def cores() -> int:
    """Count the processors that this process may use: by its affinity, and by its container's quota."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(here, cpu_limit())))


def _compiler(threads: int) -> dict[str, str]:
    """Return where compiled blocks are cached: in one folder for all ranks, private since code is loaded from
    it; and what Triton compiles, in a home that cannot be written."""
    found = {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "inductor")}
    # headers of C++ that are compiled ahead go to a folder of temporary files, which anybody may have made
    found["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    if not os.access(os.path.expanduser("~"), os.W_OK):
        found["TRITON_HOME"] = str(cache_folder())
    return found | {"TORCHINDUCTOR_COMPILE_THREADS": str(min(MAX_COMPILE_THREADS, threads))}


def sanitized_environment(
    parent: dict,
    config: ParallelConfig,
    device: str,
    interface: str = "lo",
    nccl: Mapping[str, str] | None = None,
) -> dict:
    """Return the environment of agent and ranks: ``parent`` with our settings, no other launcher's.
    ``config``: of the ranks of this machine; ``interface``: to the other machines; ``nccl``: how GPUs reach
    each other, without it as the last probe has found to work. Raises ConfigError."""
    parent = inherited(parent)
    env = {
        name: value
        for name, value in parent.items()
        if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    threads = max(1, cores() // config.world_size)
    usual = {"MALLOC_ARENA_MAX": "2", "OMP_NUM_THREADS": str(threads)} | _MALLOC[device]
    env = usual | _compiler(threads) | env  # the user's count before them
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PACK), parent.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    if sys.flags.no_user_site:  # as by python -s: packages of ~/.local are none of ours
        env["PYTHONNOUSERSITE"] = "1"
    env["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cuda":
        names = [driver_name(parent, index) for index in config.gpu_indices]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(names))
        settings = allocator.settings(parent)
        env |= settings | {FIXED_SEGMENTS: "0" if allocator.grows(settings) else "1"}
        # as many hardware queues as there are: messages that share one with others wait for those, which may
        # wait for them. 1, as Megatron-LM sets it, would also put all of them behind compute
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
        env |= nccl_settings.saved_way(parent, config.gpu_indices) if nccl is None else nccl
    if torch.version.hip:
        env.pop("HIP_VISIBLE_DEVICES", None)  # it would count instead of ours
    env |= closed_doors(parent, interface)
    env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"
    # the client ends ranks that hang, by their heartbeats, and waits for those that load or compile
    env.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(MAX_COLLECTIVE_SECONDS))
    # else what travels next to attention begins when the thousands of blocks of its kernel have had their
    # turn
    env.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    if not has_torch(2, 8) or ranks_python() != sys.executable:  # whose torch is not known here
        # else buffers of a collective are free only when the GPU has passed it, 20 blocks behind the host;
        # all of ours are held until they are waited for, and later versions do nothing else
        env["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    return env | rank_variables()
