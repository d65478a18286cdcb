"""Which plan to take of all that fit, and why: one line for the choice and one for each runner-up."""

import math
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from ..config import ConfigError, ParallelConfig
from ..shares import written
from ..units import coarse_gigabytes
from .candidates import candidates
from .cost import Cost
from .drift import penalty as drift_penalty
from .machine import DIFFERENT, Machine, RequestEstimate
from .memory import held, held_by_rank, spare_bytes
from .model_shape import ModelShape
from .option import Option
from .placement import STAYS, Placement, Ranks, choose_placement
from .weight_swaps import WeightSwaps

#: What the user chooses between; "manual" takes the degrees as they are.
AUTO, EXACT, MEMORY, MANUAL = METHODS = ("auto", "fastest exact", "least memory", "manual")
#: Runners-up that are reported.
RUNNERS_UP = 2
#: Shares that are tried until unlike GPUs are as full as each other.
FILLINGS = 8
#: Plans of which the fullest rank, times all, needs more than so many times all rooms are not filled.
FILLED = 1.5


#: Said where one model fits, and not all of a graph; and where all do, but by slower plans.
TURNS = "models take turns: those of this graph do not fit together"
FASTER_TURNS = "models take turns: plans with which those of this graph surely fit together are slower"
#: Said where ComfyUI has taken weights for its own models before.
ASIDE = "ComfyUI's own models (text encoder, VAE) share a GPU with rank "


@dataclass(frozen=True)
class PlanChoice:
    """The option to take, the next ones of other methods, and one GPU's estimate, even where it does not fit.
    notes: how the GPUs differ, whether models take turns, and whether weights leave for ComfyUI's.
    why: why a faster plan is not taken. regret: Ranks.regret after the request."""

    option: Option
    runners_up: tuple[Option, ...]
    one: Option
    method: str
    notes: tuple[str, ...] = ()
    why: str = ""
    regret: dict[Placement, float] = field(default_factory=dict)

    @property
    def plan(self) -> ParallelConfig:
        """The plan to take."""
        return self.option.with_compile.plan

    @property
    def lines(self) -> list[str]:
        """One line for the choice, one for each note, and one for each runner-up."""
        chosen = self.option.with_compile
        kind = (
            "PipeFusion drifts a little" if chosen.plan.has_stale_kv else f"same result as one {chosen.unit}"
        )
        first = f"{self.method}: {chosen.name}. {self._figures(chosen)}, {kind}.{self.why}"
        return [
            first,
            *self.notes,
            *(f"next: {each.name}. {self._next(each, chosen)}." for each in self.runners_up),
        ]

    def _next(self, option: Option, chosen: Option) -> str:
        why = option.why_not(chosen) if self.method != MEMORY and not self.why else ""
        return "; ".join(filter(None, (self._figures(option), why)))

    def _figures(self, option: Option) -> str:
        memory = (
            f"about {coarse_gigabytes(option.bytes)} of {coarse_gigabytes(option.room)} per {option.unit}"
        )
        if option.plan.world_size == 1:
            return memory
        ratio = self.one.sampling_seconds / option.sampling_seconds
        speed = f"about {ratio:.1f}x one {option.unit} (projected)"
        if not self.one.fits:
            speed += ", which it does not fit"
        return f"{speed}, {memory}"


class Tightest(NamedTuple):
    """The memory of the rank with least to spare, in bytes.

    held: what it holds. room: what it may hold. likely: ``room`` plus the most by which any rank likely
    exceeds its own. besides_weights: the most that any rank likely needs next to its weights.
    """

    held: int
    room: int
    likely: int
    besides_weights: int


@dataclass(frozen=True)
class Question:
    """What is to run, and where: a model and a request on at most ``gpus`` ranks of a machine. base: what the
    plan keeps besides degrees, patches and sharding. others: models whose weights stay on the same ranks.
    shapes: of the model and the others as the first GPU computes them, as the first two do, and so on, where
    GPUs have other types and kernels; empty where all compute alike, and ``shape`` and ``others`` are as all
    do. shares: of each GPU, where the user has set them. swaps: where models wait for others.
    caches_dequantized: quantized weights may stay dequantized in what is spare."""

    shape: ModelShape
    request: RequestEstimate
    machine: Machine
    gpus: int
    base: ParallelConfig = field(default_factory=ParallelConfig)
    others: tuple[ModelShape, ...] = ()
    shares: tuple[float, ...] = ()
    swaps: WeightSwaps = WeightSwaps()
    caches_dequantized: bool = True
    shapes: tuple[tuple[ModelShape, ...], ...] = ()

    def of_first(self, ranks: int) -> "Question":
        """Return what is asked where the first ``ranks`` run alone."""
        swaps = self.swaps.ordered(self.machine.order(ranks))
        asked = replace(self, machine=self.machine.placed(ranks), swaps=swaps)
        if not self.shapes:
            return asked
        shape, *others = self.shapes[ranks - 1]
        others = tuple(others) if self.others else ()  # unless they wait
        return replace(asked, shape=shape, others=others, machine=asked.machine.of_first(ranks), shapes=())

    def option(self, plan: ParallelConfig) -> Option:
        """Estimate one plan."""
        return self.of_first(plan.world_size)._option(plan)

    def _option(self, plan: ParallelConfig) -> Option:
        rank = self._tightest(plan)
        spare = spare_bytes(rank.room - rank.likely, rank.besides_weights) if self.caches_dequantized else 0
        seconds = Cost(self.shape, plan, self.machine, self.request, spare).total
        unit = "rank" if self.machine.on_host else "GPU"
        drift = drift_penalty(self.request.steps, plan.patches) if plan.has_stale_kv else 1.0
        models = (self.shape, plan, self.request, self.others)
        aside, reads = self.swaps.yield_time(*models, self.machine.host_link)
        return Option(
            plan,
            seconds=seconds + aside,
            bytes=rank.held,
            room=rank.room,
            likely=rank.likely,
            unit=unit,
            rereads=reads,
            yield_seconds=aside,
            drift=drift,
            compiles=self.shape.compiles and not self.machine.on_host,
        )

    def _tightest(self, plan: ParallelConfig) -> Tightest:
        """Find the rank with least to spare."""
        rooms = self.machine.rooms(plan.world_size)
        if not plan.shares and len(set(rooms)) == 1:
            fullest = held(self.shape, plan, self.request, self.others)
            return Tightest(fullest.bytes, rooms[0], fullest.likely, fullest.likely - fullest.weights)
        ranks = held_by_rank(self.shape, plan, self.request, self.others)
        sizes = [each.bytes for each in ranks]
        size, room = max(zip(sizes, rooms), key=lambda pair: pair[0] - pair[1])
        beyond = max(each.likely - own for each, own in zip(ranks, rooms))
        return Tightest(size, room, room + beyond, max(each.likely - each.weights for each in ranks))

    def _shares(self, ranks: int) -> list[str]:
        """Return how so many ranks may share the work: as the user says, else by speed, by memory or equally,
        where their GPUs differ."""
        if ranks == 1:
            return [""]
        if self.shares:
            return [written(self.shares[:ranks])]
        machine = self.machine.placed(ranks)
        speeds = machine.speeds_of(ranks)
        rooms = machine.rooms(ranks)
        uneven = [values for values in (speeds, rooms) if max(values) > DIFFERENT * min(values) > 0]
        return [*dict.fromkeys(map(written, uneven)), ""]

    def options(self, exact: bool = False) -> list[Option]:
        """Estimate every plan of one to ``gpus`` ranks; ``exact``: of those whose result is one GPU's."""
        options = []
        for ranks in range(1, self.gpus + 1):
            shares = self._shares(ranks)
            for plan in candidates(self.of_first(ranks).shape, self.request, ranks, self.base, exact):
                tried = [self.option(replace(plan, shares=each)) for each in shares]
                # alike GPUs have other rooms, too: one has ComfyUI and a desktop
                rooms = self.machine.placed(ranks).rooms(ranks)
                uneven = ranks > 1 and len(set(rooms)) > 1 and not self.shares
                # each holds about as much as the fullest: what is more than all rooms fits by no shares
                may = uneven and min(each.bytes for each in tried) * ranks <= FILLED * sum(rooms)
                if may and not any(each.fits for each in tried):
                    tried.append(self.option(self._filling_alike(plan)))
                options += tried
        return options

    def _filling_alike(self, plan: ParallelConfig) -> ParallelConfig:
        """Return the plan with shares by which every GPU is as full as the others: what each holds whatever
        its share fills a small one most."""
        asked = self.of_first(plan.world_size)
        shares = rooms = [max(1, room) for room in asked.machine.rooms(plan.world_size)]
        for _ in range(FILLINGS):
            # in per cents of an even share: a few tokens more leave the weights where they are
            whole = 100 * len(shares) / sum(shares)
            plan = replace(plan, shares=written([round(whole * each) or 1 for each in shares]))
            sizes = [each.bytes for each in held_by_rank(asked.shape, plan, self.request, asked.others)]
            if all(size <= room for size, room in zip(sizes, rooms)):
                break
            shares = [share * room / size for share, room, size in zip(shares, rooms, sizes)]
        return plan

    def in_turns(self, exact: bool = False) -> list[Option]:
        """Estimate every plan with one model at a time on the ranks, and the seconds in which they change:
        one that has left for ComfyUI's models does not leave once more for the next of the ranks'."""
        options = []
        for each in replace(self, others=(), swaps=replace(self.swaps, left_by_comfyui=())).options(exact):
            asked = self.of_first(each.plan.world_size)
            models = (asked.shape, each.plan, self.request, asked.others)
            swap, reads = self.swaps.swap(*models, self.machine.host_link)
            options.append(replace(each, seconds=each.seconds + swap, swap_seconds=swap, rereads=reads))
        return options


def choose(question: Question, method: str = AUTO, running: Ranks | None = None) -> PlanChoice:
    """Choose a plan. ``running``: the ranks that there are, whose weights stay where another plan gains less
    than reading them takes. Models of GPUs take turns where they do not fit together, or where that is
    faster. ConfigError, with the numbers, where nothing fits."""
    options, fit_together = _considered(question, method)
    ordered = ranked(options, method)
    if not ordered:
        raise ConfigError(_what_lacks(question, options))
    best, regret = (ordered[0], {}) if method == MEMORY else _settled(question, method, options, running)
    machine = question.machine
    notes = tuple(filter(None, (machine.line, machine.links, *_waits(question, best, fit_together))))
    why = _why_not(question, best, ordered[0], running) if method != MEMORY else ""
    return PlanChoice(best, _runners_up(ordered, best), _one_of(options), method, notes, why, regret)


def _considered(question: Question, method: str) -> tuple[list[Option], bool]:
    """Return the options of a method, and whether one of them has room for all models of the graph."""
    options = question.options(method == EXACT)
    fit_together = any(each.fits for each in options)
    if question.others and not question.machine.on_host and not (fit_together and method == MEMORY):
        together = [each for each in options if each.fits]
        plans = [each.plan for each in together]
        options = together + [each for each in question.in_turns(method == EXACT) if each.plan not in plans]
    return options, fit_together


def _waits(question: Question, best: Option, fit_together: bool) -> tuple[str, str]:
    """Say which weights wait for others, and what that costs; empty where none do."""
    where = f", read {question.swaps.source}" if best.rereads else ""
    turns = aside = ""
    if best.swap_seconds:
        turns = f"{FASTER_TURNS if fit_together else TURNS}, so one "
        turns += "leaves the ranks" if best.rereads else "waits in host memory"
        turns += f" for the other (about {best.swap_seconds:.0f} s each time{where}, projected)"
    ranks = [str(rank) for rank, _ in question.of_first(best.plan.world_size).swaps.left_by_comfyui]
    if ranks and not best.swap_seconds:
        aside = f"{ASIDE}{' and '.join(ranks)}: this plan's weights leave room for them"
    if best.yield_seconds:
        aside = f"{ASIDE}{' and '.join(ranks)}: weights leave for them and come back"
        aside += f" (about {best.yield_seconds:.1f} s each run{where}, projected)"
    return turns, aside


def ranked(options: list[Option], method: str = AUTO) -> list[Option]:
    """Return the options that may be taken, best first: those that fit, and where one GPU is among them, that
    are not slower than it (all that fit for the least memory)."""
    one = _one_of(options)
    fitting = [each for each in options if each.fits]
    if method == MEMORY:
        return sorted(fitting, key=_by_memory)
    if one in fitting:
        fitting = [each for each in fitting if each.seconds <= one.seconds]
    return sorted(fitting, key=attrgetter("score"))


def _one_of(options: list[Option]) -> Option:
    return next(each for each in options if each.plan.world_size == 1)


def _by_memory(option: Option) -> tuple[float, float]:
    """Return the key that sorts by memory, and plans within 2 % of each other by their speed."""
    return (round(math.log(option.bytes, 1.02)), option.score)


def _settled(
    question: Question, method: str, options: list[Option], running: Ranks | None
) -> tuple[Option, dict[Placement, float]]:
    """Return the option to take, and Ranks.regret after it."""
    later = [_considered(replace(question, request=each), method)[0] for each in question.request.then or ()]
    further = [{each.plan: each.score for each in by_plan if each.fits} for by_plan in later]
    by_plan = {each.plan: each for each in ranked(options, method)}
    if running:  # to stay may be slower than one GPU, where to leave takes longer
        by_plan |= {each.plan: each for each in options if each.fits and running.plan.same_weights(each.plan)}
    scores = {plan: each.score for plan, each in by_plan.items()}
    plan, regret = choose_placement(scores, further, running, question.request)
    return by_plan[plan], regret


def _why_not(question: Question, best: Option, fastest: Option, running: Ranks | None) -> str:
    """Return a sentence where a plan is not taken that is faster for this request, else nothing."""
    if best.score <= STAYS * fastest.score:
        return ""
    gain = f" {fastest.name} would take {fastest.seconds:.1f} s instead of {best.seconds:.1f} s"
    if running is None:
        return f"{gain}, and longer for all samplers of the graph together."
    first = "read weights again" if fastest.plan.world_size == running.plan.world_size else "start again"
    change = running.change(fastest.plan, question.request)
    return f"{gain}, but ranks would {first} for it, about {change:.0f} s."


def _runners_up(ordered: list[Option], best: Option) -> tuple[Option, ...]:
    """Return the best option of each other set of methods, in order."""
    seen = {best.mechanisms}
    runners_up = []
    for option in ordered:
        if option.mechanisms not in seen:
            seen.add(option.mechanisms)
            runners_up.append(option)
    return tuple(runners_up[:RUNNERS_UP])


def _what_lacks(question: Question, options: list[Option]) -> str:
    """Say in one sentence what the request would need, and what would help."""
    least = min(options, key=_missing)
    ranks = least.plan.world_size
    each = f"the {least.unit}" if ranks == 1 else f"each of {ranks} {least.unit}s"
    more = f"more than {question.gpus} {least.unit}{'s' * (question.gpus > 1)}"
    request = question.request
    shape = question.shape
    file = "a file of fewer bits" if shape.is_quantized else "a quantized file"
    smaller = "fewer or smaller frames" if shape.is_video else "a smaller width and height"
    remedies = [file, smaller, "memory that other programs hold now (close them)", more]
    can_share = question.gpus > 1 and not shape.whole_only and not question.base.offload_modulation
    if can_share and shape.sharding_needs:
        remedies.insert(0, shape.sharding_needs)
    offloading = replace(question, base=replace(question.base, offload_modulation=True))
    if any(each.fits for each in offloading.options()):
        remedies.insert(0, "offload_modulation of Parallel Config, with which it fits")
    needed, free, missing = map(coarse_gigabytes, (least.bytes, least.room, _missing(least)))
    return (
        f"{shape.name} with {request.image_tokens} tokens does not fit: the leanest plan "
        f"({least.name}) needs about {needed} on {each}, which has {free} free for it, {missing} too little; "
        f"use {', '.join(remedies[:-1])} or {remedies[-1]}."
    )


def _missing(option: Option) -> int:
    return option.bytes - option.room
