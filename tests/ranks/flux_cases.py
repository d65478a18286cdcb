"""What ranks/matrix.py runs: a tiny Flux under combinations of degrees, of which the fast tier takes some."""

from dataclasses import dataclass, replace
from functools import cache

from ranks import share_cases, wire_cases
from ranks.flux_degrees import AXES, configurations
from ranks.flux_requests import (
    CFG_PP,
    EVEN_BATCH,
    FEW,
    LORA,
    MIXED,
    MIXED_HEUN,
    OWN_PROMPTS,
    SHORT_NEGATIVE,
    STALE_STEPS,
    STEPS,
    UNEVEN_BATCH,
    Case,
    request_of,
)
from tiny import FLUX_CASES

from backend.config import ParallelConfig

#: Golden cases that differ from others in their solver alone.
NEW_SOLVERS = {
    "deis_normal",
    "dpmpp_2m_sde_karras",
    "ipndm_simple",
    "lms_simple",
    "res_multistep_sgm_uniform",
}
#: Every solver, and a mask, with stale keys and values.
STALE_SOLVERS = "stale, every solver"
#: Cases of 60 image tokens, of which bytes are counted, and variants that describe() does not speak of.
COUNTED, UNDESCRIBED = {"size20x12", EVEN_BATCH}, {"all warm-up"}
#: What is no traffic, among the bytes that are counted.
MODULATION_AHEAD = "modulation ahead"
#: Samples of the model calls: fewer than there are groups of ranks, as many, and a number that they do not
#: share evenly.
CALLS = {f"call of {count} samples": count for count in (1, 2, 5)}
UNEVEN_CALL = list(CALLS)[-1]


def variants(config: ParallelConfig) -> list[tuple[str, ParallelConfig]]:
    """The ways to run a configuration: exactly, and with stale keys and values where it has a pipeline."""
    if config.pipefusion_degree == 1:
        return [("exact", config)]
    found = [
        ("one patch", replace(config, num_pipeline_patch=1)),
        (
            "stale, uneven patches",
            replace(
                config,
                num_pipeline_patch=config.pipefusion_degree + 1,
                stale_kv="extrapolate",
                warmup_steps=2,
            ),
        ),
    ]
    if config.world_size == 2 or (config.sp_degree > 1 and config.world_size < 8):
        found += [("all warm-up", replace(config, warmup_steps=STEPS)), ("stale", config)]
    return found + [(STALE_SOLVERS, config)] * (config.world_size == 2)


def cases(world: int, config: ParallelConfig, variant: str) -> list[Case]:
    """What to run: on two ranks all golden cases under Ulysses, and fewer of them under rings, CFG and stale
    keys and values; elsewhere, where the code is the same, one golden case and what is special there."""
    few = STALE_STEPS if variant.startswith("stale") else FEW
    if config.data_parallel_degree > 1:
        return [Case(UNEVEN_BATCH, few)] + [Case(EVEN_BATCH, few)] * (config.data_parallel_degree == 2)
    if variant == STALE_SOLVERS:
        return [Case(case, STALE_STEPS) for case in (*FLUX_CASES, CFG_PP) if case != "size20x12"]
    plain = config.split_scheme == "megatron" and not config.shard_weights
    if world == 2 and variant == "exact" and plain and config.tensor_parallel_degree == 1:
        golden = [Case(case, STALE_STEPS) for case in FLUX_CASES]
        if config.cfg_degree > 1:
            golden = [case for case in golden if case.name not in NEW_SOLVERS | LIKE_OTHERS]
        elif config.ring_degree > 1:  # which a solver sees as Ulysses
            golden = [
                case for case in golden if case.name in EVERYWHERE or turn_of(case.name) == "ring_degree"
            ]
        return [
            *golden,
            Case(CFG_PP, STALE_STEPS),
            Case(SHORT_NEGATIVE, FEW),
            Case(MIXED_HEUN, STALE_STEPS),
        ]
    in_turn = (
        variant == "exact" and config.cfg_degree == 1
    )  # prompts are computed one after the other, as in one process
    found = [Case("size20x12", few)]
    if plain and in_turn:
        found.append(Case("euler_ancestral_simple", few))
    if world in (3, 8):  # what prompts need is shown on 2 and 4
        return found
    if not variant.startswith("stale") and (config.sp_degree > 1 or not in_turn):
        found.append(Case(SHORT_NEGATIVE, FEW))
    return found if in_turn else [*found, Case(MIXED, STALE_STEPS)]


def has_lora_case(world: int, config: ParallelConfig) -> bool:
    """Every way to cut weights, once."""
    return world == 2 or (
        config.tensor_parallel_degree > 1 and (config.pipefusion_degree > 1 or config.split_scheme == "2d")
    )


#: What runs besides requests, as the variant of a Run: a call of the model, LoRAs, LoRAs on scaled fp8, and
#: compiled blocks after others, of plain and of scaled fp8.
CALL, FP8 = "model call", "LoRA on fp8"
COMPILED, COMPILED_FP8 = "compiled blocks", "compiled blocks on fp8"
#: Modulation that replicas of sharded weights compute for so many evaluations at once, and the most
#: embeddings that one of their evaluations has: of three samples and two prompts.
CHUNKS, EVALUATIONS_AHEAD, EMBEDDINGS = "modulation in chunks", 2, 3 * 2
CHUNKED = ParallelConfig(data_parallel_degree=2, shard_weights=True)
#: Ways to hold weights that meet in one model: scaled fp8 with LoRAs, sharded, and in stages with the
#: modulation in host memory.
TOGETHER = (
    ParallelConfig(ulysses_degree=2, shard_weights=True),
    ParallelConfig(pipefusion_degree=2, offload_modulation=True),
)
#: What runs with compiled blocks besides what has float8 on the wire: hooks of blocks that gather their
#: weights, which auto chooses together, and replicas; of scaled fp8 patches with layers in host memory.
COMPILED_CONFIGS = (TOGETHER[0], ParallelConfig(data_parallel_degree=2))
#: Cases of the fast tier on two ranks under every method; solvers come under one method each, the one that
#: reads the negative prediction where ranks share the predictions, and with stale keys and values.
EVERYWHERE = {SHORT_NEGATIVE, MIXED_HEUN, "size20x12"}
#: Golden cases that --all alone runs on ranks, under Ulysses and with stale keys and values: their solvers
#: keep what others keep (a history of one or more predictions, noise), and their schedules are others'.
LIKE_OTHERS = {
    "ddim_ddim_uniform",
    "deis_normal",
    "dpmpp_2m_beta",
    "dpmpp_2m_sde_karras",
    "ipndm_simple",
    "lcm_simple",
    "res_multistep_sgm_uniform",
    "start1_last4",
}
#: Degrees of two ranks under which solvers take turns in the fast tier; the last with stale keys and values.
TURNS = ("ulysses_degree", "ring_degree", "cfg_degree", "pipefusion_degree")
#: Cases of the fast tier on four ranks of which each pair of methods has one.
SPECIAL = (SHORT_NEGATIVE, MIXED, "euler_ancestral_simple")
#: Configurations of the fast tier on more ranks: uneven shares, every pair of methods, and three at once.
FAST = {
    3: ("ulysses_degree 3", "pipefusion_degree 3"),
    8: ("pipefusion_degree 2 ulysses_degree 2 tensor_parallel_degree 2",),
}


@dataclass(frozen=True)
class Run:
    """A case under a variant of a configuration; its id is that of its test."""

    config: ParallelConfig
    variant: str
    case: Case
    #: The configuration as the variant changes it.
    varied: ParallelConfig

    @property
    def ranks(self) -> int:
        return self.config.world_size

    @property
    def label(self) -> str:
        """The configuration in words."""
        return label(self.config)

    @property
    def id(self) -> str:
        return f"{self.ranks}-{self.label}-{self.variant}-{self.case.name}"

    @property
    def is_fast(self) -> bool:
        """Is it of the fast tier? On two ranks every configuration, on four every pair of methods."""
        if self.config.shares:
            return share_cases.is_fast(self.config) and self.variant != share_cases.STALE
        if self.ranks == 2:
            return self._is_fast_on_two()
        if self.ranks == 4:
            return is_pair(self.config) and self._is_fast_on_four()
        return self.label in FAST[self.ranks] and self.variant not in ("all warm-up", "stale", LORA)

    def _is_fast_on_two(self) -> bool:
        if self.variant == CALL:
            return self.case.name == UNEVEN_CALL or self.config.data_parallel_degree > 1
        if self.variant in (COMPILED, COMPILED_FP8):
            return False
        if self.variant == LORA:
            return not self.config.shard_weights or self.config.ulysses_degree > 1
        if self.case.name in LIKE_OTHERS or (self.variant == "all warm-up" and self.case.name != MIXED):
            return False
        if self.case.name == CFG_PP:
            return self.config.cfg_degree > 1 or self.varied.patches > 1
        if self.case.name in EVERYWHERE or self.case.name not in FLUX_CASES:
            return True
        return getattr(self.config, turn_of(self.case.name)) > 1

    def _is_fast_on_four(self) -> bool:
        if self.variant in ("all warm-up", "stale"):
            return False
        if self.config.data_parallel_degree > 1 and self.case.name != UNEVEN_CALL:
            return self.case.name == (EVEN_BATCH if self.variant.startswith("stale") else UNEVEN_BATCH)
        if self.case.name not in SPECIAL:
            return True
        return pairs().index(self.label) % len(SPECIAL) == SPECIAL.index(self.case.name)


def label(config: ParallelConfig) -> str:
    """The degrees above 1, and how weights are cut and held."""
    words = [f"{axis} {getattr(config, axis)}" for axis in AXES if getattr(config, axis) > 1]
    if config.split_scheme != "megatron":
        words.append(f"split_scheme {config.split_scheme}")
    words += [name for name in ("shard_weights", "offload_modulation") if getattr(config, name)]
    words += [f"shares {config.shares}"] if config.shares else []
    return " ".join(words)


def is_pair(config: ParallelConfig) -> bool:
    """Are two methods of degree 2 combined, of weights that are held plainly?"""
    plain = not config.shard_weights and not config.shares
    return sum(getattr(config, axis) == 2 for axis in AXES) == 2 and plain


def turn_of(name: str) -> str:
    """The method under which the fast tier runs a golden case on two ranks: one of those that have it."""
    methods = [
        method
        for method in TURNS
        if not (method in ("ring_degree", "cfg_degree") and name in NEW_SOLVERS)
        and not (method == "cfg_degree" and not has_negative(Case(name)))
    ]
    return methods[FLUX_CASES.index(name) % len(methods)]


@cache
def pairs() -> list[str]:
    """The pairs of methods on four ranks, in words."""
    return [label(config) for config in configurations(4) if is_pair(config)]


@cache
def has_negative(case: Case) -> bool:
    return "negative.y" in request_of(case).tensors


def shared_runs(config: ParallelConfig) -> list[Run]:
    """The runs of a configuration with shares: a request, stale keys and values, and a call over replicas."""
    case = Case(UNEVEN_BATCH if config.data_parallel_degree > 1 else "size20x12", FEW)
    staged = config.pipefusion_degree > 1
    found = [Run(config, "exact", case, replace(config, num_pipeline_patch=int(staged)))]
    if staged:
        found.append(Run(config, share_cases.STALE, Case(case.name, STALE_STEPS), config))
    if config.data_parallel_degree * config.cfg_degree > 1:
        found.append(Run(config, CALL, Case(UNEVEN_CALL), config))
    return found + packed_runs(config)


def packed_runs(config: ParallelConfig) -> list[Run]:
    """The runs of a configuration with float8 on the wire, if it has any: on two and four ranks, fresh and
    stale keys and values. Groups of ranks that share prompts or the batch pack as one group does: one of them
    shows it."""
    groups = config.cfg_degree * config.data_parallel_degree > 1
    others = config.shard_weights or (groups and (config.shares or config.ring_degree > 1))
    if config.sp_degree == 1 or others or config.world_size not in (2, 4):
        return []
    staged = config.pipefusion_degree > 1
    case = Case(EVEN_BATCH if config.data_parallel_degree > 1 else "size20x12", FEW)
    varied = replace(config, wire="fp8", num_pipeline_patch=int(staged))
    found = [Run(config, wire_cases.WIRE, case, varied)]
    if staged:
        stale = replace(config, wire="fp8", num_pipeline_patch=3)
        found.append(Run(config, wire_cases.STALE, Case(case.name, STALE_STEPS), stale))
    return found


def is_compiled(run: Run) -> bool:
    """Does a run with float8 on the wire compile blocks too? On two ranks; to compiled blocks rings are what
    Ulysses is, also under shares."""
    return run.ranks == 2 and not (run.config.shares and run.config.ring_degree > 1)


def runs() -> list[Run]:
    """Every run of every world size, those of a configuration behind each other, in the order in which ranks
    change from one configuration into the next."""
    found = []
    for world in (2, 3, 4, 8):
        for config in configurations(world):
            for variant, varied in variants(config):
                found += [
                    Run(config, variant, case, varied)
                    for case in cases(world, config, variant)
                    if config.cfg_degree == 1 or has_negative(case)
                ]
            found += packed_runs(config)
            if config == CHUNKED:
                found.append(Run(config, CHUNKS, Case(OWN_PROMPTS, STEPS - 1), config))
            if has_lora_case(world, config):
                found.append(Run(config, LORA, Case(LORA, FEW), replace(config, num_pipeline_patch=1)))
            calls = CALLS if world == 2 else [UNEVEN_CALL]
            found += [Run(config, CALL, Case(call), config) for call in calls]
        found += [run for config in share_cases.configurations(world) for run in shared_runs(config)]
    for config in TOGETHER:
        found.append(Run(config, FP8, Case(LORA, FEW), replace(config, num_pipeline_patch=1)))
    return found + compiled_runs()


def compiled_runs() -> list[Run]:
    """The runs with compiled blocks."""
    found = []
    for config in COMPILED_CONFIGS:
        case = Case(EVEN_BATCH if config.data_parallel_degree > 1 else "size20x12", FEW)
        found.append(Run(config, COMPILED, case, config))
    staged = replace(TOGETHER[1], num_pipeline_patch=3)
    return [*found, Run(TOGETHER[1], COMPILED_FP8, Case("size20x12", FEW), staged)]
