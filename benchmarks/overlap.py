"""What overlapping communication with compute is worth on a slow link: every method as it is, and with each
operation waited for where it begins (waiting.py), on links of 1, 4 and 10 Gbit/s.

    python benchmarks/overlap.py [--rounds 5] [--steps 4] [--only WORDS ...] [--links GBIT ...] [--write]

Two ranks run on two "hosts": network namespaces on this machine (tests/support/hosts.py). Each limits what it
sends by tc's token bucket, whose delays take no processor time. Both ways to run one method take turns on
each link, and their latents are equal bit for bit. "The link alone" is what the busier direction carried in a
step, counted by the network, over the link's rate. "hidden" is the part of it by which a step is shorter than
with waiting.

The model has half of the blocks of common.py's, so compute and transfer are in the same proportion: on
1 Gbit/s a step of Ulysses or a ring computes about twice as long as it transfers, on 4 Gbit/s FSDP likewise.
PipeFusion sends so little that it also runs on 0.1 Gbit/s. "In halves" is what a GPU would do with more
tokens. Linux, root.
"""

import os
import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import common
import report
import torch
from torch import Tensor
from waiting import waiting

sys.path.insert(0, str(common.ROOT / "tests/support"))
import hosts
from page_parts import Part, markdown

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import tensor_parallel
from backend.parallel.attention import ulysses_ring
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks

PART = Part("docs/performance.md", "overlap", "benchmarks/overlap.py")
#: Gbit/s each way; 0: as fast as the machine copies.
LINKS = (0.0, 10.0, 4.0, 1.0)
SLOWEST = 0.1
#: Until how much a half is not worth it: what turns halves off, and on.
WHOLE, HALVES = 2**62, 1
#: Half of the blocks of common.FLUX.
BLOCKS: dict = dict(num_layers=2, num_single_layers=5)
SMALL: dict = dict(num_layers=1, num_single_layers=1, num_attention_heads=4)
SENT = Path("/sys/class/net", hosts.INTERFACE, "statistics/tx_bytes")
WAYS = ("as it is", "waiting")


@dataclass(frozen=True)
class Method:
    """Degrees of two ranks; ``halves``: heads and tokens are sent in two halves; links: as LINKS."""

    config: ParallelConfig
    halves: bool = False
    links: tuple[float, ...] = LINKS

    def request(self, model: str, steps: int, options: Namespace) -> Sample:
        """Make a request of ``steps`` steps in steady state, of a sample for each replica."""
        patches = self.config.num_pipeline_patch
        steps += 3 if self.config.patches > 1 else 1
        made = common.request(model, steps, False, options.side, options.text, num_pipeline_patch=patches)
        replicas = self.config.data_parallel_degree
        tensors = {
            name: x if name == "sigmas" else torch.cat([x] * replicas) for name, x in made.tensors.items()
        }
        return replace(made, tensors=tensors)

    @property
    def steady(self) -> slice:
        """The marks of the steps that count, of 0 and each step. PipeFusion's first step is the warm-up, the
        second fills the pipeline and the last one drains it."""
        return slice(2, -1) if self.config.patches > 1 else slice(1, None)


def pipeline(patches: int) -> Method:
    config = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=patches)
    return Method(config, links=(*LINKS, SLOWEST))


METHODS = {
    "Ulysses": Method(ParallelConfig(ulysses_degree=2)),
    "Ulysses, in halves": Method(ParallelConfig(ulysses_degree=2), halves=True),
    "ring": Method(ParallelConfig(ring_degree=2)),
    "tensor parallel, in halves": Method(ParallelConfig(tensor_parallel_degree=2), halves=True),
    "PipeFusion, 2 patches": pipeline(2),
    "PipeFusion, 3 patches": pipeline(3),
    "FSDP": Method(ParallelConfig(data_parallel_degree=2, shard_weights=True)),
}


class Contestant:
    """A method on this rank, and the latent that it must return each time."""

    def __init__(self, name: str, engine: Engine, sample: Sample):
        self.name = name
        self.method = METHODS[name]
        self.engine = engine
        self.sample = sample
        self.latent: Tensor | None = None
        self.rounds: Counter[float] = Counter()

    def both(self, link: float) -> dict[str, dict[str, float]]:
        """Measure both ways next to each other on a link, in the other order each round."""
        self.rounds[link] += 1
        order = WAYS if self.rounds[link] % 2 else WAYS[::-1]
        return {way: self.measure(link, way) for way in order}

    def measure(self, link: float, way: str) -> dict[str, float]:
        """Return the seconds of a step on a link, and the bytes of the busier direction."""
        shape_link(link)
        ulysses_ring.TILES_OF_A_CHUNK = HALVES if self.method.halves else WHOLE
        tensor_parallel.MIN_TOKENS_TO_HALVE = HALVES if self.method.halves else WHOLE
        common.meet()
        before = int(SENT.read_text())
        marks = common.Marks("cpu")
        marks()
        with waiting() if way == "waiting" else nullcontext():
            latent, _ = self.engine.sample(self.sample, Callbacks(on_step=marks))
        steps = len(self.sample.tensors["sigmas"]) - 1
        sent = max(each[0] for each in common.of_all_ranks(int(SENT.read_text()) - before)) / steps
        if os.environ["RANK"] != "0":
            return {}
        if self.latent is None:
            self.latent = latent.clone()
        assert torch.equal(latent, self.latent), f"{self.name} {way} has another latent"
        steady = marks.seconds[self.method.steady]
        return {"step": (steady[-1] - steady[0]) / (len(steady) - 1), "bytes": sent}


def shape_link(gbit: float):
    """Limit what this host sends from now on; 0: no limit."""
    where = ("dev", hosts.INTERFACE, "root")
    subprocess.run(["tc", "qdisc", "del", *where], capture_output=True)  # there may be none
    if gbit:
        hosts.run("tc", "qdisc", "add", *where, *hosts.token_bucket(f"{gbit * 1000:.0f}mbit"))


def contestants(options: Namespace, model: str) -> dict[str, Contestant]:
    """Load every chosen method; those of the same degrees share an engine."""
    engines: dict[tuple, Engine] = {}
    found = {}
    for name in chosen(options):
        config = METHODS[name].config
        if config.topology() not in engines:
            engines[config.topology()] = common.engine(config, "cpu", model)
        request = METHODS[name].request(model, 1 if options.quick else options.steps, options)
        found[name] = Contestant(name, engines[config.topology()], request)
    return found


def chosen(options: Namespace) -> list[str]:
    return [name for name in METHODS if name.startswith(tuple(options.only))]


def links_of(name: str, options: Namespace) -> list[float]:
    return options.links or list(METHODS[name].links)


def named(link: float) -> str:
    return f"{link:g} Gbit/s" if link else "no limit"


def scenario(name: str, link: float) -> str:
    return f"{name}, {named(link)}"


def rows_of(results: dict[str, list[dict[str, dict[str, float]]]], options: Namespace) -> list[dict]:
    """Return a row for each method and link: seconds a step both ways, their ratio, what the link alone takes
    and how much of that is hidden."""
    rows = []
    for name in chosen(options):
        for link in links_of(name, options):
            found = results[scenario(name, link)]
            own, waited = ([each[way]["step"] for each in found] for way in WAYS)
            sent = found[-1][WAYS[0]]["bytes"]
            alone = sent * 8 / (link * 1e9) if link else 0.0
            rows.append(
                {
                    "method": name,
                    "gbit": link,
                    "bytes": sent,
                    "link_alone": alone,
                    "as_it_is": common.spread(own),
                    "waiting": common.spread(waited),
                    "ratio": common.ratios(waited, own),
                    "hidden": common.spread([(b - a) / alone for a, b in zip(own, waited)]) if link else None,
                }
            )
    return rows


HEAD = ("method", "link", "MB a step", "link alone", *WAYS, "waiting / as it is", "hidden")


def cells_of(row: dict) -> tuple[str, ...]:
    """Return a row as the table shows it: seconds, medians with their ranges."""
    return (
        row["method"],
        named(row["gbit"]),
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['link_alone']:.3f}" if row["gbit"] else "",
        report.shown(row["as_it_is"], 3),
        report.shown(row["waiting"], 3),
        report.shown(row["ratio"]),
        report.shown(row["hidden"]) if row["hidden"] else "",
    )


def show(rows: list[dict], options: Namespace, **facts):
    """Print the table, write the numbers, and the page where that is asked for."""
    lines = [cells_of(row) for row in rows]
    report.table([*HEAD], [[*line] for line in lines])
    if options.write:
        PART.write(markdown(HEAD, lines))
    bars = [report.Bar(scenario(row["method"], row["gbit"]), **row["ratio"]) for row in rows]
    title = "Seconds with waiting over those without"
    report.write("overlap", title, "times", bars, rows=rows, options=vars(options), **facts)


def start_ranks(model: str) -> int:
    """Run this command once more as one rank on each host; return the first exit status that is not 0."""
    with ExitStack() as stack:
        ends = hosts.Hosts()
        stack.callback(ends.close)
        for rank, name in enumerate(ends.names):
            meeting = {"MASTER_ADDR": hosts.ADDRESSES[0], "MASTER_PORT": str(hosts.PORT)}
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            own = {**meeting, **place, "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
            command = ["ip", "netns", "exec", name, sys.executable, __file__, *sys.argv[1:]]
            env = common.rank_environment(2, "cpu", model) | own
            ends.processes.append(subprocess.Popen(command, env=env))
        return max(abs(process.wait()) for process in ends.processes)


def contest(options: Namespace):
    """Measure as one of both ranks."""
    common.hold_to_one_core("cpu")
    found = contestants(options, os.environ[common.MODEL_VARIABLE])
    for contestant in found.values():
        contestant.measure(0.0, WAYS[0])  # touches every weight
    actions = {
        scenario(name, link): partial(contestant.both, link)
        for name, contestant in found.items()
        for link in links_of(name, options)
    }
    results, busy = common.interleave(actions, options.rounds, options.patience)
    if os.environ["RANK"] == "0":
        rows = rows_of(results, options)
        show(rows, options, busy_percent=busy, rounds=results)
    common.leave()


def main():
    parser = common.model_options(common.parser(__doc__, rounds=5))
    parser.add_argument("--steps", type=int, default=4, help="steps that count of a request (default 4)")
    parser.add_argument("--only", nargs="+", default=[""], help="methods whose name begins so")
    parser.add_argument("--links", nargs="+", type=float, help="Gbit/s of the links; 0: no limit")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PART.page}")
    options = common.parse(parser)
    if options.device != "cpu":
        parser.error("hosts on one machine have no GPUs of their own")
    if common.spawned():
        contest(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are removed then, too
    if why := hosts.why_not():
        sys.exit(f"There can be no hosts: {why}.")
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        if not options.model:
            common.save_model(folder, **(SMALL if options.quick else BLOCKS))
        sys.exit(start_ranks(options.model or folder))


if __name__ == "__main__":
    main()
