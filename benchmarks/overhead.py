"""What the engine costs on one rank: Engine.sample against a plain diffusers Euler loop with the same
weights, alternating.

    python benchmarks/overhead.py [--steps 4] [--quick]

Both make the same number of model calls, and their latents are compared. The time is that of the whole
request, with whatever either does before its first step. "by CPU" compares CPU seconds: work alone, without
what other processes take.
"""

import tempfile

import common
import loops
import report

from backend.sampling.step_loop import Callbacks

#: The engine's time over the plain loop's.
GOAL = 1.02


def contest(options, model: str) -> common.Contest:
    sample = common.request(model, options.steps, side=options.side, text=options.text)
    one, plain = common.alone(options.device, model), loops.PlainLoop(model, options.device)
    return common.contest(
        {"engine": lambda: one.sample(sample, Callbacks())[0], "plain loop": lambda: plain(sample)}, options
    )


def show(found: common.Contest, options):
    ratio = common.ratios(found.seconds["engine"], found.seconds["plain loop"])
    by_cpu = common.ratios(found.cpu["engine"], found.cpu["plain loop"])
    report.table(
        ["1 rank", "seconds", "x plain loop", "by CPU", "goal", ""],
        [
            ["plain loop", report.shown(common.spread(found.seconds["plain loop"]), 3), "1", "1", "", ""],
            [
                "engine",
                report.shown(common.spread(found.seconds["engine"]), 3),
                report.shown(ratio, 3),
                report.shown(by_cpu, 3),
                f"<= {GOAL}",
                report.outcome(ratio["median"] <= GOAL),
            ],
        ],
    )
    print(f"relative difference of the latents: {found.difference:.1e}")
    report.write(
        "overhead",
        "Time of the engine on one rank over a plain diffusers loop",
        "less is better",
        [report.Bar("engine", **ratio, goal=GOAL)],
        ratio=ratio,
        by_cpu=by_cpu,
        **found.facts(options),
    )


def main():
    parser = common.model_options(common.parser(__doc__, rounds=9))
    parser.add_argument("--steps", type=int, default=4)
    options = common.parse(parser)
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        if not options.model:
            common.save_model(folder, options.device)
        show(contest(options, options.model or folder), options)


if __name__ == "__main__":
    main()
