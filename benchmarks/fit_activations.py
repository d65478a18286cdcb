"""What the activations of each family are, in tokens of its width: fitted to the dry runs of released models.

    python benchmarks/fit_activations.py [--write]

Needs scipy. Each row of dry_run.json tells how much one rank held; keys and values, latents and long skips
are known. The rest is max((replicated + cut / TP + communicated + ring) / SP, outside), whose five numbers
are fitted for each family: first for the least largest relative error, then for the least mean one. Both are
linear programs, one for each number of rows of which the layers outside of the blocks hold most. A sixth
number, "buffered", stands for "communicated" where PipeFusion's buffers take what is sent. It alone is fitted
to the rows of that hybrid. Prints the numbers and the largest error of both fits; --write stores them in
backend/rank_plan/activations.json.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("scripts", "benchmarks", "tests/support"))]
import numpy as np
import torch
from scaling_page import dry_run, model, plans_of
from scipy.optimize import linprog  # pyright: ignore[reportMissingImports]  # not among what tests need

from backend.config import ParallelConfig
from backend.rank_plan.activations import latent_bytes, long_skips, width_bytes
from backend.rank_plan.workload import Workload

STORED = ROOT / "backend/rank_plan/activations.json"
NUMBERS = ("replicated", "cut", "communicated", "ring", "outside")
#: The sixth number, the hybrid to which it is fitted, and what is tried for it.
BUFFERED, HYBRID = "buffered", "pipefusion x ulysses"
TRIED = np.arange(0, 2000) / 100
#: Digits that are stored, and how much larger than the least the largest error may be for the mean's sake.
DIGITS, SLACK = 2, 1.001


@dataclass(frozen=True)
class Row:
    """A dry run in tokens of the model's width. inside: factors of the first four NUMBERS; skips: long skips
    on this rank; latents: those and rotary tables; held: all but weights, keys and values."""

    family: str
    inside: tuple[float, ...]
    skips: float
    latents: float
    held: float


def rows(*methods: str) -> Iterator[Row]:
    """Read every dry run of ``methods`` that could run."""
    for name, counted in dry_run.stored().items():
        golden, method, ranks, rank = name.split("/")
        if isinstance(counted, dict) and method in methods:
            yield row_of(golden, method, int(ranks), int(rank), counted)


def alone() -> list[str]:
    """Return the methods that are fitted, all but FSDP and hybrids: their ranks hold what those of fewer
    methods hold, which would count twice. CFG alone, a whole image on a rank, and hybrids are compared with
    the numbers."""
    return [name for name, method in dry_run.METHODS.items() if not method.fixed and not method.shards]


def row_of(golden: str, method: str, ranks: int, rank: int, counted: dict) -> Row:
    """Read one dry run."""
    checkpoint = model(golden).checkpoint
    size = model(golden).size
    work = Workload(ParallelConfig(), checkpoint, size, torch.bfloat16, {})
    unit = size.tokens * width_bytes(work, 1)
    plan = plans_of(golden, method, ranks)[rank]
    config = dry_run.METHODS[method].config(ranks)
    sp = config.sp_degree
    tp = config.tensor_parallel_degree
    inside = (1 / sp, 1 / tp / sp, (sp > 1) / sp, (config.ring_degree > 1) / sp)
    held = counted["peak"] - max(plan.kv_bytes, counted["kv"])
    skips = long_skips(checkpoint, range(*plan.blocks)) / sp
    return Row(checkpoint.family.name, inside, skips, latent_bytes(work) / unit, held / unit)


def fitted(rows: list[Row]) -> tuple[dict[str, float], float]:
    """Return NUMBERS of a family, and the largest relative error."""
    rows = sorted(rows, key=lambda row: row.held - row.latents)
    solved = [program(rows, count) for count in range(len(rows) + 1)]
    error = min(largest for _, largest, _ in solved)
    alike = [outside for _, largest, outside in solved if largest <= SLACK * error]
    numbers, _, _ = min((program(rows, outside, SLACK * error) for outside in alike), key=itemgetter(1))
    return {name: round(max(0.0, float(each)), DIGITS) for name, each in zip(NUMBERS, numbers)}, error


def buffered(numbers: dict[str, float], rows: list[Row]) -> tuple[float, float]:
    """Fit what rows of HYBRID hold in place of "communicated", with the other numbers as they are: for the
    least largest relative error, then for the least mean one. Return it, and the largest error."""
    errors = []
    for row in rows:
        replicated, cut, sent, _ = row.inside
        known = replicated * numbers["replicated"] + cut * numbers["cut"] + row.skips
        found = np.maximum(known + sent * TRIED, numbers["outside"]) + row.latents
        errors.append(abs(found / row.held - 1))
    largest = np.max(errors, axis=0)
    mean = np.mean(errors, axis=0)
    best = min(range(len(TRIED)), key=lambda index: (round(largest[index], 4), mean[index]))
    return float(TRIED[best]), float(largest[best])


def program(rows: list[Row], outside: int, most: float | None = None) -> tuple[list[float], float, int]:
    """Fit rows of which the first ``outside`` hold most outside of the blocks. Return the numbers, what was
    made least (infinite where nothing fits), and ``outside``. ``most``: a bound of the largest error, whose
    mean is then made least."""
    count = len(rows)
    errors = count if most is not None else 1
    left = []
    right = []

    def at_most(factors: tuple[float, ...], sign: int, index: int):
        """sign * (factors * numbers - what remains) <= error * held"""
        row = rows[index]
        own = np.zeros(len(NUMBERS) + errors)
        own[: len(NUMBERS)] = sign * np.array(factors)
        own[len(NUMBERS) + (index if most is not None else 0)] = -row.held
        left.append(own)
        is_inside = factors[-1] == 0
        right.append(sign * (row.held - row.latents - (row.skips if is_inside else 0)))

    for index, row in enumerate(rows):
        inside, around = (*row.inside, 0.0), (0.0, 0.0, 0.0, 0.0, 1.0)
        at_most(inside, sign=1, index=index)
        at_most(around, sign=1, index=index)
        at_most(around if index < outside else inside, sign=-1, index=index)
    cost = [0.0] * len(NUMBERS) + [1.0] * errors
    bounds = [(0, None)] * len(NUMBERS) + [(0, most)] * errors
    solved = linprog(cost, left, right, bounds=bounds)
    if not solved.success:
        return [], float("inf"), outside
    return list(solved.x[: len(NUMBERS)]), solved.fun, outside


def by_family(rows: Iterator[Row]) -> dict[str, list[Row]]:
    """Collect the rows of each family."""
    families: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        families[row.family].append(row)
    return families


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"store the numbers in {STORED.name}")
    chosen = parser.parse_args()
    families = by_family(rows(*alone()))
    hybrids = by_family(rows(HYBRID))
    numbers = {}
    for family in sorted(families):
        numbers[family], error = fitted(families[family])
        numbers[family][BUFFERED], other = buffered(numbers[family], hybrids[family])
        print(f"{family}: {numbers[family]}, largest errors {error:.1%} and {other:.1%}", flush=True)
    if chosen.write:
        lines = (f"{json.dumps(family)}: {json.dumps(each)}" for family, each in numbers.items())
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
