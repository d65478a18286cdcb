"""How fast the steps of a request end, and a word to the user where none does while all ranks live: GPUs wait
for each other inside a kernel, which no heartbeat shows. Nothing is ended: a slow step looks the same."""

import logging
import time
from collections.abc import Callable

#: A step that takes longer than this, and so many times as long as any before it, is reported.
MIN_SECONDS, TIMES = 120.0, 20.0
#: The same of the first step, which loads kernels and tries them, and of steps that compile: the first one,
#: and the first one of PipeFusion's patches, which warm-up steps come before.
FIRST_SECONDS, COMPILED_SECONDS = 300.0, 1200.0
#: So many first Progress of a request may come early: it says that the host has started a step's kernels, of
#: which CUDA queues about 1024, a step or two.
EARLY_STEPS = 3
#: What a step does that takes longer than those after it, as a user reads it. Cancel waits for its end:
#: between two collectives a rank is alone, and peers would wait for one that left.
COMPILES = "the ranks compile the model's blocks where they have not yet, which takes up to minutes"
BEGINS = "the ranks are at the first step, before which they load LoRAs, parked weights and kernels"


class StepTimer:
    """The steps of a request with that ``compile`` as they end; ranks compile for "blocks" alone.
    ``steps_of_ranks(done)``: in which steps the ranks are after so many, in words; empty where nobody knows.
    ``warmup``: steps before those in which PipeFusion has patches. ``longest``: seconds of the longest step
    of earlier requests; then of this one's, too, those included that compile. ``has_progress``: steps are
    told as they end, as of a Sample."""

    def __init__(
        self,
        compile: str,
        steps_of_ranks: Callable[[int], str],
        warmup: int = 1,
        longest: float = 0.0,
        has_progress: bool = True,
    ):
        self.longest = longest
        #: The same without steps that compile, which are no measure of later requests.
        self.longest_without_compile = longest
        self._has_progress = has_progress
        self._steps_of_ranks = steps_of_ranks
        self._compiles = compile == "blocks"
        #: Numbers of steps that compile, or read weights first: no measure of others.
        self._unlike = {0, warmup} if self._compiles else {0}
        self._usual = MIN_SECONDS
        self._done = 0
        self._patience = max(FIRST_SECONDS, self.compiling)
        self._last = time.monotonic()
        self._is_reported = False

    def step(self):
        """Note that a step has ended."""
        spent = self.spent
        self.longest = max(self.longest, spent)
        if not self.compiling:
            self.longest_without_compile = max(self.longest_without_compile, spent)
        if self._done not in self._unlike:
            self._usual = max(self._usual, TIMES * spent)
        self._done += 1
        self._patience = max(self._usual, self.compiling)
        self._last = time.monotonic()

    @property
    def likely(self) -> float:
        """Return the seconds that a step is likely to take: of the longest so far, and of the one under way
        until one has been measured, as a call's is by its Result. That counts as FIRST_SECONDS at most: it
        may never end."""
        is_measured = self._done >= EARLY_STEPS or (self.longest > 0 and not self._has_progress)
        return max(self.longest, 0.0 if is_measured else min(self.spent, FIRST_SECONDS))

    @property
    def compiling(self) -> float:
        """Return the seconds that the step under way may take to compile; 0 where it compiles nothing."""
        return COMPILED_SECONDS if self._compiles and self._done in self._unlike else 0.0

    @property
    def reason(self) -> str:
        """Say what the step under way does besides computing; empty where it is as those before."""
        if self.compiling:
            return COMPILES
        is_first = not self._done and (self._has_progress or not self.longest)
        return BEGINS if is_first else ""

    def look(self, waits: bool = False):
        """Report, once, where the ranks are if no step has ended for too long. While the request ``waits``
        for another client's no time of it passes."""
        if waits:
            self._last = time.monotonic()
        if self._is_reported or self.spent < self._patience:
            return
        self._is_reported = True
        steps = self._steps_of_ranks(self._done)
        if steps:
            logging.warning(
                "parallel-dit: no step has ended for %.0f s, and every rank lives: %s. Where GPUs are busy "
                "and still nothing ends, they wait for each other: press Cancel, which ends the ranks if "
                "their step does not end, and run python scripts/doctor.py --full, which looks at links and "
                "kernels.",
                self.spent,
                steps,
            )

    @property
    def spent(self) -> float:
        """Return the seconds of the step under way."""
        return time.monotonic() - self._last
