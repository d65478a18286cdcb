"""Requests of scripts/doctor.py --full, which end ranks that hang. What is left of those is their log, where
their threads are, and what nvidia-smi shows meanwhile."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from doctor_findings import OutOfTime

from backend.client.auto.driver_query import driver_says
from backend.client.auto.probe_process import hang_remedy
from backend.client.pool import Backend
from backend.client.status import end_of
from backend.config import ParallelConfig
from backend.protocol import BackendError, Result, Sample

if TYPE_CHECKING:  # doctor_lab imports this module
    from doctor_lab import Lab

#: What is said of ranks that hang where the check "links" has not failed.
LINKS_FIRST = (
    "links are to blame only where the check links fails too: otherwise report it, with the file of --json"
)
#: What is said of ranks that have not imported everything in their time.
SLOW_START = (
    "some still import torch and diffusers, as from a cold or a network disk (/mnt/c under WSL), or with few "
    "processors: run it again, which finds the files in memory"
)
#: Seconds in which ranks write where their threads are.
WRITE_SECONDS = 1.0
SMI_SECONDS = 10.0


class HungError(TimeoutError):
    """Ranks did not answer in time. ``evidence``: for the report."""

    def __init__(self, what: str, evidence: dict[str, str]):
        super().__init__(what)
        self.evidence = evidence


class Hung:
    """The configurations whose ranks have hung: they would hang again, with the next model, until the minutes
    are over."""

    def __init__(self):
        self._seen: set[tuple] = set()

    def note(self, config: ParallelConfig):
        """Remember a configuration of several ranks that hung."""
        if config.world_size > 1:
            self._seen.add(_key(config))

    def has(self, config: ParallelConfig) -> bool:
        """Return whether the ranks of a configuration have hung."""
        return _key(config) in self._seen

    def check(self, config: ParallelConfig):
        """Raise OutOfTime for one that has."""
        if self.has(config):
            raise OutOfTime(f"not run: ranks with {config.product} hung before")


def _key(config: ParallelConfig) -> tuple:
    return config.topology(), config.attention, config.compile, config.num_pipeline_patch


def sample(
    lab: "Lab",
    config: ParallelConfig,
    backend: Backend,
    message: Sample,
    longest: float,
    is_slow: bool = False,
    cancels: Callable[[], bool] | None = None,
    has_killed: Callable[[], bool] | None = None,
    **how,
) -> Result | None:
    """Return the Result of a request; None where ``cancels`` says so. What takes ``longest`` seconds, or all
    that ``lab`` has left, is ended. ``is_slow``: as in Clock.has_hung; ``how``: as in Backend.sample. Raises
    RefusedError, BackendError where ranks end, HungError where they hang, and OutOfTime. ``lab.hung`` notes
    a configuration whose ranks hang or are silent, unless ``has_killed``: the caller has ended one of them,
    and the others wait for it."""
    began = time.monotonic()
    limit = lab.limit(longest)
    shown: dict[str, str] = {}

    def is_late() -> bool:
        over = time.monotonic() > limit
        if over and not backend.closed:  # ranks that hang receive no cancel, and it would be waited for
            shown.update(evidence(backend))
            backend.close()
        return over

    def should_cancel() -> bool:
        return is_late() or (cancels is not None and cancels())

    try:
        result = backend.sample(message, should_cancel=should_cancel, **how)
    except BackendError:
        if not is_late():
            is_silent = backend.process is not None and backend.process.silence
            if is_silent and not (has_killed is not None and has_killed()):
                lab.hung.note(config)
            raise
        result = None
    # to be said even where the minutes are over; None may be a cancel that came in time
    if result is None and (cancels is None or time.monotonic() > limit):
        raise late(lab, config, time.monotonic() - began, longest, is_slow, shown)
    return result


def late(
    lab: "Lab",
    config: ParallelConfig,
    seconds: float,
    longest: float,
    is_slow: bool = False,
    shown: dict[str, str] | None = None,
) -> HungError | OutOfTime:
    """Return HungError for ranks that were ended after so many seconds, which is noted, or OutOfTime where
    their time was over. ``shown``: their evidence."""
    if not lab.has_hung(seconds, longest, is_slow):
        why = f"ended after {seconds:.0f} s, when its time was over"
        return OutOfTime(f"{why}; raise --minutes or use --only")
    lab.hung.note(config)
    what = f"no answer within {seconds:.0f} s of {config.product}: the ranks hang"
    remedy = hang_remedy(lab.device) if lab.links_failed else LINKS_FIRST
    return HungError(f"{what}; {remedy}" if remedy else what, shown or {})


def evidence(backend: Backend) -> dict[str, str]:
    """Return what shows of ranks that hang: to be asked before they are ended."""
    process = backend.process
    if process is None:
        return {}
    process.dump_stacks()
    time.sleep(WRITE_SECONDS)
    return {
        "log": end_of(process.log),
        "nvidia-smi": driver_says(["nvidia-smi"], SMI_SECONDS),
        "steps": process.watch.steps_of_ranks(0),
    }
