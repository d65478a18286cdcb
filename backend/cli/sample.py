"""The command ``sample``: prompt embeddings in, latents out, without ComfyUI.

    python -m backend.cli sample request.json --config '{"gpus": 2}'

A request is an object of JSON, or a list of them, which run one after the other on the same ranks
(docs/headless.md has the entries). Without --address it starts the ranks and ends them; --config has the
inputs of Parallel Config, whose degrees are chosen for each request unless one of them is set.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from ..client import pool
from ..client.planning import plan_for
from ..client.preflight import check_headers
from ..config import PER_REQUEST, ParallelConfig
from ..protocol import Progress
from .sample_request import SampleRequest, read_requests
from .sample_tensors import planned_request, sample_message, write_result
from .settings import THERE, Plan, read_entries, read_plan, read_settings
from .status import connect, parser_of


def main(arguments: list[str]) -> int:
    """Sample the requests of a file; raises ConfigError, RefusedError or BackendError, in one sentence."""
    options = _options(arguments)
    text, folder = _source(options.request)
    requests = read_requests(text, folder)
    if options.address:
        _run_at_address(options, requests)
        return 0
    config = read_plan(options.config)
    pool.allow(*(folder for request in requests for folder in request.allowed_folders()))
    try:
        plans = [planned(config, request) for request in requests]
        for request, plan in zip(requests, plans):
            check_headers(plan, *request.choice, pool.folders())
        for request, plan in zip(requests, plans):
            run(pool.backend_for(plan, show=_line), request, plan)
    finally:
        pool.close_all()
    return 0


def _run_at_address(options: argparse.Namespace, requests: list[SampleRequest]):
    """Run the requests on ranks that somebody else has started."""
    read_entries(options.config, PER_REQUEST, THERE)  # refused without a connection
    client = connect(options)
    try:
        config = read_settings(options.config, client.welcome)
        backend = pool.Backend(config, client)
        for request in requests:
            run(backend, request, config)
    finally:
        client.close()


def planned(config: Plan, request: SampleRequest) -> ParallelConfig:
    """Return the ranks for a request: those that ``config`` says, or those that the planner chooses, whose
    reasons are printed. Raises ConfigError where nothing fits, RefusedError and BackendError."""
    if isinstance(config, ParallelConfig):
        return config
    plan, lines = plan_for(config, request.choice, partial(planned_request, request), show=_line)
    if lines:
        _line("")
    for line in lines:
        print(line, file=sys.stderr)
    return plan


def run(backend: pool.Backend, request: SampleRequest, config: ParallelConfig):
    """Load, sample and write one request."""
    loaded = backend.load(*request.choice, keep=[request.choice], loras=request.loras)
    for warning in loaded.info.get("warnings", []):
        if warning:
            print(warning, file=sys.stderr)
    message = sample_message(request, loaded, config.per_request)
    result = backend.sample(message, _show)
    assert result is not None  # nothing cancels it
    write_result(request, result.tensors["samples"], result.stats, message.latent_shapes)
    print(f"{request.out}: {result.stats['seconds']:.2f} s", flush=True)


def _source(name: str) -> tuple[str, Path]:
    """Return the text of the requests, and the folder at which their paths begin."""
    if name == "-":
        return sys.stdin.read(), Path.cwd()
    return Path(name).read_text(), Path(name).absolute().parent


def _show(progress: Progress):
    _line(f"step {progress.step} of {progress.total}", end="\n" if progress.step == progress.total else "")


def _line(text: str, end: str = ""):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end=end, file=sys.stderr, flush=True)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("sample", __doc__, needs_address=False)
    parser.add_argument("request", help="a file of JSON, or - for standard input")
    parser.add_argument("--config", default="{}", help="inputs of Parallel Config as JSON")
    return parser.parse_args(arguments)
