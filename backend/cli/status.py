"""The commands ``status`` and ``stop`` for a backend that runs.

    python -m backend.cli status --address unix:/run/pdit/backend.sock --token-file /run/pdit/token \\
        [--prometheus]
    python -m backend.cli stop --address ... --token-file ...
"""

import argparse
import json
import os
from contextlib import suppress
from dataclasses import asdict

from ..client.client import BackendClient
from ..client.machines.machines import placement
from ..protocol import BackendError, Report, Shutdown, Status
from ..rank.start import own_token

#: Metric -> its help; values are made by ``metrics``.
METRICS = {
    "up_seconds": "Seconds since the ranks have started.",
    "models": "Transformers that are loaded.",
    "rank_weight_bytes": "Weights that a rank holds on its device.",
    "rank_resident_bytes": "Memory of a rank's process; 0 on another machine than rank 0's.",
    "running_seconds": "Seconds of the request under way, 0 for none.",
    "waiting": "Requests that wait.",
    "answered_total": "Requests that were answered.",
    "last_error_info": "1, with the last refusal as a label; absent without one.",
}


def main(arguments: list[str]) -> int:
    """Print how a backend is. Raises BackendError and ConfigError."""
    parser = parser_of("status", __doc__)
    parser.add_argument("--prometheus", action="store_true", help="as Prometheus's text, instead of JSON")
    chosen = parser.parse_args(arguments)
    client = connect(chosen)
    print(status(client, chosen.prometheus))
    client.close()
    return 0


def stop(arguments: list[str]) -> int:
    """Have a backend end, once it has answered what waits. Raises BackendError and ConfigError."""
    client = connect(parser_of("stop", __doc__).parse_args(arguments))
    with suppress(BackendError):  # it has hung up: its ranks end
        client.request(Shutdown())
    return 0


def parser_of(command: str, doc: str | None, needs_address: bool = True) -> argparse.ArgumentParser:
    """Return the parser of a command of a backend."""
    parser = argparse.ArgumentParser(
        prog=f"python -m backend.cli {command}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = "the backend's, unix:PATH or tcp:HOST:PORT"
    parser.add_argument("--address", type=_address, default="", required=needs_address, help=where)
    secret = "a file of this user alone with the token; without it PARALLEL_DIT_TOKEN counts"
    parser.add_argument("--token-file", help=secret)
    return parser


def connect(chosen: argparse.Namespace) -> BackendClient:
    """Return a client of the backend that the command line names. BackendError where there is none."""
    token = own_token(chosen.token_file)
    try:
        return BackendClient(chosen.address, token)
    except OSError as error:
        raise BackendError(
            f"no backend listens at {chosen.address} ({error}); start one there, or correct --address."
        ) from None


def _address(text: str) -> str:
    """Return an address whose path does not depend on the folder; shells leave the ~ of unix:~/ as it is."""
    kind, _, path = text.partition(":")
    return f"unix:{os.path.abspath(os.path.expanduser(path))}" if kind == "unix" and path else text


def status(client: BackendClient, prometheus: bool) -> str:
    """Return how a backend is, as JSON or as Prometheus's text."""
    report = client.request(Status())
    if prometheus:
        return metrics(report)
    degrees = client.welcome.degrees
    state = {"degrees": degrees, "device": client.welcome.device, **asdict(report)}
    machines = 1 + max(rank["machine"] for rank in report.ranks)
    if machines > 1:
        state["placement"] = placement(degrees, machines)
    return json.dumps(state, indent=1)


def metrics(report: Report) -> str:
    """Return a report in Prometheus's text format (exposition format 0.0.4)."""
    values = {
        "up_seconds": {"": report.seconds},
        "models": {"": len(report.models)},
        "running_seconds": {"": report.running_seconds},
        "waiting": {"": report.waiting},
        "answered_total": {f'{{kind="{kind}"}}': count for kind, count in report.answered.items()},
    }
    if report.last_error:
        values["last_error_info"] = {f'{{error="{_escaped(report.last_error)}"}}': 1}
    for name in ("weight_bytes", "resident_bytes"):
        values[f"rank_{name}"] = {f'{{rank="{rank["rank"]}"}}': rank[name] for rank in report.ranks}
    lines = []
    for name, text in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP parallel_dit_{name} {text}", f"# TYPE parallel_dit_{name} {kind}"]
        lines += [f"parallel_dit_{name}{labels} {value}" for labels, value in values.get(name, {}).items()]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
