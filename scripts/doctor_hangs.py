"""What is kept of ranks that hang or end while scripts/doctor.py --full runs: their log, where their threads
are, and what nvidia-smi shows meanwhile."""

import shutil
import subprocess
import time

from doctor_findings import OutOfTime

from backend.client import driver_query
from backend.client.pool import Backend
from backend.client.status import end_of
from backend.config import ParallelConfig

#: What is said of ranks that hang where the check "links" has not failed.
LINKS_FIRST = (
    "links are to blame only where the check links fails too: otherwise report it, with the file of --json"
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


def evidence(backend: Backend) -> dict[str, str]:
    """Return what shows of ranks that hang: to be asked before they are ended."""
    process = backend.process
    if process is None:
        return {}
    process.dump_stacks()
    time.sleep(WRITE_SECONDS)
    return {"log": end_of(process.log), "nvidia-smi": _smi(), "steps": process.watch.steps_of_ranks(0)}


def _smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        return driver_query.answer(["nvidia-smi"], SMI_SECONDS).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi failed: {error}"
