"""What previews cost while a latent is sampled: transport.py runs it.

A round is four whole samplings on a warm backend: without previews, with, with, without, so that a machine
that grows faster or slower meanwhile does so for both. Reported are, in percent, the time that rank 0 spends
on making previews over that of sampling ("made"), and by how much the two with previews take longer at the
engine ("slower") and cost rank 0's process more CPU time, its sending included ("CPU"), than the two without.
"""

import tempfile
from dataclasses import replace

import common
import psutil

from backend.client import pool
from backend.config import ParallelConfig

#: Most percent of sampling that previews may cost, at the rate of the nodes (seconds between two), and the
#: ways of two ranks in which that is measured.
GOAL, SECONDS = 2.0, 0.2
MODEL = dict(num_layers=1, num_single_layers=2)
WAYS = {"ulysses": "ulysses_degree", "cfg": "cfg_degree", "pipefusion": "pipefusion_degree"}
PATCHES = 4


def sampled(backend, message, seconds: float) -> dict:
    """Statistics of a sampling with a preview every ``seconds`` (0: none), and the CPU seconds of rank 0."""
    process = psutil.Process(backend.welcome.pids[0])

    def spent():
        return sum(process.cpu_times()[:2])

    before = spent()
    return {**backend.sample(replace(message, preview_seconds=seconds)).stats, "cpu": spent() - before}


def costs(config: ParallelConfig, model: str, rounds: int, steps: int) -> dict[str, list[float]]:
    """Percent of sampling, of each round."""
    pool.allow(model)
    backend, percents = pool.backend_for(config), {"made": [], "slower": [], "CPU": []}
    message = common.request(
        model,
        steps,
        guided=config.cfg_degree == 2,
        num_pipeline_patch=PATCHES if config.pipefusion_degree > 1 else 1,
    )
    message = replace(message, model=backend.load(model).model)
    backend.sample(message)
    for _ in range(rounds):
        first, shown, again, last = (
            sampled(backend, message, seconds) for seconds in (0.0, SECONDS, SECONDS, 0.0)
        )
        assert shown["previews"] > 0 and again["previews"] > 0 and not first["previews"]

        def both(name, a, b):
            return a[name] + b[name]

        percents["made"].append(100 * both("preview_seconds", shown, again) / both("seconds", shown, again))
        for name, clock in (("slower", "seconds"), ("CPU", "cpu")):
            percents[name].append(100 * (both(clock, shown, again) / both(clock, first, last) - 1))
    return percents


def measure(rounds: int, steps: int, device: str, ways: list[str]) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        common.save_model(folder, device, **MODEL)
        try:
            return {
                f"previews, {way}, {name}": values
                for way in ways
                for name, values in costs(
                    replace(ParallelConfig(device=device), **{WAYS[way]: 2}), folder, rounds, steps
                ).items()
            }
        finally:
            pool.close_all()
