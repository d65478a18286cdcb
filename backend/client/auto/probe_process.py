"""Runs backend/probe.py on ranks of their own, which end with this process."""

import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ...config import ParallelConfig
from ...hardware.device_memory import says_full_gpu
from ...planner.machine import AGAIN
from ...protocol import BackendError
from ...runtime.callbacks import never
from ..exit_report import (
    FIXED_SEGMENTS_REMEDY,
    NCCL_CAUSE,
    ended_by_signal,
    lacks_growing_segments,
    shared_memory_hint,
    was_shared_memory_full,
    words_of_abort,
)
from ..launching import fork_guard, nccl_settings
from ..launching.agent_command import agent_command
from ..launching.child_process import END_SECONDS, end_process
from ..launching.interpreter import PACK
from ..launching.private_folder import private_folder
from ..launching.rank_environment import sanitized_environment
from ..pack_version import require_same_pack

#: A machine that takes longer than this to measure is not going to.
MAX_SECONDS = 300.0
#: Ranks that have imported everything reach each other in seconds; those that hang in NCCL never do. What is
#: measured after that takes as long as it takes, with many GPUs and slow links more than this.
ANSWER_SECONDS = 90.0
#: Bytes of a failure's report: the end of what ranks printed.
LOG_BYTES = 8 << 10
#: What a failure says that another way between GPUs may fix.
_OF_LINKS = re.compile(
    r"nccl|nvlink|peer access|other bytes|illegal memory access|launch failure", re.IGNORECASE
)

#: What torchrun, and torch's own traceback, put before each line of a rank.
_OF_RANK = re.compile(r"^(\[default\d+\]:)?(\[rank\d+\]: ?)?", re.MULTILINE)

#: By which NCCL's faults end ranks (NVIDIA/nccl issue 2106); names, which Windows need not have.
LINK_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGABRT")

Check = Callable[[], None]


#: What to do where not every rank has begun to measure.
SLOW_START = (
    "some were still importing torch and diffusers, as from a cold or a network disk, or with few "
    "processors: queue it again, which finds the files in memory"
)


#: What to do where a GPU has no memory for NCCL's buffers.
FULL_GPU = "close what fills a GPU (nvidia-smi shows it), or list the others in gpus of Parallel Config"


class UnmeasuredError(BackendError):
    """The ranks that measure this machine failed. why: in words; remedy: what to try, empty where the doctor
    is to say it; of_links: GPUs may be what did not reach each other; log: the end of what they printed."""

    log = ""

    def __init__(self, why: str, remedy: str = "", of_links: bool = False):
        self.why = why
        self.remedy = remedy
        self.of_links = of_links
        first = remedy or "run python scripts/doctor.py, which says what is wrong with GPUs and links"
        last = "the degrees of Parallel Config by hand (method manual)"
        if of_links:  # which degrees by hand would start, too
            last = "gpus of Parallel Config to 1"
        super().__init__(f"Auto could not measure this machine ({why}); {first}, or set {last}.")


#: The tries of the last measurement of this process that failed, in their order: for a report.
FAILED: list[UnmeasuredError] = []


def measured_rates(
    config: ParallelConfig,
    device: str,
    check: Check,
    show: Callable[[str], None],
    longest: float = MAX_SECONDS,
) -> dict:
    """Return what the ranks of ``config`` measure (Machine.as_dict), each try in ``longest`` seconds at most.
    Where GPUs do not reach each other as NCCL chooses, the ways of nccl_settings are tried: the first that
    works is cached for all ranks that start here, and "links" of the result says so. ``check`` and ``show``
    as in measurements.machine_rates. Raises UnmeasuredError."""
    ways = nccl_settings.to_try(os.environ) if device == "cuda" and config.world_size > 1 else [{}]
    failed = FAILED
    failed.clear()
    full: UnmeasuredError | None = None
    room = ""
    for way in ways:
        try:
            rates = _probed(config, device, way, check, longest, is_last=way is ways[-1])
        except UnmeasuredError as error:
            failed.append(error)
            if full is None and was_shared_memory_full(error.why):  # asked now: room may come back
                full = error
                room = shared_memory_hint(error.why)
            if way is ways[-1] or not error.of_links:
                raise _in_all(failed, ways) from None
            logging.warning("parallel-dit: GPUs do not reach each other: %s", error.why)
            show("GPUs do not reach each other's memory; trying another way between them")
            continue
        if device == "cuda":
            nccl_settings.save_way(os.environ, config.gpu_indices, way, full is not None)
        return rates | {"links": _links(way, failed[0], full, room) if failed else ""}
    raise AssertionError("there is always a way")


def _in_all(failed: list[UnmeasuredError], ways: list[dict[str, str]]) -> UnmeasuredError:
    """Return what failed at first, with the ways that failed after it."""
    tried = [nccl_settings.words(way) for way, _ in zip(ways, failed) if way]
    also = f", also with {', with '.join(tried)}" if tried else ""
    return UnmeasuredError(failed[0].why + also, failed[0].remedy, failed[0].of_links)


def _links(way: Mapping[str, str], failed: UnmeasuredError, full: UnmeasuredError | None, room: str) -> str:
    """Say which way the ranks take, and why: how NCCL's own choice ``failed``, and what found shared memory
    ``full``, with the ``room`` that there was then."""
    through = "sockets" if "NCCL_SHM_DISABLE" in way else "host memory"
    why = f"{failed.why}{room if full is failed else shared_memory_hint(failed.why)}"
    line = (
        f"GPUs fail to reach each other's memory here ({why}), so ranks send through {through} "
        f"({nccl_settings.words(way)}), which is slower: docs/faq.md, peer access."
    )
    if full is None:
        return line
    if full is failed:
        return f"{line[:-1]}; {AGAIN}"
    return f"{line} Room was lacking{room}; {AGAIN}"


def _probed(
    config: ParallelConfig, device: str, way: dict[str, str], check: Check, longest: float, is_last: bool
) -> dict:
    """Return what a probe measures whose GPUs reach each other in one ``way``. The last one is waited for as
    long as it takes."""
    private = private_folder()
    try:
        out = private.path / "rates.json"
        store = private.path / "store"
        probe = ["-m", "backend.probe", "--store", str(store), "--device", device, "--out", str(out)]
        command = [*agent_command(config.world_size, private.path), *probe]
        environment = sanitized_environment(dict(os.environ), config, device, nccl=way)

        def are_there() -> bool:
            return len(list(private.path.glob(f"{store.name}.ready-*"))) == config.world_size

        def remedy() -> str:
            return hang_remedy(device) if are_there() else SLOW_START

        is_linked = Path(f"{store}.linked").exists
        try:
            run(
                command,
                environment,
                check,
                longest,
                is_started=are_there,
                is_linked=is_linked,
                held=private.inherited,
                remedy=remedy,
                is_last=is_last,
            )
        except UnmeasuredError as error:
            if not out.exists():
                raise
            # links are measured; native products, which are written last, may be what ended a rank
            logging.warning("parallel-dit: not all of this machine was measured: %s", error.why)
        return json.loads(out.read_text())
    finally:
        private.close()


def run(
    command: list[str],
    environment: dict[str, str],
    check: Check,
    longest: float = MAX_SECONDS,
    is_started: Callable[[], bool] = never,
    is_linked: Callable[[], bool] = never,
    held: tuple[int, ...] = (),
    remedy: Callable[[], str] = lambda: "",
    is_last: bool = False,
):
    """Run a process of the backend to its end; it ends with us, by the pipe that is its standard input, and
    keeps the descriptors ``held``. Once it ``is_started``, it has ANSWER_SECONDS until it ``is_linked``, or
    ``longest`` in the last way. Raises UnmeasuredError with its last words where it fails, or with ``remedy``
    where it does not end."""
    require_same_pack()
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=PACK,  # whatever is called backend where we run is not ours
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=held,
        )
        assert process.stdin is not None  # it was opened as a pipe
        fork_guard.hold(process.stdin)
        try:
            hangs = _waited(process, check, longest, lambda: not is_last and is_started() and not is_linked())
        finally:
            process.stdin.close()  # by which an agent and its ranks end
            end_process(process, END_SECONDS)
        if not hangs and not process.returncode:
            return
        log.seek(0)
        text = log.read().decode(errors="replace").strip()
        if hangs:
            what = f"its ranks did not answer within {hangs:.0f} s"
            # those that are still importing say nothing of links, nor those that had too little time
            has_had_time = longest >= MAX_SECONDS and not is_last
            may_be_links = is_started() and (not is_linked() or has_had_time)
            what_to_do = remedy()
            error = UnmeasuredError(what, what_to_do, of_links=bool(what_to_do) and may_be_links)
        else:
            error = _unmeasured(text, process.returncode)
        error.log = text[-LOG_BYTES:]
        raise error


def _unmeasured(text: str, code: int) -> UnmeasuredError:
    """Return the error of ranks that ended with ``code``, from what they printed. NCCL names the cause of its
    errors apart; of a full GPU no other way between GPUs makes room."""
    if killed := ended_by_signal(text):
        name = signal.Signals(-killed.code).name
        said = words_of_abort(text) if name == "SIGABRT" else ""
        of_links = bool(_OF_LINKS.search(said)) if said else name in LINK_SIGNALS
        return UnmeasuredError(str(replace(killed, error=said)), of_links=of_links)
    lines = _OF_RANK.sub("", text).splitlines()
    said = (line for line in lines if "Error" in line and not line.startswith(" "))  # no source
    last = next(said, f"code {code}")[:300]
    if (cause := NCCL_CAUSE.search(text)) and cause[1] not in last:
        last = f"{last} ({cause[1][:200]})"
    # NCCL's "out of memory" alone may be the host's, by a way that another one replaces
    if says_full_gpu(last):
        return UnmeasuredError(last, FULL_GPU)
    if lacks_growing_segments(last):
        return UnmeasuredError(last, FIXED_SEGMENTS_REMEDY)
    return UnmeasuredError(last, of_links=bool(_OF_LINKS.search(last)))


def _waited(
    process: subprocess.Popen, check: Check, longest: float, is_linking: Callable[[], bool]
) -> float | None:
    """Wait for a process; return the seconds that it had where it has not ended by then."""
    began = time.monotonic()
    limit = longest
    linking = False
    while process.poll() is None:
        if time.monotonic() > began + limit:
            return limit
        check()
        time.sleep(0.1)
        if is_linking() != linking:
            linking = not linking
            began = time.monotonic()
            limit = min(longest, ANSWER_SECONDS) if linking else longest
    return None


def hang_remedy(device: str) -> str:
    """Say what to try where ranks do not answer; empty on the CPU, where nothing is known to hang."""
    if device != "cuda":
        return ""
    return (
        "GPUs that cannot reach each other's memory hang so in NCCL: switch IOMMU and ACS off in the BIOS, "
        "and see that /dev/shm has room"
    )
