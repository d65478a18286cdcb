"""Which plan to take of all that fit, and why: one line for the choice and one for each runner-up."""

import math
from dataclasses import dataclass, field, replace
from operator import attrgetter

from ..config import ConfigError, ParallelConfig
from ..units import coarse_gigabytes
from .option import Option
from .placement import STAYS, Placement, Ranks, choose_placement
from .question import Question

#: What the user chooses between; "manual" takes the degrees as they are.
AUTO, EXACT, MEMORY, MANUAL = METHODS = ("auto", "fastest exact", "least memory", "manual")
#: Runners-up that are reported.
RUNNERS_UP = 2
#: So many times the seconds of one GPU are named: what is shown of them is less than 1.0x.
SLOWER = 1 / 0.95
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
        return self.option.with_compile.plan

    @property
    def lines(self) -> list[str]:
        """One line for the choice, one for each note, and one for each runner-up."""
        chosen = self.option.with_compile
        result = f"same result as one {chosen.unit}"
        if chosen.plan.has_stale_kv:
            result = "PipeFusion drifts a little"
        lines = [f"{self.method}: {chosen.name}. {self._figures(chosen)}, {result}.{self.why}", *self.notes]
        for each in self.runners_up:
            why = ""
            if self.method != MEMORY and not self.why:
                why = each.why_not(chosen, self._times(each) == self._times(chosen))
            lines.append(f"next: {each.name}. {self._figures(each)}{why and '; '}{why}.")
        return lines

    def _figures(self, option: Option) -> str:
        held, room = coarse_gigabytes(option.bytes), coarse_gigabytes(option.room)
        memory = f"about {held} of {room} per {option.unit}"
        if option.plan.world_size == 1:
            return memory
        speed = f"about {self._times(option)}x one {option.unit} (projected)"
        if not self.one.fits:
            speed += ", which it does not fit"
        return f"{speed}, {memory}"

    def _times(self, option: Option) -> str:
        """Write how many times as fast as one GPU an option is."""
        ratio = self.one.sampling_seconds / option.sampling_seconds
        if ratio < 1 < self.one.seconds / option.seconds:  # it wins by what leaves and comes back alone
            ratio = self.one.seconds / option.seconds
        return f"{ratio:.1f}"


def choose(question: Question, method: str = AUTO, running: Ranks | None = None) -> PlanChoice:
    """Choose a plan. ``running``: the ranks that there are, whose weights stay where another plan gains less
    than reading them takes. Models of GPUs take turns where they do not fit together, or where that is
    faster. ConfigError, with the numbers, where nothing fits."""
    options, fit_together = _considered(question, method)
    ordered = ranked(options, method)
    if not ordered:
        raise ConfigError(_what_lacks(question, options))
    best = ordered[0]
    regret: dict[Placement, float] = {}
    why = ""
    if method != MEMORY:
        best, regret = _settled(question, method, options, running)
        why = _why_not(question, best, ordered[0], running)
        why = why or _why_slower(question, best, _one_of(options))
    machine = question.machine
    notes = tuple(filter(None, (machine.line, machine.links, *_waits(question, best, fit_together))))
    return PlanChoice(
        option=best,
        runners_up=_runners_up(ordered, best),
        one=_one_of(options),
        method=method,
        notes=notes,
        why=why,
        regret=regret,
    )


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
    are not slower than it (all that fit for the least memory). Models take no turns where another plan spares
    them that, whatever it has to gain by its further mechanisms: each turn moves gigabytes."""
    one = _one_of(options)
    fitting = [each for each in options if each.fits]
    if method == MEMORY:
        return sorted(fitting, key=_by_memory)
    if one in fitting:
        fitting = [each for each in fitting if each.seconds <= one.seconds]
    together = [each for each in fitting if not each.swap_seconds]
    fitting = [each for each in fitting if not any(other.spares_turns_of(each) for other in together)]
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
    if best.score <= STAYS * fastest.score or best.seconds <= fastest.seconds:
        return ""
    gain = f" With {fastest.name} it would take {1 - fastest.seconds / best.seconds:.0%} less time"
    if running is None:
        return f"{gain}, and longer for all samplers of the graph together."
    first = "read weights again" if fastest.plan.world_size == running.plan.world_size else "start again"
    change = running.change(fastest.plan, question.request)
    remedy = ": set gpus to 1 if many such runs follow" if fastest.plan.world_size == 1 else ""
    return f"{gain}, but ranks would {first} for it, about {change:.0f} s{remedy}."


def _why_slower(question: Question, best: Option, one: Option) -> str:
    """Return a sentence where ranks that run go on though one of them alone is a little faster."""
    if not one.fits or best.seconds < SLOWER * one.seconds:
        return ""
    larger = "longer or larger videos" if question.shape.is_video else "larger images"
    return f" One {best.unit} is a little faster here: set gpus to 1, or make {larger}."


def _runners_up(ordered: list[Option], best: Option) -> tuple[Option, ...]:
    """Return the best option of each other set of methods, in order."""
    by_methods: dict[frozenset[str], Option] = {}
    for option in ordered:
        by_methods.setdefault(option.mechanisms, option)
    others = [option for methods, option in by_methods.items() if methods != best.mechanisms]
    return tuple(others[:RUNNERS_UP])


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
    fitting = [each for each in offloading.options() if each.fits]
    # elsewhere what is offloaded stays in the GPU's own memory
    if any(question.of_first(each.plan.world_size).swaps.parks(each.plan) for each in fitting):
        remedies.insert(0, "offload_modulation of Parallel Config, with which it fits")
    needed, free, missing = map(coarse_gigabytes, (least.bytes, least.room, _missing(least)))
    return (
        f"{shape.name} with {request.image_tokens} tokens does not fit: the leanest plan "
        f"({least.name}) needs about {needed} on {each}, which has {free} free for it, {missing} too little; "
        f"use {', '.join(remedies[:-1])} or {remedies[-1]}."
    )


def _missing(option: Option) -> int:
    return option.bytes - option.room
