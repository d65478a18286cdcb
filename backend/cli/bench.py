"""The command ``bench``: how fast a backend that runs answers, loads and samples.

    python -m backend.cli bench request.json --address ... --token-file ... [--rounds 5]

Each request of the file (as in the command ``sample``; docs/headless.md) is sampled once to fill caches and
then ``rounds`` times; the latents are thrown away. Prints one object of JSON a line: the socket's round trip,
and for each request the load, the steps, and median, least and most seconds. Other clients that use the
backend meanwhile are measured too.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from ..client.pool import Backend
from ..config import ConfigError, ParallelConfig
from ..protocol import Ping
from .sample_request import SampleRequest, read_requests
from .sample_tensors import sample_message
from .settings import read_settings
from .status import connect, parser_of

#: Round trips of the socket.
PINGS = 50


def main(arguments: list[str]) -> int:
    """Measure and print. Raises ConfigError, RefusedError and BackendError."""
    parser = parser_of("bench", __doc__)
    parser.add_argument("request", type=Path, help="a file of JSON")
    parser.add_argument("--config", default="{}", help="settings that travel with a request, as JSON")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each request, default 5")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        raise ConfigError(f"--rounds is {chosen.rounds}; measure at least once.")
    requests = read_requests(chosen.request.read_text(), chosen.request.absolute().parent)
    client = connect(chosen)
    config = read_settings(chosen.config, client.welcome)
    welcome = client.welcome
    round_trips = [1000 * timed(client.request, Ping())[0] for _ in range(PINGS)]
    about = {"degrees": welcome.degrees, "device": welcome.device, **spread("round_trip_ms", round_trips)}
    print(json.dumps(about))
    backend = Backend(config, client)
    for request in requests:
        print(json.dumps(measured(backend, request, config, chosen.rounds)), flush=True)
    backend.close()
    return 0


def measured(backend: Backend, request: SampleRequest, config: ParallelConfig, rounds: int) -> dict:
    """Return the seconds of a load (of what is loaded already: of finding it) and of samples."""
    load, loaded = timed(backend.load, *request.choice, loras=request.loras)
    message = sample_message(request, loaded, config.per_request)
    first, result = timed(backend.sample, message)
    every = [timed(backend.sample, message)[0] for _ in range(rounds)]
    steps = len(message.tensors["sigmas"]) - 1
    return {
        "model": Path(request.model).name,
        "latent": list(result.tensors["samples"].shape),
        "steps": steps,
        "load_seconds": round(load, 3),
        "first_seconds": round(first, 3),
        **spread("seconds", every),
        "seconds_per_step": round(statistics.median(every) / steps, 4),
    }


def timed(action: Callable, *arguments, **options) -> tuple:
    """Return the seconds of a call of ``action``, and what it returned."""
    began = time.monotonic()
    result = action(*arguments, **options)
    return time.monotonic() - began, result


def spread(name: str, values: list[float]) -> dict:
    """Return median, least and most of what was measured."""
    found = {"": statistics.median(values), "_least": min(values), "_most": max(values)}
    return {f"{name}{kind}": round(value, 3) for kind, value in found.items()}
