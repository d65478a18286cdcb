"""Why a backend ended and what to do about it, where the cause does not say that itself."""

import re
import signal

from ..errors import RAN_OUT
from ..hardware.device_memory import says_out_of_memory
from .exit_report import RankFailure
from .silence import RUNS, STATES

_REPORT = "report it with the log"
#: Where nothing is known of a cause, it may be gone with the processes.
_AGAIN = f"run it again, and where it ends so again, {_REPORT}"
_LOST = f"run it again, which ends them and starts new ones, and where it is lost again, {_REPORT}"
#: Signal that ended a process -> what helps.
_OF_SIGNALS = {
    signal.SIGKILL: "close what else takes host memory, or give the machine more of it or swap (sudo dmesg "
    "says what the system has killed)",
    signal.SIGBUS: "run it again once the model's files are whole (in a container with --shm-size=8g)",
    signal.SIGTERM: "run it again, unless it was ended on purpose",
}
_OF_CRASHES = (
    "run it again, and where it crashes again, set attention of Parallel Config to sdpa and compile to off, "
    f"and {_REPORT}"
)
_OF_MEMORY = "use a smaller latent or batch, or more ranks, or close what else takes memory"
#: What an error of a rank says -> what helps.
_OF_ERRORS = {
    r"^(ModuleNotFound|Import)Error": "run python scripts/doctor.py, which names packages that are missing "
    "or broken",
    r"NCCL|CUDA|CUBLAS|CUDNN|\bHIP\b": "run python scripts/doctor.py --full, which tries GPUs, their kernels "
    "and links",
}
#: Errors whose messages end with what to do.
_SAYING = ("ConfigError", "UnsupportedError")
_ON_EACH = "start the backend on each machine again"
#: What is said of ranks or machines that are silent -> what helps.
_OF_SILENCES = {
    STATES["D"]: "look for errors of the disk, network share or driver (sudo dmesg), and run it again",
    "its process is stopped": "run it again; who stops ranks in a debugger sets PARALLEL_DIT_SILENT_SECONDS",
    RUNS: f"run it again, and where it hangs again, {_REPORT}, which says where its threads were",
    "its link is cut": f"see to the network and to that machine, and {_ON_EACH}",
    "its launcher has ended": f"its log there says why; {_ON_EACH}",
    "has left: ": f"put that right there, and {_ON_EACH}",
}


def failure_sentence(
    silence: str, failure: RankFailure | None, status: int | None, last_error: str, disk: str
) -> str:
    """Return, without a full stop, why a backend ended and what to do. ``silence``: of ranks or machines;
    ``failure``: of the rank that failed first; ``status``: the launcher's exit code, None while it runs;
    ``last_error``: in its log; ``disk``: a sentence that follows on a full disk, which explains an end that
    nothing else does."""
    ended = "The backend ended because"
    if silence:
        return _joined(f"{ended} {silence}", _after_silence(silence))
    if failure is not None:
        return _joined(f"{ended} {failure}", _after_failure(failure))
    if status is None:
        return _joined("The backend's connection was lost while its processes still run", _LOST)
    step = "" if disk else _after_exit(status)
    return _joined(f"{ended} its launcher exited with code {status}{last_error}", step)


def _joined(what: str, step: str) -> str:
    return f"{what}; {step}" if step else what


def _after_silence(silence: str) -> str:
    return next((step for words, step in _OF_SILENCES.items() if words in silence), _AGAIN)


def _after_failure(failure: RankFailure) -> str:
    error = failure.error
    if not error:
        return _after_exit(failure.code)
    if failure.hint or RAN_OUT in error or error.startswith(_SAYING):
        return ""
    if says_out_of_memory(error):
        return _OF_MEMORY
    return next((step for words, step in _OF_ERRORS.items() if re.search(words, error)), _AGAIN)


def _after_exit(code: int) -> str:
    """Return what to do about a process that has ended with an exit code, negative for a signal."""
    if code >= 0:
        return _AGAIN
    return _OF_SIGNALS.get(signal.Signals(-code), _OF_CRASHES)
