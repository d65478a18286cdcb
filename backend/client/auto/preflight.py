"""Asks a process of its own what a model's headers say: its shape, and what ranks would refuse, before any is
started or ended for it."""

import hashlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ...config import ParallelConfig
from ...hardware.device_memory import host_bytes
from ...hardware.gpu_kernels import Capability
from ...loading.files.regular_files import file_state
from ...protocol import BackendError, RefusedError
from ...runtime.callbacks import nothing
from ...runtime.torch_version import installed
from .. import cache_files
from ..exit_report import killed_by
from ..interrupts import turn
from ..launching import fork_guard
from ..launching.interpreter import PACK, answered, packages_changed, ranks_python
from ..launching.rank_environment import sanitized_environment
from ..pack_version import IMPORTED, require_same_pack
from .model_choice import ModelChoice

#: How often the wait looks whether somebody wants to stop, in seconds.
POLL_SECONDS = 0.1
#: Questions that were answered well are not asked again: to import what answers them takes seconds, also in
#: the first run after each start of ComfyUI. So many are cached.
ACCEPTED = 200


def check_headers(config: ParallelConfig, choice: ModelChoice, folders: Iterable[str], check=nothing):
    """Refuse a model that the ranks of ``config`` could not load: its family, blocks, heads, formats, and
    weights larger than the memory. ``folders``: from where ranks may load. ``check()`` is called ten times a
    second and may raise to give up. Raises RefusedError, ConfigError where ``config`` does not fit this
    machine, BackendError where the process ends without an answer."""
    device = config.resolve_device(torch.cuda.device_count())
    memory = [host_bytes()]
    if device == "cuda":
        memory = [torch.cuda.get_device_properties(index).total_memory for index in config.gpu_indices]
    question = {
        **choice._asdict(),
        "config": asdict(replace(config, device=device, gpus="", address="")),
        "device": device,
        "folders": sorted(folders),
        "capability": least_capability(device, config.gpu_indices),
        "memory": memory,
    }
    # the model's files, packages that read and run it, and this pack decide, too
    packages = [installed(name) for name in ("torch", "diffusers", "gguf", "comfy-kitchen")]
    versions = [*packages, ranks_python(), packages_changed(), IMPORTED]
    key = [question | {"config": config.topology()}, stamp(Path(choice.path)), versions]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    accepted = cache_files.read("accepted", [], _digests) or []
    if digest not in accepted:
        _ask(question, config, check)
        cache_files.write("accepted", [], {"digests": [*accepted, digest][-ACCEPTED:]})


def _digests(values: dict) -> list[str]:
    return [str(digest) for digest in values["digests"]]


def read_shape(choice: ModelChoice, device: str, indices: list[int], check=nothing) -> dict:
    """Return the shape of a transformer (ModelShape.as_dict) on the GPUs ``indices``, or on the CPU.
    ``check`` and errors as in check_headers."""
    where = {"device": device, "folders": None, "capability": least_capability(device, indices)}
    return _ask({**choice._asdict(), **where}, ParallelConfig(device=device), check)["shape"]


def least_capability(device: str, indices: list[int]) -> Capability | None:
    """Return GPUs' least compute capability, by which all ranks choose types and kernels; None on the CPU and
    with ROCm."""
    if device == "cpu" or torch.version.hip:
        return None
    gpus = [torch.cuda.get_device_properties(index) for index in indices]
    return min((gpu.major, gpu.minor) for gpu in gpus)


def stamp(path: Path) -> tuple:
    """Tell versions of a file apart, or of the files of a folder of diffusers."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return tuple((str(each), *state) for each in files if (state := file_state(each)))


class _Reader:
    """The process that reads headers: what it imports takes seconds, so it stays for further questions."""

    def __init__(self, config: ParallelConfig):
        require_same_pack()
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [ranks_python(), "-m", "backend.preflight"],
            cwd=PACK,  # whatever is called backend where we run is not ours
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            errors="replace",
            env=sanitized_environment(dict(os.environ), config, "cpu"),  # it needs no GPU
        )
        assert self.process.stdin is not None  # it was opened as a pipe
        fork_guard.hold(self.process.stdin)  # else it would not see us end
        self.waiting = ThreadPoolExecutor(1)

    def ask(self, question: dict, check) -> dict | None:
        """Return the answer, None where the process has ended. What ``check`` raises ends it."""
        pipes = self.process.stdin, self.process.stdout
        assert pipes[0] is not None and pipes[1] is not None  # they were opened as pipes
        try:
            pipes[0].write(json.dumps(question) + "\n")
            pipes[0].flush()
        except OSError:  # nobody had asked for a while
            return None
        answer = self.waiting.submit(answered, pipes[1])
        while not answer.done():
            wait([answer], POLL_SECONDS)
            try:
                check()
            except BaseException:
                self.process.kill()
                raise
        return answer.result()

    def close(self):
        """Close the pipes of a process that has ended, before their numbers are others'."""
        assert self.process.stdin is not None
        with suppress(OSError):  # of a question that was not taken
            self.process.stdin.close()
        self.errors.close()
        self.waiting.shutdown(wait=False)

    def last_words(self) -> str:
        """Return how the process ended: the signal, or the last line on standard error that names an error,
        if one does."""
        code = self.process.wait()
        if code < 0:
            return f"the process that reads them {killed_by(-code)}"
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1])


_reader: _Reader | None = None
_lock = threading.Lock()


def _ask(question: dict, config: ParallelConfig, check) -> dict:
    """Return the answer; RefusedError where that is a refusal."""
    global _reader
    with turn(_lock, check):
        answer = _reader.ask(question, check) if _reader else None
        if answer is None:
            dead, _reader = _reader, None  # the next line may raise
            if dead is not None:
                dead.close()
            reader = _reader = _Reader(config)
            answer = reader.ask(question, check)
            if answer is None:
                what = "The model's headers could not be read, and ranks would fail likewise"
                raise BackendError(f"{what}: {reader.last_words()}")
    if answer["refused"]:
        raise RefusedError(answer["refused"])
    return answer
