"""Asks a short process what a model's headers refuse, before ranks are started or ended for it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ..config import ParallelConfig
from ..protocol import BackendError, RefusedError
from .launcher import sanitized_environment

#: How often the wait looks whether somebody wants to stop, in seconds.
POLL_SECONDS = 0.1
#: Questions that were answered well, so that a graph that is queued again does not ask again.
_accepted: set[tuple] = set()


def check_headers(
    config: ParallelConfig,
    path: str,
    weight_dtype: str,
    matmul: str,
    folders: Iterable[str],
    check=lambda: None,
):
    """Refuse a model that the ranks of ``config`` could not load: its family, blocks, heads, formats, and
    weights larger than the memory. ``folders``: from where ranks may load. ``check()`` is called ten times a
    second and may raise to give up.

    Raises RefusedError, ConfigError where ``config`` does not fit this machine, BackendError where the
    process ends without an answer.
    """
    device = config.resolve_device(torch.cuda.device_count())
    key = (config.topology(), weight_dtype, matmul, device, path, _stamp(path))
    if key in _accepted:
        return
    question = {
        "config": asdict(replace(config, device=device, gpus="", address="")),
        "path": path,
        "weight_dtype": weight_dtype,
        "matmul": matmul,
        "device": device,
        "folders": sorted(folders),
        **_hardware(config, device),
    }
    refused = _ask(question, config, check)
    if refused:
        raise RefusedError(refused)
    _accepted.add(key)


def _stamp(path: str) -> tuple:
    """Tell versions of a file apart. A folder's changes are not seen: the ranks look at it again anyway."""
    stat = Path(path).stat() if os.path.exists(path) else None
    return (stat.st_mtime_ns, stat.st_size) if stat else ()


def _hardware(config: ParallelConfig, device: str) -> dict:
    """Return the memory and the least compute capability of the ranks' devices."""
    if device == "cpu":
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        return {"capability": None, "memory": [pages] if pages else []}
    gpus = [torch.cuda.get_device_properties(index) for index in config.gpu_indices]
    capability = None if torch.version.hip else min((gpu.major, gpu.minor) for gpu in gpus)
    return {"capability": capability, "memory": [gpu.total_memory for gpu in gpus]}


def _ask(question: dict, config: ParallelConfig, check) -> str:
    """Return why the model is refused, empty where it is not."""
    command = [sys.executable, "-m", "backend.preflight"]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=sanitized_environment(dict(os.environ), config, "cpu"),  # it needs no GPU
    ) as process:
        sent: bytes | None = json.dumps(question).encode()
        while True:
            try:
                answer, errors = process.communicate(sent, timeout=POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                sent = None  # communicate has it, and goes on with it
            try:
                check()
            except BaseException:
                process.kill()
                raise
    if process.returncode:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise BackendError(f"The model's headers could not be checked, and ranks would fail likewise: {last}")
    return json.loads(answer)["refused"]
