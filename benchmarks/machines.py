"""Which method bears which network: two "hosts" on this machine, joined by a cable of limited bandwidth, or
by one that adds latency too.

    python benchmarks/machines.py [--rounds 3] [--steps 4] [--only WORDS ...] [--write]
    python benchmarks/machines.py --wire [--rounds 3] [--steps 4] [--write]     # full against fp8

The hosts are network namespaces (tests/support/hosts.py), each with half of the ranks, on the CPU, with a
Flux of random weights (177M parameters; --quick: a small one). tc limits the cable's bandwidth (tbf). Latency
is a second cable's, whose packets a thread of this program holds (slow_cable.py), since not every kernel has
netem. Printed for each method: megabytes that cross the cable in a step, counted by the network, and seconds
of a step on each link, the best of the rounds. --write puts the table into docs/multi_node.md. Linux, root.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import common

sys.path[:0] = [str(common.ROOT / "tests/support"), str(common.ROOT / "scripts")]
import hosts
from page_parts import Part, markdown
from slow_cable import DEVICE, SlowCable

from backend import protocol
from backend.client.client import BackendClient
from backend.config import CHOICES, ParallelConfig

PART = Part("docs/multi_node.md", "links", "benchmarks/machines.py")
WIRE = Part("docs/multi_node.md", "wire", "benchmarks/machines.py")
TOKEN = "9" * 64
#: The links: device of the cable, rate as tc calls it, seconds that a packet takes more.
LINKS: dict[str, tuple[str, str, float]] = {
    "no limit": (hosts.INTERFACE, "", 0.0),
    "10 Gbit/s": (hosts.INTERFACE, "10gbit", 0.0),
    "1 Gbit/s": (hosts.INTERFACE, "1gbit", 0.0),
    "1 Gbit/s, 1 ms": (DEVICE, "1gbit", 1e-3),
}
#: Ranks -> what they run, and what of it crosses the cable. The first one is how they start.
METHODS: dict[int, dict[str, dict]] = {
    2: {
        "cfg 2 across": {"cfg_degree": 2},
        "PipeFusion 2 across": {"pipefusion_degree": 2, "num_pipeline_patch": 4},
        "ring 2 across": {"ring_degree": 2},
        "Ulysses 2 across": {"ulysses_degree": 2},
        "tensor parallel 2 across": {"tensor_parallel_degree": 2},
    },
    4: {
        "Ulysses 2 inside, cfg 2 across": {"ulysses_degree": 2, "cfg_degree": 2},
        "Ulysses 2 inside, PipeFusion 2 across": {
            "ulysses_degree": 2,
            "pipefusion_degree": 2,
            "num_pipeline_patch": 4,
        },
    },
}
#: Methods of METHODS[2] whose tensors may travel as float8, and the links that is compared on.
PACKED = ("ring 2 across", "Ulysses 2 across")
PACKED_LINKS = ("no limit", "10 Gbit/s", "1 Gbit/s")
#: A method bears a link that makes a step longer by at most this part.
BORNE = 0.1
SMALL: dict = dict(num_layers=1, num_single_layers=2, num_attention_heads=4)


@dataclass
class Method:
    """A row: megabytes across the cable in a step, and best seconds of a step on each link."""

    name: str
    megabytes: float
    seconds: dict[str, float]


class Ranks:
    """A backend on both hosts."""

    def __init__(self, stack: ExitStack, count: int, model: Path, steps: int):
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="parallel-dit-machines-")))
        (self.folder / "token").write_text(TOKEN)
        (self.folder / "token").chmod(0o600)
        self.hosts = hosts.Hosts()
        stack.callback(self.hosts.close)
        self.slow_cable = SlowCable(self.hosts, 0.0)
        stack.callback(self.slow_cable.close)
        self.model = str(model)
        first = next(iter(METHODS[count].values()))
        given = ({"device": "cpu", **first}, "--models", self.model)
        head, other = [self.hosts.serve(i, self.folder, *given) for i in (0, 1)]
        assert head.stdout is not None
        if not (head.stdout.readline() and head.stdout.readline()):
            sys.exit(f"{head.communicate()[1]}{other.communicate()[1]}")
        self.client = BackendClient(f"unix:{self.folder}/s", TOKEN)
        self.steps = steps

    def become(self, degrees: dict) -> Callable[..., float]:
        """Change the degrees; return what samples once and says the seconds of a step."""
        config = ParallelConfig(device="cpu", **degrees)
        self.client.request(protocol.Arrange(asdict(config)))
        loaded = self.client.request(
            protocol.Load(self.model, weight_dtype="default", loras=[], matmul="auto")
        )
        made = common.request(self.model, self.steps, guided=True, side=SIDE[0], text=TEXT[0])
        request = replace(made, model=loaded.model, num_pipeline_patch=config.num_pipeline_patch)

        def sample(wire: str = "full") -> float:
            result = self.client.sample(replace(request, wire=wire))
            assert result is not None  # nothing cancels it
            return result.stats["seconds"] / self.steps

        sample()  # caches, connections
        return sample

    def connect(self, link: str):
        """Send by a link of LINKS from now on."""
        device, rate, self.slow_cable.seconds = LINKS[link]
        self.hosts.shape(rate, device)


SIDE, TEXT = [64], [128]


def measured(ranks: Ranks, name: str, degrees: dict, rounds: int) -> Method:
    """Return the best seconds of a step on each link, in turn, and what crosses the cable."""
    sample = ranks.become(degrees)
    before = ranks.hosts.sent()
    seconds = {"no limit": sample()}
    megabytes = (ranks.hosts.sent() - before) / ranks.steps / 1e6
    for _ in range(rounds):
        for link in LINKS:
            ranks.connect(link)
            seconds[link] = min(seconds.get(link, float("inf")), sample())
    ranks.connect("no limit")
    print(f"{name}: {megabytes:.2f} MB a step, {json.dumps(seconds)}", file=sys.stderr, flush=True)
    return Method(name, megabytes, seconds)


def compared(ranks: Ranks, name: str, rounds: int) -> list[tuple[str, ...]]:
    """Return two lines of the table of ``wire``: a method's median seconds of a step in full and in float8,
    which take turns on each link, with the least and the most."""
    sample = ranks.become(METHODS[2][name])
    wires = CHOICES["wire"]
    megabytes = {}
    for wire in wires:
        before = ranks.hosts.sent()
        sample(wire)
        megabytes[wire] = (ranks.hosts.sent() - before) / ranks.steps / 1e6
    seconds = {(link, wire): [] for link in PACKED_LINKS for wire in wires}
    for _ in range(rounds):
        for link in PACKED_LINKS:
            ranks.connect(link)
            for wire in wires:
                seconds[link, wire].append(sample(wire))
    ranks.connect("no limit")
    lines = []
    for wire in wires:
        of_wire = [seconds[link, wire] for link in PACKED_LINKS]
        cells = [f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in of_wire]
        lines.append((f"{name}, wire {wire}", f"{megabytes[wire]:.2f}", *cells))
    return lines


def row(each: Method) -> tuple[str, ...]:
    """Return a line of the table. The least that a link adds is half of the megabytes over its rate, since
    both directions go at once."""
    first, *limited = LINKS
    added = {link: each.seconds[link] / each.seconds[first] - 1 for link in limited}
    cells = [each.name, f"{each.megabytes:.2f}", f"{each.seconds[first]:.2f}"]
    cells += [f"{each.seconds[link]:.2f} ({added[link]:+.0%})" for link in limited]
    borne = [link for link in limited if added[link] <= BORNE]
    return (*cells, "; ".join(borne) or "none of them")


def table(rows: dict[str, tuple[str, ...]]) -> str:
    """Return the page's table of these lines, in the order of METHODS."""
    first, *limited = LINKS
    head = ("method", "MB a step", f"s a step, {first}", *(f"at {link}" for link in limited), "bears")
    names = [name for methods in METHODS.values() for name in methods]
    return markdown(head, [rows[name] for name in names if name in rows])


def compare_wires(options: argparse.Namespace, model: str):
    """Measure ``wire`` full and fp8 on the links, and print and write the table."""
    lines = []
    with ExitStack() as stack:
        ranks = Ranks(stack, 2, Path(model), options.steps)
        for name in PACKED:
            lines += compared(ranks, name, options.rounds)
    first, *limited = PACKED_LINKS
    head = ("method", "MB a step", f"s a step, {first}", *(f"at {link}" for link in limited))
    print(markdown(head, lines))
    if options.write:
        WIRE.write(markdown(head, lines))


def main():
    """Measure every method on every link."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=[""], help="methods whose name begins so")
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs")
    parser.add_argument("--wire", action="store_true", help="compare wire full and fp8 instead")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PART.page}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are removed then, too
    if why := hosts.why_not():
        sys.exit(f"There can be no hosts: {why}.")
    if options.quick:
        SIDE[0], TEXT[0] = 16, 32
    rows: dict[str, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as model:
        common.save_model(model, **(SMALL if options.quick else {}))
        if options.wire:
            compare_wires(options, model)
            return
        for count, methods in METHODS.items():
            chosen = [name for name in methods if name.startswith(tuple(options.only))]
            if not chosen:
                continue
            with ExitStack() as stack:
                ranks = Ranks(stack, count, Path(model), options.steps)
                for name in chosen:
                    rows[name] = row(measured(ranks, name, methods[name], options.rounds))
    print(table(rows))
    if options.write:
        PART.write(table(PART.rows() | rows))


if __name__ == "__main__":
    main()
