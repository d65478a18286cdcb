"""The command ``sample``: prompt embeddings in, latents out, without ComfyUI.

    python -m backend.cli sample request.json --config '{"gpus": 2}'

A request is an object of JSON, or a list of them, which run one after the other on the same ranks
(docs/headless.md has the entries); what one of a list fails with is printed after its file's name, and the
others run. Without --address it starts the ranks and ends them; --config has the
inputs of Parallel Config, whose degrees are chosen for each request unless one of them is set.
"""

from ..runtime import lean_imports  # noqa: F401  # before all that imports torch and diffusers

# isort: split
import argparse
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from ..client import pool
from ..client.auto.model_choice import ModelChoice
from ..client.auto.open_patches import with_patches
from ..client.auto.planning import Asked, plan_for
from ..client.auto.preflight import check_headers
from ..config import PER_REQUEST, ConfigError, ParallelConfig
from ..protocol import Progress, RefusedError
from . import FAILURES
from .sample_request import SampleRequest, read_requests
from .sample_tensors import planned_request, sample_message, write_result
from .settings import THERE, Plan, read_entries, read_plan, read_settings
from .status import connect, parser_of


def main(arguments: list[str]) -> int:
    """Sample the requests of a file; 1 where one of a list fails. Raises ConfigError, RefusedError or
    BackendError, in one sentence, where a single one does, or none can run."""
    options = _options(arguments)
    requests = read_requests(*_source(options.request))
    if options.address:
        return _run_at_address(options, requests)
    choices = {request.choice for request in requests}
    config = read_plan(options.config)
    pool.allow(*(folder for request in requests for folder in request.allowed_folders()))
    plans: dict[int, ParallelConfig] = {}

    def plan(index: int, request: SampleRequest):
        found = planned(config, request)
        check_headers(found, request.choice, pool.folders())
        plans[index] = found

    def sample(index: int, request: SampleRequest):
        if index in plans:
            own = plans[index]
            # their refusals name what the user has set, not the patches that were chosen for one request
            ranks = config if isinstance(config, ParallelConfig) else own
            run(pool.backend_for(ranks, show=_line), request, own, choices)

    try:
        return for_each(requests, plan) | for_each(requests, sample)
    finally:
        pool.close_all()


def for_each(requests: list[SampleRequest], action: Callable[[int, SampleRequest], None]) -> int:
    """Do ``action`` for every request. Of several, print what one fails with, which else is raised, and
    return 1."""
    status = 0
    for index, request in enumerate(requests):
        try:
            action(index, request)
        except FAILURES as error:
            if len(requests) == 1:
                raise
            status = 1
            print(f"{request.out}: {error}", file=sys.stderr, flush=True)
    return status


def _run_at_address(options: argparse.Namespace, requests: list[SampleRequest]) -> int:
    """Run the requests on ranks that somebody else has started; 1 where one of several fails."""
    read_entries(options.config, PER_REQUEST, THERE)  # refused without a connection
    choices = {request.choice for request in requests}
    backend = _connected(options)

    def sample(_: int, request: SampleRequest):
        nonlocal backend
        if backend.client.closed:  # it ended with the request before
            backend = _connected(options)
        run(backend, request, backend.config, choices)

    try:
        return for_each(requests, sample)
    finally:
        backend.client.close()


def _connected(options: argparse.Namespace) -> pool.Backend:
    client = connect(options)
    try:
        return pool.Backend(read_settings(options.config, client.welcome), client)
    except ConfigError:
        client.close()
        raise


def planned(config: Plan, request: SampleRequest) -> ParallelConfig:
    """Return the ranks of ``config``, or those that the planner chooses, with the request's patches, and
    print why. Raises ConfigError where nothing fits, RefusedError and BackendError."""
    estimate = partial(planned_request, request)
    if isinstance(config, ParallelConfig):
        plan, lines = with_patches(config, request.choice, estimate)
    else:
        plan, lines = plan_for(Asked(config, request.choice, estimate), show=_line)
    if lines:
        _line("")
    for line in lines:
        print(line, file=sys.stderr)
    return plan


def run(
    backend: pool.Backend,
    request: SampleRequest,
    config: ParallelConfig,
    keep: Collection[ModelChoice] = (),
):
    """Load, sample and write one request, next to the models ``keep`` as far as memory allows."""
    try:
        result, shapes = _sampled(backend, request, config, keep)
    except RefusedError as error:
        if not error.lacking or not backend.models.keys() - {request.choice}:
            raise
        result, shapes = _sampled(backend, request, config, ())
    write_result(request, result.tensors["samples"], result.stats, shapes)
    print(f"{request.out}: {result.stats['seconds']:.2f} s", flush=True)


def _sampled(
    backend: pool.Backend, request: SampleRequest, config: ParallelConfig, keep: Collection[ModelChoice]
):
    """Return the result of a request, and the shapes of its latents."""
    waits = partial(_show_turn, backend)
    loaded = backend.load(*request.choice, keep=[request.choice, *keep], loras=request.loras, check=waits)
    for warning in loaded.info.get("warnings", []):
        if warning:
            print(warning, file=sys.stderr)
    message = sample_message(request, loaded, config.per_request)
    result = backend.sample(message, _show, waits)
    assert result is not None  # nothing cancels it
    return result, message.latent_shapes


def _source(name: str) -> tuple[str, Path]:
    """Return the text of the requests, and the folder at which their paths begin."""
    if name == "-":
        return sys.stdin.read(), Path.cwd()
    return Path(name).read_text(), Path(name).absolute().parent


def _show(progress: Progress):
    _line(f"step {progress.step} of {progress.total}", end="\n" if progress.step == progress.total else "")


def _show_turn(backend: pool.Backend) -> bool:
    """Show for which other client's request one to ``backend`` waits; nothing cancels it."""
    if line := backend.wait_line:
        _line(line)
    return False


def _line(text: str, end: str = ""):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end=end, file=sys.stderr, flush=True)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("sample", __doc__, needs_address=False)
    parser.add_argument("request", help="a file of JSON, or - for standard input")
    parser.add_argument("--config", default="{}", help="inputs of Parallel Config as JSON")
    return parser.parse_args(arguments)
