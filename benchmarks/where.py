"""Where a rank's CPU seconds of a step go: matrix products, attention, copies, other operations, collectives.

    python benchmarks/where.py [--methods one ulysses ring tensor diffusers] [--link GBIT] [--json FILE]

Each operation's seconds are of the thread that runs the step (time.thread_time), so other processes do not
count, and neither does waiting. "gloo" is what the process's other threads use. "Python" is the thread's
rest, less what watching the operations costs, which is measured. Medians over the rounds, of rank 0.

--link lets the ranks talk over a loopback of so many Gbit/s, both directions together, in a network of its
own (unshare and tc's token bucket, on Linux). There the wall clock counts. "in halves" is what a GPU would do
with more tokens: what one half sends is under way while the other is computed.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path

import common
import loops
import report
import torch
from diffusers.models._modeling_parallel import ContextParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode

from backend.config import ParallelConfig
from backend.parallel import tensor_parallel
from backend.parallel.attention import ulysses_ring
from backend.parallel.mesh import single
from backend.sampling.step_loop import Callbacks

#: Method -> its degree's field.
METHODS = {
    "one": "",
    "ulysses": "ulysses_degree",
    "ring": "ring_degree",
    "tensor": "tensor_parallel_degree",
    "diffusers": "",  # its own Ulysses
    "ulysses in halves": "ulysses_degree",
    "tensor in halves": "tensor_parallel_degree",
}
#: Until how much a half is not worth it: what turns halves off, and on.
WHOLE, HALVES = 2**62, 1
#: Set in the network that --link makes.
SHAPED = "PARALLEL_DIT_SHAPED_LINK"
#: A network of this process and its children alone.
SLOW = 'ip link set lo up && tc qdisc add dev lo root tbf rate {}gbit burst 256kb latency 200ms && exec "$@"'
#: What an operation's name begins with -> where its seconds are counted.
KINDS = {
    "c10d::": "collectives",
    "aten::addmm": "matrix products",
    "aten::mm": "matrix products",
    "aten::bmm": "matrix products",
    "aten::linear": "matrix products",
    "aten::scaled_dot_product": "attention",
    "aten::_scaled_dot_product": "attention",
    "aten::copy_": "copies",
    "aten::clone": "copies",
    "aten::cat": "copies",
    "aten::_to_copy": "copies",
    "aten::stack": "copies",
    "aten::index": "copies",
    "aten::contiguous": "copies",
    "aten::reshape": "copies",
}
#: Operations of which --json has the seconds.
SHOWN = 25
COLUMNS = ("matrix products", "attention", "copies", "other operations", "collectives", "Python", "gloo")


class CpuTimeWatch(TorchDispatchMode):
    """Adds up the thread's CPU seconds inside operations, by kind."""

    def __init__(self):
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.names: defaultdict[str, float] = defaultdict(float)
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        started = time.thread_time()
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), "other operations")
        spent = time.thread_time() - started
        self.seconds[kind] += spent
        self.names[name] += spent
        self.calls += 1
        return out


SUMS = (*COLUMNS, "CPU", "wall clock")


def seconds_of_watching() -> float:
    """CPU seconds that CpuTimeWatch costs an operation, besides what it counts."""
    x = torch.zeros(1)
    spent = []
    for watch in (CpuTimeWatch(), None):
        started = time.thread_time()
        with torch.inference_mode():
            if watch:
                with watch:
                    for _ in range(2000):
                        x.add_(1)
                inside = sum(watch.seconds.values())
            else:
                for _ in range(2000):
                    x.add_(1)
                inside = 0.0
        spent.append(time.thread_time() - started - inside)
    return max(0.0, spent[0] / 2000)


def measure(action: Callable[[], object], steps: int, cost: float) -> dict[str, float]:
    """Kind -> CPU seconds of a step; "CPU" is the whole process's."""
    watch = CpuTimeWatch()
    clocks = (time.perf_counter, time.process_time, time.thread_time)
    before = [clock() for clock in clocks]
    with watch:
        action()
    wall, process, thread = (clock() - then for clock, then in zip(clocks, before))
    seconds_of = {**dict.fromkeys(COLUMNS, 0.0), **watch.seconds}
    watching = cost * watch.calls
    seconds_of["Python"] = max(0.0, thread - sum(watch.seconds.values()) - watching)
    seconds_of["gloo"] = process - thread
    seconds_of["CPU"] = process - watching
    seconds_of["wall clock"] = wall
    seconds_of |= dict(sorted(watch.names.items(), key=itemgetter(1), reverse=True)[:SHOWN])
    return {kind: seconds / steps for kind, seconds in seconds_of.items()}


def actions(options, model: str, sample):
    """Yield each method and what samples by it on all ranks, or on this one alone."""
    for method in options.methods:
        if method == "diffusers":
            is_divided = options.ranks > 1
            parallel = ContextParallelConfig(ulysses_degree=options.ranks) if is_divided else None
            loop = loops.PlainLoop(model, options.device, parallel)
            yield method, lambda loop=loop: loop(sample)
            continue
        field = METHODS[method]
        config = ParallelConfig(**{field: options.ranks}) if field else ParallelConfig()
        mesh = None if field else single(options.device)
        engine = common.engine(config, options.device, model, mesh)
        yield method, partial(sample_by, engine, sample, HALVES if "halves" in method else WHOLE)


def sample_by(engine, sample, least: int):
    """Sample; ``least``: tiles and tokens of a half that is sent or summed apart."""
    ulysses_ring.TILES_OF_A_CHUNK = tensor_parallel.MIN_TOKENS_TO_HALVE = least
    engine.sample(sample, Callbacks())


def main():
    parser = common.model_options(common.parser(__doc__, rounds=3))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--methods", nargs="*", default=list(METHODS)[:5], choices=list(METHODS))
    parser.add_argument("--json", help="store every round's numbers there, and the longest operations")
    parser.add_argument("--link", type=float, help="Gbit/s of the loopback between ranks (default: as it is)")
    options = common.parse(parser)
    if options.link and not os.environ.get(SHAPED):
        shell = ["unshare", "-Urn", "bash", "-c", SLOW.format(options.link), "-"]
        sys.exit(
            subprocess.run([*shell, sys.executable, *sys.argv], env={**os.environ, SHAPED: "1"}).returncode
        )
    if not common.spawned():
        common.spawn(__file__, ranks=options.ranks, device=options.device, model=options.model)
    model = os.environ[common.MODEL_VARIABLE]
    sample = common.request(model, options.steps, side=options.side, text=options.text)
    cost = seconds_of_watching()
    every = dict(actions(options, model, sample))
    for action in every.values():
        action()  # touches every weight
    results = {method: [] for method in every}
    for _ in range(options.rounds):
        for method, action in every.items():
            common.meet()
            results[method].append(measure(action, options.steps, cost))
    if os.environ["RANK"] == "0":
        show(results, options)
    common.leave()


def show(results: dict[str, list[dict[str, float]]], options):
    rows = []
    for method, rounds in results.items():
        cells = [statistics.median(each[kind] for each in rounds) for kind in SUMS]
        rows.append([method, *(f"{seconds * 1000:.0f}" for seconds in cells)])
    report.table(["ms a step", *SUMS], rows)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
