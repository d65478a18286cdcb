"""Where a rank's step goes: CPU seconds of matrix products, attention, copies, other operations, collectives,
and how long it waits for others.

    python benchmarks/where.py [--methods one ulysses ... ] [--link GBIT] [--json FILE]

Each operation's seconds are of the thread that runs the step (time.thread_time), so other processes do not
count, and neither does waiting. "gloo" is what the process's other threads use. "Python" is the thread's
rest, less what watching the operations costs, which is measured. "waiting" is the wall clock inside of waits
for collectives, receives and sends, less the thread's CPU seconds there: whatever else runs on the machine
makes it longer, as it does the wall clock. Medians over the rounds, of rank 0, and of every stage of a
pipeline.

Whole requests are measured, and divided by their steps; of PipeFusion steps in steady state. CFG has two
prompts, one on each half of the ranks, so one rank with one prompt is its ideal.

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
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import common
import loops
import report
import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig
from torch.distributed import _functional_collectives as functional_collectives
from torch.utils._python_dispatch import TorchDispatchMode

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import tensor_parallel
from backend.parallel.attention import ulysses_ring
from backend.parallel.mesh import single
from backend.protocol import Sample
from backend.runtime.callbacks import nothing
from backend.sampling.step_loop import Callbacks

T = TypeVar("T")


@dataclass(frozen=True)
class Method:
    """A way to sample. degree: the field that gets the ranks, under CFG those of each prompt; none for one
    rank. patches: of PipeFusion, which is measured in steady state. halves: of what is sent or summed."""

    degree: str = ""
    guided: bool = False
    patches: int = 0
    halves: bool = False

    def config(self, ranks: int) -> ParallelConfig:
        """Configure so many ranks."""
        prompts = 1 + self.guided
        degrees: dict[str, Any] = {self.degree: ranks // prompts} if self.degree else {}
        return replace(ParallelConfig(), cfg_degree=prompts, **degrees)

    def steps(self, counted: int) -> int:
        """Return the steps of a request of which so many are counted: PipeFusion's first is the warm-up, the
        second fills the pipeline and the last one drains it."""
        return counted + 3 if self.patches else counted

    def counted(self, readings: list[dict[str, float]]) -> defaultdict[str, float]:
        """Subtract readings at the start of a request, at each step's and at its end."""
        first, last = (readings[3], readings[-2]) if self.patches else (readings[0], readings[-1])
        spent: defaultdict[str, float] = defaultdict(float)
        spent.update((name, value - first.get(name, 0.0)) for name, value in last.items())
        return spent


#: diffusers' own Ulysses.
DIFFUSERS = "diffusers"
METHODS = {
    "one": Method(),
    "ulysses": Method("ulysses_degree"),
    "ring": Method("ring_degree"),
    "tensor": Method("tensor_parallel_degree"),
    "pipefusion 2": Method("pipefusion_degree", patches=2),
    "pipefusion 4": Method("pipefusion_degree", patches=4),
    "cfg": Method("ulysses_degree", guided=True),
    DIFFUSERS: Method(),
    "ulysses in halves": Method("ulysses_degree", halves=True),
    "tensor in halves": Method("tensor_parallel_degree", halves=True),
}
#: Those that are measured where nothing else is said.
USUAL = [name for name, method in METHODS.items() if not method.halves]
#: Until how much a half is not worth it: what turns halves off, and on.
WHOLE, HALVES = 2**62, 1
#: Set in the network that --link makes.
SHAPED = "PARALLEL_DIT_SHAPED_LINK"
#: A network of this process and its children alone.
SLOW = 'ip link set lo up && tc qdisc add dev lo root tbf rate {}gbit burst 256kb latency 200ms && exec "$@"'
#: What an operation's name begins with -> where its seconds are counted.
KINDS = {
    "c10d::": "collectives",
    "_c10d_functional::": "collectives",
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
SUMS = (*COLUMNS, "CPU", "waiting", "wall clock")
#: What the thread waits by: every collective's end, but of diffusers', whose tensors wait as they are used.
WAITS = ((dist.Work, "wait"), (functional_collectives, "wait_tensor"))


class Watch(TorchDispatchMode):
    """Adds up the thread's CPU seconds inside operations, by kind and by name, and how long it waits."""

    def __init__(self):
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.names: defaultdict[str, float] = defaultdict(float)
        self.waited = 0.0
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        started = time.thread_time()
        out = func(*args, **(kwargs or {}))
        kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), "other operations")
        spent = time.thread_time() - started
        self.seconds[kind] += spent
        self.names[name] += spent
        self.calls += 1
        return out

    def timed(self, wait: Callable[..., T]) -> Callable[..., T]:
        """Return ``wait`` that adds its wall clock, less the thread's CPU seconds, to what was waited."""

        @wraps(wait)
        def waited(*args, **kwargs) -> T:
            wall, thread = time.perf_counter(), time.thread_time()
            result = wait(*args, **kwargs)
            self.waited += time.perf_counter() - wall - (time.thread_time() - thread)
            return result

        return waited

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch operations and waits."""
        with self, ExitStack() as stack:
            for owner, name in WAITS:
                stack.enter_context(patch.object(owner, name, self.timed(getattr(owner, name))))
            yield

    def read(self) -> dict[str, float]:
        """Return all sums until now, and the clocks."""
        clocks = {"wall clock": time.perf_counter(), "process": time.process_time()}
        sums = {"thread": time.thread_time(), "waiting": self.waited, "calls": self.calls}
        return {**clocks, **sums, **self.seconds, **self.names}


def seconds_of_watching() -> float:
    """CPU seconds that Watch costs an operation, besides what it counts."""
    x = torch.zeros(1)
    spent = []
    for watch in (Watch(), None):
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


class Contestant:
    """A method on this rank. run: samples, and calls what it is given with each step that begins (diffusers'
    loop does not)."""

    def __init__(self, method: Method, steps: int, run: Callable[[Callable[[int], None]], object]):
        self.method = method
        self.steps = steps
        self.run = run
        #: CPU seconds of the longest operations, of each round.
        self.operations: list[dict[str, float]] = []

    def measure(self, cost: float) -> dict[str, float]:
        """Return the seconds of SUMS of a step, "CPU" of the whole process. cost: seconds of watching an
        operation."""
        watch = Watch()
        readings = [watch.read()]

        def note(step: int | None = None):
            readings.append(watch.read())

        with watch.watching():
            self.run(note)
        note()
        spent = self.method.counted(readings)
        watching = cost * spent["calls"]
        in_operations = sum(spent[kind] for kind in {*KINDS.values(), "other operations"})
        sums = {kind: spent[kind] for kind in SUMS}
        sums["Python"] = max(0.0, spent["thread"] - in_operations - watching)
        sums["gloo"] = spent["process"] - spent["thread"]
        sums["CPU"] = spent["process"] - watching
        sums["waiting"] = max(0.0, spent["waiting"])
        operations = {name: spent[name] for name in watch.names}
        longest = sorted(operations.items(), key=itemgetter(1), reverse=True)[:SHOWN]
        self.operations.append({name: seconds / self.steps for name, seconds in longest})
        return {kind: seconds / self.steps for kind, seconds in sums.items()}


def contestants(options: Namespace, model: str) -> dict[str, Contestant]:
    """Load every chosen method, on all ranks or on this one alone. The same degrees share an engine."""
    engines: dict[tuple, Engine] = {}
    found = {}
    for name in options.methods:
        method = METHODS[name]
        sample = common.request(
            *(model, method.steps(options.steps), method.guided, options.side, options.text),
            num_pipeline_patch=method.patches,
        )
        if name == DIFFUSERS:
            is_divided = options.ranks > 1
            parallel = ContextParallelConfig(ulysses_degree=options.ranks) if is_divided else None
            loop = loops.PlainLoop(model, options.device, parallel)
            run = partial(sample_by_diffusers, loop, sample)
        else:
            config = method.config(options.ranks)
            if config.topology() not in engines:
                mesh = None if method.degree else single(options.device)
                engines[config.topology()] = common.engine(config, options.device, model, mesh)
            run = partial(sample_by, engines[config.topology()], sample, HALVES if method.halves else WHOLE)
        found[name] = Contestant(method, options.steps, run)
    return found


def sample_by_diffusers(loop: loops.PlainLoop, sample: Sample, on_begin: Callable[[int], None]):
    """Sample by diffusers' own loop, which tells no step's beginning."""
    loop(sample)


def sample_by(engine: Engine, sample: Sample, least: int, on_begin: Callable[[int], None]):
    """Sample; ``least``: tiles and tokens of a half that is sent or summed apart."""
    ulysses_ring.TILES_OF_A_CHUNK = tensor_parallel.MIN_TOKENS_TO_HALVE = least
    engine.sample(sample, Callbacks(on_begin=on_begin))


def main():
    parser = common.model_options(common.parser(__doc__, rounds=3))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--methods", nargs="*", default=USUAL, choices=list(METHODS))
    parser.add_argument("--json", help="store every round's numbers there, and the longest operations")
    parser.add_argument("--link", type=float, help="Gbit/s of the loopback between ranks (default: as it is)")
    options = common.parse(parser)
    if options.ranks % 2 and "cfg" in options.methods:
        parser.error("cfg wants an even number of ranks; leave it out of --methods")
    if options.link and not os.environ.get(SHAPED):
        shell = ["unshare", "-Urn", "bash", "-c", SLOW.format(options.link), "-"]
        sys.exit(
            subprocess.run([*shell, sys.executable, *sys.argv], env={**os.environ, SHAPED: "1"}).returncode
        )
    if not common.spawned():
        common.spawn(__file__, ranks=options.ranks, device=options.device, model=options.model)
    found = contestants(options, os.environ[common.MODEL_VARIABLE])
    cost = seconds_of_watching()
    for contestant in found.values():
        contestant.run(nothing)  # touches every weight
    actions = {name: partial(contestant.measure, cost) for name, contestant in found.items()}
    results, _ = common.interleave(actions, options.rounds, options.patience)
    rows = rows_of(results)
    if os.environ["RANK"] == "0":
        report.table(["ms a step", *SUMS], rows)
        if options.json:
            every = {
                name: [sums | longest for sums, longest in zip(rounds, found[name].operations)]
                for name, rounds in results.items()
            }
            Path(options.json).write_text(json.dumps(every, indent=1))
    common.leave()


def rows_of(results: dict[str, list[dict[str, float]]]) -> list[list[str]]:
    """Return a row of medians for each method, of rank 0, and of a pipeline for each rank. All ranks call
    this."""
    rows = []
    for name, rounds in results.items():
        medians = (statistics.median(each[kind] for each in rounds) for kind in SUMS)
        of_ranks = common.of_all_ranks(*medians)
        shown = of_ranks if METHODS[name].patches else of_ranks[:1]
        for rank, seconds in enumerate(shown):
            label = f"{name}, rank {rank}" if METHODS[name].patches else name
            rows.append([label, *(f"{each * 1000:.0f}" for each in seconds)])
    return rows


if __name__ == "__main__":
    main()
