"""How near the planner's choice is to the best plan: every plan of so many ranks is run, next to one rank.

    python benchmarks/auto.py [--ranks 2] [--quick]

The planner gets what it gets in the product: rates of the same ranks (backend/probe.py) and the model's
headers. Then every plan runs the whole request in turn, round after round; a plan's weights are loaded before
its turn and freed after it. "of best" is the least time of the choice over that of the fastest plan: other
processes only add time.
"""

import os
import time
from dataclasses import dataclass, replace

import common
import report
import torch

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.planner.choose import Option, Question, ranked
from backend.planner.machine import Machine, Request
from backend.probe import Probe
from backend.protocol import Sample
from backend.rank_plan.shape_of import shape_of
from backend.sampling.step_loop import Callbacks

#: A choice that takes at most so many times the seconds of the best plan is good.
GOAL = 1.10
#: Small enough that every plan of a case runs in seconds on a core: 9M parameters.
SMALL = dict(
    num_layers=2,
    num_single_layers=4,
    attention_head_dim=32,
    num_attention_heads=8,
    joint_attention_dim=256,
    pooled_projection_dim=256,
    axes_dims_rope=(8, 12, 12),
)
#: The memory of every rank: no plan of these models is too large.
MEMORY = 1 << 40


@dataclass(frozen=True)
class Case:
    """A request: side of the square latent, steps, whether a negative prompt is computed, batch."""

    side: int
    steps: int
    guided: bool
    batch: int = 1

    @property
    def name(self) -> str:
        """For the table."""
        cfg = "cfg 4" if self.guided else "cfg 1"
        return f"{self.side**2 // 4} tokens, {self.steps} steps, {cfg}, batch {self.batch}"

    def request(self, text: int) -> Request:
        """As the planner gets it."""
        return Request(self.side**2 // 4, text, self.steps, 2 if self.guided else 1, self.batch)

    def sample(self, model: str, text: int) -> Sample:
        """As the ranks get it."""
        sample = common.request(model, self.steps, self.guided, self.side, text)
        repeated = {name: sample.tensors[name].repeat(self.batch, 1, 1, 1) for name in ("noise", "latent")}
        return replace(sample, tensors={**sample.tensors, **repeated})


CASES = (
    Case(32, 8, False),
    Case(32, 8, True),
    Case(32, 4, True),
    Case(64, 4, False),
    Case(48, 4, False, batch=2),
    Case(48, 8, False),
    Case(16, 8, True),
    Case(64, 4, True),
)
QUICK = (Case(8, 8, True), Case(8, 2, False, batch=2))


def options_of(case: Case, shape, machine: Machine, ranks: int, text: int) -> list[Option]:
    """Estimate one rank and every plan of ``ranks``."""
    question = Question(shape, case.request(text), machine, ranks)
    return [option for option in question.options() if option.plan.world_size in (1, ranks)]


class Ranks:
    """This process as one rank of any plan."""

    def __init__(self, device: str, model: str):
        self.device = device
        self.model = model
        self.rank = int(os.environ["RANK"])

    def seconds(self, plan: ParallelConfig, sample: Sample) -> float:
        """Run a request under ``plan``; one rank runs alone while the others sleep."""
        if plan.world_size == 1:
            found = self._run(plan, mesh.single(self.device), sample) if self.rank == 0 else 0.0
            common.meet()
            return found
        groups = mesh.build(plan, self.device)
        found = self._run(plan, groups, sample)
        mesh.close(groups)
        return found

    def _run(self, plan: ParallelConfig, groups: mesh.Mesh, sample: Sample) -> float:
        engine = Engine(plan, groups)
        engine.load("model", self.model, "default")
        sample = replace(sample, num_pipeline_patch=plan.num_pipeline_patch, warmup_steps=plan.warmup_steps)
        warm = replace(sample, tensors={**sample.tensors, "sigmas": torch.linspace(1, 0, 2)})
        engine.sample(warm, Callbacks())
        if groups.world_size > 1:
            common.meet()
        started = time.perf_counter()
        engine.sample(sample, Callbacks())
        found = time.perf_counter() - started
        engine.unload("model")
        return found


def row_of(case: Case, options: list[Option], found: dict[str, list[float]]) -> dict:
    """The choice, the best plan, and how many times its seconds the choice takes."""
    least = {name: min(seconds) for name, seconds in found.items()}
    best = min(least, key=lambda name: least[name])
    chosen = ranked(options)[0].name
    one = next(option.name for option in options if option.plan.world_size == 1)
    return {
        "case": case.name,
        "plans": len(options),
        "chosen": chosen,
        "best": best,
        "of_best": least[chosen] / least[best],
        "speedup": least[one] / least[chosen],
        "met": least[chosen] <= GOAL * least[best],
        "seconds": found,
        "estimated": {option.name: option.seconds for option in options},
    }


def show(rows: list[dict], **facts):
    report.table(
        ["case", "plans", "chosen", "best", "of best", "x 1 rank", ""],
        [
            [
                row["case"],
                str(row["plans"]),
                row["chosen"],
                row["best"],
                f"{row['of_best']:.2f}",
                f"{row['speedup']:.2f}",
                report.outcome(row["met"]),
            ]
            for row in rows
        ],
    )
    print(f"{sum(row['met'] for row in rows)} of {len(rows)} choices within {GOAL - 1:.0%} of the best plan")
    bars = [report.Bar(row["case"], *[row["of_best"]] * 3, goal=GOAL) for row in rows]
    report.write("auto", "Seconds of the chosen plan over the best one's", "times", bars, rows=rows, **facts)


def main():
    parser = common.model_options(common.parser(__doc__, rounds=3))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of the cases")
    options = common.parse(parser)
    if not common.spawned():
        common.spawn(__file__, options.ranks, options.device, options.model, **SMALL)
    model = os.environ[common.MODEL_VARIABLE]
    with torch.inference_mode():
        machine = Probe(options.device).measure()
    machine = replace(machine, memory=(MEMORY,) * options.ranks)
    checkpoint = open_checkpoint(model)
    shape = shape_of(checkpoint, torch.float32 if options.device == "cpu" else torch.bfloat16)
    ranks = Ranks(options.device, model)
    rows, busy = [], []
    for case in QUICK if options.quick else CASES[: options.cases]:
        estimated = options_of(case, shape, machine, options.ranks, options.text)
        sample = case.sample(model, options.text)
        actions = {
            option.name: lambda option=option, sample=sample: ranks.seconds(option.plan, sample)
            for option in estimated
        }
        found, percent = common.interleave(actions, options.rounds, options.patience)
        busy += percent
        if ranks.rank == 0:
            rows.append(row_of(case, estimated, found))
    if ranks.rank == 0:
        show(rows, ranks=options.ranks, machine=machine.as_dict(), busy_percent=busy, options=vars(options))
    common.leave()


if __name__ == "__main__":
    main()
