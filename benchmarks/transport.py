"""What the socket costs: latents there and back through the protocol's framing, queueing again on a warm
backend, and previews.

    python benchmarks/transport.py [--quick] [--only latents requeue calls previews] [--ways ulysses cfg
    pipefusion]

Round trips go to another process over AF_UNIX, a Sample there and a Result with the same tensor back, without
any sampling. The re-queue overhead is a one-step request's wall time at the client less the engine's own
seconds, on a backend launched as ComfyUI's nodes launch it. Before each request the
client does what the nodes do: it asks whether the backend lives, and for the model. Calls of the model and
previews: calls.py, previews.py.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import calls
import common
import previews
import report
import torch

from backend import protocol
from backend.client import pool
from backend.config import ParallelConfig
from backend.protocol import framing, socket_options

#: Latent -> shape, and most milliseconds for its round trip.
LATENTS = {
    "Flux, 1024 px": ((1, 16, 128, 128), 1.5),
    "Wan, 81 frames, 1280x720": ((1, 16, 21, 90, 160), 12.0),
    calls.TRANSFER: (calls.SHAPE, 3.0),
}
#: Most milliseconds of a request on a warm backend that the engine does not see.
REQUEUE_GOAL = 20.0
TINY = dict(num_layers=1, num_single_layers=1, num_attention_heads=2)
PARTS = ("latents", "requeue", "calls", "previews")


def echo(path: str):
    """The other process: answer every request with its tensor until the client leaves."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
    socket_options.prepare(connection)
    with connection:
        try:
            while True:
                framing.send(
                    connection,
                    protocol.Result(tensors={"samples": framing.receive(connection).tensors["noise"]}),
                )
        except ConnectionError:
            return


def connected(path: str) -> socket.socket:
    """A socket to the echo process, once it listens."""
    sock, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + 60
    while True:
        try:
            sock.connect(path)
            socket_options.prepare(sock)
            return sock
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def round_trips(sock: socket.socket, shape: tuple, count: int) -> list[float]:
    """Milliseconds of each round trip of a float32 latent; the first, which warms up, is left out."""
    message, times = (
        protocol.Sample(
            model="model", sampler="euler", cfg=1.0, seed=0, tensors={"noise": torch.randn(shape)}
        ),
        [],
    )
    for _ in range(count + 1):
        began = time.perf_counter()
        framing.send(sock, message)
        framing.receive(sock)
        times.append(1000 * (time.perf_counter() - began))
    return times[1:]


def measure_latents(count: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        path = os.path.join(folder, "echo.sock")
        process = subprocess.Popen([sys.executable, __file__, "--echo", path])
        try:
            with connected(path) as sock:
                return {name: round_trips(sock, shape, count) for name, (shape, _) in LATENTS.items()}
        finally:
            process.wait(10)


def requeue(config: ParallelConfig, model: str, count: int) -> list[float]:
    """Milliseconds around each one-step request of a Flux latent of 1024 px that the engine does not count as
    its own."""
    pool.allow(model)
    backend, times = pool.backend_for(config), []
    backend.load(model)
    for _ in range(count + 2):
        message = common.request(model, 1, side=128)
        began = time.perf_counter()
        backend = pool.backend_for(config)
        result = backend.sample(replace(message, model=backend.load(model).model))
        took = time.perf_counter() - began
        assert result is not None  # nothing cancels it
        times.append(1000 * (took - result.stats["seconds"]))
    return times[2:]


def measure_requeue(count: int, device: str) -> dict[str, list[float]]:
    configs = {
        "1 rank": ParallelConfig(device=device),
        "2 ranks, ulysses": ParallelConfig(device=device, ulysses_degree=2),
    }
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        common.save_model(folder, device, **TINY)
        try:
            return {f"re-queue, {name}": requeue(config, folder, count) for name, config in configs.items()}
        finally:
            pool.close_all()


def show(times: dict[str, list[float]], goals: dict[str, float], unit: str) -> list[tuple]:
    """Print the rows (label, spread, goal) and return them."""
    rows = [(name, common.spread(values), goals[name]) for name, values in times.items()]
    if rows:
        report.table(
            ["", unit, "goal", ""],
            [
                [name, report.shown(s), f"<= {goal:g}", report.outcome(s["median"] <= goal)]
                for name, s, goal in rows
            ],
        )
    return rows


def main():
    parser = common.parser(__doc__, rounds=50)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure (default: all)"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=previews.WAYS,
        default=list(previews.WAYS),
        help="ways of two ranks in which previews are measured (default: all)",
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="steps of a sampling with previews (default 24)"
    )
    parser.add_argument("--echo", type=Path, metavar="SOCKET", help="be the other process")
    options = parser.parse_args()
    if options.echo:
        return echo(str(options.echo))
    busy, count = (
        common.wait_until_quiet(5.0 if options.quick else options.patience),
        10 if options.quick else options.rounds,
    )
    times, shares = {}, {}
    if {"latents", "calls"} & set(options.only):
        times |= measure_latents(count)
    if "requeue" in options.only:
        times |= measure_requeue(count, options.device)
    if "calls" in options.only:
        times |= calls.measure(count, options.device)
    if "previews" in options.only:
        shares = previews.measure(
            1 if options.quick else max(1, options.rounds // 5),
            4 if options.quick else options.steps,
            options.device,
            options.ways,
        )
    transfer = common.spread(times[calls.TRANSFER])["median"] if calls.TRANSFER in times else 0.0
    rows = show(
        times,
        {
            name: LATENTS[name][1]
            if name in LATENTS
            else calls.GOAL + transfer
            if name.startswith(calls.PREFIX)
            else REQUEUE_GOAL
            for name in times
        },
        "milliseconds",
    )
    percent = show(shares, dict.fromkeys(shares, previews.GOAL), "percent of sampling")
    bars = [
        report.Bar(f"{name} ({unit})", **s, goal=goal)
        for unit, of in (("ms", rows), ("%", percent))
        for name, s, goal in of
    ]
    report.write(
        "transport",
        "Socket cost",
        "ms, %",
        bars,
        spreads={name: s for name, s, _ in rows + percent},
        rounds=times | shares,
        goals={name: goal for name, _, goal in rows + percent},
        busy_percent=[busy],
        options={**vars(options), "echo": None},
    )


if __name__ == "__main__":
    main()
