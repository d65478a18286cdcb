"""What the activations of each family are, in tokens of its width: fitted to the dry runs of released models.

    python benchmarks/fit_activations.py [--write]

Needs scipy. Each row of dry_run.json tells how much one rank held; keys and values, latents, long skips and
what a stage receives are known. The rest is max((replicated + cut / TP + communicated + ring) / SP + whole,
outside), whose six numbers are fitted for each family: first for the least largest relative error, then for
the least mean one. Both are linear programs, one for each number of rows of which the layers outside of the
blocks hold most. Two more numbers, "buffered" and "joined", stand for "communicated" and "ring" where
PipeFusion's buffers take what is sent; each is fitted to the rows of one hybrid alone. Of several lists of
blocks, these are the numbers of the one that holds most; what is in the first brackets on stages of another
one, as a share of it, is fitted last. Prints the numbers and the largest error of each fit; --write stores
them in backend/rank_plan/activations.json.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("scripts", "benchmarks", "tests/support"))]
import numpy as np
import torch
from scaling_page import dry_run, model, plans_of
from scipy.optimize import linprog  # pyright: ignore[reportMissingImports]  # not among what tests need

from backend.config import ParallelConfig
from backend.rank_plan.activations import BLOCKS, carried_streams, latent_bytes, width_bytes
from backend.rank_plan.workload import Workload

STORED = ROOT / "backend/rank_plan/activations.json"
NUMBERS = ("replicated", "cut", "communicated", "ring", "whole", "outside")
#: Two more numbers, the hybrid to which each is fitted, and what is tried for them.
BUFFERED, HYBRID = "buffered", "pipefusion x ulysses"
JOINED, OF_A_RING = "joined", "pipefusion x ring"
TRIED = [number / 100 for number in range(2000)]
#: What is tried for the share of a list of blocks.
SHARES = TRIED[1:101]
#: Digits that are stored, and how much larger than the least the largest error may be for the mean's sake.
DIGITS, SLACK = 2, 1.001


@dataclass(frozen=True)
class Row:
    """A dry run in tokens of the model's width. blocks: the lists of this rank's blocks; inside: factors of
    all NUMBERS but the last; carried: long skips on this rank and what it receives; latents: those and rotary
    tables; held: all but weights, keys and values."""

    family: str
    blocks: frozenset[str]
    inside: tuple[float, ...]
    carried: float
    latents: float
    held: float

    def found(self, numbers: dict[str, float], sent: float, share: float = 1.0) -> float:
        """Return what is estimated with ``numbers``, ``sent`` in place of "communicated", and a share of what
        is inside blocks."""
        replicated, cut, communicated, ring, whole = self.inside
        known = replicated * numbers["replicated"] + cut * numbers["cut"] + ring * numbers["ring"]
        inside = (known + communicated * sent) * share + self.carried + whole * numbers["whole"]
        return max(inside, numbers["outside"]) + self.latents

    def error(self, numbers: dict[str, float], sent: float, share: float = 1.0) -> float:
        """Return the relative error of ``found``."""
        return abs(self.found(numbers, sent, share) / self.held - 1)


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
    inside = (1 / sp, 1 / tp / sp, (sp > 1) / sp, (config.ring_degree > 1) / sp, 1.0)
    held = counted["peak"] - max(plan.kv_bytes, counted["kv"])
    blocks = range(*plan.blocks)
    lists = frozenset(checkpoint.block_names[index].rpartition(".")[0] for index in blocks)
    carried = carried_streams(checkpoint, blocks) / sp
    return Row(checkpoint.family.name, lists, inside, carried, latent_bytes(work) / unit, held / unit)


def fitted(rows: list[Row]) -> tuple[dict[str, float], float]:
    """Return NUMBERS of a family, and the largest relative error."""
    rows = sorted(rows, key=lambda row: row.held - row.latents)
    solved = [program(rows, count) for count in range(len(rows) + 1)]
    error = min(largest for _, largest, _ in solved)
    alike = [outside for _, largest, outside in solved if largest <= SLACK * error]
    numbers, _, _ = min((program(rows, outside, SLACK * error) for outside in alike), key=itemgetter(1))
    return {name: round(max(0.0, float(each)), DIGITS) for name, each in zip(NUMBERS, numbers)}, error


def least(tried: list[float], errors: Callable[[float], list[float]]) -> tuple[float, float]:
    """Return the number of those ``tried`` that has the least largest error, of equal ones the least mean
    one; and the largest error."""
    largest, _, best = min(
        (round(max(found), 4), sum(found), each) for each in tried if (found := errors(each))
    )
    return best, largest


def buffered(numbers: dict[str, float], rows: list[Row]) -> tuple[float, float]:
    """Fit what ``rows`` hold in place of "communicated", with the other numbers as they are. Return it, and
    the largest error."""
    return least(TRIED, lambda sent: [row.error(numbers, sent) for row in rows])


def joined(numbers: dict[str, float], rows: list[Row]) -> tuple[float, float]:
    """Fit what ``rows`` of pipelines of rings hold in place of "ring". Return it, and the largest error."""
    degree = dry_run.METHODS[OF_A_RING].fixed["ring_degree"]
    sent = numbers[BUFFERED]
    return least(TRIED, lambda each: [row.error(numbers | {"ring": degree * each}, sent) for row in rows])


def largest_list(rows: list[Row]) -> str:
    """Return the list of which a block holds most, by the stages with blocks of one list."""
    of_one = (row for row in rows if len(row.blocks) == 1)
    return only_list(max(of_one, key=lambda row: row.held - row.carried))


def only_list(row: Row) -> str:
    """Return the list of a stage with blocks of one alone."""
    [name] = row.blocks
    return name


def share_of_list(numbers: dict[str, float], rows: list[Row]) -> tuple[float, float]:
    """Fit the share of what is inside blocks that stages of one list hold, with the numbers as they are.
    Return it, and the largest error."""
    return least(SHARES, lambda share: [row.error(numbers, numbers[BUFFERED], share) for row in rows])


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
        right.append(sign * (row.held - row.latents - (row.carried if is_inside else 0)))

    for index, row in enumerate(rows):
        inside, around = (*row.inside, 0.0), (0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
        at_most(inside, sign=1, index=index)
        at_most(around, sign=1, index=index)
        at_most(around if index < outside else inside, sign=-1, index=index)
    cost = [0.0] * len(NUMBERS) + [1.0] * errors
    bounds = [(0, None)] * len(NUMBERS) + [(0, most)] * errors
    solved = linprog(cost, left, right, bounds=bounds)
    if not solved.success:
        return [], float("inf"), outside
    return list(solved.x[: len(NUMBERS)]), solved.fun, outside


def grouped(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Collect the rows of each ``key``."""
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def of_family(rows: list[Row], hybrids: list[Row], rings: list[Row]) -> dict[str, Any]:
    """Fit all that is stored of a family, and print it with the largest errors."""
    largest = largest_list(rows)
    numbers, error = fitted([row for row in rows if largest in row.blocks])
    numbers[BUFFERED], of_hybrid = buffered(numbers, [row for row in hybrids if largest in row.blocks])
    numbers[JOINED], of_rings = joined(numbers, [row for row in rings if largest in row.blocks])
    errors = [error, of_hybrid, of_rings]
    shares = {}
    others = [row for row in (*rows, *hybrids) if largest not in row.blocks]
    for name, own in grouped(others, only_list).items():
        shares[name], error = share_of_list(numbers, own)
        errors.append(error)
    found: dict[str, Any] = numbers | ({BLOCKS: shares} if shares else {})
    print(
        f"{rows[0].family}: {found}, largest errors {', '.join(f'{each:.1%}' for each in errors)}", flush=True
    )
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"store the numbers in {STORED.name}")
    chosen = parser.parse_args()
    families = grouped(rows(*alone()), attrgetter("family"))
    hybrids, rings = (grouped(rows(name), attrgetter("family")) for name in (HYBRID, OF_A_RING))
    stored = {name: of_family(families[name], hybrids[name], rings[name]) for name in sorted(families)}
    if chosen.write:
        lines = (f"{json.dumps(family)}: {json.dumps(each)}" for family, each in stored.items())
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
