"""Entry point of every rank: python -m torch.distributed.run ... -m backend.worker --address unix:PATH
--config JSON

Rank 0 serves the socket and tells the others what to do; a failure inside a collective ends the rank,
torchrun ends its peers, and the client starts a fresh backend (crash-only). What can be refused is refused on
rank 0 before the others hear of it.
"""

import argparse
import gc
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from . import mesh as meshes
from .checks import refusing
from .config import ConfigError, ParallelConfig
from .denoise import Callbacks
from .denoise import Cancelled as Stopped
from .dispatch import Dispatcher
from .engine import Engine
from .errors import UnsupportedError
from .folders import Folders
from .loading.lora import lora_stack
from .protocol import (
    LORAS,
    Arrange,
    Cancelled,
    Describe,
    Described,
    Failure,
    Load,
    Loaded,
    ModelCall,
    Ping,
    Progress,
    Result,
    Sample,
    Shutdown,
    Unload,
    Welcome,
)
from .server import Job, Previews, Server, progress

#: Rank 0 speaks to idle ranks this often (seconds), well within the timeout of a collective.
HEARTBEAT_SECONDS = 60.0
#: Least time between two messages about a load's progress.
LOAD_SECONDS = 0.1


class Worker:
    """What every rank does with a message; rank 0 (Leader) adds the clients."""

    def __init__(self, config: ParallelConfig, device: str, folders: Folders):
        self.device = device
        self.mesh = meshes.build(config, device)
        self.engine = Engine(config, self.mesh, folders)
        self.dispatcher = Dispatcher(self.mesh.control)
        self.pids = self.dispatcher.answers(os.getpid())
        self.reports: dict[str, list[dict]] = {}
        self.paths: dict[str, str] = {}

    def follow(self):
        """Ranks 1..N-1: do what rank 0 says until it says Shutdown."""
        while not isinstance(message := self.dispatcher.hear(), Shutdown):
            if isinstance(message, Load):
                self.load(message)
            elif isinstance(message, Unload):
                self.engine.unload(message.model)
            elif isinstance(message, Arrange):
                self.arrange(ParallelConfig(**message.config))
            elif isinstance(message, Sample):
                try:
                    self.engine.sample(message, Callbacks())
                except Stopped:
                    pass  # rank 0 tells the client
            elif isinstance(message, ModelCall):
                self.engine.forward(message)

    def load(self, message: Load, on_progress=lambda done, total: None) -> list[str]:
        """Load on this rank, or name LoRAs where it is loaded; the reasons of all ranks that could not (then
        no rank keeps it), else what it cost each is in ``reports``."""
        key, reason = model_key(message), ""
        if key in self.engine.models:
            self.engine.name(key, lora_stack(message.loras))
            return []
        try:
            self.engine.load(key, message.path, message.weight_dtype, on_progress)
            print(self.engine.models[key].report)
        except Exception as error:  # out of memory, a disk that fails: this rank's peers must hear of it
            traceback.print_exc()
            reason = f"rank {self.mesh.rank}: {error}"
        answers = self.dispatcher.answers(
            [reason, None if reason else self.engine.models[key].report.as_dict()]
        )
        reasons, self.reports[key] = [why for why, _ in answers if why], [report for _, report in answers]
        if reasons:
            self.engine.unload(key)
        return reasons

    def arrange(self, config: ParallelConfig):
        """Change the process groups and what is loaded on them."""
        old, self.mesh = self.mesh, meshes.build(config, self.device)
        self.engine.rearrange(config, self.mesh)
        meshes.close(old)
        self.dispatcher = Dispatcher(self.mesh.control)
        self.reports = {
            key: self.dispatcher.answers(self.engine.models[key].report.as_dict())
            for key in self.reports
            if key in self.engine.models
        }


class Leader(Worker):
    """Rank 0: a queue of clients' requests, each refused here or run by all."""

    def __init__(self, config: ParallelConfig, device: str, folders: Folders, address: str, token: str):
        super().__init__(config, device, folders)
        welcome = Welcome(config.world_size, device, config.degrees, self.pids)
        self.server = Server(
            address,
            token,
            welcome,
            models=lambda: list(self.engine.models.keys() - self.engine.stacks.keys()),
        )
        self.handlers = {
            Arrange: self.on_arrange,
            Load: self.on_load,
            Describe: self.on_describe,
            Unload: self.on_unload,
            Sample: self.on_sample,
            ModelCall: self.on_call,
        }

    def lead(self):
        """Serve until a client says Shutdown."""
        while True:
            job = self.server.next_job(HEARTBEAT_SECONDS)
            if job is None:
                self.dispatcher.tell(Ping())
                continue
            if isinstance(job.message, Shutdown):
                self.dispatcher.tell(job.message)
                return
            self.run(job)
            self.server.finish(job)

    def run(self, job: Job):
        """One request, answered in any case."""
        handler = self.handlers.get(type(job.message))
        if handler is None:
            job.reply(Failure(f"a client does not send {type(job.message).__name__}."))
            return
        try:
            handler(job, job.message)
        except (UnsupportedError, ConfigError) as error:
            job.reply(Failure(str(error)))

    def on_arrange(self, job: Job, message: Arrange):
        try:
            config = ParallelConfig(**message.config).validate()
        except TypeError as error:
            raise ConfigError(f"the configuration is not one of this version: {error}.") from None
        if config.world_size != self.mesh.world_size:
            raise ConfigError(
                f"{config.product}, but this backend has {self.mesh.world_size}; start another."
            )
        self.dispatcher.tell(message)
        self.arrange(config)
        self.server.welcome = replace(self.server.welcome, degrees=config.degrees)
        job.reply(self.server.welcome)

    def on_load(self, job: Job, message: Load):
        folders = self.engine.folders
        folders.check(message.path)  # before anything there is looked at
        key, stack = model_key(message), lora_stack(message.loras, folders)
        if key not in self.engine.models:
            self.engine.check_load(message.path, message.weight_dtype)
            self.dispatcher.tell(message)
            reasons = self.load(message, _reporter(job))
            if reasons:
                raise UnsupportedError(f"the model could not be loaded ({'; '.join(reasons)}).")
            self.paths[key] = message.path
        warnings = self.engine.check_loras(key, stack)
        if stack:
            self.dispatcher.tell(message)
        name = self.engine.name(key, stack)
        job.reply(
            Loaded(
                name,
                self.engine.models[key].family.name,
                {**self.engine.facts(key), "warnings": warnings, "ranks": self.reports[key]},
            )
        )

    def on_describe(self, job: Job, message: Describe):
        job.reply(
            Described(*self.engine.describe(message, self.paths.get(message.model.partition(LORAS)[0], "")))
        )

    def on_unload(self, job: Job, message: Unload):
        self.dispatcher.tell(message)
        self.engine.unload(message.model)
        job.reply(Result())

    def on_sample(self, job: Job, message: Sample):
        self.engine.check_sample(message)
        if job.cancelled.is_set():
            job.reply(Cancelled(0))
            return
        self.dispatcher.tell(message)
        total, previews = (
            len(message.tensors["sigmas"]) - 1,
            Previews(message.preview_seconds, time.monotonic),
        )
        tensors = {}
        callbacks = Callbacks(
            lambda step, make_x0: progress(job, step, total, previews, make_x0),
            job.cancelled.is_set,
            lambda x0: tensors.update(denoised=x0),
        )
        try:
            samples, stats = self.engine.sample(message, callbacks)
        except Stopped as stopped:
            job.reply(Cancelled(stopped.step))
            return
        job.reply(Result(stats | previews.stats, {"samples": samples, **tensors}))

    def on_call(self, job: Job, message: ModelCall):
        with refusing("the call"):
            self.engine.kept.check(message)
            missing = self.engine.kept.missing(message)
        if missing:
            job.reply(Result({"missing": missing}))
            return
        self.engine.check_forward(message)
        if job.cancelled.is_set():
            job.reply(Cancelled(0))
            return
        self.dispatcher.tell(message)
        output, stats = self.engine.forward(message)
        job.reply(Result(stats, {"output": output}))


def _reporter(job: Job):
    """Tells the client how much of rank 0's part is loaded."""
    rate = Previews(LOAD_SECONDS, time.monotonic)
    return lambda done, total: job.reply(Progress(done, total)) if rate.due() or done == total else None


def model_key(message: Load) -> str:
    """Names what a Load loads: a file that changed on disk is another model. The same on every rank of a
    machine."""
    path = Path(message.path).resolve()
    stamp = [path.stat().st_mtime_ns, path.stat().st_size] if path.exists() else []
    return hashlib.sha256(json.dumps([str(path), message.weight_dtype, stamp]).encode()).hexdigest()[:16]


def exit_with_parent():
    """End this rank when standard input, a pipe that the launcher holds open, reaches its end: the launcher's
    death by any signal closes it."""

    def watch():
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def arguments() -> argparse.ArgumentParser:
    """What a rank is told on its command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="unix:PATH or tcp:HOST:PORT on which rank 0 listens")
    parser.add_argument("--config", default="{}", help="the ParallelConfig as JSON")
    parser.add_argument("--exit-with-parent", action="store_true", help="end at the end of standard input")
    parser.add_argument(
        "--models",
        nargs="*",
        action="extend",
        help="folders below which clients may have files loaded; without this option, any file",
    )
    return parser


@record
def main():
    """Join the others and serve. Raises what ends this rank, which torchrun then reports."""
    options = arguments().parse_args()
    if options.exit_with_parent:
        exit_with_parent()
    token = os.environ.pop("PARALLEL_DIT_TOKEN")
    config = ParallelConfig(**json.loads(options.config)).validate()
    config = replace(config, gpus="")  # the launcher made exactly those visible, numbered from 0
    device = config.resolve_device(torch.cuda.device_count())
    folders = Folders.of(options.models)
    gc.freeze()  # what is imported stays: no collection looks through it again
    if int(os.environ["RANK"]) == 0:
        Leader(config, device, folders, options.address, token).lead()
    else:
        Worker(config, device, folders).follow()


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # at once: destructors of process groups wait for peers that may be gone
