"""Programs that scripts/doctor.py runs: how they end, and what is said of it."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import doctor
import doctor_kernels
import doctor_lab
import doctor_processes
import doctor_steps
import psutil
import pytest
from doctor_findings import OK, PROBLEM, WARNING, OutOfTime, findings
from doctor_processes import Ended
from interpreters import recording

from backend.runtime.parent_pipe import signals_the_end_alone

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
#: Starts a process in a session of its own, as torchrun does a rank, which does not end when it is told to.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""
CHILD = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_ranks_in_sessions_of_their_own_end_with_their_program(monkeypatch):
    monkeypatch.setattr(doctor_processes, "GRACE_SECONDS", 2.0)
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        processes = [psutil.Process(int(parent.stdout.readline())), psutil.Process(parent.pid)]
        doctor_processes._end(parent.pid)
        assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def test_a_program_has_its_time_and_its_errors_are_reported(tmp_path):
    slow = doctor_processes.run([sys.executable, "-c", "import time; time.sleep(600)"], 1.0, tmp_path)
    assert slow.code is None and slow.why == "it did not end within 1 s"
    wrong = "import sys; sys.exit('ValueError: no link')"
    ended = doctor_processes.run([sys.executable, "-c", wrong], 600.0, tmp_path)
    assert (ended.code, ended.why) == (1, "ValueError: no link")
    where = "import sys, tempfile; sys.exit(tempfile.gettempdir())"
    assert doctor_processes.run([sys.executable, "-c", where], 600.0, tmp_path).why == str(tmp_path)


#: The doctor, which runs a program that says its process id.
RUNS = """
import sys
from pathlib import Path
import doctor_processes
code = "import os, sys, time; sys.path.insert(0, '..'); from backend.runtime import parent_pipe; "
code += "parent_pipe.end_with_parent(); open(sys.argv[1], 'w').write(f'{os.getpid()};'); time.sleep(600)"
doctor_processes.run([sys.executable, "-c", code, sys.argv[1]], 600.0, Path(sys.argv[1]).parent)
"""


def test_a_program_ends_with_a_doctor_that_is_killed(tmp_path):
    """Nothing can be done then: a pipe that closes is what is left of it."""
    file = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", RUNS, str(file)], cwd=SCRIPTS) as doctor_process:
        while not (file.exists() and file.read_text().endswith(";")):
            assert doctor_process.poll() is None
            time.sleep(0.05)
        program = psutil.Process(int(file.read_text().rstrip(";")))
        doctor_process.kill()
    program.wait(60)


#: scripts/gpu_copies.py, of which a copy hangs.
HANGS = """
import ctypes, time
import gpu_copies
def copy(gpus, seconds, note):
    print("begun", flush=True)
    {copy}
gpu_copies.time_copies = copy
{before}
gpu_copies.main()
"""
HANGING = {
    "with the interpreter's lock": dict(before="", copy="ctypes.PyDLL(None).sleep(600)"),
    "where Linux kills nobody": dict(
        before="gpu_copies.be_killed_with_parent = lambda: None", copy="time.sleep(600)"
    ),
}


@pytest.mark.parametrize("how", HANGING)
def test_copies_that_hang_end_with_a_doctor_that_is_killed(how, tmp_path):
    """Its end of the pipe closes then."""
    if "lock" in how and not signals_the_end_alone(os.uname().release):
        pytest.skip("this Linux does not signal the end of a pipe alone")
    options = ["--out", str(tmp_path / "out"), "--seconds", "3", "0"]
    command = [sys.executable, "-c", HANGS.format(**HANGING[how]), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=SCRIPTS)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"begun\n"
        process.stdin.close()
        process.wait(60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("name", ["waits.py", "kernels.py", "peers.py"])
def test_benchmarks_of_the_doctor_end_with_their_standard_input(name):
    command = [sys.executable, str(doctor_lab.BENCHMARKS / name), "--ends-with-stdin"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # by which Python leaves their folder out
    ended = subprocess.run(command, input=b"", capture_output=True, env=environment)
    assert b"ModuleNotFoundError" not in ended.stderr
    assert ended.returncode in (1, -signal.SIGKILL), ended.stderr


TORCHRUN = """[rank1]: Traceback (most recent call last):
[rank1]:   File "mesh.py", line 198, in _weights
[rank1]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77, unhandled system error
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================
waits.py FAILED
============================================
"""


@pytest.mark.parametrize(
    "ended, why",
    [
        (
            Ended(1, 9.0, TORCHRUN),
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:77",
        ),
        (Ended(1, 9.0, "====\nSignal 11 (SIGSEGV) received\n====\n"), "Signal 11 (SIGSEGV) received"),
        (Ended(-9, 9.0), "signal 9"),
        (Ended(3, 9.0), "exit status 3"),
    ],
    ids=["of a rank", "last words", "killed", "silent"],
)
def test_the_reason_is_what_a_rank_raised(ended, why):
    assert ended.why.startswith(why)


ROW = '{"kernel": "sdpa", "head_size": 64, "masked": false, "seconds": 1.0, "distance": 0.0, "own": true}\n'
RUN = '[{"method": "ulysses", "family": "flux-dev", "steps": 2, "waits": {}}]'


@pytest.fixture
def lab(monkeypatch):
    """A lab of two ranks whose programs write half of what they have to, and do not end."""

    def run(command, seconds, folder, environment):
        (folder / "kernels.jsonl").write_text(ROW + ROW[:20])
        (folder / "waits.1").write_text(RUN)
        return Ended(None, seconds, "waiting for NCCL")

    monkeypatch.setattr(doctor_processes, "run", run)
    lab = doctor_lab.Lab("cpu", 2, 60.0)
    yield lab
    lab.close()


@pytest.mark.parametrize(
    "check",
    [partial(doctor_kernels._head_sizes, kernel="sdpa", head_sizes=(64,)), doctor_steps.waits],
    ids=["kernels", "waits"],
)
def test_what_was_found_until_the_limit_is_told(lab, check):
    found = list(findings("check", check, lab))
    assert [each.status for each in found] == [OK, PROBLEM]
    assert "did not end within" in found[1].text and found[1].values == {"stderr": "waiting for NCCL"}
    lab.end = 0.0  # the minutes are over: nothing is wrong
    found = list(findings("check", check, lab))
    assert [each.status for each in found] == [OK, WARNING] and "minutes are over" in found[1].text
    with pytest.raises(OutOfTime):
        lab.check()


#: The doctor, whose checks are a wait.
WAITS = """
import sys, time, types
import doctor
checks = types.ModuleType("doctor_checks")
checks.Finding, checks.OutOfTime = object, Exception
checks.quick = lambda facts: print("checking", flush=True) or time.sleep(600)
facts = types.ModuleType("doctor_facts")
facts.Facts = facts.finite = object
sys.modules |= {"doctor_checks": checks, "doctor_facts": facts}
doctor.main(sys.argv[1:])
"""


def test_it_ends_in_order_with_whoever_holds_its_standard_input():
    command = [sys.executable, "-c", WAITS, "--ends-with-stdin"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=SCRIPTS) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.parametrize("other", [True, False])
def test_it_goes_on_in_the_python_of_the_ranks_once(tmp_path, monkeypatch, other):
    ran = []
    monkeypatch.setattr(doctor.os, "execve", lambda *arguments: ran.append(arguments))
    monkeypatch.delenv(doctor.MOVED, raising=False)
    python = str(recording(tmp_path / "python", tmp_path / "log")) if other else sys.executable
    monkeypatch.setenv("PARALLEL_DIT_PYTHON", python)
    doctor.go_on_in_ranks_python(["--full"])
    assert [(path, arguments[0], arguments[2:]) for path, arguments, _ in ran] == (
        [(python, python, ["--full"])] if other else []
    )
    for _, _, environment in ran:
        monkeypatch.setenv(doctor.MOVED, environment[doctor.MOVED])
        assert float(environment[doctor.SINCE]) == doctor.BEGAN  # its minutes go on, too
        doctor.go_on_in_ranks_python(["--full"])
    assert len(ran) == other


def test_a_python_of_the_ranks_that_is_not_there_is_said(monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_PYTHON", "/nowhere/python")
    with pytest.raises(SystemExit, match="problem  python .*/nowhere/python"):
        doctor.go_on_in_ranks_python([])
