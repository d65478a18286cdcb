"""Why a backend ended: the first rank that failed, from what torchrun and the ranks left in its folder. Ranks
fail whose peer is gone, and torchrun kills the others once one has failed: neither is the cause."""

import json
import os
import re
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from .launching import allocator

#: torchrun's failure table (torch.distributed.elastic.multiprocessing.errors).
_FAILURE = re.compile(
    r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+) \(pid: \d+\)"
)
#: torchrun's heading over the rank that ended first.
_FIRST = "Root Cause (first observed failure)"
#: What a rank says when it was another one that went away.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket timeout|remote error"
    r"|recvvalue failed|store.*(timeout|timed out)|timed out waiting|collective operation timeout"
    r"|remote process exited or there was a network error",
    re.IGNORECASE,
)
#: What a rank that aborts says of it: NCCL's watchdog throws what CUDA or NCCL told it, in C++.
_ABORTED = (r"what\(\):\s+(?:.*with exception: )?(.*)", r"(.*(?:CUDA|NCCL) error.*)")
_MAX_LINE = 400
#: Where NCCL's errors have their cause, in lines of its own; torchrun puts the rank before each it prints.
NCCL_CAUSE = re.compile(r"Last error:\s*(?:\[\w+\]:\s*)?(\S.*?)\s*$", re.MULTILINE)
#: Where NCCL keeps what GPUs without peer access send each other, and how much room it needs (bytes): about
#: 10 MB a channel and peer.
SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_MEMORY = 1 << 30
_NO_SPACE = "No space left on device"
_OF_NCCL = re.compile(r"nccl|/dev/shm", re.IGNORECASE)
#: Errors of a driver without expandable segments (vGPUs, Jetson, old ones of WSL), and of torch where NVML,
#: which it asks for them, is broken; an error that may have another cause; and the remedy.
_NO_GROWING_SEGMENTS = re.compile(
    r"CUDA driver error: operation not supported|NVML_SUCCESS == .*(PeerToPeerAccess|GpuFabricInfo)"
)
_UNKNOWN = "CUDA driver error: unknown error"
FIXED_SEGMENTS_REMEDY = "start ComfyUI with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
#: What an error of GPUs says -> the remedy.
_HINTS = {
    r"peer access|cuda failure 217": " (GPUs of this machine do not reach each other's memory; python "
    "scripts/doctor.py --full, or a first run with method auto, finds another way)",
    r"busy or unavailable": " (the GPU is in exclusive mode, and another program has it: sudo nvidia-smi -c "
    "DEFAULT)",
}
_SEGMENTS_HINT = f" (its driver may know no segments that grow: {FIXED_SEGMENTS_REMEDY})"
#: What ranks of one machine wait for where others are on other machines, and what to do.
UNREACHED = (
    "those of other machines are not ready or not reached (let every TCP port pass between the machines, "
    "give containers the host's network, and set NCCL_IB_DISABLE=1 where InfiniBand does not connect them)"
)
#: What GPUs of one machine may hang in. A launch measures nothing, and its host need not have ComfyUI.
HANGING = (
    "GPUs that do not reach each other's memory hang so (python scripts/doctor.py --full, run as this user, "
    "finds another way between them: docs/faq.md)"
)
#: Signal -> what sends it to a rank that nobody has killed.
_SENDERS = {
    "SIGKILL": ", as the system does when memory runs out",
    "SIGBUS": ", as the system does when a file is cut short while it is read, or shared memory runs out",
}
#: A disk with less than this free (bytes) is full: logs and error files could not be written.
_FULL = 1 << 20


@dataclass(frozen=True)
class RankFailure:
    """How one rank ended: exit code (negative: a signal), recorded error and its time (seconds; clocks of
    several machines may differ). ``is_first``: torchrun saw it end before the others of its machine;
    ``machine``: where it ran, of a backend on several."""

    rank: int
    code: int = 1
    error: str = ""
    seconds: float = float("inf")
    is_first: bool = False
    machine: str = ""

    @property
    def is_cause(self) -> bool:
        if self.is_by_signal:
            return self.code != -signal.SIGTERM
        return not _CONSEQUENCE.search(self.error)

    @property
    def is_by_signal(self) -> bool:
        """Return whether something outside ended it. abort() is the rank's own."""
        return self.code < 0 and self.code != -signal.SIGABRT

    @property
    def hint(self) -> str:
        """Return the remedy of its error in brackets; empty where the error is not known."""
        return shared_memory_hint(self.error) or _known_hint(self.error)

    def __str__(self):
        who = f"rank {self.rank}" + (f" on {self.machine}" if self.machine else "")
        if self.error:
            return f"{who} failed with {self.error}{self.hint}"
        if self.code < 0:
            return f"{who} {killed_by(-self.code)}"
        return f"{who} exited with code {self.code}"


def killed_by(number: int) -> str:
    """Say which signal ended a process, and what sends it where nobody has."""
    name = signal_name(number)
    return f"was killed by {name}{_SENDERS.get(name, '')}"


def signal_name(number: int) -> str:
    """Return a signal's name, or its number in words where it has none, as most real-time signals."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def failures(folder: Path, first_rank: int = 0, machine: str = "") -> list[RankFailure]:
    """Return what is recorded in a backend's folder (backend.log, ranks/) of the ranks of this ``machine``,
    which are numbered from ``first_rank``."""
    by_rank = {failure.rank: failure for failure in _recorded_errors(folder, first_rank)}
    log = _log(folder)
    for rank, code in _exit_codes(log).items():
        known = by_rank.get(rank) or RankFailure(rank, error=_words(folder, rank - first_rank, code))
        by_rank[rank] = replace(known, code=code)
    first = _seen_first(log)
    return [replace(each, is_first=each.rank == first, machine=machine) for each in by_rank.values()]


def cause_among(failures: list[RankFailure]) -> RankFailure | None:
    """Return the failure from which the others followed."""
    causes = [failure for failure in failures if failure.is_cause] or failures

    def order(failure: RankFailure):
        # a signal from outside leaves no time: what the others recorded followed from it
        by_signal = failure.is_by_signal
        first = failure.is_first
        return not by_signal, by_signal and not first, failure.seconds, not first, failure.rank

    return min(causes, key=order, default=None)


def ended_by_signal(log: str) -> RankFailure | None:
    """Return the rank that torchrun saw end first, by its ``log``, where a signal ended it; else None."""
    codes = _exit_codes(log)
    first = _seen_first(log)
    if first is None or codes.get(first, 0) >= 0 or codes[first] == -signal.SIGTERM:
        return None
    return RankFailure(first, codes[first], is_first=True)


def full_disk(folder: Path) -> str:
    """Return a sentence on the disk of the backend's folder where it is full, else nothing."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:  # the folder is gone
        return ""
    if disk.free >= _FULL:
        return ""
    what = f" The disk of {folder} is full ({disk.free:,} of {disk.total:,} bytes free)"
    return f"{what}: make room there, or set TMPDIR to a folder on another one."


def links_hint(has_machines: bool, has_gpus: bool) -> str:
    """Return the rest of a sentence on ranks that have started and wait for each other; empty where nothing
    is known. ``has_machines``: others are elsewhere; ``has_gpus``: several run on GPUs of this machine."""
    within = HANGING if has_gpus else ""
    if has_machines:
        return f" here, so {UNREACHED}{'; or ' + within if within else ''}"
    return f" and {within}" if within else ""


def _exit_codes(log: str) -> dict[int, int]:
    return {int(match["rank"]): int(match["code"]) for match in _FAILURE.finditer(log)}


def _seen_first(log: str) -> int | None:
    """Return the rank that torchrun saw end first; it sends SIGTERM to the others itself."""
    match = _FAILURE.search(log.partition(_FIRST)[2])
    return int(match["rank"]) if match else None


def last_error(folder: Path) -> str:
    """Return the last line of the log that names an error, in brackets: why torchrun itself has ended, which
    no rank records; empty where there is none."""
    found = re.findall(r"^(?:\w+\.)*\w*Error: \S.*", _log(folder), re.MULTILINE)
    return f" ({_cut(found[-1])})" if found else ""


def _log(folder: Path) -> str:
    log = folder / "backend.log"
    return log.read_text(errors="replace") if log.exists() else ""


def _recorded_errors(folder: Path, first_rank: int):
    for path in folder.glob("ranks/*/attempt_*/*/error.json"):
        try:
            record = json.loads(path.read_text())["message"]
        except ValueError:  # the rank was killed while it wrote
            continue
        seconds = float(record["extraInfo"]["timestamp"])
        rank = first_rank + int(path.parent.name)
        yield RankFailure(rank, error=_one_line(record["message"]), seconds=seconds)


def _words(folder: Path, local_rank: int, code: int) -> str:
    """Return the line of a rank's stderr that says why it ended, for one that could not record it: the last
    one, or of an abort the exception; nothing of other signals."""
    for path in folder.glob(f"ranks/*/attempt_*/{local_rank}/stderr.log"):
        text = path.read_text(errors="replace")
        if code > 0:
            return _one_line(text.strip().rpartition("\n")[2])
        if code == -signal.SIGABRT:
            return words_of_abort(text)
    return ""


def words_of_abort(log: str) -> str:
    """Return what a rank that ended by abort() has said of it; empty where it said nothing."""
    found = filter(None, (re.search(pattern, log) for pattern in _ABORTED))
    return next((_one_line(each[1]) for each in found), "")


def _one_line(text: str) -> str:
    """Return the first line that is not empty, cut; of NCCL's errors with their cause, which comes last."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    line = _cut(lines[0]) if lines else ""
    cause = NCCL_CAUSE.search(text)
    return f"{line}: {_cut(cause[1])}" if cause else line


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_LINE else line[:_MAX_LINE] + " …"


def lacks_shared_memory() -> bool:
    """Return whether /dev/shm is as small as Docker makes it."""
    return SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).total < MIN_SHARED_MEMORY


def was_shared_memory_full(error: str) -> bool:
    """Return whether NCCL failed since /dev/shm, which is large enough, had no room left: it says so, or has
    said nothing else that is known, and there is little now."""
    if not _OF_NCCL.search(error) or not SHARED_MEMORY.exists() or lacks_shared_memory():
        return False
    return _NO_SPACE in error or (_is_little() and not _known_hint(error))


def _is_little() -> bool:
    return shutil.disk_usage(SHARED_MEMORY).free < MIN_SHARED_MEMORY // 4


def lacks_growing_segments(error: str) -> bool:
    """Return whether an error may mean that the driver has no expandable segments, which the ranks use."""
    has_them = allocator.grows(allocator.settings(os.environ))
    return bool(_NO_GROWING_SEGMENTS.search(error)) or (_UNKNOWN in error and has_them)


def _known_hint(error: str) -> str:
    """Return the remedy of an error that says itself what is wrong; empty of others."""
    if lacks_growing_segments(error):
        return _SEGMENTS_HINT
    return next((hint for words, hint in _HINTS.items() if re.search(words, error, re.IGNORECASE)), "")


def shared_memory_hint(error: str) -> str:
    """Name the remedy where NCCL failed and /dev/shm is as small as Docker makes it, or full. Empty where the
    error has another remedy, unless it says that no space is left."""
    if not _OF_NCCL.search(error) or not SHARED_MEMORY.exists():
        return ""
    room = shutil.disk_usage(SHARED_MEMORY)
    what = "in which NCCL keeps what GPUs without peer access send each other"
    if room.total < MIN_SHARED_MEMORY:
        remedy = "if this is a container, start it with --shm-size=8g or --ipc=host"
        return f" ({SHARED_MEMORY} has {room.total >> 20} MB, {what}; {remedy})"
    if not was_shared_memory_full(error):
        return ""
    state = f"has {room.free >> 20} of {room.total >> 20} MB free" if _is_little() else "was full"
    return f" ({SHARED_MEMORY} {state}, {what}; remove {SHARED_MEMORY}/nccl-* that no process uses)"
