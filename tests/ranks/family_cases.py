"""What ranks/family_runs.py runs: cases under configurations, of which the fast tier takes some. Data alone,
so that tests are collected without diffusers' transformers."""

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

import signatures
from families import LATENT_FORMATS
from launch import EVERY_COMPILED
from variants import VARIANTS

from backend.config import ParallelConfig

#: Flux has tests of its own.
FAMILIES = [family for family in LATENT_FORMATS if family != "flux-dev"]
#: Variants that are others with more channels, pixels or weights.
OTHER_NUMBERS = ("wan22-i2v-low", "ltx2-i2v", "wan22-animate", "cogvideox-void")
#: World size -> cases; on two ranks also prompts with hidden tokens, where the family takes a mask, of one
#: token, so that the other rank has a dummy token for its text, or none, and none, where the family can do
#: without.
CASES = {
    2: [
        *FAMILIES,
        *(variant for variant in VARIANTS if variant not in OTHER_NUMBERS),
        "qwen-image+mask",
        "hunyuan-video+mask",
        "hunyuan-video15+mask",
        "ideogram4+mask",
        "qwen-image21+mask",
        "hunyuan-video+one",
        "qwen-image+one",
        "ideogram4+image",
    ],
    4: [
        *FAMILIES,
        "flux-kontext",
        "flux2-edit",
        "flux3-edit",
        "qwen-image-edit-2511",
        "qwen-image21-edit",
        "krea2-edit",
        "wan21-i2v",
        "wan22-ti2v",
        "wan21-fun-control",
        "wan22-bernini",
        "ltxv-i2v",
        "ltx25-i2v",
        "ltxv-smaller-guides",
        "ltx25-smaller-guides",
        "minimax-h3-guides",
        "cogvideox-1.5-i2v",
    ],
}
#: Attention heads of the tiny checkpoints that have fewer than four.
HEADS = {"kandinsky5-image": 2}
CONFIGURATIONS = {
    2: [
        dict(ulysses_degree=2),
        dict(cfg_degree=2),
        dict(ring_degree=2),
        dict(tensor_parallel_degree=2),
        dict(tensor_parallel_degree=2, shares="70,30"),
        dict(pipefusion_degree=2, num_pipeline_patch=1),
        dict(pipefusion_degree=2, num_pipeline_patch=3),
    ],
    4: [
        dict(tensor_parallel_degree=2, ulysses_degree=2),
        dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=1),
        dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=2),
        dict(cfg_degree=2, pipefusion_degree=2, num_pipeline_patch=2),
    ],
}
#: Of families whose keys and values have fewer heads than queries, one for each rank of Ulysses.
GROUPED = ("krea2", "lumina2")
OF_GROUPED = {2: [], 4: [dict(ulysses_degree=2, ring_degree=2)]}
#: Those of a variant, on four ranks also of a family, whose blocks and attention are like another case's:
#: what conditions it is cut, or is not. Under CFG it is called, and does not sample. Rings cut what Ulysses
#: cuts.
OF_VARIANTS = {
    2: [
        dict(ulysses_degree=2),
        dict(cfg_degree=2),
        dict(pipefusion_degree=2, num_pipeline_patch=3),
    ],
    4: [dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=2)],
}
#: Variants with a condition that tensor parallelism cuts by heads: how much guides are attended to.
CUT_BY_HEADS = ("ltxv-i2v", "ltx25-i2v", "ltxv-smaller-guides", "ltx25-smaller-guides")
#: A variant whose modulation is that of two timesteps, and what cuts, gathers or moves modulation.
TWO_TIMESTEPS = "qwen-image-edit-2511"
OF_MODULATION: tuple[dict[str, Any], ...] = (
    dict(tensor_parallel_degree=2),
    dict(ulysses_degree=2, shard_weights=True),
    dict(pipefusion_degree=2, num_pipeline_patch=1, offload_modulation=True),
)
#: Methods of whose exact runs each family is called under one, in turn, besides Ulysses and CFG: what a call
#: has else, samples at different times, they do not see.
CALLED_IN_TURN = {
    2: [
        dict(ring_degree=2),
        dict(tensor_parallel_degree=2),
        dict(pipefusion_degree=2, num_pipeline_patch=1),
    ],
    4: [
        dict(tensor_parallel_degree=2, ulysses_degree=2),
        dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=1),
    ],
}
#: Other ways to cut matrices: one call of the model each. On four ranks, where rows and columns that each
#: family has on two are cut at once, of one case of each signature.
SCHEMES = {2: ("row", "column"), 4: ("2d",)}
#: World size -> configurations of a signature's representative in the fast tier: what blocks and their
#: attention see of every method, in few runs.
METHODS = {
    2: [dict(ring_degree=2), dict(pipefusion_degree=2, num_pipeline_patch=3)],
    4: [
        dict(tensor_parallel_degree=2, ulysses_degree=2),
        dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=1),
    ],
}
#: Of what cuts matrices without a look at heads, and of CFG, each representative has one in turn.
TURNS = (
    dict(tensor_parallel_degree=2, split_scheme="row"),
    dict(tensor_parallel_degree=2, split_scheme="column"),
    dict(cfg_degree=2),
    dict(tensor_parallel_degree=4, split_scheme="2d"),
)
#: Methods that each family has in turn with compiled blocks; with the environment variable all have all.
COMPILED = (
    dict(pipefusion_degree=2, num_pipeline_patch=3),
    dict(ring_degree=2),
    dict(tensor_parallel_degree=2),
    dict(ulysses_degree=2),
)
#: Hybrids on four ranks: of families whose kind of block no turn on two ranks compiles in patches, and of one
#: with tokens and matrices cut at once. Under CFG alone blocks are those of one process.
COMPILED_HYBRIDS = {
    "qwen-image": dict(cfg_degree=2, pipefusion_degree=2, num_pipeline_patch=2),
    "ltx2": dict(cfg_degree=2, pipefusion_degree=2, num_pipeline_patch=2),
    "sana": dict(cfg_degree=2, pipefusion_degree=2, num_pipeline_patch=2),
    "wan21-t2v": dict(tensor_parallel_degree=2, ulysses_degree=2),
    "flux3": dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=2),
    "z-image-turbo": dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=2),
}
#: Families of whose compiled blocks all ranks trace: with two latents shards are not of one kind.
ALL_TRACE = ("ltx2",)
#: (family, what cuts its blocks) -> why no run compiles them so.
UNCOMPILED = {
    ("chroma", "patches"): "qwen-image has its double blocks in patches, qwen-image21 the joined ones",
    ("minimax-h3", "patches"): "ltx2 has patches of two latents, qwen-image21 joined blocks",
    ("sana", "matrices"): "its layers are opaque operators, as those of every family that is cut",
}
#: That of the fast tier.
FAST_COMPILED = {"qwen-image21": dict(pipefusion_degree=2, num_pipeline_patch=3)}
#: Methods that have float8 on the wire, and the families that send sums in full.
ROUNDED = (dict(ulysses_degree=2), dict(ring_degree=2))
IN_FULL = ("sana",)
#: The configuration of a case in the fast tier, where another case has its signature.
HYBRID = dict(ulysses_degree=2)


@dataclass(frozen=True)
class Run:
    """One case under one configuration; its id is that of its test."""

    ranks: int
    case: str
    degrees: tuple[tuple[str, Any], ...]

    @property
    def config(self) -> ParallelConfig:
        return ParallelConfig(**dict(self.degrees))

    @property
    def label(self) -> str:
        """The configuration in words."""
        return " ".join(f"{name} {value}" for name, value in self.degrees)

    @property
    def id(self) -> str:
        return f"{self.ranks}-{self.case}-{self.label}"

    @property
    def stale(self) -> bool:
        """Are keys and values of an earlier step read?"""
        return self.config.has_stale_kv

    @property
    def is_simulated(self) -> bool:
        """Does one process compute the same patches? Of one case of each signature and of every family; the
        groups of CFG have their pipelines' patches."""
        return self.stale and self.config.cfg_degree == 1 and not is_variant(self.ranks, self.case)

    @property
    def patches(self) -> tuple[int, int]:
        """What decides which tokens a patch has: how many patches, and how many tokens at least."""
        return self.config.patches, self.config.sp_degree

    @property
    def samples(self) -> bool:
        """Does it sample? Megatron's equal cuts and plain weights do."""
        is_alone = is_variant(self.ranks, self.case) and self.config.cfg_degree > 1
        is_other_cut = self.config.split_scheme != "megatron" or bool(self.config.shares)
        return not is_other_cut and not is_alone

    @property
    def is_called(self) -> bool:
        """Is the model called? Not where a pipeline differs from another run's in its patches alone: for a
        call it is drained."""
        if is_variant(self.ranks, self.case) or self.config.cfg_degree > 1 or not self.samples:
            return True
        in_turn = CALLED_IN_TURN[self.ranks]
        if dict(self.degrees) not in in_turn:
            return not self.stale
        turns = [turn for turn in in_turn if can_run(self.case, ParallelConfig(**turn))]
        return dict(self.degrees) == turns[CASES[self.ranks].index(self.case) % len(turns)]

    @property
    def is_fast(self) -> bool:
        """Is it of the fast tier? Every method of a signature's representative on two ranks and, of every
        second one, one in turn on four; one hybrid of every other family and of some of the variants."""
        if self.case in _representatives(self.ranks) and dict(self.degrees) in methods(self.ranks, self.case):
            return True
        if self.ranks == 2 and self.case not in _representatives(2):
            return dict(self.degrees) == HYBRID and not self._is_left_out
        return dict(self.degrees) == self._turn and not self._is_left_out

    @property
    def is_compiled(self) -> bool:
        """Does it run with compiled blocks too? Every family under one method, which is its turn; in the fast
        tier a few of them."""
        if EVERY_COMPILED in os.environ:
            return self.ranks == 2 and self.samples
        if self.ranks == 4:
            return dict(self.degrees) == COMPILED_HYBRIDS.get(self.case)
        if self.case not in FAMILIES:
            return False
        if self.case in FAST_COMPILED:
            return dict(self.degrees) == FAST_COMPILED[self.case]
        every = [Run(2, self.case, tuple(turn.items())) for turn in COMPILED]
        turns = [run for run in every if can_run(self.case, run.config) and not run.is_fast]
        return self == turns[FAMILIES.index(self.case) % len(turns)]

    @property
    def is_rounded(self) -> bool:
        """Does it run with float8 on the wire too? Every family that allows it, under the first method of
        sequences that --all alone runs."""
        if self.ranks != 2 or self.case not in FAMILIES or self.case in IN_FULL:
            return False
        every = [Run(2, self.case, tuple(method.items())) for method in ROUNDED]
        return self == next(run for run in every if not run.is_fast)

    @property
    def all_trace(self) -> bool:
        """Do all ranks trace the compiled blocks, and not one for all that have the same?"""
        return EVERY_COMPILED in os.environ or (self.ranks == 2 and self.case in ALL_TRACE)

    @property
    def cuts(self) -> set[str]:
        """What is cut, as compiled blocks see it: Ulysses and rings are one operator to them."""
        found = {"patches"} if self.stale else set()
        if self.config.sp_degree > 1:
            found.add("tokens")
        return found | ({"matrices"} if self.config.tensor_parallel_degree > 1 else set())

    @property
    def _is_left_out(self) -> bool:
        """Is it a variant, with the signature of another one, that --all alone runs? Two of three are."""
        of_another = self.case in VARIANTS and is_variant(self.ranks, self.case)
        return of_another and CASES[2].index(self.case) % 3 != 0

    @property
    def _turn(self) -> dict[str, Any]:
        """The configuration that is this case's turn, on whichever world size."""
        turns = [turn for turn in TURNS if can_run(self.case, ParallelConfig(**turn))]
        return turns[CASES[2].index(self.case) % len(turns)]


def methods(ranks: int, case: str) -> list[dict[str, Any]]:
    """What of METHODS a representative runs in the fast tier: on two ranks all that it can run, on four every
    second one what is its turn. There each method is as on two, and Flux has every pair (flux_cases.py)."""
    able = [degrees for degrees in METHODS[ranks] if can_run(case, ParallelConfig(**degrees))]
    if ranks == 2:
        return able
    place, is_left_out = divmod(sorted(_representatives(ranks)).index(case), 2)
    return [] if is_left_out else [able[place % len(able)]]


@cache
def _representatives(ranks: int) -> set[str]:
    return set(signatures.representatives(CASES[ranks]).values())


def is_variant(ranks: int, case: str) -> bool:
    """Is it a variant with the signature of another case? On four ranks families are too: the cuts of their
    own weights are shown on two."""
    return (ranks == 4 or case not in LATENT_FORMATS) and case not in _representatives(ranks)


def can_run(case: str, config: ParallelConfig) -> bool:
    """A variant's weights are cut as its family's are, which is shown there; every scheme but megatron cuts
    any number of heads."""
    by_heads = case in (*CUT_BY_HEADS, TWO_TIMESTEPS) and config.split_scheme == "megatron"
    if config.tensor_parallel_degree > 1 and case not in LATENT_FORMATS and not by_heads:
        return False
    return (
        config.split_scheme != "megatron"
        or config.tensor_parallel_degree * config.ulysses_degree <= HEADS.get(case, 4)
    )


def runs() -> list[Run]:
    """Every run of every world size; those of a case follow each other, in the order in which ranks change
    from one configuration into the next."""
    found = []
    for ranks, cases in CASES.items():
        schemes = [dict(tensor_parallel_degree=ranks, split_scheme=scheme) for scheme in SCHEMES[ranks]]
        for case in cases:
            configs = OF_VARIANTS[ranks] if is_variant(ranks, case) else CONFIGURATIONS[ranks]
            if case in GROUPED:
                configs = [*configs, *OF_GROUPED[ranks]]
            if ranks == 2 and is_variant(ranks, case) and case in CUT_BY_HEADS:
                configs = [*configs, dict(tensor_parallel_degree=2)]
            if ranks == 2 and case == TWO_TIMESTEPS:
                configs = [*configs, *OF_MODULATION]
            if ranks == 2 or case in _representatives(ranks):
                configs = [*configs, *schemes]
            every = [Run(ranks, case, tuple(degrees.items())) for degrees in configs]
            found += [run for run in every if can_run(case, run.config)]
    return found
