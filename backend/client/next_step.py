"""Why a backend ended and what to do about it, where the cause does not say that itself."""

import re

from ..errors import RAN_OUT
from ..hardware.device_memory import says_out_of_memory
from .exit_report import RankFailure, signal_name
from .silence import RUNS, STATES

#: Why a machine ends its ranks where no client asked for that, as it tells the others.
NOBODY_ASKED = "it was told to end"
_RUN = "run it again"
_REPORT = "report it with the log"
#: Where nothing is known of a cause, it may be gone with the processes.
_AGAIN = f"{_RUN}, and where it ends so again, {_REPORT}"
_LOST = f"{_RUN}, which ends them and starts new ones, and where it is lost again, {_REPORT}"
_ON_PURPOSE = "unless it was ended on purpose"
_OF_CRASHES = (
    f"{_RUN}, and where it crashes again, set attention of Parallel Config to sdpa and compile to off, "
    f"and {_REPORT}"
)
#: Signal that ended a process, by name, since a system may lack it -> what helps.
_OF_SIGNALS = {
    "SIGKILL": "close what else takes host memory, or give the machine more of it or swap (sudo dmesg says "
    "what the system has killed)",
    "SIGBUS": f"{_RUN} once the model's files are whole (in a container with --shm-size=8g)",
    **dict.fromkeys(("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT"), f"{_RUN}, {_ON_PURPOSE}"),
    **dict.fromkeys(("SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"), _OF_CRASHES),
}
_OF_MEMORY = "use a smaller latent or batch, or more ranks, or close what else takes memory"
#: What an error of a rank says -> what helps.
_OF_ERRORS = {
    r"^(ModuleNotFound|Import)Error": "run python scripts/doctor.py, which names packages that are missing "
    "or broken",
    r"NCCL|CUDA|CUBLAS|CUDNN|\bHIP\b": "run python scripts/doctor.py --full, which tries GPUs, their kernels "
    "and links",
}
#: Errors whose messages end with what to do, under their modules' names, too.
_SAYING = r"(?:\w+\.)*(?:ConfigError|UnsupportedError|MisfitError|RefusedByAllRanks)\b"
_ON_EACH = "start the backend on each machine again"
#: What is said of ranks or machines that are silent -> what helps. What stands first in it decides, and of
#: the same place the upper row.
_OF_SILENCES = {
    STATES["D"]: f"look for errors of the disk, network share or driver (sudo dmesg), and {_RUN}",
    "its process is stopped": f"{_RUN}; who stops ranks in a debugger sets PARALLEL_DIT_SILENT_SECONDS",
    RUNS: f"{_RUN}, and where it hangs again, {_REPORT}, which says where its threads were",
    "its link is cut": f"see to the network and to that machine, and {_ON_EACH}",
    "its launcher has ended": f"its log there says why; {_ON_EACH}",
    f"has left: {NOBODY_ASKED}": f"{_ON_EACH}, {_ON_PURPOSE}",
    "has left: ": f"put that right there, and {_ON_EACH}",
}


def failure_sentence(
    silence: str,
    failure: RankFailure | None,
    status: int | None,
    last_error: str,
    disk: str,
    starts_anew: bool = False,
) -> str:
    """Return, without the last full stop, why a backend ended and what to do. ``silence``: of ranks or
    machines; ``failure``: of the rank that failed first; ``status``: the launcher's exit code, None while it
    runs; ``last_error``: in its log; ``disk``: a sentence that follows on a full disk, which explains an end
    that nothing else does; ``starts_anew``: the next run is under way, so nobody has to start it."""
    ended = "The backend ended because"
    if silence:
        what, step = f"{ended} {silence}", _after_silence(silence)
    elif failure is not None:
        what, step = f"{ended} {failure}", _after_failure(failure)
    elif status is None:
        what, step = "The backend's connection was lost while its processes still run", _LOST
    else:
        error = last_error.removeprefix(" (").removesuffix(")") if status >= 0 else ""
        launcher = RankFailure(0, status, error)
        what = f"{ended} its launcher exited with code {status}{last_error}{launcher.hint}"
        step = _after_failure(launcher)
    if disk and step in (_AGAIN, _LOST):
        step = ""
    if starts_anew:
        step = _without_run(step)
    what = what.removesuffix(".")
    return f"{what}. {step[0].upper()}{step[1:]}" if step else what


def _without_run(step: str) -> str:
    """Return what remains of a step without the next run, and what may follow from that."""
    step = step.removeprefix(f"{_RUN}; ").removesuffix(f", and {_RUN}")
    return "" if step.startswith(_RUN) else step


def _after_silence(silence: str) -> str:
    said = [words for words in _OF_SILENCES if words in silence]
    return _OF_SILENCES[min(said, key=silence.find)] if said else _AGAIN


def _after_failure(failure: RankFailure) -> str:
    error = failure.error
    if not error:
        return _OF_SIGNALS.get(signal_name(-failure.code), _AGAIN)
    if failure.hint or RAN_OUT in error or re.match(_SAYING, error):
        return ""
    if says_out_of_memory(error):
        return _OF_MEMORY
    return next((step for words, step in _OF_ERRORS.items() if re.search(words, error)), _AGAIN)
