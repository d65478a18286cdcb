"""The tables of docs/scaling.md: projections of the planner's cost model next to published numbers, and what
each rank of released models holds, sends and multiplies.

    python scripts/scaling_page.py [--write]

Prints them; --write puts them into the page. A test compares a part. Nothing here is measured: seconds are
backend/planner/cost.py's, counts are describe()'s, checked by benchmarks/dry_run.py.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / name) for name in ("scripts", "benchmarks", "tests/support"))]
import dry_run
import torch
from dry_run_methods import PROJECTED
from page_parts import Part, markdown
from published import A100, CASES, H100, L40, LEFT_OUT, RTX4090
from published_errors import errors, middle, of_pipefusion, published
from released_sizes import DISTILLED, RELEASED, checkpoint_of, request_of

from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.checkpoint import Checkpoint
from backend.planner.candidates import candidates
from backend.planner.choose import Question, choose
from backend.planner.cost import Cost
from backend.planner.machine import OVERHEAD, Machine, RequestEstimate
from backend.planner.model_shape import ModelShape
from backend.planner.option import Option
from backend.rank_plan import RankPlan, describe
from backend.rank_plan.request_size import RequestSize, size_of
from backend.rank_plan.shape_of import shape_of
from backend.sampling.validation import check_degrees

PART = Part("docs/scaling.md", "scaling", "scripts/scaling_page.py")
#: The cost model follows published times to this median error.
GOAL = 0.10
#: Seconds of the host for a stream of a block, and those that a divided block adds: Machine's default, and a
#: wrapper without copies. Neither was measured on a GPU.
HOST = {"launch": Machine.launch, "overhead": OVERHEAD}
GIB = 2**30
#: Name -> machine, how many GPUs it has, GiB of each.
MACHINES = {
    "2 x RTX 4090, PCIe": (replace(RTX4090, **HOST), 2, 24),
    "4 x L40, PCIe": (replace(L40, **HOST), 4, 48),
    "8 x A100, NVLink": (replace(A100, **HOST), 8, 80),
    "8 x H100, NVLink": (replace(H100, **HOST), 8, 80),
}
STEPS = 28
#: Name in published.py -> golden family.
SAME = {
    "flux": "flux-dev",
    "pixart": "pixart-sigma",
    "cogvideox-5b": "cogvideox",
    "hunyuan-video": "hunyuan-video",
    "qwen-image": "qwen-image",
}


# ------------------------------------------------------------------ published
def published_table() -> str:
    """Write published and projected seconds, and their error."""
    rows = []
    for case, name, seconds, projected in published():
        request = case.request
        what = f"{request.image_tokens} tokens, {request.steps} steps"
        numbers = (f"{seconds:.2f}", f"{projected:.2f}", f"{projected / seconds - 1:+.1%}")
        rows.append((case.model.name, what, case.machine.name, name, case.source, *numbers))
    off = errors()
    summary = (
        f"{len(off)} plans of several GPUs: median error **{middle(off):.1%}**, mean "
        f"{sum(off) / len(off):.1%}, nine of ten below {middle(off, 0.9):.1%}, "
        f"largest {off[-1]:.1%}; {sum(error <= GOAL for error in off)} within {GOAL:.0%}. "
        f"Median of PipeFusion's, with its sign: "
        f"{middle(of_pipefusion()):+.1%}.\n"
    )
    left_out = "".join(f"- {what}: {why}.\n" for what, why in LEFT_OUT.items())
    head = ("model", "request", "GPU", "plan", "source", "published s", "projected s", "error")
    return f"{markdown(head, rows)}\n{summary}\nNot in the table, and why:\n\n{left_out}"


# ------------------------------------------------------------------ released models
@dataclass(frozen=True)
class Model:
    """A released model of a golden family with a usual request."""

    family: str

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Its headers."""
        return checkpoint_of(self.family)

    @cached_property
    def shape(self) -> ModelShape:
        """FLOPs and bytes of its blocks, in bf16."""
        return shape_of(self.checkpoint, torch.bfloat16)

    @cached_property
    def size(self) -> RequestSize:
        """Size of the request with one prompt."""
        checkpoint = self.checkpoint
        sample = request_of(self.family, checkpoint, STEPS)
        return size_of(sample, ParallelConfig(), checkpoint)

    @property
    def request(self) -> RequestEstimate:
        """For the planner."""
        prompts = 1 if self.family in DISTILLED else 2
        return RequestEstimate(self.size.image_tokens, self.size.text_tokens, STEPS, prompts)

    def macs(self, plan: RankPlan, method: str, ranks: int) -> float:
        """Count the multiplications of a rank's blocks in a step: of its prompt, and of its samples."""
        config = dry_run.METHODS[method].config(ranks)
        tp = config.tensor_parallel_degree
        ring = config.ring_degree
        lengths = (self.size.image_tokens, self.size.text_tokens)
        heads = plan.heads * tp / self.shape.heads
        total = 0.0
        for block in self.shape.blocks[slice(*plan.blocks)]:
            text_is_joint = self.shape.joint
            for text, image in plan.patches:
                linear = block.linear(image, text if text_is_joint else lengths[1])
                total += linear * (1 - block.cut + block.cut / tp)
            total += block.attention(*lengths) * heads / tp / ring
        return total * plan.samples


@cache
def model(family: str) -> Model:
    """Return the released model of a golden family."""
    return Model(family)


@cache
def plans_of(family: str, method: str, ranks: int, calls: int = 0) -> list[RankPlan]:
    """Plan every rank, for a usual number of ``calls`` if not given. Raises ConfigError and
    UnsupportedError."""
    found = model(family)
    wanted = dry_run.METHODS[method]
    config = wanted.config(ranks)
    check_degrees(found.checkpoint, config)
    size = replace(found.size, prompts=wanted.prompts, batch=wanted.batch, calls=calls or found.size.calls)
    return describe(config, found.checkpoint, size, torch.bfloat16)


# ------------------------------------------------------------------ projected seconds
def question(about: Model, machine: Machine, gpus: int, gib: int) -> Question:
    """Ask the planner about a model on a machine."""
    with_memory = replace(machine, memory=(gib * GIB,) * gpus)
    return Question(about.shape, about.request, with_memory, gpus)


def step(asked: Question, option: Option) -> float:
    """Return the projected seconds of a step in steady state."""
    return Cost(asked.shape, option.plan, asked.machine, request=asked.request).step(option.plan.patches)


def by_method(asked: Question, method: str) -> Option | None:
    """Return the plan that gives all GPUs to a method; None where it does not fit the model."""
    wanted = dry_run.METHODS[method].config(asked.gpus)
    stages = asked.gpus if wanted.pipefusion_degree > 1 else 0
    plans = candidates(asked.shape, asked.request, ranks=asked.gpus, base=asked.base)
    found = (
        each
        for each in plans
        if (each.degrees, each.num_pipeline_patch, each.shard_weights)
        == (wanted.degrees, stages, wanted.shard_weights)
    )
    return next(map(asked.option, found), None)


def cell(asked: Question, option: Option | None, one: float) -> str:
    """Write seconds and how many times one GPU's speed they are; "!" where memory is too small."""
    if option is None:
        return "-"
    seconds = step(asked, option)
    times = f" ({one / seconds:.1f}x)" if option.plan.world_size > 1 else ""
    return f"{seconds:.3f}{times}{'' if option.fits else ' !'}"


def same_published(about: Model, machine: Machine, gpus: int) -> str:
    """Write the least published seconds a step of the same model, tokens and GPUs."""
    best: list[tuple[float, str]] = []
    for case in CASES:
        same = SAME.get(case.model.name) == about.family and case.machine.name == machine.name
        if same and case.request.image_tokens == about.request.image_tokens and "1" in case.seconds:
            best += [
                (seconds / case.request.steps, name)
                for name, seconds in case.seconds.items()
                if case.plans[name].world_size == gpus
            ]
    return f"{min(best)[0]:.3f} ({min(best)[1]})" if best else ""


def projected_row(family: str, name: str) -> tuple[str, ...]:
    """Return the line of a model on a machine."""
    machine, gpus, gib = MACHINES[name]
    about = model(family)
    asked = question(about, machine, gpus, gib)
    alone = asked.option(ParallelConfig())
    one = step(asked, alone)
    methods = [cell(asked, by_method(asked, method), one) for method in PROJECTED]
    try:
        option = choose(asked).option
        chosen = (option.name, cell(asked, option, one))
    except ConfigError:
        chosen = ("does not fit", "")
    request = about.request
    tokens = f"{request.image_tokens} + {request.text_tokens}"
    published_step = same_published(about, machine, gpus)
    return family, tokens, str(request.prompts), cell(asked, alone, one), *methods, *chosen, published_step


def projected_table(name: str) -> str:
    """Write the projected seconds a step of every model on a machine."""
    methods = [f"{method} {MACHINES[name][1]}" for method in PROJECTED]
    head = ("model", "tokens", "prompts", "one GPU", *methods, "auto takes", "auto", "published")
    return markdown(head, [projected_row(family, name) for family in RELEASED])


# ------------------------------------------------------------------ counted
def counted_cell(family: str, method: str, ranks: int) -> str:
    """Write GB of weights and of keys and values, GB sent, TMAC of the busiest rank, and its share over an
    even one."""
    about = model(family)
    if not dry_run.METHODS[method].suits(family):
        return "-"
    try:
        plans = plans_of(family, method, ranks)
    except (ConfigError, UnsupportedError):
        return "-"
    weights = max(plan.weight_bytes for plan in plans) / 1e9
    kv = max(plan.kv_bytes for plan in plans) / 1e9
    sent = max(sum(plan.bytes_per_step.values()) for plan in plans) / 1e9
    work = [about.macs(plan, method, ranks) for plan in plans]
    held = f"{weights:.1f}" + (f" + {kv:.1f}" if kv >= 0.05 else "")
    return f"{held}, {sent:.2f}, {max(work) / 1e12:.2f}, {max(work) * ranks / sum(work):.2f}"


def counted_row(family: str, method: str) -> tuple[str, ...]:
    """Return the line of a model in the table of a method."""
    return (family, *(counted_cell(family, method, ranks) for ranks in dry_run.METHODS[method].ranks))


def counted_table(method: str) -> str:
    """Write what the ranks of every model hold, send and multiply under a method."""
    head = ("model", *(f"{ranks} ranks" for ranks in dry_run.METHODS[method].ranks))
    return markdown(head, [counted_row(family, method) for family in RELEASED])


# ------------------------------------------------------------------ dry run
@dataclass(frozen=True)
class Compared:
    """A dry run of one rank next to what is counted of it."""

    name: str
    counted: dict

    @property
    def parts(self) -> tuple[str, str, int, int]:
        """Family, method, ranks, rank."""
        family, method, ranks, rank = self.name.split("/")
        return family, method, int(ranks), int(rank)

    @property
    def plan(self) -> RankPlan:
        """What describe() says of the rank, in as many steps."""
        *where, rank = self.parts
        return plans_of(*where, calls=dry_run.STEPS)[rank]

    @property
    def sent(self) -> dict[str, int]:
        """Counted bytes by mechanism, without what is sent once a request or with each step's embedding."""
        return {name: size for name, size in self.plan.bytes_per_step.items() if name != "modulation"}

    @property
    def macs(self) -> float:
        """Counted multiplications."""
        family, method, ranks, _ = self.parts
        return model(family).macs(self.plan, method, ranks)

    @property
    def ratios(self) -> tuple[float, float]:
        """Bytes sent and multiplications of the dry run over the counted ones."""
        sent = sum(self.sent.values())
        traffic = sum(self.counted["sent"].values()) / sent if sent else 1.0
        return traffic, self.counted["macs"] / self.macs


def dry_cell(family: str, method: str) -> str:
    """Write what dry runs send and multiply, over what is counted of the same ranks: least and most."""
    every = {name: run for name, run in dry_run.stored().items() if name.startswith(f"{family}/{method}/")}
    ratios = [Compared(name, run).ratios for name, run in every.items() if isinstance(run, dict)]
    if not ratios:
        return "-"
    written = [(f"{min(each):.2f}", f"{max(each):.2f}") for each in zip(*ratios)]
    ranges = [low if low == high else f"{low} to {high}" for low, high in written]
    return f"{', '.join(ranges)} ({len(ratios)})"


def dry_row(family: str, methods: list[str]) -> tuple[str, ...]:
    """Return the line of a model in the table of some methods."""
    return (family, *(dry_cell(family, method) for method in methods))


def dry_tables() -> dict[int, list[str]]:
    """Return the methods of each table: fewest ranks of which there are dry runs -> methods."""
    found: dict[int, list[str]] = {}
    for name, method in dry_run.METHODS.items():
        found.setdefault(min(method.ranks), []).append(name)
    return found


def dry_table(methods: list[str]) -> str:
    """Write the dry runs of all models under some methods."""
    return markdown(("model", *methods), [dry_row(family, methods) for family in RELEASED])


def tables() -> str:
    """Write the whole part of the page that is made."""
    parts = ["## Published and projected\n", published_table()]
    for name in MACHINES:
        parts += [f"## Projected seconds a step: {name}\n", projected_table(name)]
    for method in dry_run.METHODS:
        parts += [f"## Counted: {method}\n", counted_table(method)]
    for ranks, methods in dry_tables().items():
        parts += [f"## Counted and dry run: from {ranks} ranks on\n", dry_table(methods)]
    return "\n".join(parts)


if __name__ == "__main__":
    made = tables()
    if "--write" in sys.argv[1:]:
        PART.write(made)
    print(made)
