"""Seconds from nothing to the first answer of a backend: processes, imports, process groups, the socket.

    python benchmarks/start.py [--ranks 2] [--rounds 5] [--device cpu|cuda]

A backend is launched as ComfyUI's nodes launch it, asked which models it has, and ended, in each round. Files
are in the system's cache after the start that is not counted.
"""

import time

import common
import report

from backend.client import pool
from backend.config import ParallelConfig
from backend.protocol import Ping


def start(config: ParallelConfig) -> float:
    """Return the seconds to the first answer of new ranks, and end them."""
    began = time.perf_counter()
    backend = pool.backend_for(config)
    backend.client.request(Ping())
    seconds = time.perf_counter() - began
    pool.close_all()
    return seconds


def main():
    """Measure, and print a table."""
    parser = common.parser(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, default=2)
    options = common.parse(parser)
    config = ParallelConfig(ulysses_degree=options.ranks, device=options.device)
    name = f"{options.ranks} ranks"
    start(config)
    rounds, busy = common.interleave({name: lambda: start(config)}, options.rounds, options.patience)
    seconds = common.spread(rounds[name])
    report.table(["", "seconds"], [[name, report.shown(seconds, 2)]])
    bars = [report.Bar(name, **seconds)]
    facts = {"rounds": rounds, "busy_percent": busy, "options": vars(options)}
    report.write("start", "Starting ranks", "seconds", bars, **facts)


if __name__ == "__main__":
    main()
