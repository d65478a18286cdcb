"""Our engine against diffusers' own transformer in a plain Euler loop: same weights, tokens, ranks and
rounds.

    python benchmarks/peers.py --ranks 1    # what the engine costs: the time of whole requests
    python benchmarks/peers.py              # Ulysses of two ranks against diffusers' own context parallelism
    python benchmarks/peers.py --ring       # the ring of two ranks against diffusers' own
    python benchmarks/peers.py --compile    # and both with compiled blocks (compile_repeated_blocks)

"by CPU" compares rank 0's CPU seconds: work alone, without waiting, and without what other processes take.
Graphs are compiled before the first round, by the CPU's or the GPU's inductor.

diffusers' ring merges by log-sum-exps, which its usual backend does not return. That of torch's flash
attention does; its operator has no kernel on the CPU and gets torch's own there (loops.py).

raylight and xDiT are not compared here: they need CUDA and NCCL, so on the CPU there is nothing to compare.
diffusers has no PipeFusion and no CFG parallelism.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]  # which Python leaves out with PYTHONSAFEPATH
import common
import loops
import report
import torch
from diffusers.models._modeling_parallel import ContextParallelConfig

from backend.config import ParallelConfig
from backend.runtime.parent_pipe import be_killed_with_parent, end_with_parent
from backend.sampling.step_loop import Callbacks

#: Our time over diffusers': what the engine may cost, what Ulysses should save, and what a ring may take.
ONE_RANK_OR_COMPILED, ULYSSES, RING = 1.02, 1 / 1.05, 1.0
#: Request.compile -> what the rows are called.
NAMES = {"blocks": ", compiled", "off": ""}


@dataclass(frozen=True)
class Contest:
    """Ways to the same latent. seconds, cpu: by name, of each round, cpu without waiting and without what
    other processes take; difference: largest relative one of a latent from the first; busy: of interleave."""

    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]
    difference: float
    busy: list[float]


def configurations(options: argparse.Namespace) -> tuple[ParallelConfig, ContextParallelConfig | None]:
    """Return ours and diffusers' of the same method and ranks; of one rank diffusers has none."""
    degree = {"ring_degree" if options.ring else "ulysses_degree": options.ranks}
    theirs = ContextParallelConfig(**degree) if options.ranks > 1 else None
    return ParallelConfig(**degree), theirs


def contest(options: argparse.Namespace, model: str) -> Contest:
    """Run diffusers and ours in rounds, with compiled blocks first where those are asked for."""
    sample = common.request(model, options.steps, side=options.side, text=options.text)
    config, parallel = configurations(options)
    alone = options.ranks == 1
    ours = common.alone(options.device, model) if alone else common.engine(config, options.device, model)
    theirs = loops.PlainLoop(model, options.device, parallel)
    if options.compile:
        theirs.compile(fullgraph=alone)  # their context parallelism breaks graphs

    def run(compile: str):
        samples, stats = ours.sample(replace(sample, compile=compile), Callbacks())
        assert not any("uncompiled" in note for note in stats["notes"]), stats["notes"]
        return samples

    contenders = {}
    for compile in ("blocks", "off") if options.compile else ("off",):
        contenders[f"diffusers{NAMES[compile]}"] = partial(theirs, sample, compile == "blocks")
        contenders[f"ours{NAMES[compile]}"] = partial(run, compile)
    return measured(contenders, options)


def measured(contenders: dict[str, Callable[[], torch.Tensor]], options: argparse.Namespace) -> Contest:
    """Let functions take turns, after each has run once (which touches every weight, and compiles)."""
    first, *others = [action() for action in contenders.values()]
    clocked = {name: partial(common.timed, action, options.device) for name, action in contenders.items()}
    found, busy = common.interleave(clocked, options.rounds, options.patience)
    seconds, cpu = ({name: [times[i] for times in rounds] for name, rounds in found.items()} for i in (0, 1))
    difference = max(((first - other).norm() / other.norm()).item() for other in others)
    return Contest(seconds, cpu, difference, busy)


def show(results: Contest, options: argparse.Namespace):
    """Print a row for each, and write the numbers, all over those of the first."""
    base, ours, *_ = results.seconds
    goal = RING if options.ring else ULYSSES
    goal = ONE_RANK_OR_COMPILED if options.ranks == 1 or options.compile else goal
    ratios = {
        name: common.ratios(seconds, results.seconds[base]) for name, seconds in results.seconds.items()
    }
    by_cpu = {name: common.ratios(seconds, results.cpu[base]) for name, seconds in results.cpu.items()}
    method = "ring" if options.ring else "Ulysses"
    title = "one rank" if options.ranks == 1 else f"{method}, {options.ranks} ranks"
    goals = {ours: [f"<= {goal:.2f}", report.outcome(ratios[ours]["median"] <= goal)]}
    rows = [
        [
            name,
            report.shown(common.spread(results.seconds[name]), 3),
            report.shown(ratio, 3),
            report.shown(by_cpu[name], 3),
            *goals.get(name, ["", ""]),
        ]
        for name, ratio in ratios.items()
    ]
    report.table([title, "seconds", f"x {base}", "by CPU", "goal", ""], rows)
    print(f"largest relative difference of the latents: {results.difference:.1e}")
    report.write(
        f"peers-{options.ranks}{'-ring' if options.ring else ''}{'-compiled' if options.compile else ''}",
        f"Our time over {base}'s, {title}",
        "less is better",
        [report.Bar(name, **ratio, goal=goal if name == ours else None) for name, ratio in ratios.items()],
        goal=goal,
        ratio=ratios[ours],
        by_cpu=by_cpu[ours],
        difference=results.difference,
        rounds=results.seconds,
        busy_percent=results.busy,
        options=vars(options),
    )


def main():
    parser = common.model_options(common.parser(__doc__, rounds=9))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compile", action="store_true", help="compare both with compiled blocks too")
    parser.add_argument("--ring", action="store_true", help="compare rings, not Ulysses")
    parser.add_argument("--ends-with-stdin", action="store_true", help=argparse.SUPPRESS)
    options = common.parse(parser)
    if options.ends_with_stdin:
        end_with_parent()
        be_killed_with_parent()
    if options.ring and options.ranks == 1:
        parser.error("--ring wants at least 2 ranks")
    if options.ranks == 1:
        with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
            if not options.model:
                common.save_model(folder, options.device)
            show(contest(options, options.model or folder), options)
        return
    if not common.spawned():
        common.spawn(__file__, ranks=options.ranks, device=options.device, model=options.model)
    common.hold_to_one_core(options.device)
    results = contest(options, os.environ[common.MODEL_VARIABLE])
    if os.environ["RANK"] == "0":
        show(results, options)
    common.leave()


if __name__ == "__main__":
    main()
