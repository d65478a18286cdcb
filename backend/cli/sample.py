"""The command ``sample``: prompt embeddings in, latents out, without ComfyUI.

    python -m backend.cli sample request.json --config '{"ulysses_degree": 2}'

A request is an object of JSON, or a list of them, which run one after the other on the same ranks
(docs/headless.md has the entries). Without --address it starts the ranks and ends them.
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from ..client import pool
from ..client.client import BackendClient
from ..client.preflight import check_headers
from ..config import ConfigError, ParallelConfig
from ..protocol import Progress
from ..start import own_token
from .sample_request import SampleRequest, read_requests
from .sample_tensors import sample_message, write_result


def main(arguments: list[str]) -> int:
    """Sample the requests of a file; raises ConfigError, RefusedError or BackendError, in one sentence."""
    options = _options(arguments)
    text, folder = _source(options.request)
    requests = read_requests(text, folder)
    config = read_config(options.config)
    pool.allow(*(folder for request in requests for folder in request.allowed_folders()))
    try:
        if not options.address:
            for request in requests:
                check_headers(config, *request.wanted, pool.folders())
        backend = _backend(options, config)
        for request in requests:
            run(backend, request, config)
    finally:
        pool.close_all()
    return 0


def run(backend: pool.Backend, request: SampleRequest, config: ParallelConfig):
    """Load, sample and write one request."""
    loras = [tuple(lora) for lora in request.loras]
    path, weight_dtype, matmul = request.wanted
    loaded = backend.load(path, weight_dtype, keep=[request.wanted], loras=loras, matmul=matmul)
    for warning in loaded.info.get("warnings", []):
        if warning:
            print(warning, file=sys.stderr)
    result = backend.sample(sample_message(request, loaded, config.per_request), _show)
    assert result is not None  # nothing cancels it
    write_result(request, result.tensors["samples"], result.stats)
    print(f"{request.out}: {result.stats['seconds']:.2f} s", flush=True)


def read_config(text: str) -> ParallelConfig:
    """Return the ParallelConfig of a JSON object of its fields. Raises ConfigError."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--config is no JSON ({error}); write it like '{{\"ulysses_degree\": 2}}'."
        ) from error
    names = [each.name for each in fields(ParallelConfig)]
    unknown = [name for name in found if name not in names] if isinstance(found, dict) else [text]
    if unknown:
        raise ConfigError(f"--config has {unknown[0]!r:.80}; its entries are {', '.join(names)}.")
    return ParallelConfig(**found).validate()


def _backend(options: argparse.Namespace, config: ParallelConfig) -> pool.Backend:
    if not options.address:
        return pool.backend_for(config, show=lambda line: _line(line))
    return pool.Backend(config, BackendClient(options.address, own_token(options.token_file)))


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
    parser = argparse.ArgumentParser(
        prog="python -m backend.cli sample",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("request", help="a file of JSON, or - for standard input")
    parser.add_argument("--config", default="{}", help="fields of ParallelConfig as JSON")
    parser.add_argument("--address", default="", help="a backend that runs: unix:PATH or tcp:HOST:PORT")
    parser.add_argument("--token-file", help="its token; without it PARALLEL_DIT_TOKEN counts")
    return parser.parse_args(arguments)
