"""How the minutes of scripts/doctor.py --full are divided among its checks, so that it ends within them."""

import math
import time
from collections.abc import Iterable, Iterator

from doctor_findings import OutOfTime
from doctor_sizes import BLOCKS, timed_blocks

#: Check -> seconds that it takes on two GPUs like an H200, estimated from its starts of ranks (6 s each),
#: changes of their methods (2 s each, with a load), requests and files. What is worth most comes first: what
#: the default has no time for by these estimates comes last.
SECONDS = {
    "links": 30,
    "one rank": 25,
    "speed of one rank": 71,  # 12 requests, and a file of 3.7 GB: 13 s on a fast disk, 37 on a slow one
    "methods": 88,  # a start, ten changes, 88 requests of tiny models
    "speed": 95,  # the ranks of methods, eight changes, 72 requests
    "life": 40,
    "waits": 40,
    "quantized": 88,  # seven files, six starts, 45 requests of all ranks, 60 timed ones of one
    "dequantized once": 20,
    "memory": 40,
    "overhead": 22,  # a program that reads the model twice, five rounds of at least a second
    "fp8 and int8": 48,  # two files, two starts, a change, six timed methods of six requests
    "shapes": 155,  # eight files, 15 starts, 24 timed methods of six requests
    "compiled": 115,  # two starts, two changes, 56 requests
    "kernels": 55,
    "overhead compiled": 75,  # both compile
}
#: The same of "methods" where ranks make a grid: a start, 24 to 29 changes, 116 requests.
METHODS_OF_GRIDS = 135
#: The same of "shapes" with a block more of each model, in six of its eight files and 16 of its 24 methods.
SHAPES_OF_THREE = 192
#: Seconds of a step of the mid-size Flux on an H200 (docs/performance.md), for which all these are.
STEP_SECONDS = 0.0262
#: Check -> in how many such steps of one rank its GPUs compute what they do, of which the mid-size Flux has
#: 19 TFLOP, the quantized files' 9, Flux.1's shapes as many as the first, Wan's 83 and MiniMax-H3's 36. The
#: others' models are tiny. The rest of SECONDS is the host's.
STEPS = {
    "speed": 240,  # 34 of each timed method, half as many where two ranks divide them
    "life": 15,
    "quantized": 275,  # 374 of one rank, weight only up to twice as long; the others partly in float32
    "dequantized once": 30,
    "memory": 5,
    "overhead": 25,
    "fp8 and int8": 150,
    "shapes": 1050,
    "compiled": 180,
    "kernels": 120,
    "overhead compiled": 25,
}
#: The same of "shapes" with a block more of each model.
STEPS_OF_THREE = 1500
#: Of a check that is not among them.
OTHERS = 60
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


def seconds_of(name: str, ranks: int = 2, step: float = STEP_SECONDS) -> float:
    """Return the seconds that a check takes on so many ranks, as far as their number matters, of GPUs that
    take ``step`` seconds for what an H200 does in STEP_SECONDS."""
    seconds, steps = SECONDS.get(name, OTHERS), STEPS.get(name, 0)
    if name == "methods" and ranks >= 4 and ranks % 2 == 0:
        seconds = METHODS_OF_GRIDS
    if name == "shapes" and timed_blocks(ranks) > BLOCKS:
        seconds, steps = SHAPES_OF_THREE, STEPS_OF_THREE
    return seconds + steps * (step - STEP_SECONDS)


def in_order(
    names: Iterable[str],
    minutes: float,
    spent: float = 0.0,
    ranks: int = 2,
    step: float = STEP_SECONDS,
) -> tuple[list[str], list[str]]:
    """Divide checks, in order, into those that so many minutes have time for, of which seconds are ``spent``,
    and the others, which have what those leave. ``step``: as in seconds_of."""
    fitting: list[str] = []
    others: list[str] = []
    left = usable_seconds(minutes) - spent
    for name in names:
        seconds = seconds_of(name, ranks, step)
        (fitting if seconds <= left else others).append(name)
        left -= seconds if seconds <= left else 0.0
    return fitting, others


def minutes_of(names: Iterable[str], spent: float = 0.0, ranks: int = 2, step: float = STEP_SECONDS) -> int:
    """Return the whole minutes that have time for these checks, after what is ``spent`` before them."""
    return math.ceil((spent + sum(seconds_of(name, ranks, step) for name in names) + CLOSING_SECONDS) / 60)


class Clock:
    """The time until ``minutes`` are over, of which seconds are ``spent``, and that of the check begun."""

    ranks = 2
    #: What a step of the mid-size Flux takes here on one rank, an H200's until one is timed.
    one_step = STEP_SECONDS

    def __init__(self, minutes: float, spent: float = 0.0):
        self.minutes = minutes
        self.end = time.monotonic() + max(0.0, usable_seconds(minutes) - spent)
        self.part = ""
        self.part_end = self.end

    def begin(self, name: str, later: Iterable[str] = ()):
        """Give the check ``name`` its part of what is left; those that come ``later`` have theirs."""
        own, *others = [seconds_of(each, self.ranks, self.one_step) for each in (name, *later)]
        left = max(0.0, self.end - time.monotonic())
        seconds = left * own / (own + sum(others))
        self.part = name
        self.part_seconds = seconds
        self.part_end = time.monotonic() + seconds

    @property
    def elapsed(self) -> float:
        """Seconds of the minutes that are over."""
        return usable_seconds(self.minutes) - max(0.0, self.end - time.monotonic())

    def divided(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Divide checks as in_order, by the time that is left."""
        return in_order(names, self.minutes, self.elapsed, self.ranks, self.one_step)

    def enough(self, names: Iterable[str]) -> int:
        """Return the whole minutes, of all, that have time for these checks, too."""
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
