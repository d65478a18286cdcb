"""How much faster several ranks sample than one: every parallel method, and PipeFusion with several numbers
of patches.

    python benchmarks/scaling.py [--ranks 2] [--quick]

One process group runs everything. The reference is one rank while the others sleep; the ceiling is every rank
sampling by itself at once, which is what the machine's cores and memory give to independent work. Seconds a
step leave out what comes before a request's first step; PipeFusion's leave out its warm-up step, the fill and
the drain too (steady state). The time of 28 steps is a whole short run plus further steps: a projection. "by
CPU" is the speed-up in CPU seconds of the busiest rank: work alone, without waiting, and without what other
processes take.
"""

import os
import time
from dataclasses import dataclass

import common
import report

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.protocol import Sample

#: Steps of the runs that are called 28 steps.
WHOLE = 28
#: Method -> least part of the ceiling on two ranks.
GOALS = {
    "cfg": 0.97,
    "ulysses": 0.92,
    "ring": 0.92,
    "tp": 0.92,
    "pipefusion M=2": 0.97,
    "pipefusion M=4": 0.97,
}
CEILING = "ceiling"


@dataclass(frozen=True)
class Run:
    """A scenario: its engine (None: this rank idles) and request; ``reference`` names the scenario of one
    rank that does the same work."""

    engine: Engine | None
    sample: Sample
    reference: str

    @property
    def patches(self) -> int:
        return self.sample.num_pipeline_patch


def methods(ranks: int) -> dict[str, ParallelConfig]:
    """The ways to use ``ranks`` ranks."""
    ways = (
        {"cfg": ParallelConfig(cfg_degree=2)}
        if ranks == 2
        else {"cfg x ulysses": ParallelConfig(cfg_degree=2, ulysses_degree=ranks // 2)}
        if ranks % 2 == 0
        else {}
    )
    ways |= {
        "ulysses": ParallelConfig(ulysses_degree=ranks),
        "ring": ParallelConfig(ring_degree=ranks),
        "tp": ParallelConfig(tensor_parallel_degree=ranks),
    }
    return ways | {
        f"pipefusion M={patches}": ParallelConfig(pipefusion_degree=ranks, num_pipeline_patch=patches)
        for patches in (ranks, ranks + 1, 2 * ranks)  # which auto chooses among
    }


def runs(options, model: str) -> dict[str, Run]:
    """Every scenario; engines of one topology are shared."""
    rank, scenarios, engines = int(os.environ["RANK"]), {}, {}
    steps = 2 if options.quick else options.steps

    def request(config, guided):
        return common.request(
            model,
            steps + (3 if config.patches > 1 else 0),
            guided,
            options.side,
            options.text,
            num_pipeline_patch=config.num_pipeline_patch,
        )

    for name, config in methods(options.ranks).items():
        if options.only and not name.startswith(options.only):
            continue
        if config.topology() not in engines:
            engines[config.topology()] = common.engine(config, options.device, model)
        guided = config.cfg_degree == 2
        scenarios[name] = Run(
            engines[config.topology()], request(config, guided), "1 rank, cfg" if guided else "1 rank"
        )
    one = common.alone(options.device, model)

    def idle(engine):
        return engine if rank == 0 else None

    scenarios["1 rank"] = Run(idle(one), request(ParallelConfig(), False), "1 rank")
    if any(run.reference == "1 rank, cfg" for run in scenarios.values()):
        scenarios["1 rank, cfg"] = Run(idle(one), request(ParallelConfig(), True), "1 rank, cfg")
    return scenarios | {CEILING: Run(one, request(ParallelConfig(), False), "1 rank")}


def measure(run: Run, device: str) -> dict[str, float]:
    """Seconds of a step (steady state) and of 28 steps, where this rank sees the steps (rank 0 does), and
    this process's CPU seconds for a step."""
    if run.engine is None:
        return {"step": 0.0, "whole": 0.0, "cpu": 0.0}
    began, steps = time.process_time(), len(run.sample.tensors["sigmas"]) - 1
    at = common.clocked(run.engine, run.sample, device)
    cpu = (time.process_time() - began) / steps
    if len(at) == 2:
        return {"step": 0.0, "whole": 0.0, "cpu": cpu}
    # PipeFusion: step 1 is the warm-up, step 2 fills the pipeline, the last one drains it
    first, last = (2, steps - 1) if run.patches > 1 else (1, steps)
    step = (at[last] - at[first]) / (last - first)
    return {"step": step, "whole": at[-1] + (WHOLE - steps) * step, "cpu": cpu}


def measure_on_all(run: Run, name: str, device: str) -> dict[str, float]:
    """As ``measure`` with the CPU seconds of the busiest rank; the ceiling's step is what all ranks together
    need for one."""
    own = measure(run, device)
    steps, cpu = zip(*common.of_all_ranks(own["step"], own["cpu"]))
    if name != CEILING:
        return {**own, "cpu": max(cpu)}
    rate = sum(1 / step for step in steps)
    return {"step": 1 / rate, "whole": WHOLE / rate, "cpu": max(cpu) / len(cpu)}


def rows_of(results: dict[str, list[dict]], scenarios: dict[str, Run], ranks: int) -> list[dict]:
    """One row for each scenario, and one for each projected run: seconds, speed-up, part of the ceiling, and
    whether that is its goal."""

    def values(name, key):
        return [result[key] for result in results[name]]

    ceiling, rows = common.ratios(values("1 rank", "step"), values(CEILING, "step")), []
    for name, run in scenarios.items():
        for key, label in (("step", name), ("whole", f"{name}, {WHOLE} steps"))[
            : 2 if run.patches > 1 else 1
        ]:
            speedup = common.ratios(values(run.reference, key), values(name, key))
            part = speedup["median"] / ceiling["median"]
            goal = GOALS.get(label) if ranks == 2 else None
            rows.append(
                {
                    "scenario": label + (" (projected)" if key == "whole" else ""),
                    "seconds": common.spread(values(name, key)),
                    "speedup": speedup,
                    "by_cpu": common.ratios(values(run.reference, "cpu"), values(name, "cpu"))["median"],
                    "of_ceiling": part,
                    "goal_of_ceiling": goal,
                    "met": None if goal is None else part >= goal,
                }
            )
    return rows


def show(rows: list[dict], **facts):
    def number(value):
        return "" if value is None else f"{value:.2f}"

    report.table(
        ["scenario", "seconds", "x 1 rank", "by CPU", "of ceiling", "goal", ""],
        [
            [
                r["scenario"],
                report.shown(r["seconds"], 3),
                report.shown(r["speedup"]),
                number(r["by_cpu"]),
                number(r["of_ceiling"]),
                number(r["goal_of_ceiling"]),
                report.outcome(r["met"]),
            ]
            for r in rows
        ],
    )
    bars = [report.Bar(r["scenario"], **r["speedup"]) for r in rows]
    report.write("scaling", f"Speed-up of {facts['ranks']} ranks over one", "times", bars, rows=rows, **facts)


def main():
    parser = common.model_options(common.parser(__doc__, rounds=5))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of a run; PipeFusion takes 3 more (default 3)"
    )
    parser.add_argument(
        "--only",
        default="",
        help="only the methods whose names begin so, besides one rank and the ceiling: cfg, pipefusion, ...",
    )
    options = common.parse(parser)
    if not common.spawned():
        common.spawn(__file__, ranks=options.ranks, device=options.device, model=options.model)
    common.hold_to_one_core(options.device)
    scenarios = runs(options, os.environ[common.MODEL_VARIABLE])
    actions = {
        name: lambda name=name, run=run: measure_on_all(run, name, options.device)
        for name, run in scenarios.items()
    }
    results, busy = common.interleave(actions, options.rounds, options.patience)
    if os.environ["RANK"] == "0":
        show(
            rows_of(results, scenarios, options.ranks),
            ranks=options.ranks,
            busy_percent=busy,
            rounds=results,
            options=vars(options),
        )
    common.leave()


if __name__ == "__main__":
    main()
