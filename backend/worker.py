"""Entry point of every rank: python -m torch.distributed.run ... -m backend.worker --address unix:PATH ...
(docs/security.md has the whole command for a start by hand; start.py reads the rest of it).

Rank 0 serves the socket and broadcasts what the others do. A failure inside a collective ends the rank,
torchrun ends its peers, and the client starts a fresh backend (crash-only). What can be refused is refused on
rank 0 before the broadcast.
"""

import gc
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from . import lean_imports, start  # noqa: F401  # the first one before all that imports diffusers
from .config import ConfigError, ParallelConfig
from .engine import Engine
from .errors import UnsupportedError
from .loading.lora_keys import LoraUse, lora_stack
from .loading.scale_values import check_scales
from .parallel import mesh as meshes
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
from .sampling.step_loop import Callbacks
from .sampling.step_loop import Cancelled as Stopped
from .sampling.validation import refusing
from .serving.broadcast import Dispatcher
from .serving.server import Job, Previews, Server, progress

#: Rank 0 speaks to idle ranks this often (seconds), well within the timeout of a collective.
HEARTBEAT_SECONDS = 60.0
#: Least time between two messages about a load's progress.
LOAD_SECONDS = 0.1
Act = Callable[[], None]  # what all ranks do once a message was looked at


class Worker:
    """What every rank does with a message; rank 0 (Leader) adds the clients."""

    def __init__(self, begun: start.Start):
        self.device = begun.device
        self.mesh = meshes.build(begun.config, begun.device, begun.store)
        self.engine = Engine(begun.config, self.mesh, begun.folders)
        self.dispatcher = Dispatcher(self.mesh.control)
        self.pids = self.dispatcher.all_gather_object(os.getpid())
        capabilities = self.dispatcher.all_gather_object(self.engine.capability)
        self.engine.capability = min((tuple(each) for each in capabilities if each), default=None)
        self.reports: dict[str, list[dict]] = {}
        self.paths: dict[str, str] = {}

    def follow(self):
        """Ranks 1..N-1: do what rank 0 says until it says Shutdown."""
        while not isinstance(message := self.dispatcher.receive(), Shutdown):
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
                    pass  # rank 0 answers the client
            elif isinstance(message, ModelCall):
                self.engine.forward(message)

    def load(self, message: Load, on_progress=lambda done, total: None) -> list[str]:
        """Load on this rank, or name LoRAs where it is loaded; the reasons of all ranks that could not (then
        no rank keeps it), else what it cost each is in ``reports``."""
        key = model_key(message)
        if key in self.engine.models:
            self.engine.name(key, lora_stack(message.loras))
            return []
        reason = ""
        try:
            self.engine.load(key, message.path, message.weight_dtype, message.matmul, on_progress)
            print(self.engine.models[key].report)
        except Exception as error:  # out of memory, a disk that fails: this rank's peers wait for it
            traceback.print_exc()
            reason = f"rank {self.mesh.rank}: {error}"
        report = None if reason else self.engine.models[key].report.as_dict()
        answers = self.dispatcher.all_gather_object([reason, report])
        reasons = [why for why, _ in answers if why]
        self.reports[key] = [report for _, report in answers]
        if reasons:
            self.engine.unload(key)
        return reasons

    def arrange(self, config: ParallelConfig):
        """Change the process groups and what is loaded on them."""
        old = self.mesh
        self.mesh = meshes.build(config, self.device)
        self.engine.rearrange(config, self.mesh)
        meshes.close(old)
        self.dispatcher = Dispatcher(self.mesh.control)
        self.reports = {
            key: self.dispatcher.all_gather_object(self.engine.models[key].report.as_dict())
            for key in self.reports
            if key in self.engine.models
        }


class Leader(Worker):
    """Rank 0: a queue of clients' requests, each refused here or run by all."""

    def __init__(self, begun: start.Start):
        super().__init__(begun)
        config, device = begun.config, begun.device
        welcome = Welcome(config.world_size, device, config.degrees, self.pids)
        self.server = Server(begun.address, begun.token, welcome, models=self._models)

    def _models(self) -> list[str]:
        return list(self.engine.models.keys() - self.engine.stacks.keys())

    def lead(self):
        """Serve until a client says Shutdown."""
        while True:
            job = self.server.next_job(HEARTBEAT_SECONDS)
            if job is None:
                self.dispatcher.broadcast(Ping())
                continue
            if isinstance(job.message, Shutdown):
                self.dispatcher.broadcast(job.message)
                return
            self.run(job)
            self.server.finish(job)

    def run(self, job: Job):
        """One request, answered in any case.

        Its handler looks at it while no other rank knows of it, so whatever it raises is a refusal. It
        returns what all ranks then do: an error of that ends this rank, since its peers wait in a collective.
        """
        kind = type(job.message)
        if kind not in HANDLERS:
            job.reply(Failure(f"a client does not send {kind.__name__}."))
            return
        handler, what = HANDLERS[kind]
        try:
            with refusing(what):
                act = handler(self, job, job.message)
        except (UnsupportedError, ConfigError) as error:
            job.reply(Failure(str(error)))
            return
        if job.cancelled.is_set() and kind in (Sample, ModelCall):
            job.reply(Cancelled(0))
            return
        act()

    def on_arrange(self, job: Job, message: Arrange) -> Act:
        """Refuse what is no configuration of these ranks. Raises ConfigError."""
        try:
            config = ParallelConfig(**message.config).validate()
        except TypeError as error:
            raise ConfigError(f"the configuration is not one of this version: {error!s:.300}.") from None
        if config.world_size != self.mesh.world_size:
            raise ConfigError(
                f"{config.product}, but this backend has {self.mesh.world_size}; start another."
            )

        def act():
            self.dispatcher.broadcast(message)
            self.arrange(config)
            self.server.welcome = replace(self.server.welcome, degrees=config.degrees)
            job.reply(self.server.welcome)

        return act

    def on_load(self, job: Job, message: Load) -> Act:
        """Refuse a model, or LoRAs of one that is loaded. Raises UnsupportedError."""
        folders = self.engine.folders
        folders.check(message.path)  # before anything there is looked at
        key = model_key(message)
        with refusing("a LoRA"):
            stack = lora_stack(message.loras, folders)
        if key in self.engine.models:
            return self.on_loaded(job, message, key, stack)
        checkpoint = self.engine.check_load(message.path, message.weight_dtype, message.matmul)
        with refusing("the model"):
            check_scales(checkpoint)

        def act():
            self.dispatcher.broadcast(message)
            reasons = self.load(message, _reporter(job))
            if reasons:  # no rank keeps it
                job.reply(Failure(f"the model could not be loaded ({'; '.join(reasons)})."))
                return
            self.paths[key] = message.path
            self.run(job)  # now that it is loaded: the LoRAs

        return act

    def on_loaded(self, job: Job, message: Load, key: str, stack: tuple[LoraUse, ...]) -> Act:
        """Refuse LoRAs that do not fit the loaded model ``key``. Raises UnsupportedError."""
        warnings = self.engine.check_loras(key, stack)

        def act():
            if stack:
                self.dispatcher.broadcast(message)
            name = self.engine.name(key, stack)
            info = {**self.engine.facts(key), "warnings": warnings, "ranks": self.reports[key]}
            job.reply(Loaded(name, self.engine.models[key].family.name, info))

        return act

    def on_describe(self, job: Job, message: Describe) -> Act:
        """Nothing runs. Raises UnsupportedError or ConfigError."""
        path = self.paths.get(message.model.partition(LORAS)[0], "")
        return partial(job.reply, Described(*self.engine.describe(message, path)))

    def on_unload(self, job: Job, message: Unload) -> Act:
        """A model that is not loaded is no error."""

        def act():
            self.dispatcher.broadcast(message)
            self.engine.unload(message.model)
            job.reply(Result())

        return act

    def on_sample(self, job: Job, message: Sample) -> Act:
        """Refuse a request that cannot run. Raises UnsupportedError or ConfigError."""
        self.engine.check_sample(message)
        return partial(self.sample, job, message)

    def sample(self, job: Job, message: Sample):
        """Denoise on all ranks."""
        self.dispatcher.broadcast(message)
        previews = Previews(message.preview_seconds, time.monotonic)
        total = len(message.tensors["sigmas"]) - 1
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
        self.reply(job, message.model, Result(stats | previews.stats, {"samples": samples, **tensors}))

    def reply(self, job: Job, model: str, result: Result):
        """Reply with what all ranks have computed, or refuse it where no value is a number."""
        try:
            for computed in result.tensors.values():
                self.engine.check_result(computed, model)
        except UnsupportedError as error:
            job.reply(Failure(str(error)))
        else:
            job.reply(result)

    def on_call(self, job: Job, message: ModelCall) -> Act:
        """Refuse a call that cannot run. Raises UnsupportedError."""
        self.engine.argument_cache.check(message)
        missing = self.engine.argument_cache.missing(message)
        if missing:
            return partial(job.reply, Result({"missing": missing}))
        self.engine.check_forward(message)
        return partial(self.call, job, message)

    def call(self, job: Job, message: ModelCall):
        """Call the model on all ranks."""
        self.dispatcher.broadcast(message)
        output, stats = self.engine.forward(message)
        self.reply(job, message.model, Result(stats, {"output": output}))


#: Message of a client -> its handler, and what a refusal calls it.
HANDLERS = {
    Arrange: (Leader.on_arrange, "the configuration"),
    Load: (Leader.on_load, "the model"),
    Describe: (Leader.on_describe, "what is to be described"),
    Unload: (Leader.on_unload, "what is to be freed"),
    Sample: (Leader.on_sample, "the request"),
    ModelCall: (Leader.on_call, "the call"),
}


def _reporter(job: Job):
    """Return a callback that reports to the client how many bytes of the file rank 0 has loaded."""
    rate = Previews(LOAD_SECONDS, time.monotonic)

    def report(done, total):
        if rate.due() or done == total:
            job.reply(Progress(done, total))

    return report


def model_key(message: Load) -> str:
    """Names what a Load loads: a file that changed on disk is another model. The same on every rank of a
    machine."""
    path = Path(message.path).resolve()
    stamp = [path.stat().st_mtime_ns, path.stat().st_size] if path.exists() else []
    what = [str(path), message.weight_dtype, message.matmul, stamp]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


@record
def main():
    """Join the others and serve. Raises what ends this rank, which torchrun then reports."""
    begun = start.begin()
    gc.freeze()  # what is imported stays: no collection looks through it again
    if begun.token:
        Leader(begun).lead()
    else:
        Worker(begun).follow()


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # at once: destructors of process groups wait for peers that may be gone
