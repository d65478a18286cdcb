"""Our Ulysses against diffusers' native context parallelism (Ulysses): same weights, tokens, ranks and
rounds.

    python benchmarks/peers.py [--quick]

"by CPU" compares rank 0's CPU seconds: work alone, without waiting, and without what other processes take.

raylight and xDiT are not compared here: they need CUDA and NCCL, so on the CPU there is nothing to compare.
diffusers' ring attention does not run on the CPU either, and it has no PipeFusion and no CFG parallelism.
"""

import common
import loops
import report

from backend.config import ParallelConfig
from backend.sampling.step_loop import Callbacks

#: diffusers' time over ours.
GOAL = 1.05


def contest(options, model: str) -> common.Contest:
    sample = common.request(model, options.steps, side=options.side, text=options.text)
    ours = common.engine(ParallelConfig(ulysses_degree=options.ranks), options.device, model)
    theirs = loops.PlainLoop(model, options.device, options.ranks)
    return common.contest(
        {"ours": lambda: ours.sample(sample, Callbacks())[0], "diffusers": lambda: theirs(sample)}, options
    )


def show(found: common.Contest, options):
    ratio = common.ratios(found.seconds["diffusers"], found.seconds["ours"])
    by_cpu = common.ratios(found.cpu["diffusers"], found.cpu["ours"])
    report.table(
        [f"Ulysses, {options.ranks} ranks", "seconds", "x diffusers", "by CPU", "goal", ""],
        [
            ["diffusers", report.shown(common.spread(found.seconds["diffusers"]), 3), "1", "1", "", ""],
            [
                "ours",
                report.shown(common.spread(found.seconds["ours"]), 3),
                report.shown(ratio, 3),
                report.shown(by_cpu, 3),
                f">= {GOAL:g}",
                report.outcome(ratio["median"] >= GOAL),
            ],
        ],
    )
    print(f"relative difference of the latents: {found.difference:.1e}")
    report.write(
        "peers",
        "Speed of our Ulysses over diffusers' own",
        "times",
        [report.Bar("ours", **ratio, goal=GOAL)],
        ratio=ratio,
        by_cpu=by_cpu,
        **found.facts(options),
    )


def main():
    parser = common.model_options(common.parser(__doc__, rounds=9))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    common.compete(__file__, contest, show, common.parse(parser))


if __name__ == "__main__":
    main()
