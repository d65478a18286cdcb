"""The backends that this process uses: reused while they live and their topology fits, launched or connected
otherwise. Imports neither ComfyUI nor torch.distributed."""

import logging
import os
import threading
import time
from dataclasses import asdict, replace

import torch

from .. import protocol
from ..config import ConfigError, ParallelConfig, in_words
from ..protocol import BackendError
from .client import BackendClient
from .launcher import BackendProcess, ClosedError

#: What a backend holds for a graph: path, weight_dtype, matmul.
Wanted = tuple[str, str, str]
#: Environment variable with the addresses that a graph may name.
ADDRESSES_VARIABLE = "PARALLEL_DIT_ADDRESSES"

_lock = threading.Lock()
#: ParallelConfig.topology() -> Backend. Holds at most one that we launched: they would share the same GPUs.
_backends: dict[tuple, "Backend"] = {}
#: Folders below which backends that we launch may load files.
_folders: set[str] = set()


class Backend:
    """A connected backend, its process where we launched it, and the models that it has loaded for us."""

    def __init__(self, config: ParallelConfig, client: BackendClient, process: BackendProcess | None = None):
        self.config = config
        self.client = client
        self.process = process
        self.models: dict[Wanted, str] = {}
        self.closed = False
        self._busy = threading.Lock()

    @property
    def welcome(self):
        return self.client.welcome

    def load(
        self,
        path: str,
        weight_dtype: str = "default",
        keep=None,
        check=lambda: None,
        loras=(),
        on_progress=lambda progress: None,
        matmul: str = "auto",
    ) -> protocol.Loaded:
        """Load a transformer, or find it loaded. ``keep``: what somebody still needs; with it, all others
        make room first. ``loras``: (path, strength) of each, in order. ``check`` and ``on_progress`` as in
        BackendClient.request."""
        key = (path, weight_dtype, matmul)
        message = protocol.Load(path, weight_dtype, [list(lora) for lora in loras], matmul)
        with self._busy:
            unused = [] if keep is None else [other for other in self.models if other not in (key, *keep)]
            for other in unused:
                self._request(protocol.Unload(self.models.pop(other)), check)
            loaded = self._request(message, check, on_progress)
            replaced = self.models.get(key)
            self.models[key] = loaded.base
            if replaced is not None and replaced != loaded.base:  # the file has changed since
                self._request(protocol.Unload(replaced), check)
            return loaded

    def describe(self, message: protocol.Describe) -> protocol.Described:
        """What each rank would hold and send; nothing runs."""
        with self._busy:
            return self._request(message)

    def unload(self, path: str, weight_dtype: str, matmul: str = "auto"):
        """Free a transformer on every rank, unless it is not loaded or a request runs."""
        if not self._busy.acquire(blocking=False):
            return
        try:
            model = self.models.pop((path, weight_dtype, matmul), None)
            if model is not None:
                self._request(protocol.Unload(model))
        finally:
            self._busy.release()

    def sample(self, message: protocol.Sample | protocol.ModelCall, *callbacks, **named_callbacks):
        """Sample as BackendClient does; name the rank and the reason where the backend ends. None also where
        this process ends it."""
        with self._busy:
            try:
                return self._explained(lambda: self.client.sample(message, *callbacks, **named_callbacks))
            except ClosedError:
                return None

    def can_become(self, config: ParallelConfig) -> bool:
        """Return whether our ranks can run ``config`` without starting again."""
        return self.process is not None and self.may_load and self.config.same_ranks(config)

    @property
    def may_load(self) -> bool:
        """Whether it may load from all folders allowed by now; who launches another one says from which."""
        return self.process is None or _folders <= self.process.models

    def become(self, config: ParallelConfig, check=lambda: None):
        """Run ``config`` on the same ranks and forget the models that these have freed for it."""
        fields = asdict(replace(config, device=self.welcome.device, gpus="", address=""))
        with self._busy:
            self.client.welcome = self._request(protocol.Arrange(fields), check)
            left = self._request(protocol.Ping(), check).models
        self.config = config
        self.models = {key: model for key, model in self.models.items() if model in left}

    def alive(self) -> bool:
        """Return whether the process runs and the connection is open; costs no round trip."""
        if self.client.closed or (self.process is not None and not self.process.running):
            return False
        if not self._busy.acquire(blocking=False):
            return True  # a request is under way, and finds out by itself
        try:
            return self.client.is_open()
        finally:
            self._busy.release()

    def loss(self) -> str:
        """Return one sentence on why a backend that is not alive has ended between two requests; empty where
        a request has said it already, or where we have closed it."""
        if self.closed:
            return ""
        if self.process is None:
            return f"The backend at {self.config.address} has hung up since the last run."
        return self.process.failure_cause()

    def close(self):
        """Hang up, and end the processes where they are ours."""
        self.closed = True
        if self.process is not None:
            self.process.close()
        self.client.close()

    def _request(self, message, *watching):
        return self._explained(lambda: self.client.request(message, *watching))

    def _explained(self, action):
        try:
            return action()
        except BackendError as error:
            if self.process is None:
                raise BackendError(f"{error}; the next run connects again.") from error
            raise self.process.failure() from error
        finally:
            if self.client.closed:
                self.close()


def allow(*folders: str | os.PathLike):
    """Let backends load files below ``folders``; without a call nothing can be loaded. One that was launched
    before ends when it is next needed."""
    _folders.update(os.path.abspath(folder) for folder in folders)


def backend_for(
    config: ParallelConfig,
    check=lambda: None,
    warn=lambda sentence: None,
    show=lambda line: None,
) -> Backend:
    """Return a live backend of this topology: the one at hand, a new connection to ``config.address``, or a
    new launch, during which ``check`` is called ten times a second and may raise to give up.

    ``warn`` gets a sentence where the one at hand has ended by itself since it was last used;
    ``show`` gets a line on how long a launch has taken so far, as often as ``check`` is called. Raises
    ConfigError where ``config`` cannot run here, BackendError where the backend does not come up.
    """
    key = config.validate().topology()
    with _lock:
        backend = _backends.get(key)
        if backend is not None and backend.may_load and backend.alive():
            return backend
        _report_losses(warn)
        _drop(key)
        if config.address:
            backend = _connect(config)
        else:
            backend = _changed(config, check) or _launch(config, check, show)
        _backends[key] = backend
        return backend


def folders() -> list[str]:
    """Return from below which folders backends that we launch may load files."""
    return sorted(_folders)


def keeps_weights(config: ParallelConfig) -> bool:
    """Return whether ``backend_for(config)`` would find a running backend's weights where they belong."""
    return any(
        running.can_become(config) and running.config.same_weights(config) and running.alive()
        for running in list(_backends.values())
    )


def backend_at_hand(config: ParallelConfig) -> Backend | None:
    """Return the backend of this topology if there is one, alive or not."""
    return _backends.get(config.topology())


def launched() -> Backend | None:
    """Return the live backend whose ranks we have started, if there is one."""
    return next((b for b in list(_backends.values()) if b.process is not None and b.alive()), None)


def backend_holding(wanted: Wanted) -> Backend | None:
    """Return a backend that has loaded ``wanted`` for us, alive or not."""
    return next((backend for backend in list(_backends.values()) if wanted in backend.models), None)


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
        loss = backend.loss()
        if loss:
            logging.warning("parallel-dit: %s", loss)
            warn(loss)
        _drop(key)


def _drop(key: tuple):
    backend = _backends.pop(key, None)
    if backend is not None:
        backend.close()


def _changed(config: ParallelConfig, check) -> Backend | None:
    """Change the backend that we launched into ``config``; None where there is none or it has to end."""
    for key, running in [(k, b) for k, b in _backends.items() if b.process is not None]:
        before = running.config
        names = (before.product, config.product)
        if running.can_become(config) and running.alive():
            try:
                running.become(config, check)
            except BackendError as error:
                logging.warning("parallel-dit: %s", error)
            else:
                what = "the model is loaded again, since each rank's share of the weights is another"
                if before.same_weights(config):
                    what = "each keeps its weights, which are the same"
                logging.info("parallel-dit: the ranks for %s go on as %s: %s", *names, what)
                return _backends.pop(key)
        what = "the ranks for %s end and the model is loaded again: %s are other ranks"
        logging.info("parallel-dit: " + what, *names)
        _drop(key)
    return None


def _launch(config: ParallelConfig, check, show) -> Backend:
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"
    began = time.monotonic()

    device = config.resolve_device(torch.cuda.device_count())
    process = BackendProcess(config, device, _folders)

    def wait():
        ready = process.ready_ranks
        state = f": {ready} of {config.world_size} ready" if ready else ""
        show(f"starting {ranks}, {time.monotonic() - began:.0f} s{state}")
        check()

    logging.info("parallel-dit: starting %s on %s, log %s", config.product, device, process.log)
    try:
        return Backend(config, process.wait_ready(check=wait), process)
    except BaseException:
        process.close()
        raise


def _connect(config: ParallelConfig) -> Backend:
    # graphs come from strangers: they may name only what this process's starter has listed
    allowed = [name.strip() for name in os.environ.get(ADDRESSES_VARIABLE, "").split(",")]
    if config.address not in allowed:
        raise ConfigError(
            f"address is {config.address[:200]!r}, which {ADDRESSES_VARIABLE} does not list; a graph may "
            f"name only backends that whoever starts ComfyUI allows there (exact addresses, with commas), or "
            f"clear address to launch one here."
        )
    token = os.environ.get("PARALLEL_DIT_TOKEN", "")
    if not token:
        what = f"address is {config.address!r} but the environment has no PARALLEL_DIT_TOKEN"
        raise ConfigError(f"{what}; set it to the token that this backend was started with.")
    try:
        client = BackendClient(config.address, token)
    except OSError as error:
        why = f"No backend listens at {config.address} ({error})"
        raise BackendError(f"{why}; start one there, or clear address to launch one here.") from error
    runs = client.welcome.degrees
    if runs != config.degrees:
        client.close()
        raise ConfigError(
            f"the backend at {config.address} runs with {in_words(runs)}, but Parallel Config has "
            f"{in_words(config.degrees)}; set the same degrees."
        )
    return Backend(config, client)
