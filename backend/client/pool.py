"""The backends that this process uses: reused while they live and fit, launched or connected otherwise."""

import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial

import torch

from .. import protocol
from ..config import ParallelConfig
from ..protocol import BackendError
from ..runtime.callbacks import never, nothing
from .auto.model_choice import ModelChoice
from .connect import connect
from .connected import Connected
from .idle import watch
from .interrupts import POLL_SECONDS, CancelledError, InterruptWatch, cancel, turn
from .launching.launcher import BackendProcess, ClosedError
from .room import Room, with_room

_lock = threading.Lock()
#: ParallelConfig.topology() -> Backend. Holds at most one that we launched: they would share the same GPUs.
_backends: dict[tuple, "Backend"] = {}
#: Folders below which backends that we launch may load files.
_folders: set[str] = set()


class Backend(Connected):
    """A connected backend, its process where we launched it, and the models that it has loaded for us."""

    def load(
        self,
        path: str,
        weight_dtype: str = "default",
        matmul: str = "auto",
        *,
        keep: Collection[ModelChoice] | None = None,
        loras=(),
        check=nothing,
        on_progress=nothing,
        room: Room | None = None,
        all_ranks: bool = False,
    ) -> protocol.Loaded:
        """Load a transformer, or find it loaded. ``keep``: what somebody still needs; all others make room
        first. ``loras``: (path, strength), in order. ``room``: on devices that ranks share with us;
        ``all_ranks``: as in with_room."""
        key = ModelChoice(path, weight_dtype, matmul)
        message = protocol.Load(path, weight_dtype, [list(lora) for lora in loras], matmul)
        leaving = InterruptWatch(self.client, check)
        with turn(self._busy, check):
            for other in set() if keep is None else self.models.keys() - {key, *keep}:
                leaving.ask(self._request, protocol.Unload(self.models[other]))
                del self.models[other]  # an interrupt may have taken the request out of the queue
        leaving.end()
        interrupts = InterruptWatch(self.client, check, on_progress, is_short=key in self.models)

        def load(message) -> protocol.Loaded:
            with turn(self._busy, check):
                loaded = interrupts.ask(self._request, message)
                replaced = self.models.pop(key, None)
                self.models[key] = loaded.base  # now the last of them
                self.aside.discard(key)
                if replaced not in (None, loaded.base):  # the file has changed since
                    self.replaced.add(replaced)
                self.replaced -= {*self.models.values()}  # of a file that is again as it was
                for name in list(self.replaced):
                    leaving.ask(self._request, protocol.Unload(name))
                    self.replaced.discard(name)
            return loaded

        loaded = with_room(room, self.client, message, load, all_ranks)
        leaving.end()
        interrupts.end()
        return loaded

    def describe(self, message: protocol.Describe, check=nothing) -> protocol.Described:
        """Return what each rank would hold and send. ``check`` may interrupt a wait for others."""
        with turn(self._busy, check):
            described = (interrupts := InterruptWatch(self.client, check)).ask(self._request, message)
        interrupts.end()
        return described

    def unload(
        self,
        choice: ModelChoice,
        park=True,
        ranks: Collection = (),
        waits=False,
        check=nothing,
        yields: Collection[ModelChoice] = (),
    ) -> list[int]:
        """Take a transformer off the device of every rank; ``park``: into host memory where that has room, on
        ``ranks`` alone if there are any. ``yields``: models of which parked ones make room there, the first
        one first. Return the ranks whose devices hold nothing of it now: none where it is not loaded, or
        while a request runs. ``check`` may interrupt a wait for others."""
        if not self._busy.acquire(timeout=POLL_SECONDS):  # alive() of another thread has it for a moment
            return []
        try:
            if choice not in self.models:
                return []
            spare = [self.models[each] for each in yields if each in self.models]
            message = protocol.Unload(self.models[choice], park, list(ranks), waits=waits, yields=spare)
            done = (interrupts := InterruptWatch(self.client, check)).ask(self._request, message).stats
            gone = {*done.get("dropped", ()), *([message.model] if done["freed"] else [])}
            self.models = {key: name for key, name in self.models.items() if name not in gone}
            interrupts.end()
            return done["left"]
        finally:
            self._busy.release()

    def release(self, room: Room | None, check=nothing, forget: Sequence[str] = ()) -> bool:
        """Have ranks give cached memory back on devices that they share with this process; return whether
        they have: not where there are none, or while another client's request runs. After one that Cancel has
        left they will. ``check`` may interrupt a wait for others; ``forget``: as in Release."""
        ranks = room.shared_ranks(self.welcome) if room else []
        if not ranks or not self.alive():
            return False
        message = protocol.Release(ranks, list(forget))
        if self.is_left:  # nobody waits for its end
            with suppress(RuntimeError):  # this process may have no more threads
                threading.Thread(target=self._release_later, args=(message,), daemon=True).start()
            return False
        with turn(self._busy, check):
            done = self._request(message).stats
        return "freed" not in done  # as the answer says that comes at once

    def _release_later(self, message: protocol.Release):
        """Have ranks give cached memory back once what Cancel has left has ended."""
        with suppress(BackendError), turn(self._busy, nothing):
            self._request(message)

    def sample(
        self,
        message: protocol.Sample | protocol.ModelCall,
        on_progress=nothing,
        should_cancel=never,
        meanwhile=nothing,
        room: Room | None = None,
        all_ranks: bool = False,
        leaves=False,
    ):
        """Sample as BackendClient does; name rank and reason where the backend ends. None also where this
        process ends it, as where a cancelled request does not end. ``room``, ``all_ranks`` as in load. What
        ``leaves`` returns soon after Cancel; until its step has ended nothing else is sent (``settled``)."""

        is_left = False

        def sample(message):
            nonlocal is_left
            callbacks = (on_progress, should_cancel, meanwhile)
            with ExitStack() as held:
                held.enter_context(turn(self._busy, partial(cancel, should_cancel)))
                try:
                    return self._explained(self.client.sample, message, *callbacks, leaves)
                finally:
                    is_left = self.client.left is not None
                    if is_left:
                        self.leave(held.pop_all())

        try:
            result = with_room(room, self.client, message, sample, all_ranks)
        except (CancelledError, ClosedError):  # before its turn; or somebody ends the ranks, or this process
            return None
        if result is None and not is_left:
            self.report_end()
        return result

    def can_become(self, config: ParallelConfig) -> bool:
        """Return whether our ranks can run ``config`` without starting again."""
        return self.process is not None and self.may_load and self.config.same_ranks(config)

    @property
    def may_load(self) -> bool:
        """Return whether it may load from all folders that are allowed by now. Of one that runs at an
        address, who started it has said from which."""
        return self.process is None or _folders <= self.process.models

    def become(self, config: ParallelConfig, check=nothing) -> InterruptWatch:
        """Run ``config`` on the same ranks, and forget models that they have freed for it. Return the watch
        that may hold an interrupt by ``check``."""
        fields = asdict(replace(config, device=self.welcome.device, gpus="", address=""))
        interrupts = InterruptWatch(self.client, check)
        with turn(self._busy, check):
            self.client.welcome = interrupts.ask(self._request, protocol.Arrange(fields))
            left = interrupts.ask(self._request, protocol.Ping()).models
        self.config = config
        self.models = {key: model for key, model in self.models.items() if model in left}
        return interrupts


def allow(*folders: str | os.PathLike):
    """Let backends load files below ``folders``, too; without a call nothing can be loaded. One that was
    launched before ends when it is next needed."""
    _folders.update(os.path.abspath(folder) for folder in folders)


def backend_for(
    config: ParallelConfig,
    check=nothing,
    warn=nothing,
    show=nothing,
    make_room=nothing,
) -> Backend:
    """Return a live backend of this topology: the one at hand, a new connection to ``config.address``, or a
    new launch, during which ``check`` is called ten times a second and may raise to give up. A backend at an
    address that has ended since is waited for as long as for a launch.

    ``warn`` gets a sentence where the one at hand has ended by itself since it was last used; ``show`` a line
    on the seconds of a launch, or of a step that Cancel has left, as often as ``check``; ``make_room()`` goes
    before a launch, after the end of ranks that it replaces. Raises ConfigError where ``config`` cannot run
    here, BackendError where the backend does not come up.
    """
    key = config.validate().topology()
    with turn(_lock, check):
        backend = _backends.get(key)
        if backend is not None and backend.may_load and backend.settled(check, show):
            backend.last_used = time.monotonic()
            return backend
        for other in list(_backends.values()):  # whose ranks may go on for this run, if they live
            if not config.address and other.can_become(config):
                other.settled(check, show)
        _report_losses(warn)
        _drop(key)
        if config.address:
            backend = Backend(config, connect(config, check, show))
        else:
            backend = _changed(config, check) or _launch(config, check, show, make_room)
        _backends[key] = backend
        return backend


def folders() -> list[str]:
    """Return from below which folders backends that we launch may load files."""
    return sorted(_folders)


def backend_at_hand(config: ParallelConfig) -> Backend | None:
    """Return the backend of this topology if there is one, alive or not."""
    return _backends.get(config.topology())


def backends() -> list[Backend]:
    """Return every backend that this process uses, alive or not."""
    return list(_backends.values())


def launched() -> Backend | None:
    """Return the live backend whose ranks we have started, if there is one."""
    return next((b for b in backends() if b.process is not None and b.alive()), None)


def close_idle(seconds: float):
    """End every backend that this process launched and has not used for so long."""
    with _lock:
        for key in [key for key, backend in _backends.items() if backend.is_idle(seconds)]:
            logging.info("parallel-dit: the ranks were idle for %.0f min and end", seconds / 60)
            _drop(key)


def close_all():
    """End every backend that this process launched and hang up on the others."""
    with _lock:
        for key in list(_backends):
            _drop(key)


def _report_losses(warn):
    """Say once of each backend that has ended by itself why it did, and keep its log."""
    for key, backend in list(_backends.items()):
        if backend.alive():
            continue
        if loss := backend.loss():
            logging.warning("parallel-dit: %s", loss)
            warn(loss)
        _drop(key)


def _drop(key: tuple):
    if backend := _backends.pop(key, None):
        backend.close()


def _changed(config: ParallelConfig, check) -> Backend | None:
    """Change the backend that we launched into ``config``; None where there is none or it has to end."""
    for key, running in [(k, b) for k, b in _backends.items() if b.process is not None]:
        before = running.config
        names = (before.product, config.product)
        if running.can_become(config) and running.alive():
            try:
                interrupts = running.become(config, check)
            except BackendError as error:
                logging.warning("parallel-dit: %s", error)
            else:
                what = "the model is loaded again, since each rank's share of the weights is another"
                if before.same_weights(config):
                    what = "each keeps its weights, which are the same"
                logging.info("parallel-dit: the ranks for %s go on as %s: %s", *names, what)
                _backends[config.topology()] = _backends.pop(key)
                interrupts.end()
                return running
        what = "the ranks for %s end and the model is loaded again: %s are other ranks"
        logging.info("parallel-dit: " + what, *names)
        _drop(key)
    return None


def _launch(config: ParallelConfig, check, show, make_room) -> Backend:
    make_room()
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"
    began = time.monotonic()
    watch(close_idle)
    device = config.resolve_device(torch.cuda.device_count())
    process = BackendProcess(config, device, _folders)

    def wait():
        show(f"starting {ranks}, {time.monotonic() - began:.0f} s{process.ready_text}")
        check()

    logging.info("parallel-dit: starting %s on %s, log %s", config.product, device, process.log)
    try:
        return Backend(config, process.wait_ready(check=wait), process)
    except BaseException:
        process.close()
        raise
