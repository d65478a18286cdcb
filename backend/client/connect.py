"""Connects to a backend that somebody else has started."""

import os
import time
from collections.abc import Callable

from ..config import ConfigError, ParallelConfig, in_words
from ..protocol import BackendError
from ..runtime.callbacks import nothing
from .client import POLL_SECONDS, BackendClient
from .durations import READY_SECONDS

#: Environment variable with the addresses that a graph may name.
ADDRESSES_VARIABLE = "PARALLEL_DIT_ADDRESSES"
#: What is raised where nobody listens at an address: no socket, or that of one that has ended.
_NOT_THERE = (FileNotFoundError, ConnectionRefusedError)
#: Addresses at which this process has found a backend.
_met: set[str] = set()


def token_of_environment() -> str:
    """Return the token of backends that somebody else has started; empty without one."""
    return os.environ.get("PARALLEL_DIT_TOKEN", "").strip()


def connect(config: ParallelConfig, check=nothing, show=nothing) -> BackendClient:
    """Return a client of the backend at ``config.address``, also of one that starts again. ``check`` may
    raise to give up, ``show`` gets a line. Raises ConfigError where this process may not name it or the
    backend runs with other degrees or settings, BackendError where nobody listens."""
    # graphs come from strangers: they may name only what this process's starter has listed
    allowed = [name.strip() for name in os.environ.get(ADDRESSES_VARIABLE, "").split(",")]
    if config.address not in allowed:
        raise ConfigError(
            f"address is {config.address[:200]!r}, which {ADDRESSES_VARIABLE} does not list; a graph may "
            f"name only backends that whoever starts ComfyUI allows there (exact addresses, with commas), or "
            f"clear address to launch one here."
        )
    token = token_of_environment()
    if not token:
        what = f"address is {config.address!r} but the environment has no PARALLEL_DIT_TOKEN"
        raise ConfigError(f"{what}; set it to the token that this backend was started with.")
    client = _client(config.address, token, check, show)
    runs = client.welcome.degrees
    if runs != config.degrees:
        client.close()
        raise ConfigError(
            f"the backend at {config.address} runs with {in_words(runs)}, but Parallel Config has "
            f"{in_words(config.degrees)}; set the same degrees."
        )
    settings = client.welcome.settings
    asked = config.of_ranks
    others = [name for name, value in asked.items() if settings[name] != value]
    if others:
        client.close()
        raise ConfigError(
            f"the backend at {config.address} runs with {_listed(settings, others)}, but Parallel Config has "
            f"{_listed(asked, others)}; set the same."
        )
    return client


def _client(address: str, token: str, check: Callable, show: Callable) -> BackendClient:
    """Return a client of who listens at ``address``. One that we have met is waited for, as its service
    starts it again: a queue would fail within a minute. Raises BackendError."""
    end = time.monotonic() + (READY_SECONDS if address in _met else 0)
    while True:
        try:
            client = BackendClient(address, token, check)
            _met.add(address)
            return client
        except OSError as error:
            if not isinstance(error, _NOT_THERE) or time.monotonic() >= end:
                why = f"No backend listens at {address} ({error})"
                raise BackendError(f"{why}; start one there, or clear address to launch one here.") from error
        show(f"waiting for the backend at {address}")
        check()
        time.sleep(POLL_SECONDS)


def _listed(settings: dict, names: list[str]) -> str:
    return ", ".join(f"{name} {settings[name]!r:.200}" for name in names)
