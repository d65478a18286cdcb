"""How near the planner's choice is to the best plan: every plan of so many ranks is run, next to one rank.

    python benchmarks/auto.py [--ranks 2] [--minutes 10] [--quick]

The planner gets what it gets in the product: rates of the same ranks (backend/probe.py) and the model's
headers. Every plan runs the whole request once. Those near the best one, the choice and one rank then take
turns, round after round, with their weights loaded. "of best" is the median of the rounds' ratios of seconds,
choice over best plan (the one of the least median). "by CPU" is the same in CPU seconds, which others
do not lengthen: of the busiest rank, or of all over the cores, whichever is more (without waiting).
Cases that would begin after --minutes are left out, and named.
"""

import os
import statistics
import time
from dataclasses import dataclass, replace
from functools import partial

import common
import report
import torch

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.planner.choose import Question, ranked
from backend.planner.machine import Machine, RequestEstimate
from backend.planner.option import Option
from backend.probe import Probe
from backend.protocol import Sample
from backend.rank_plan.shape_of import shape_of
from backend.sampling.step_loop import Callbacks

#: A choice that takes at most so many times the seconds of the best plan is good.
GOAL = 1.10
#: Plans that take turns: the fastest of a first run, within so many times the seconds of the very fastest.
CONTENDERS, NEAR = 4, 1.3
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

    def request(self, text: int) -> RequestEstimate:
        """As the planner gets it."""
        return RequestEstimate(
            image_tokens=self.side**2 // 4,
            text_tokens=text,
            steps=self.steps,
            prompts=2 if self.guided else 1,
            batch=self.batch,
        )

    def sample(self, model: str, text: int) -> Sample:
        """As the ranks get it."""
        sample = common.request(model, self.steps, self.guided, self.side, text)
        repeated = {name: sample.tensors[name].repeat(self.batch, 1, 1, 1) for name in ("noise", "latent")}
        return replace(sample, tensors={**sample.tensors, **repeated})


CASES = (
    Case(side=32, steps=8, guided=False),
    Case(side=32, steps=8, guided=True),
    Case(side=32, steps=4, guided=True),
    Case(side=64, steps=4, guided=False),
    Case(side=48, steps=4, guided=False, batch=2),
    Case(side=48, steps=8, guided=False),
    Case(side=16, steps=8, guided=True),
    Case(side=64, steps=4, guided=True),
)
QUICK = (Case(side=8, steps=8, guided=True), Case(side=8, steps=2, guided=False, batch=2))


def options_of(case: Case, shape, machine: Machine, ranks: int, text: int) -> list[Option]:
    """Estimate one rank and every plan of ``ranks``."""
    question = Question(shape=shape, request=case.request(text), machine=machine, gpus=ranks)
    return [option for option in question.options() if option.plan.world_size in (1, ranks)]


class Loaded:
    """A plan with its groups and the model's weights on this rank; one rank runs alone while others sleep."""

    def __init__(self, plan: ParallelConfig, device: str, model: str, sample: Sample):
        settings = {"num_pipeline_patch": plan.num_pipeline_patch, "warmup_steps": plan.warmup_steps}
        self.sample = replace(sample, **settings)
        self.is_shared = plan.world_size > 1
        self.groups = mesh.build(plan, device) if self.is_shared else mesh.single(device)
        self.device = device
        self.engine = None
        if self.is_shared or os.environ["RANK"] == "0":
            self.engine = Engine(plan, self.groups)
            self.engine.load("model", model, "default")
        self._run(replace(self.sample, tensors={**sample.tensors, "sigmas": torch.linspace(1, 0, 2)}))

    def _run(self, sample: Sample):
        if self.engine:
            self.engine.sample(sample, Callbacks())

    def __call__(self) -> list[float]:
        """Run the request; return the longest seconds of a rank, and the CPU seconds that the cores need."""
        common.meet()
        seconds, cpu = common.timed(lambda: self._run(self.sample), self.device)
        ranks = common.of_all_ranks(seconds if self.engine else 0.0, cpu)
        each = [rank[1] for rank in ranks]
        return [max(rank[0] for rank in ranks), max(*each, sum(each) / (os.cpu_count() or 1))]

    def close(self):
        """Free the weights, and the groups on all ranks."""
        if self.engine:
            self.engine.unload("model")
        if self.is_shared:
            mesh.close(self.groups)


@dataclass
class Runs:
    """The measurements of a case: [seconds, CPU seconds] of every plan once, and of contenders by round."""

    once: dict[str, list[float]]
    rounds: dict[str, list[list[float]]]
    busy: list[float]

    def median(self, name: str, kind: int = 0) -> float:
        """Median seconds, or CPU seconds (1), of a contender."""
        return statistics.median(values[kind] for values in self.rounds[name])

    def ratio(self, over: str, under: str, kind: int = 0) -> dict[str, float]:
        """Spread of the rounds' ratios of two contenders."""
        pairs = ([values[kind] for values in self.rounds[name]] for name in (over, under))
        return common.ratios(*pairs)


def contenders(options: list[Option], once: dict[str, list[float]]) -> list[str]:
    """Name the plans that take turns: the fastest, the choice, and one rank."""
    fastest = sorted(once, key=lambda name: once[name][0])[:CONTENDERS]
    near = [name for name in fastest if once[name][0] <= NEAR * once[fastest[0]][0]]
    one = next(option.name for option in options if option.plan.world_size == 1)
    return list(dict.fromkeys([*near, ranked(options)[0].name, one]))


def measure(options: list[Option], device: str, model: str, sample: Sample, given) -> Runs:
    """Run every plan once, and the contenders in turn."""
    plans = {option.name: option.plan for option in options}

    def once(plan: ParallelConfig) -> list[float]:
        loaded = Loaded(plan, device, model, sample)
        samples = loaded()
        loaded.close()
        return samples

    first, busy = common.interleave(
        {name: partial(once, plan) for name, plan in plans.items()}, 1, given.patience
    )
    single = {name: values[0] for name, values in first.items()}
    loaded = {name: Loaded(plans[name], device, model, sample) for name in contenders(options, single)}
    samples, more = common.interleave(loaded, given.rounds, given.patience)
    for each in loaded.values():
        each.close()
    return Runs(single, samples, busy + more)


def row_of(case: Case, options: list[Option], runs: Runs) -> dict:
    """The choice, the best plan, and how many times its seconds the choice takes."""
    best, best_by_cpu = (min(runs.rounds, key=lambda name: runs.median(name, kind)) for kind in (0, 1))
    chosen = ranked(options)[0].name
    one = next(option.name for option in options if option.plan.world_size == 1)
    of_best = runs.ratio(chosen, best)
    return {
        "case": case.name,
        "plans": len(options),
        "chosen": chosen,
        "best": best,
        "of_best": of_best,
        "by_cpu": runs.ratio(chosen, best_by_cpu, kind=1),
        "speedup": runs.ratio(one, chosen),
        "met": of_best["median"] <= GOAL,
        "once": runs.once,
        "rounds": runs.rounds,
        "busy_percent": runs.busy,
        "estimated": {option.name: option.seconds for option in options},
    }


def show(rows: list[dict], **facts):
    report.table(
        ["case", "plans", "chosen", "best", "of best", "by CPU", "x 1 rank", ""],
        [
            [
                row["case"],
                str(row["plans"]),
                row["chosen"],
                row["best"],
                report.shown(row["of_best"]),
                f"{row['by_cpu']['median']:.2f}",
                f"{row['speedup']['median']:.2f}",
                report.outcome(row["met"]),
            ]
            for row in rows
        ],
    )
    print(f"{sum(row['met'] for row in rows)} of {len(rows)} choices within {GOAL - 1:.0%} of the best plan")
    bars = [report.Bar(row["case"], **row["of_best"], goal=GOAL) for row in rows]
    report.write("auto", "Seconds of the chosen plan over the best one's", "times", bars, rows=rows, **facts)


def main():
    parser = common.model_options(common.parser(__doc__, rounds=5))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of the cases")
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no case after so many")
    options = common.parse(parser)
    if not common.spawned():
        common.spawn(__file__, ranks=options.ranks, device=options.device, model=options.model, **SMALL)
    model = os.environ[common.MODEL_VARIABLE]
    started = time.monotonic()
    with torch.inference_mode():
        machine = Probe(options.device).measure()
    machine = replace(machine, memory=(MEMORY,) * options.ranks)
    checkpoint = open_checkpoint(model)
    shape = shape_of(checkpoint, torch.float32 if options.device == "cpu" else torch.bfloat16)
    cases = QUICK if options.quick else CASES[: options.cases]
    rows = []
    for case in cases:
        minutes = common.of_all_ranks((time.monotonic() - started) / 60)[0][0]
        if minutes >= options.minutes:
            break
        estimated = options_of(case, shape, machine, options.ranks, options.text)
        sample = case.sample(model, options.text)
        rows.append(row_of(case, estimated, measure(estimated, options.device, model, sample, options)))
    if os.environ["RANK"] == "0":
        show(rows, ranks=options.ranks, machine=machine.as_dict(), options=vars(options))
        for case in cases[len(rows) :]:
            print(f"left out for want of time: {case.name}")
    common.leave()


if __name__ == "__main__":
    main()
