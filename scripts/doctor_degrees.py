"""The degrees of every method that scripts/doctor.py --full runs, and those of a hybrid of as many ranks for
a model that has too few heads or blocks for a method."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path

from doctor_lab import Lab

from backend.config import AXES, ParallelConfig

#: Golden families whose tiny models run: joined text, a video with cross-attention, two streams, a refiner.
FAMILIES = ("flux-dev", "wan21-t2v", "qwen-image", "z-image-turbo")
#: Those of shorter forms.
TELLING = FAMILIES[:2]
#: Degree -> the degrees that take what a model has too few heads or blocks for, the first that fits. A ring
#: needs neither.
OTHERS = {
    "pipefusion_degree": ("ulysses_degree", "ring_degree"),
    "tensor_parallel_degree": ("ring_degree",),
    "ulysses_degree": ("ring_degree",),
}

#: Returns why ranks would refuse a model for its heads or blocks, "" where they fit.
Refusal = Callable[[ParallelConfig], str]


def methods(ranks: int) -> dict[str, ParallelConfig]:
    """Return every method that ``ranks`` ranks allow, and every pair of methods where they make a grid."""
    if ranks == 1:
        return {"one rank": ParallelConfig()}
    configs = {"dp": ParallelConfig(data_parallel_degree=ranks)}
    configs["ulysses"] = ParallelConfig(ulysses_degree=ranks)
    configs["ulysses, wire fp8"] = replace(configs["ulysses"], wire="fp8")  # of the same ranks, so next to it
    configs["ring"] = ParallelConfig(ring_degree=ranks)
    configs["ring, wire fp8"] = replace(configs["ring"], wire="fp8")
    configs["tensor parallel"] = ParallelConfig(tensor_parallel_degree=ranks)
    configs["FSDP"] = ParallelConfig(ulysses_degree=ranks, shard_weights=True)
    configs["ring, FSDP"] = ParallelConfig(ring_degree=ranks, shard_weights=True)
    configs["pipefusion M=1"] = ParallelConfig(pipefusion_degree=ranks, num_pipeline_patch=1)
    configs[f"pipefusion M={ranks}"] = ParallelConfig(pipefusion_degree=ranks, num_pipeline_patch=ranks)
    if ranks == 2:
        configs["cfg"] = ParallelConfig(cfg_degree=2)
    if ranks >= 4 and ranks % 2 == 0:
        for first, second in combinations(("cfg", "pp", "ring", "ulysses", "tp"), 2):
            patches = ParallelConfig(num_pipeline_patch=1 if "pp" in (first, second) else 0)
            pair = {AXES[first]: 2, AXES[second]: ranks // 2}
            name = f"{first} 2 x {second} {ranks // 2}"
            configs[name] = replace(patches, **pair)
            if stages := pair.get(AXES["pp"]):
                configs[f"{name} M={stages}"] = replace(configs[name], num_pipeline_patch=stages)
    return configs


def hybrids(config: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yield configurations of as many ranks that keep the largest part of a degree first, and give the rest
    to another method; at last tensor parallelism that divides no heads."""
    for field, others in OTHERS.items():
        degree = getattr(config, field)
        parts = [part for part in range(degree - 1, 1, -1) if degree % part == 0]
        for part in parts:
            for other in others:
                changes = {field: part, other: getattr(config, other) * degree // part}
                if field == "pipefusion_degree" and config.num_pipeline_patch > 1:
                    changes["num_pipeline_patch"] = part  # as many as stages
                yield replace(config, **changes)
    if config.tensor_parallel_degree > 1:
        yield replace(config, split_scheme="row")


def fitting(refusal: Refusal, config: ParallelConfig) -> tuple[ParallelConfig | None, str]:
    """Return what a model is run with for ``config``, itself if that fits, None where no hybrid does; and why
    it is not ``config``, else ""."""
    why = refusal(config)
    if not why:
        return config, ""
    return next((each for each in hybrids(config) if not refusal(each)), None), why


@dataclass(frozen=True)
class Turn:
    """A method as it is run, by its name, and the families that are run so, one after another."""

    name: str
    config: ParallelConfig
    families: list[str]


def turns(
    ranks: int, refusal: Callable[[str, ParallelConfig], str], families: Sequence[str] = FAMILIES
) -> tuple[list[Turn], dict[str, list[str]]]:
    """Return what benchmarks/waits.py runs, in turn, and method -> families that no hybrid of it fits. Every
    method as asked comes first, then the hybrids of families of too few heads or blocks. Degrees that a
    family has run as another method are not run again. refusal: of a family and a configuration."""
    asked = methods(ranks)
    as_asked: dict[str, Turn] = {}
    of_hybrids: dict[str, Turn] = {}
    left_out: dict[str, list[str]] = {}
    for name, config in asked.items():
        for family in families:
            own, _ = fitting(partial(refusal, family), config)
            if own is None:
                left_out.setdefault(name, []).append(family)
            elif own == config:
                as_asked.setdefault(name, Turn(name, config, [])).families.append(family)
            elif own not in asked.values():
                as_run = named(name, config, own)
                of_hybrids.setdefault(as_run, Turn(as_run, own, [])).families.append(family)
    return [*as_asked.values(), *of_hybrids.values()], left_out


def turns_of(lab: Lab, families: Sequence[str] = FAMILIES) -> tuple[list[Turn], dict[str, list[str]]]:
    """Return what ``turns`` does for the tiny models of a lab."""
    paths = {family: lab.tiny(family)[0] for family in families}

    def refusal(family: str, config: ParallelConfig) -> str:
        return lab.refusal(paths[family], config)

    return turns(lab.ranks, refusal, families)


def in_short(config: ParallelConfig) -> str:
    """Name the degrees of a configuration by their mesh axes, and its patches."""
    degrees = " x ".join(f"{axis} {size}" for axis, size in config.degrees.items() if size > 1)
    by_rows = " by rows" if config.split_scheme == "row" else ""
    patches = f" M={config.patches}" if config.has_stale_kv else ""
    return degrees + by_rows + patches


def named(name: str, config: ParallelConfig, own: ParallelConfig) -> str:
    """Return the name of a method, with the degrees of ``own`` where that is run for ``config``."""
    return name if own == config else f"{name} as {in_short(own)}"


def shape_methods(lab: Lab, path: Path) -> dict[str, ParallelConfig]:
    """Return one rank, which comes first, and what auto divides an image or a video by, as far as the model
    at ``path`` allows it."""
    configs = {"one rank": ParallelConfig()}
    if lab.ranks == 1:
        return configs
    ulysses = ParallelConfig(ulysses_degree=lab.ranks)
    own = fitting(partial(lab.refusal, path), ulysses)[0] or ulysses
    configs[named("ulysses", ulysses, own)] = own
    own = _pipefusion(lab, path)
    name = f"pipefusion M={own.patches}"
    if own.pipefusion_degree < own.world_size:
        name = in_short(own)
    if own.world_size < lab.ranks:
        name += f" ({own.world_size} of {lab.ranks} ranks)"
    configs[name] = own
    return configs


def _pipefusion(lab: Lab, path: Path) -> ParallelConfig:
    """Return PipeFusion on all ranks, or on all but one where no hybrid of them fits, as of 5 or 7; where
    neither does, what ranks refuse."""
    every, *fewer = (
        ParallelConfig(pipefusion_degree=ranks, num_pipeline_patch=ranks)
        for ranks in (lab.ranks, lab.ranks - 1)
        if ranks > 1
    )
    for config in (every, *fewer):
        own, _ = fitting(partial(lab.refusal, path), config)
        if own:
            return own
    return every
