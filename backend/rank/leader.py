"""Rank 0: clients' requests, each refused here or run by all ranks. What can be refused is refused before the
broadcast: a failure inside a collective ends the rank, and torchrun ends its peers."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ..config import ConfigError, ParallelConfig
from ..errors import UnsupportedError
from ..loading.checkpoint import Checkpoint
from ..loading.files.scale_values import check_scales
from ..loading.lora.lora_keys import LoraUse, lora_stack
from ..loading.model_key import model_key
from ..protocol import (
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
    Release,
    Result,
    Sample,
    Shutdown,
    Unload,
    Welcome,
)
from ..rank_plan.request_size import size_of
from ..sampling.model_inputs import ModelInputs, run_config
from ..sampling.model_runner import LoadedModel
from ..sampling.step_loop import Callbacks, RequestCancelled
from ..sampling.validation import refusing
from ..serving.job_queue import CANCELLABLE, Job
from ..serving.progress import Previews, load_progress, progress
from ..serving.server import Server
from ..serving.step_times import noted
from . import start
from .admission import InsufficientMemory, Planned, RefusedByAllRanks
from .served_models import ServedFile, ServedModels

#: Rank 0 speaks to idle ranks this often (seconds), well within the timeout of a collective.
PING_SECONDS = 60.0
Act = Callable[[], None]  # what all ranks do after rank 0's checks


class Leader(ServedModels):
    """Rank 0: a queue of clients' requests, each refused here or run by all."""

    def __init__(self, begun: start.Start):
        super().__init__(begun)
        config = begun.config
        welcome = Welcome(
            world_size=config.world_size,
            device=begun.device,
            degrees=config.degrees,
            pids=self.pids,
            devices=self.admission.names,
            settings=config.of_ranks,
        )
        self.beats = begun.beats
        self.server = Server(begun.address, begun.token, welcome, self._models, self._of_rank, self.machines)

    def _models(self) -> dict[str, str]:
        loaded = self.engine.models.keys() - self.engine.lora_stacks.keys()
        files = {key: self.files.get(key) for key in loaded}  # one look: other threads call it
        return {key: file.path if file else "" for key, file in files.items()}

    def _of_rank(self, rank: int) -> dict:
        """Return what Report.ranks says of a rank's models and last steps, from any thread."""
        models = self.engine.models
        held = [
            ranks[rank]["weight_bytes"]
            for key, ranks in list(self.reports.items())
            if key in models and rank not in models[key].parked_on
        ]
        return {"weight_bytes": sum(held), **noted(self.beats, rank)}

    def lead(self):
        """Serve until a client says Shutdown."""
        while True:
            job = self.server.jobs.next(PING_SECONDS)
            if job is None:
                self.control.broadcast(Ping())
                self.free_parked()
                continue
            if isinstance(job.message, Shutdown):
                self.control.broadcast(job.message)
                self.server.write_out()
                return
            self.run(job)
            self.clock.note_memory(self.engine.memory.reserved())
            self.server.jobs.finish(job)

    def run(self, job: Job):
        """Refuse or run one request, and answer it in any case.

        Its handler looks at it while no other rank knows of it, so whatever it raises is a refusal. It
        returns what all ranks then do: an error of that ends this rank: its peers wait in a collective.
        """
        if job.is_abandoned:
            return
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
        if job.cancelled.is_set() and kind in CANCELLABLE:
            job.reply(Cancelled(0))
            return
        try:
            act()
        except RefusedByAllRanks as error:  # no rank goes on with it
            # without numbers an allocation failed in its midst (out_of_memory_error): nobody knows how many
            # bytes it wants, so all leave, and it runs again from its beginning
            every = not error.lacking
            if isinstance(error, InsufficientMemory) and self.free_abandoned(job.message, every=every):
                self.run(job)
                return
            job.reply(Failure(str(error), lacking=[list(each) for each in error.lacking.items()]))

    def on_arrange(self, job: Job, message: Arrange) -> Act:
        """Refuse what is no configuration of these ranks. Raises ConfigError."""
        try:
            config = ParallelConfig(**message.config).validate()
        except TypeError as error:
            what = f"the configuration is not one of this version: {error!s:.300}"
            raise ConfigError(f"{what}; use one version of the pack on both sides.") from None
        ranks = self.mesh.world_size
        if config.world_size != ranks:
            raise ConfigError(f"{config.product}, but this backend has {ranks}; start another.")

        def act():
            self.control.broadcast(message)
            self.arrange(config)
            welcome = replace(self.server.welcome, degrees=config.degrees, settings=config.of_ranks)
            self.server.welcome = welcome
            job.reply(welcome)

        return act

    def on_load(self, job: Job, message: Load) -> Act:
        """Refuse a model, or LoRAs of one that is loaded. Raises UnsupportedError."""
        folders = self.engine.folders
        folders.check(message.path)  # before anything there is looked at
        key = model_key(message)
        with refusing("a LoRA"):
            stack = lora_stack(message.loras, folders)
        if key in self.engine.models:
            return self._load_loras(job, message, key, stack)
        checked = self.engine.check_load(message.path, message.weight_dtype, message.matmul)
        checkpoint = checked.checkpoint
        with refusing("the model"):
            check_scales(checkpoint)
            planned = self.admission.plan_load(checkpoint, checked.dtype)
            planned = replace(planned, others=self._holds_others(job))
            products = self.engine.products(checked, message.matmul)
        autodetected = dict(checkpoint.autodetected or {})
        load_message = replace(message, autodetected=autodetected, products=list(map(list, products)))

        def act():
            self.control.broadcast(load_message)
            reasons = self.load(load_message, key, load_progress(job), planned, checked)
            if reasons:  # no rank keeps it
                job.reply(Failure(f"the model could not be loaded ({'; '.join(reasons)})."))
                return
            if key in self.engine.models:
                self.files[key] = ServedFile(message.path, checkpoint)
            self.run(job)  # the LoRAs of what is loaded, or what refuses it by what the ranks have learnt

        return act

    def _load_loras(self, job: Job, message: Load, key: str, stack: tuple[LoraUse, ...]) -> Act:
        """Refuse LoRAs that do not fit the loaded model ``key``. Raises UnsupportedError."""
        warnings = self.engine.check_loras(key, stack)

        def act():
            if stack:
                self.control.broadcast(message)
                reasons = self.load(message, key)
                if reasons:
                    job.reply(Failure(f"the LoRAs could not be added ({'; '.join(reasons)})."))
                    return
            self.named.setdefault(job.client, set()).add(key)
            name = self.engine.add_lora_stack(key, stack)
            model = self.engine.models[key]
            info = {
                **self.engine.facts(key),
                "warnings": warnings,
                "notes": [lora.note for lora in model.weights.open(stack)],
                "lora_bytes": list(model.whole_lora_bytes(stack)),
                "ranks": self.reports[key],
            }
            job.reply(Loaded(name, model.family.name, info))

        return act

    def on_describe(self, job: Job, message: Describe) -> Act:
        """Describe each rank; nothing runs. Raises UnsupportedError or ConfigError."""
        return partial(job.reply, Described(self.engine.describe(message, self._checkpoint(message.model))))

    def _checkpoint(self, model: str) -> Checkpoint:
        """Return the checkpoint of a loaded model. Raises UnsupportedError."""
        base = model.partition(LORAS)[0]
        self.engine.loaded(base)
        return self.files[base].checkpoint

    def plan(self, job: Job, message: Sample | ModelCall, inputs: ModelInputs) -> Planned:
        """Plan a checked request, which gives the model ``inputs``. Raises UnsupportedError."""
        model = self.engine.models[message.model]
        config = run_config(message, self.engine.config)
        checkpoint = self._checkpoint(message.model)
        size = size_of(message, config, checkpoint, inputs)
        plan = self.admission.plan_request(config, checkpoint, size, model.dtype, model.choices)
        return replace(plan, others=self._holds_others(job, model), inputs=inputs)

    def _holds_others(self, job: Job, model: LoadedModel | None = None) -> bool:
        """Return whether any device has weights of another model than this one that the client may unload."""
        others = filter(None, (self.engine.models.get(key) for key in self.named.get(job.client, ())))
        return any(other is not model and self.is_on_devices(other) for other in others)

    def on_unload(self, job: Job, message: Unload) -> Act:
        """Unload a model, if it is loaded. One that another client has loaded, too, is parked at most: that
        client may sample."""

        def act():
            sent = self.named.take_off(message, job.client)
            self.control.broadcast(sent)
            left = self.unload(sent)
            freed = message.model not in self.engine.models or not message.park
            dropped = [key for key in sent.yields if key not in self.engine.models]
            job.reply(Result({"left": left, "freed": freed, "dropped": dropped}))

        return act

    def on_release(self, job: Job, message: Release) -> Act:
        """Have ranks give cached memory back; nothing is refused."""

        def act():
            self.control.broadcast(message)
            self.release(message.ranks, message.forget)
            job.reply(Result())

        return act

    def on_sample(self, job: Job, message: Sample) -> Act:
        """Refuse a request that cannot run. Raises UnsupportedError or ConfigError."""
        inputs = self.engine.check_sample(message)
        return partial(self.sample, job, message, self.plan(job, message, inputs))

    def sample(self, job: Job, message: Sample, planned: Planned):
        """Denoise on all ranks."""
        self.control.broadcast(message)
        previews = Previews(message.preview_seconds, time.monotonic)
        job.total = total = len(message.tensors["sigmas"]) - 1
        tensors = {}

        def on_step(step, start):
            progress(job, step, total, previews, start)

        callbacks = Callbacks(on_step, job.cancelled.is_set, partial(tensors.__setitem__, "denoised"))

        def on_cancelled(step):
            job.reply(Cancelled(step))

        try:
            samples, stats = self.run_sample(message, callbacks, planned, on_cancelled)
        except RequestCancelled:  # and its client has been told
            return
        self.reply(job, message, Result(stats | previews.stats, {"samples": samples, **tensors}))

    def reply(self, job: Job, message: Sample | ModelCall, result: Result):
        """Reply with what all ranks have computed, or refuse it where no value is a number."""
        try:
            for computed in result.tensors.values():
                self.engine.check_result(computed, message)
        except UnsupportedError as error:
            job.reply(Failure(str(error)))
        else:
            job.reply(result)

    def on_call(self, job: Job, message: ModelCall) -> Act:
        """Refuse a call that cannot run. Raises UnsupportedError or ConfigError."""
        self.engine.argument_cache.check(message)
        missing = self.engine.argument_cache.missing(message)
        if missing:
            return partial(job.reply, Result({"missing": missing}))
        inputs = self.engine.check_forward(message)
        return partial(self.call, job, message, self.plan(job, message, inputs))

    def call(self, job: Job, message: ModelCall, planned: Planned):
        """Call the model on all ranks."""
        self.control.broadcast(message)
        output, stats = self.run_call(message, planned)
        self.reply(job, message, Result(stats, {"output": output}))


#: Message of a client -> its handler, and what a refusal calls it.
HANDLERS = {
    Arrange: (Leader.on_arrange, "the configuration"),
    Load: (Leader.on_load, "the model"),
    Describe: (Leader.on_describe, "what is to be described"),
    Unload: (Leader.on_unload, "what is to be freed"),
    Release: (Leader.on_release, "what is to be freed"),
    Sample: (Leader.on_sample, "the request"),
    ModelCall: (Leader.on_call, "the call"),
}
