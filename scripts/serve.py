"""Starts a backend that graphs and scripts connect to by its address, and says how one is.

    python scripts/serve.py start --address unix:/run/pdit/backend.sock --token-file /run/pdit/token \\
        --config '{"ulysses_degree": 2}' --models ~/models
    python scripts/serve.py status --address ... --token-file ... [--prometheus]
    python scripts/serve.py stop --address ... --token-file ...

`start` stays in the foreground, for systemd or a container: it ends its ranks with itself, watches their
heartbeats, and ends with 1 and one sentence where the backend ends by itself. The socket's folder and the
token's file must be this user's alone (docs/security.md). One machine; several: docs/security.md.
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch

from backend.client.client import BackendClient, open_socket
from backend.client.launcher import BackendProcess
from backend.config import ConfigError, ParallelConfig
from backend.protocol import BackendError, Report, Shutdown, Status
from backend.start import own_token

#: Metric -> its help; values are made by ``metrics``.
METRICS = {
    "up_seconds": "Seconds since the ranks have started.",
    "models": "Transformers that are loaded.",
    "rank_weight_bytes": "Weights that a rank holds.",
    "rank_resident_bytes": "Memory of a rank's process.",
    "running_seconds": "Seconds of the request under way, 0 for none.",
    "waiting": "Requests that wait.",
    "answered_total": "Requests that were answered.",
}


def start(options: argparse.Namespace, token: str) -> int:
    """Serve until a signal or a client ends it; 1 where it ends by itself."""
    config = ParallelConfig(**json.loads(options.config)).validate()
    device = config.resolve_device(torch.cuda.device_count())
    remove_stale(options.address)
    process = BackendProcess(config, device, options.models, options.address, token)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        process.wait_ready()
        print(f"{config.product} on {device} at {options.address}, log {process.log}", flush=True)
        while process.running:
            time.sleep(0.5)
        if process.ended_as_asked:
            return 0
        print(process.failure_cause(), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        process.close()
        remove_stale(options.address)


def remove_stale(address: str):
    """Remove the socket that a killed backend has left, on which nobody listens."""
    kind, _, path = address.partition(":")
    if kind == "unix" and Path(path).is_socket():
        try:
            open_socket(address).close()
        except ConnectionRefusedError:
            Path(path).unlink()


def status(client: BackendClient, prometheus: bool) -> str:
    """Return how a backend is, as JSON or as Prometheus's text."""
    report = client.request(Status())
    if prometheus:
        return metrics(report)
    return json.dumps(
        {"degrees": client.welcome.degrees, "device": client.welcome.device, **asdict(report)}, indent=1
    )


def metrics(report: Report) -> str:
    """Return a report in Prometheus's text format (exposition format 0.0.4)."""
    values = {
        "up_seconds": {"": report.seconds},
        "models": {"": len(report.models)},
        "running_seconds": {"": report.running_seconds},
        "waiting": {"": report.waiting},
        "answered_total": {f'{{kind="{kind}"}}': count for kind, count in report.answered.items()},
    }
    for name in ("weight_bytes", "resident_bytes"):
        values[f"rank_{name}"] = {f'{{rank="{rank["rank"]}"}}': rank[name] for rank in report.ranks}
    lines = []
    for name, text in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP parallel_dit_{name} {text}", f"# TYPE parallel_dit_{name} {kind}"]
        lines += [f"parallel_dit_{name}{labels} {value}" for labels, value in values[name].items()]
    return "\n".join(lines)


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("start", "status", "stop"))
    parser.add_argument("--address", required=True, help="unix:PATH or tcp:HOST:PORT")
    parser.add_argument(
        "--token-file", help="a file of this user alone; without it PARALLEL_DIT_TOKEN counts"
    )
    parser.add_argument("--config", default="{}", help="start: fields of ParallelConfig as JSON")
    parser.add_argument(
        "--models", nargs="*", default=[], help="start: folders from which files may be loaded"
    )
    parser.add_argument("--prometheus", action="store_true", help="status: as Prometheus's text")
    options = parser.parse_args()
    try:
        token = own_token(options.token_file)
        if options.command == "start":
            return start(options, token)
        client = BackendClient(options.address, token)
        if options.command == "stop":
            client.send(Shutdown())
        else:
            print(status(client, options.prometheus))
        client.close()
    except (ConfigError, BackendError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
