"""What the socket costs: latents there and back through the protocol's framing, and queueing again on a warm backend.

    python benchmarks/transport.py [--quick]

Round trips go to another process over AF_UNIX, a Sample there and a Result with the same tensor back, without any sampling. The re-queue overhead is a
one-step request's wall time at the client less the engine's own seconds, on a backend launched as ComfyUI's nodes launch it.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import common
import report
import torch
from parallel_dit.backend import protocol
from parallel_dit.backend.config import ParallelConfig
from parallel_dit.nodes import backends

#: Latent -> shape, and most milliseconds for its round trip.
LATENTS = {
    "Flux, 1024 px": ((1, 16, 128, 128), 1.5),
    "Wan, 81 frames, 1280x720": ((1, 16, 21, 90, 160), 12.0),
}
#: Most milliseconds of a request on a warm backend that the engine does not see.
REQUEUE_GOAL = 20.0
TINY = dict(num_layers=1, num_single_layers=1, num_attention_heads=2)


def echo(path: str):
    """The other process: answer every request with its tensor until the client leaves."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection, _ = listener.accept()
    with connection:
        try:
            while True:
                protocol.send(connection, protocol.Result(tensors={"samples": protocol.receive(connection).tensors["noise"]}))
        except ConnectionError:
            return


def connected(path: str) -> socket.socket:
    """A socket to the echo process, once it listens."""
    sock, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + 60
    while True:
        try:
            sock.connect(path)
            return sock
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def round_trips(sock: socket.socket, shape: tuple, count: int) -> list[float]:
    """Milliseconds of each round trip of a float32 latent; the first, which warms up, is left out."""
    message, found = protocol.Sample("model", "euler", 1.0, 0, tensors={"noise": torch.randn(shape)}), []
    for _ in range(count + 1):
        began = time.perf_counter()
        protocol.send(sock, message)
        protocol.receive(sock)
        found.append(1000 * (time.perf_counter() - began))
    return found[1:]


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
    """Milliseconds around each one-step request of a Flux latent of 1024 px that the engine does not count as its own."""
    backend, found = backends.backend_for(config), []
    name = backend.load(model).model
    for _ in range(count + 2):
        message = common.request(model, 1, side=128)
        began = time.perf_counter()
        result = backend.sample(replace(message, model=name))
        found.append(1000 * (time.perf_counter() - began - result.stats["seconds"]))
    return found[2:]


def measure_requeue(count: int, device: str) -> dict[str, list[float]]:
    configs = {"1 rank": ParallelConfig(device=device), "2 ranks, ulysses": ParallelConfig(device=device, ulysses_degree=2)}
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        common.save_model(folder, device, **TINY)
        try:
            return {f"re-queue, {name}": requeue(config, folder, count) for name, config in configs.items()}
        finally:
            backends.close_all()


def main():
    parser = common.parser(__doc__, rounds=50)
    parser.add_argument("--echo", type=Path, metavar="SOCKET", help="be the other process")
    options = parser.parse_args()
    if options.echo:
        return echo(str(options.echo))
    busy, count = common.wait_until_quiet(5.0 if options.quick else options.patience), 10 if options.quick else options.rounds
    found, goals = measure_latents(count), {name: goal for name, (_, goal) in LATENTS.items()}
    found |= measure_requeue(count, options.device)
    spreads = {name: common.spread(values) for name, values in found.items()}
    rows = [(name, spread, goals.get(name, REQUEUE_GOAL)) for name, spread in spreads.items()]
    report.table(["", "milliseconds", "goal", ""], [[name, report.shown(s), f"<= {goal:g}", report.verdict(s["median"] <= goal)] for name, s, goal in rows])
    report.write("transport", "Socket cost", "ms", [report.Bar(name, **s, goal=goal) for name, s, goal in rows],
                 spreads=spreads, rounds=found, busy_percent=[busy], options={**vars(options), "echo": None})


if __name__ == "__main__":
    main()
