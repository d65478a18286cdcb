"""What the side panel shows of the backends, and its button that ends them. For threads of the server."""

import os
import time

import comfy.model_management
import torch

from ...backend.client import pool
from ...backend.client.auto import measurements
from ...backend.client.status import rank_state, report
from ...backend.config import in_words
from ...backend.protocol import BackendError
from ..graph.queued_graph import executes
from ..host import refusals, remote_solver
from ..host.graph_requests import LOADER
from ..host.progress import NodeStatus

#: Seconds for which the free memory of GPUs is not asked for again: the driver's tool needs a while.
MEMORY_SECONDS = 5.0
#: GPUs -> when they were asked (monotonic s), and their free bytes.
_memory: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}


def status() -> dict:
    """Return how everything is: ``backends``, the line that a node shows now (``doing``), whether ComfyUI is
    at a graph of ours (``graph_runs``), the latest run and the latest error."""
    backends = [_backend(each) for each in pool.backends()]
    last_run = dict(remote_solver.LATEST_RUN)
    if last_run:
        last_run["what"] = in_words(last_run.pop("degrees"))
    return {
        "backends": backends,
        "doing": NodeStatus.latest,
        "graph_runs": executes(LOADER),
        "last_run": last_run,
        "last_error": dict(refusals.LATEST),
    }


def _backend(backend: pool.Backend) -> dict:
    facts = {
        "what": in_words(backend.welcome.degrees),
        "device": backend.welcome.device,
        "ours": backend.process is not None,
        "address": backend.config.address,
        "ranks": [],
    }
    try:
        found = report(backend)
    except BackendError as error:
        return {**facts, "problem": str(error)}
    gpus = backend.config.gpu_indices if backend.process and backend.welcome.device == "cuda" else []
    memory = _gpu_memory(tuple(gpus))
    ranks = []
    for index, rank in enumerate(found.ranks):
        state = rank_state(backend, rank["pid"], bool(found.running))
        device = {"gpu": gpus[index], **memory[index]} if gpus else {}
        ranks.append({**rank, **device, "state": state})
    return {
        **facts,
        "ranks": ranks,
        "models": [os.path.basename(path) for path in found.models.values()],
        "running": found.running,
        "running_seconds": found.running_seconds,
        "waiting": found.waiting,
        "up_seconds": found.seconds,
        "answered": found.answered,
    }


def _gpu_memory(gpus: tuple[int, ...]) -> list[dict]:
    """Return the name, and the free and all bytes, of each GPU."""
    if not gpus:
        return []
    asked, free = _memory.get(gpus, (-MEMORY_SECONDS, ()))
    if time.monotonic() - asked >= MEMORY_SECONDS:
        free = measurements.free_memory("cuda", list(gpus))
        _memory[gpus] = (time.monotonic(), free)
    properties = [torch.cuda.get_device_properties(index) for index in gpus]
    return [
        {"name": each.name, "free_bytes": left, "total_bytes": each.total_memory}
        for each, left in zip(properties, free)
    ]


def stop() -> dict:
    """End the ranks that this process has started, and what runs on them; hang up on others. A graph that is
    at a node of somebody else's, such as a text encoder, would start the ranks again: it ends, too."""
    ours = [backend for backend in pool.backends() if backend.process is not None]
    is_busy = any(backend.is_busy and not backend.is_left for backend in ours)
    if NodeStatus.latest or is_busy or executes(LOADER):
        comfy.model_management.interrupt_current_processing()
    pool.close_all()
    return {"stopped": True}
