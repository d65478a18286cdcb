"""Our engine with compiled blocks against diffusers' transformer with compiled blocks
(compile_repeated_blocks) in a plain loop: same weights, tokens, ranks and rounds.

    python benchmarks/compiled.py [--quick] [--ranks 2]

One rank, or Ulysses over ``--ranks`` against diffusers' own context parallelism. Both are shown without
compiled blocks too. "by CPU" compares rank 0's CPU seconds, as in peers.py. Graphs are compiled before the
first round, by the CPU's or the GPU's inductor.
"""

from dataclasses import replace

import common
import loops
import report

from backend.config import ParallelConfig
from backend.sampling.step_loop import Callbacks

#: Our time over diffusers', both compiled.
GOAL = 1.02


def contest(options, model: str) -> common.Contest:
    """Run the four in rounds; the first run of each, which compiles, is before them."""
    sample = common.request(model, options.steps, side=options.side, text=options.text)
    ours = common.engine(ParallelConfig(ulysses_degree=options.ranks), options.device, model)
    theirs = loops.PlainLoop(model, options.device, options.ranks)
    theirs.compile(fullgraph=options.ranks == 1)  # their context parallelism breaks graphs

    def run(compile: str):
        samples, stats = ours.sample(replace(sample, compile=compile), Callbacks())
        assert not any("uncompiled" in note for note in stats["notes"]), stats["notes"]
        return samples

    return common.contest(
        {
            "diffusers, compiled": lambda: theirs(sample, compiled=True),
            "ours, compiled": lambda: run("blocks"),
            "diffusers": lambda: theirs(sample),
            "ours": lambda: run("off"),
        },
        options,
    )


def show(found: common.Contest, options):
    """Print a row for each, and write the numbers of the compiled ones."""
    base = found.seconds["diffusers, compiled"]
    ratios = {name: common.ratios(seconds, base) for name, seconds in found.seconds.items()}
    by_cpu = {
        name: common.ratios(seconds, found.cpu["diffusers, compiled"]) for name, seconds in found.cpu.items()
    }
    title = "one rank" if options.ranks == 1 else f"Ulysses, {options.ranks} ranks"
    report.table(
        [title, "seconds", "x compiled diffusers", "by CPU", "goal", ""],
        [
            [
                name,
                report.shown(common.spread(found.seconds[name]), 3),
                report.shown(ratio, 3),
                report.shown(by_cpu[name], 3),
                f"<= {GOAL:g}" if name == "ours, compiled" else "",
                report.outcome(ratio["median"] <= GOAL) if name == "ours, compiled" else "",
            ]
            for name, ratio in ratios.items()
        ],
    )
    print(f"largest relative difference of the latents: {found.difference:.1e}")
    report.write(
        f"compiled-{options.ranks}",
        "Our time over compiled diffusers'",
        "times",
        [report.Bar(name, **ratio) for name, ratio in ratios.items()],
        ratio=ratios["ours, compiled"],
        by_cpu=by_cpu["ours, compiled"],
        **found.facts(options),
    )


def main():
    parser = common.model_options(common.parser(__doc__, rounds=7))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    common.compete(__file__, contest, show, common.parse(parser))


if __name__ == "__main__":
    main()
