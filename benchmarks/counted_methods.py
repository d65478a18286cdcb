"""Of which families and methods benchmarks/launches.py counts what a steady micro-step starts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "benchmarks"), str(ROOT / "tests/support")]
import packed_models
import signatures
from families import LATENT_FORMATS

from backend.parallel import tensor_parallel
from backend.parallel.attention import ulysses_ring

#: Method -> degrees, and the ranks that are counted.
METHODS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "one rank": ({}, (0,)),
    "u2": ({"ulysses_degree": 2}, (1,)),
    "u8": ({"ulysses_degree": 8}, (1,)),
    "ring 4": ({"ring_degree": 4}, (1,)),
    "pp2": ({"pipefusion_degree": 2}, (0, 1)),
    "pp8": ({"pipefusion_degree": 8}, (0, 3, 7)),
}
#: Methods of which a few families are counted (further_methods), as in METHODS.
FURTHER: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "tp2": ({"tensor_parallel_degree": 2}, (1,)),
    "u2, halves": ({"ulysses_degree": 2}, (1,)),
    "tp2, halves": ({"tensor_parallel_degree": 2}, (1,)),
    "cfg2 pp2 u2": ({"cfg_degree": 2, "pipefusion_degree": 2, "ulysses_degree": 2}, (0, 7)),
}
#: Methods whose messages leave in two halves, as those of real sizes do.
IN_HALVES = ("u2, halves", "tp2, halves")
#: Families that are counted in halves and as a hybrid: of two streams and of one.
OF_REAL_SIZES = ("flux-dev", "wan21-t2v")
FAMILIES = tuple(LATENT_FORMATS)
#: Quantized models, and the methods of which they are counted.
PACKED, PACKED_METHODS = tuple(packed_models.MODELS), ("one rank", "u2", "pp2")


def methods_of(family: str) -> tuple[str, ...]:
    """Return the methods of which a family or a quantized model is counted."""
    return PACKED_METHODS if family in PACKED else (*METHODS, *further_methods(family))


@cache
def further_methods(family: str) -> tuple[str, ...]:
    """Return those of FURTHER: tensor parallelism where the family is the first of its signature."""
    if family in OF_REAL_SIZES:
        return tuple(FURTHER)
    is_first = family in signatures.representatives(list(FAMILIES)).values()
    return ("tp2",) if is_first and signatures.family_of(family).tensor_plan is not None else ()


@contextmanager
def in_halves() -> Iterator[None]:
    """Have tiny tensors sent and summed in two halves, as those of real sizes are."""
    with (
        patch.object(ulysses_ring, "TILES_OF_A_CHUNK", 1),
        patch.object(tensor_parallel, "MIN_TOKENS_TO_HALVE", 1),
    ):
        yield
