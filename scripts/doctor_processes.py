"""Programs that scripts/doctor.py runs besides ranks. None outlives its time, nor the doctor."""

import json
import os
import re
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

#: Programs that are told to end have this long, torchrun and its ranks among them; then they are killed.
GRACE_SECONDS = 10.0
#: Characters of a program's errors that are reported.
MAX_ERRORS = 4000
#: The last line of a traceback, of torch's ranks with their number.
RAISED = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
#: What torchrun raises wherever a rank has failed; it says nothing of why.
OF_TORCHRUN = "ChildFailedError"


@dataclass(frozen=True)
class Ended:
    """How a program ended. code: its exit status, None where its time was over; seconds: that time; errors:
    the end of what it wrote to stderr."""

    code: int | None
    seconds: float
    errors: str = ""

    @property
    def why(self) -> str:
        """Why it failed: its signal, what it raised first, or its last words."""
        if self.code is None:
            return f"it did not end within {self.seconds:.0f} s"
        if self.code < 0:
            return f"signal {-self.code}"
        raised = [each for each in RAISED.findall(self.errors) if OF_TORCHRUN not in each]
        words = " ".join(self.errors.split()).strip("= ")
        return raised[0][:400] if raised else words[-400:] or f"exit status {self.code}"


def rows_in(path: Path) -> list[dict]:
    """Return the JSON objects of a file, one a line, that a program writes: a line that it has not ended is
    none."""
    whole = path.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def run(command: list, seconds: float, folder: Path, environment: dict[str, str] | None = None) -> Ended:
    """Run a program to its end, or for so many seconds, in the doctor's environment or another one. Its
    temporary files lie in ``folder``, which outlives it. What it has started ends with it, and where an
    exception comes, as by Ctrl-C. Its standard input is a pipe that closes with the doctor, however that
    ends."""
    with tempfile.TemporaryFile(dir=folder) as errors:
        process = subprocess.Popen(
            list(map(str, command)),
            env={**(environment or os.environ), "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
        assert process.stdin is not None  # it was opened as a pipe
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process.pid)
            with suppress(subprocess.TimeoutExpired):  # one that waits for a lost GPU cannot be ended
                process.wait(GRACE_SECONDS)
            process.stdin.close()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_ERRORS))
        return Ended(code, seconds, errors.read().decode(errors="replace"))


def _end(session: int):
    """End the processes of a session: those in it, and what they started in sessions of their own."""
    living = _members(session)
    for each in living:
        with suppress(psutil.Error):  # it has ended
            each.terminate()
    psutil.wait_procs(living, GRACE_SECONDS)
    living = {each for each in living | _members(session) if each.is_running()}
    for each in living:
        with suppress(psutil.Error):
            each.kill()
    psutil.wait_procs(living, GRACE_SECONDS)


def _members(session: int) -> set[psutil.Process]:
    """Return the processes of a session and their descendants; torchrun gives each rank a session."""
    processes: set[psutil.Process] = set()
    for each in psutil.process_iter():
        try:
            if os.getsid(each.pid) == session:
                processes |= {each, *each.children(recursive=True)}
        except (OSError, psutil.Error):
            continue  # it has ended
    return processes
