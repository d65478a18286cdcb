"""How the minutes of scripts/doctor.py --full are divided among its checks, so that it ends within them."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from doctor_findings import OutOfTime
from doctor_sizes import BLOCKS, timed_blocks

#: Check -> seconds that it takes on two GPUs like an H200, estimated from its starts of ranks (6 s each),
#: changes of their methods (2 s each, with a load), requests and files. What is worth most comes first.
SECONDS = {
    "links": 25,  # a start, and what takes about ten seconds
    "one rank": 25,
    "speed of one rank": 70,  # 10 requests, and a file of 3.7 GB: 13 s on a fast disk, 37 on a slow one
    "methods": 132,  # a start, eleven changes, 136 requests of tiny models, 24 of their files
    "speed": 84,  # the ranks of methods, eight changes, 60 requests
    "fp8 and int8": 46,  # two files, two starts, a change, six timed methods of five requests
    "life": 40,
    "waits": 40,
    "quantized": 88,  # seven files, one of them twice, 45 requests of all ranks, 55 timed ones of one
    "dequantized once": 15,  # a start, five requests
    "memory": 40,  # four starts
    "overhead": 22,  # a program that reads the model twice, five rounds of at least a second
    "shapes": 147,  # six files, 15 starts, 24 timed methods of five requests
    "compiled": 156,  # two starts, four changes, 72 requests
    "kernels": 54,
    "overhead compiled": 75,  # both compile
}
#: The same of checks that have a shorter form, of the most telling cases, which is what ten minutes have time
#: for on two GPUs. The others are as they are.
SHORT_SECONDS = {
    "one rank": 15,  # two families
    "methods": 43,  # 33 requests
    "speed": 46,  # seven timed methods instead of twelve
    "life": 20,
    "waits": 22,  # one family
    "quantized": 43,  # four files, 15 requests of all ranks, 20 timed ones of one
    "memory": 20,  # two starts
    "overhead": 18,  # three rounds
    "shapes": 42,  # two files, two starts, a change, six timed methods
    "compiled": 30,  # a start, 12 requests
    "kernels": 24,
    "overhead compiled": 70,
}
#: Of "methods", what a family with one method takes in float32: its file (53 MB in the mean), a load and a
#: request. Two ranks took 3.2 s on two CPU cores that others used, too, of which they computed for 1.9.
FAMILY_SECONDS = 1.5
#: The same of "methods" where ranks make a grid: a start, 24 to 30 changes, 164 requests; shorter 64.
METHODS_OF_GRIDS, SHORT_METHODS_OF_GRIDS = 180, 93
#: The same of "shapes" with a block more of each model, in six files and 18 methods; shorter in two and six.
SHAPES_OF_THREE, SHORT_SHAPES_OF_THREE = 184, 52
#: Seconds of a step of the mid-size Flux on an H200 (docs/performance.md), for which all these are.
STEP_SECONDS = 0.0262
#: Check -> in how many such steps of one rank its GPUs compute what they do, of which the mid-size Flux has
#: 19 TFLOP, the quantized files' 9, Flux.1's shapes as many as the first, Wan's 83 and MiniMax-H3's 36. The
#: others' models are tiny. The rest of SECONDS is the host's.
STEPS = {
    "speed": 220,  # 31 of each timed method, half as many where two ranks divide them
    "fp8 and int8": 132,
    "life": 15,
    "quantized": 252,  # 341 of one rank, weight only up to twice as long; the others partly in float32
    "dequantized once": 27,
    "memory": 5,
    "overhead": 25,
    "shapes": 940,
    "compiled": 231,
    "kernels": 110,
    "overhead compiled": 25,
}
#: The same of shorter forms.
SHORT_STEPS = {
    "speed": 135,
    "life": 8,
    "quantized": 120,
    "memory": 3,
    "overhead": 15,
    "shapes": 205,
    "compiled": 35,
    "kernels": 105,
    "overhead compiled": 15,
}
#: The same of "shapes" with a block more of each model.
STEPS_OF_THREE, SHORT_STEPS_OF_THREE = 1340, 305
#: Of a check that is not among them.
OTHERS = 60
#: Those of scripts/doctor.py without --minutes.
DEFAULT_MINUTES = 10.0
#: Imports and quick checks, before the first check of --full.
EARLIER_SECONDS = 20.0
#: Of the minutes, for ranks and files to go; less of few minutes.
CLOSING_SECONDS = 20.0
CLOSING_SHARE = 0.1
#: A load or a request of so many seconds hangs, or it may go on to its end though its check's time is over.
HANG_SECONDS = 60.0
#: Making a model with random weights and writing it, which nothing interrupts.
MAKE_SECONDS_A_GB = 10.0


def usable_seconds(minutes: float) -> float:
    """Return the seconds of checks in so many minutes."""
    whole = 60 * minutes
    return whole - min(CLOSING_SECONDS, CLOSING_SHARE * whole)


def seconds_of(name: str, ranks: int = 2, step: float = STEP_SECONDS, is_short: bool = False) -> float:
    """Return the seconds that a check takes on so many ranks, as far as their number matters, of GPUs that
    take ``step`` seconds for what an H200 does in STEP_SECONDS. ``is_short``: in its shorter form, if any."""
    is_short = is_short and name in SHORT_SECONDS
    seconds = SHORT_SECONDS[name] if is_short else SECONDS.get(name, OTHERS)
    steps = (SHORT_STEPS if is_short else STEPS).get(name, 0)
    if name == "methods" and ranks >= 4 and ranks % 2 == 0:
        seconds = SHORT_METHODS_OF_GRIDS if is_short else METHODS_OF_GRIDS
    if name == "shapes" and timed_blocks(ranks) > BLOCKS:
        seconds = SHORT_SHAPES_OF_THREE if is_short else SHAPES_OF_THREE
        steps = SHORT_STEPS_OF_THREE if is_short else STEPS_OF_THREE
    return seconds + steps * (step - STEP_SECONDS)


@dataclass(frozen=True)
class Plan:
    """Checks, in order, that the minutes have time for (``fitting``), and the ``others``, which have what
    those leave. ``short``: which of all of them run in their shorter form."""

    fitting: list[str]
    others: list[str]
    short: frozenset[str] = frozenset()


def in_order(
    names: Iterable[str],
    minutes: float,
    spent: float = 0.0,
    ranks: int = 2,
    step: float = STEP_SECONDS,
) -> Plan:
    """Plan checks for so many minutes, of which seconds are ``spent``: all in their shorter form, as far as
    there is time, then whole ones, in order, by what that leaves. ``step``: as in seconds_of."""
    fitting: list[str] = []
    others: list[str] = []
    listed = list(names)
    short = {name for name in listed if name in SHORT_SECONDS}
    left = usable_seconds(minutes) - spent
    for name in listed:
        seconds = seconds_of(name, ranks, step, name in short)
        (fitting if seconds <= left else others).append(name)
        left -= seconds if seconds <= left else 0.0
    for name in [] if others else fitting:
        more = seconds_of(name, ranks, step) - seconds_of(name, ranks, step, name in short)
        if more <= left:
            short.discard(name)
            left -= more
    return Plan(fitting, others, frozenset(short))


def minutes_of(names: Iterable[str], spent: float = 0.0, ranks: int = 2, step: float = STEP_SECONDS) -> int:
    """Return the minutes, a whole number, that have time for these checks in their whole form, after what is
    ``spent`` before them."""
    return math.ceil((spent + sum(seconds_of(name, ranks, step) for name in names) + CLOSING_SECONDS) / 60)


class Clock:
    """The time until ``minutes`` are over, of which seconds are ``spent``, and that of the check begun.
    left_out: what its shorter form does not run."""

    ranks = 2
    #: Checks that run in their shorter form.
    short: frozenset[str] = frozenset()
    #: What a step of the mid-size Flux takes here on one rank, an H200's until one is timed.
    one_step = STEP_SECONDS

    def __init__(self, minutes: float, spent: float = 0.0):
        self.minutes = minutes
        self.end = time.monotonic() + max(0.0, usable_seconds(minutes) - spent)
        self.part = ""
        self.part_end = self.end
        self.left_out: list[str] = []

    @property
    def is_short(self) -> bool:
        """Return whether the check under way runs in its shorter form."""
        return self.part in self.short

    def begin(self, name: str, later: Iterable[str] = ()):
        """Give the check ``name`` its part of what is left; those that come ``later`` have theirs."""
        own, *others = [
            seconds_of(each, self.ranks, self.one_step, each in self.short) for each in (name, *later)
        ]
        left = max(0.0, self.end - time.monotonic())
        seconds = left * own / (own + sum(others))
        self.part = name
        self.left_out = []
        self.part_seconds = seconds
        self.part_end = time.monotonic() + seconds

    @property
    def elapsed(self) -> float:
        """Seconds of the minutes that are over."""
        return usable_seconds(self.minutes) - max(0.0, self.end - time.monotonic())

    def planned(self, names: Iterable[str]) -> Plan:
        """Plan checks as in_order, by the time that is left."""
        return in_order(names, self.minutes, self.elapsed, self.ranks, self.one_step)

    def enough(self, names: Iterable[str]) -> int:
        """Return the minutes, of all, that have time for these checks, too, in their whole form."""
        return minutes_of(names, self.elapsed, self.ranks, self.one_step)

    def check_end(self):
        """Raise OutOfTime where the minutes are over."""
        if time.monotonic() > self.end:
            raise OutOfTime(f"not run: the {self.minutes:g} minutes are over; raise --minutes or use --only")

    def check(self):
        """Raise OutOfTime where the minutes are over, or the time of the check under way."""
        self.check_end()
        if time.monotonic() > self.part_end:
            over = f"not run: its {self.part_seconds:.0f} s of the {self.minutes:g} minutes are over"
            raise OutOfTime(f'{over}; raise --minutes, or, to try it again: --only "{self.part}"')

    def has_time_for(self, seconds: float) -> bool:
        """Return whether the check under way has so many seconds left."""
        return time.monotonic() + seconds <= self.part_end

    def limit(self, longest: float) -> float:
        """Return until when something may go on that hangs after ``longest`` seconds (monotonic)."""
        now = time.monotonic()
        return min(now + longest, max(self.part_end, now + HANG_SECONDS), self.end)

    def has_hung(self, seconds: float, longest: float, is_slow: bool = False) -> bool:
        """Return whether what was ended after so many ``seconds`` hangs, or only had no time; ``is_slow``: it
        may well take ``longest``, as a compiler does."""
        return seconds >= (longest if is_slow else min(longest, HANG_SECONDS))

    def need_time(self, size: int, what: str):
        """Raise OutOfTime where a file of so many bytes would be made beyond the end."""
        seconds = size / 1e9 * MAKE_SECONDS_A_GB
        left = self.end - time.monotonic()
        if seconds > left:
            short = f"not run: {max(0.0, left):.0f} s are left, and {what} takes about {seconds:.0f}"
            raise OutOfTime(f"{short}; raise --minutes or use --only")


def while_time(clock, names: Iterable[str]) -> Iterator[str]:
    """Yield each name; raise OutOfTime with the names of those that are left once the time is over."""
    listed = list(names)
    for index, name in enumerate(listed):
        try:
            clock.check()
        except OutOfTime as over:
            separator = "; " if any("," in each for each in listed) else ", "
            raise OutOfTime(f"{separator.join(listed[index:])}: {over}") from None
        yield name


def of_form(clock, names: Iterable[str], telling: Iterable[str]) -> list[str]:
    """Return what the check under way runs: all, or of its shorter form the most ``telling`` ones. The others
    are left out, which is said after the check."""
    listed = list(names)
    if not clock.is_short:
        return listed
    chosen = set(telling)
    clock.left_out += [name for name in listed if name not in chosen]
    return [name for name in listed if name in chosen]
