"""How much shares gain where one rank is slower: equal parts against parts by one timed step.

    python benchmarks/shares.py [--quick] [--methods ulysses,tp]

Two ranks on the CPU, one core each. A process that only computes runs on the second one's core, so that this
rank has about half of it. The shares are what the planner's probe measures then (backend/probe.py). Both ways
sample in turn, round after round; "equal / shares" is the median of the rounds' ratios of seconds: above 1
shares are faster. Linux only, where processes can be held to a core.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import common
import report
import torch

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.probe import Probe
from backend.rank_plan import RequestSize, describe
from backend.sampling.step_loop import Callbacks
from backend.shares import written

#: Method -> its degrees on two ranks. Samples of a batch are too few to be divided finely.
METHODS = {
    "ulysses": ParallelConfig(ulysses_degree=2),
    "ring": ParallelConfig(ring_degree=2),
    "tp": ParallelConfig(tensor_parallel_degree=2),
    "pipefusion": ParallelConfig(pipefusion_degree=2, num_pipeline_patch=2),
}
#: Heads, and blocks of equal work, that go round in many shares: 20M parameters.
MODEL = dict(
    num_layers=2,
    num_single_layers=10,
    attention_head_dim=32,
    num_attention_heads=12,
    joint_attention_dim=256,
    pooled_projection_dim=256,
    axes_dims_rope=(8, 12, 12),
)
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


@contextlib.contextmanager
def competitor(rank: int) -> Iterator[Callable[[bool], None]]:
    """Yield a function that lets a busy process run on the core of the last rank, or stops it."""
    if rank != 1:
        yield lambda running: None
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY])

    def run(running: bool):
        process.send_signal(signal.SIGCONT if running else signal.SIGSTOP)

    run(False)
    try:
        yield run
    finally:
        process.kill()
        process.wait()


def measured_shares(run: Callable[[bool], None]) -> str:
    """Return the shares of ranks by one timed step, while one of them is slowed down."""
    probe = Probe("cpu")
    run(True)
    speeds = probe.speeds()
    run(False)
    return written(speeds)


class Way:
    """A configuration that samples one request; ``latent``: the last result."""

    def __init__(self, config: ParallelConfig, model: str, sample, run: Callable[[bool], None]):
        self.engine = Engine(config, mesh.build(config, "cpu"))
        self.engine.load("model", model, "default")
        settings = {"num_pipeline_patch": config.num_pipeline_patch, "warmup_steps": config.warmup_steps}
        self.request = replace(sample, **settings)
        self.run = run
        warm = replace(self.request, tensors={**sample.tensors, "sigmas": torch.linspace(1, 0, 3)})
        self.engine.sample(warm, Callbacks())

    def __call__(self) -> float:
        """Sample while the competitor runs; return the seconds."""
        self.run(True)
        common.meet()
        seconds, _ = common.timed(self._sample, "cpu")
        common.meet()
        self.run(False)
        return seconds

    def _sample(self):
        self.latent = self.engine.sample(self.request, Callbacks())[0]


def work(config: ParallelConfig, model: str, tokens: int, text: int) -> list[str]:
    """Count what each rank has: tokens, heads, blocks."""
    ranks = describe(config, open_checkpoint(model), RequestSize(tokens, text))
    return [
        f"{sum(map(sum, rank.patches))} tokens, {rank.heads} heads, {rank.blocks[1] - rank.blocks[0]} blocks"
        for rank in ranks
    ]


def row_of(method: str, ways: dict[str, Way], results: dict[str, list[float]], parts: list[str]) -> dict:
    """Compare the rounds of a method's two ways; exact ones have the same latent."""
    equal, uneven = (way.latent for way in ways.values())
    return {
        "method": method,
        "ratio": common.ratios(results["equal"], results["shares"]),
        "difference": ((equal - uneven).norm() / equal.norm()).item(),
        "parts": parts,
        "seconds": results,
    }


def show(rows: list[dict], given: str, **facts):
    print(f"shares by one timed step: {given}")
    report.table(
        ["method", "equal / shares", "difference", "rank 0", "rank 1"],
        [
            [row["method"], report.shown(row["ratio"]), f"{row['difference']:.1e}", *row["parts"]]
            for row in rows
        ],
    )
    bars = [
        report.Bar(
            row["method"],
            median=row["ratio"]["median"],
            low=row["ratio"]["low"],
            high=row["ratio"]["high"],
            goal=1.0,
        )
        for row in rows
    ]
    report.write(
        "shares", "Seconds of equal parts over shares", "times", bars, rows=rows, shares=given, **facts
    )


def main():
    parser = common.model_options(common.parser(__doc__, rounds=5))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--shares", help="instead of those by one timed step, like 67,33")
    options = common.parse(parser)
    if not common.spawned():
        common.spawn(__file__, ranks=2, device="cpu", model=options.model, **MODEL)
    model = os.environ[common.MODEL_VARIABLE]
    rank = int(os.environ["RANK"])
    common.hold_to_one_core("cpu")
    sample = common.request(model, options.steps, False, options.side, options.text)
    rows, busy = [], []
    with torch.inference_mode(), competitor(rank) as run:
        given = options.shares or measured_shares(run)
        for method in options.methods.split(","):
            config = METHODS[method]
            uneven = replace(config, shares=given).validate()
            pair = {"equal": config, "shares": uneven}
            ways = {name: Way(each, model, sample, run) for name, each in pair.items()}
            results, percent = common.interleave(ways, options.rounds, options.patience)
            busy += percent
            parts = work(uneven, model, options.side**2 // 4, options.text)
            rows.append(row_of(method, ways, results, parts))
    if rank == 0:
        show(rows, given, busy_percent=busy, options=vars(options))
    common.leave()


if __name__ == "__main__":
    main()
