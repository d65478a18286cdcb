"""Asks programs of a GPU's driver (nvidia-smi, rocm-smi), which hang where the driver does: SIGKILL does not
end them then, and subprocess.run would wait for that. Standard library only."""

import shutil
import subprocess
import time

#: A program that hung is not asked again for so many seconds: one more process would hang, too.
PAUSE_SECONDS = 300.0

#: In which a process ends that SIGKILL ends.
KILL_SECONDS = 1.0

#: Program -> until when it is not asked (monotonic).
_paused: dict[str, float] = {}


def answer(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Return what a command printed, and its exit status. Raises OSError, and TimeoutExpired where it takes
    more than ``seconds``, or took more within the last PAUSE_SECONDS."""
    program = command[0]
    if time.monotonic() < _paused.get(program, 0.0):
        raise subprocess.TimeoutExpired(command, seconds)
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException as error:
        process.kill()
        if isinstance(error, subprocess.TimeoutExpired) and not _has_ended(process):
            _paused[program] = time.monotonic() + PAUSE_SECONDS
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def driver_says(command: list[str], seconds: float) -> str:
    """Return what a program of a GPU's driver prints, or why it failed; nothing where it is not there."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        return answer(command, seconds).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]} failed: {error}"


def _has_ended(process: subprocess.Popen) -> bool:
    """Return whether a killed process is gone, as one is that was only slow."""
    try:
        process.wait(KILL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True
