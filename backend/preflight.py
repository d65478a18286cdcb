"""Reads a model's headers in a process of its own: refuses what ranks would refuse, before any of them is
started, and measures the shape by which the planner chooses degrees.

    python -m backend.preflight < QUESTIONS

client/auto/preflight.py asks: a question is a line of JSON on standard input, the answer {"refused":
SENTENCE} on standard output (client/launching/interpreter.py), the sentence empty where ranks can load the
model. A question without a configuration asks for the model's "shape" too. Nothing is read but headers and
scales, and no GPU is touched."""

from .runtime import lean_imports  # noqa: F401  # before all that imports torch and diffusers

# isort: split
import json
import os
import sys
import threading
from dataclasses import replace

import torch

from .client.launching import interpreter
from .config import ConfigError, ParallelConfig
from .errors import UnsupportedError, quoted
from .hardware.gpu_kernels import Capability
from .loading.compute_dtype import chosen_dtype
from .loading.files.allowed_folders import ANYWHERE, Folders
from .loading.files.scale_values import check_scales
from .loading.recognition import open_checkpoint
from .loading.weight_loading import matrices
from .planner.config_changes import named_change
from .quantization.matmul import choose_all
from .rank_plan.describe import mesh_indices
from .rank_plan.request_size import RequestSize
from .rank_plan.shape_of import shape_of
from .rank_plan.weights import tensor_mesh
from .rank_plan.workload import Workload
from .sampling.validation import check_degrees, refusing
from .units import coarse_gigabytes

#: A process that nobody asks for so long ends; degrees are changed several times in a row.
IDLE_SECONDS = 300.0


def check_before_start(
    config: ParallelConfig,
    path: str,
    weight_dtype: str = "default",
    matmul: str = "auto",
    device: str = "cpu",
    capability: Capability | None = None,
    memory: list[int] | None = None,
    folders: Folders = ANYWHERE,
):
    """Refuse what the ranks of ``config`` could not load. Raises UnsupportedError or ConfigError. ``device``:
    "cuda" or "cpu"; ``capability``: the least of the ranks' GPUs. ``memory``: bytes of each rank's GPU, or of
    the whole machine as one number where ranks run on the CPU; nothing where it is unknown."""
    where = torch.device(device)
    folders.check(path)
    with refusing("the model"):
        checkpoint = open_checkpoint(path, folders)
        check_degrees(checkpoint, config.validate())
        dtype = chosen_dtype(weight_dtype, checkpoint, where, capability)
        cuts = checkpoint.cut_plan(config).shards(tensor_mesh(config, 0))  # ranks choose alike (Matrix)
        found = choose_all(checkpoint.name, matrices(checkpoint, cuts), matmul, where, capability)
        work = Workload(config, checkpoint, RequestSize(prompts=1, calls=1), dtype, found)
        check_memory(work, device, memory or [])
        check_scales(checkpoint)


def read_shape(
    path: str, weight_dtype: str, matmul: str, device: str, capability: Capability | None, folders: Folders
) -> dict:
    """Return what the planner has to know of the transformer at ``path`` (ModelShape.as_dict). Arguments are
    those of check_before_start. Raises UnsupportedError."""
    where = torch.device(device)
    folders.check(path)
    with refusing("the model"), torch.inference_mode():
        checkpoint = open_checkpoint(path, folders)
        found = choose_all(checkpoint.name, matrices(checkpoint, {}), matmul, where, capability)
        dtype = chosen_dtype(weight_dtype, checkpoint, where, capability)
        return shape_of(checkpoint, dtype, found).as_dict()


def check_memory(work: Workload, device: str, memory: list[int]):
    """Refuse weights that are larger than the memory that they are for. Raises UnsupportedError."""
    if not memory:
        return
    what = f"the weights of {quoted(work.checkpoint.name)} need"
    needed = _on_devices(work)
    if device == "cpu":
        total = sum(needed) + sum(work.weights(place).host for place in mesh_indices(work.config))
        if total > memory[0]:
            raise UnsupportedError(
                f"{what} {coarse_gigabytes(total)} on {len(needed)} ranks together, but this machine has "
                f"{coarse_gigabytes(memory[0])}; choose a smaller or quantized file, or fewer ranks."
            )
        return
    for rank, (size, most) in enumerate(zip(needed, memory)):
        if size > most:
            raise UnsupportedError(
                f"{what} {coarse_gigabytes(size)} on rank {rank}, whose GPU has {coarse_gigabytes(most)}; "
                f"{_remedy(work, memory)}."
            )


def _on_devices(work: Workload) -> list[int]:
    """Return the bytes of weights on the device of each rank."""
    held = [work.weights(place) for place in mesh_indices(work.config)]
    return [each.device + each.scratch + each.gathered for each in held]


def _remedy(work: Workload, memory: list[int]) -> str:
    """Name settings with which as many ranks hold the weights: more of them need GPUs that may be missing."""
    if work.config.world_size == 1:
        return "use more GPUs (method auto, gpus empty), or choose a file of fewer bits"

    def check(other: ParallelConfig):
        check_degrees(work.checkpoint, other)
        needed = _on_devices(replace(work, config=other))
        if any(size > most for size, most in zip(needed, memory)):
            raise UnsupportedError("its weights are too large as well")

    if change := named_change(work.config, check):
        return f"they fit with {change}, or choose a file of fewer bits"
    return "use more GPUs (method auto, every degree 1, gpus empty), or choose a file of fewer bits"


def answer(question: dict) -> dict:
    """Return {"refused": why, or nothing}, and the "shape" where the question has no configuration."""
    config = question.pop("config", None)
    question["folders"] = Folders.of(question["folders"])
    question["capability"] = tuple(question["capability"]) if question["capability"] else None
    try:
        if config is None:
            return {"refused": "", "shape": read_shape(**question)}
        check_before_start(ParallelConfig(**config), **question)
        return {"refused": ""}
    except (UnsupportedError, ConfigError) as error:
        return {"refused": str(error)}


def main():
    """Answer questions, one a line, until standard input ends or nobody has asked for IDLE_SECONDS."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no answer
    while True:
        idle = threading.Timer(IDLE_SECONDS, os._exit, (0,))
        idle.daemon = True
        idle.start()
        line = sys.stdin.readline()
        idle.cancel()
        if not line:
            return
        print(interpreter.answer(answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
