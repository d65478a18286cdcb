"""The process that measures the machine: how it fails, and the ways between GPUs that it tries."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backend import probe
from backend.client.auto import probe_process
from backend.client.exit_report import _FIRST
from backend.client.launching import nccl_settings
from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig
from backend.protocol import BackendError


def test_a_machine_that_cannot_be_measured_is_sent_to_the_doctor():
    """In one sentence: what, why, and what to do about it, the diagnosis first."""
    command = [sys.executable, "-c", "raise ValueError('no link')"]
    with pytest.raises(BackendError) as failure:
        probe_process.run(command, dict(os.environ), lambda: None)
    sentence = str(failure.value)
    assert "(ValueError: no link); run python scripts/doctor.py" in sentence
    assert sentence.index("doctor.py") < sentence.index("by hand") and sentence.count(". ") == 0


def test_a_rank_that_a_signal_ends_is_named():
    """As NCCL's faults do; torchrun tells it in a table alone."""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV) if os.environ['RANK'] == '1' else None"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*command, "--no-python", sys.executable, "-c", code]
    with pytest.raises(probe_process.UnmeasuredError, match="rank 1 was killed by SIGSEGV") as failure:
        probe_process.run(command, dict(os.environ), lambda: None)
    assert failure.value.of_links


@pytest.mark.parametrize(
    "said, of_links, name",
    [
        (
            "  what():  [PG ID 1 Rank 1] Process group watchdog thread terminated with exception: {}",
            True,
            "SIGABRT",
        ),
        ("  what():  {}", True, "SIGABRT"),
        ("  what():  CUDA error: uncorrectable NVLink error detected during the execution", True, "SIGABRT"),
        ("", True, "SIGABRT"),
        ("", False, "SIGKILL"),
        ("  what():  CUDA error: out of memory", False, "SIGABRT"),
    ],
)
def test_a_rank_that_dies_is_judged_by_its_words_and_its_signal(said, of_links, name):
    """NCCL's watchdog aborts it for links, and for what CUDA says besides; the system kills it where memory
    runs out."""
    error = "CUDA error: unspecified launch failure"
    table = f"{_FIRST}: rank : 1 (local_rank: 1) exitcode : {-signal.Signals[name]} (pid: 42)"
    told = f"{said.format(error)}\n{table}"
    command = [sys.executable, "-c", f"import sys; print({told!r}); sys.exit(1)"]
    with pytest.raises(probe_process.UnmeasuredError) as failure:
        probe_process.run(command, dict(os.environ), lambda: None)
    assert failure.value.of_links == of_links
    says = said.rpartition(": ")[2].strip().format(error) if said else f"killed by {name}"
    assert says in failure.value.why


#: A probe whose ranks hang, and a process like ComfyUI's, that measures on a thread and ends meanwhile.
HANGING = """
import os, sys, time
from backend import probe
def hang(*arguments):
    with open(sys.argv[sys.argv.index("--out") + 1], "w") as out:
        out.write(str(os.getpid()))
    time.sleep(600)
os.environ["RANK"] = "0"
probe.Probe = hang
probe.mesh.file_store = str
probe.main()
"""
ENDING = """
import sys, threading, time
from pathlib import Path
import os
from backend.client.auto import probe_process
command = [sys.executable, "-c", {code!r}, "--store", {out!r} + ".store", "--device", "cpu", "--out", {out!r}]
run = lambda: probe_process.run(command, dict(os.environ), lambda: None)
threading.Thread(target=run, daemon=True).start()
while not (Path({out!r}).exists() and Path({out!r}).read_text()):
    time.sleep(0.05)
"""


def test_what_is_measured_once_links_work_may_take_longer(tmp_path, monkeypatch):
    """Links between many GPUs take minutes to measure: that is no reason to send through sockets."""
    monkeypatch.setattr(probe_process, "ANSWER_SECONDS", 5.0)
    linked = tmp_path / "linked"
    code = f"import time; open({str(linked)!r}, 'w').close(); time.sleep(6.0)"
    command = [sys.executable, "-S", "-c", code]
    always, seen = lambda: True, linked.exists
    probe_process.run(command, dict(os.environ), lambda: None, 60.0, is_started=always, is_linked=seen)


def test_a_probe_that_hangs_ends_with_who_measures(tmp_path):
    """A daemon thread, as ComfyUI's worker is, runs no ``finally`` when its process ends."""
    out = tmp_path / "pid"
    ends = [sys.executable, "-c", ENDING.format(code=HANGING, out=str(out))]
    subprocess.run(ends, cwd=probe_process.PACK, check=True, timeout=300)
    pid = int(out.read_text())
    try:
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline, "the probe outlives who started it"
            time.sleep(0.05)
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def test_an_agent_that_does_not_end_is_killed(monkeypatch):
    """Its ranks have seen the end of their pipe by then."""
    monkeypatch.setattr(probe_process, "END_SECONDS", 0.5)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    with pytest.raises(probe_process.UnmeasuredError, match="did not answer within 1 s"):
        probe_process.run([sys.executable, "-c", code], dict(os.environ), lambda: None, longest=1.0)


#: A probe on a machine whose GPUs reach each other in one way alone, and fail in another manner otherwise.
OF_MACHINE = """
import json, os, sys, time
options = dict(zip(sys.argv, sys.argv[1:]))
for rank in range(2):
    open(f"{options['--store']}.ready-{rank}", "w").close()
ways = ("NCCL_P2P", "NCCL_SHM", "NCCL_CUMEM")
way = {name: os.environ[name] for name in os.environ if name.startswith(ways)}
with open(os.environ["TRIED"], "a") as tried:
    print(json.dumps(way), file=tried)
if way != json.loads(os.environ["WORKS"]):
    print("NCCL WARN by", json.dumps(way), flush=True)
    if os.environ["FAILS"] == "hangs":
        time.sleep(600)
    sys.exit(os.environ["FAILS"])
with open(options["--out"], "w") as out:
    json.dump({"gemm": 1.0}, out)
"""
NVLINK, HOST, BEFORE, SOCKETS = nccl_settings.WAYS[1:]
REFUSED = "DistBackendError: NCCL error: Cuda failure 217 'peer access is not supported'"
TWO = ParallelConfig(ulysses_degree=2)


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Measure two GPUs that reach each other in one way: the result, the ways that were tried, what was
    shown."""
    for name in nccl_settings.LINK_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TRIED", str(tmp_path / "tried"))
    monkeypatch.setattr(probe_process, "agent_command", lambda *_: [sys.executable, "-c", OF_MACHINE])

    def run(
        works: dict | None,
        fails: str,
        config: ParallelConfig = TWO,
        device: str = "cuda",
        longest: float = 60.0,
    ):
        (tmp_path / "tried").write_text("")
        monkeypatch.setenv("WORKS", json.dumps(works))
        monkeypatch.setenv("FAILS", fails)
        # a process that ends may take its time, where others want the machine
        monkeypatch.setattr(probe_process, "ANSWER_SECONDS", 0.5 if fails == "hangs" else 60.0)
        shown = []
        try:
            found = probe_process.measured_rates(config, device, lambda: None, shown.append, longest=longest)
        except probe_process.UnmeasuredError as error:
            found = error
        tried = [json.loads(line) for line in (tmp_path / "tried").read_text().splitlines()]
        return found, tried, shown

    return run


def settings(device: str = "cuda", **config) -> dict[str, str]:
    """What ranks that start now are told of links."""
    env = sanitized_environment(dict(os.environ), ParallelConfig(**config), device)
    return {name: value for name, value in env.items() if name in nccl_settings.LINK_SETTINGS[1:]}


@pytest.mark.parametrize(
    "works, fails, words",
    [
        (NVLINK, "hangs", "did not answer within .*through host memory .NCCL_P2P_LEVEL=NVL"),
        (HOST, REFUSED, "Cuda failure 217.*through host memory .NCCL_P2P_DISABLE=1"),
        (HOST, "LinkError: rank 1 received other bytes than rank 0 sent", "other bytes.*host memory"),
        (NVLINK, "torch.AcceleratorError: CUDA error: an illegal memory access", "illegal.*host memory"),
        (BEFORE, "DistBackendError: NCCL error: out of memory", "host memory.*NCCL_CUMEM_HOST_ENABLE=0"),
        (SOCKETS, "DistBackendError: NCCL error: unhandled system error", "sockets .*NCCL_SHM_DISABLE=1"),
    ],
    ids=["hang", "refused", "other bytes", "fault", "cuMem", "no shared memory"],
)
def test_another_way_between_gpus_is_found_and_cached(measure, works, fails, words):
    """In the order of what it costs; ranks that start later take it, on these GPUs."""
    found, tried, shown = measure(works, fails)
    assert tried == list(nccl_settings.WAYS[: nccl_settings.WAYS.index(works) + 1])
    assert re.search(words, found["links"]) and "docs/faq.md" in found["links"]
    assert shown == ["GPUs do not reach each other's memory; trying another way between them"] * (
        len(tried) - 1
    )
    logs = [each.log.splitlines()[0] for each in probe_process.FAILED]  # for a report
    assert logs == [f"NCCL WARN by {json.dumps(way)}" for way in tried[:-1]]
    assert settings(ulysses_degree=2) == works
    assert settings(cfg_degree=2, ulysses_degree=2) == works  # GPUs 0 to 3
    assert settings(ulysses_degree=2, gpus="2,3") == settings(gpus="1") == {}
    assert settings("cpu", ulysses_degree=2) == {}


@pytest.mark.parametrize("longest", [0.5, 0.3])
def test_ranks_that_hang_have_no_longer_than_was_said(measure, monkeypatch, longest):
    """Also where that is no more than they have to answer, as the doctor says it."""
    waited = []

    def sleep(seconds: float):
        waited.append(seconds)
        assert len(waited) < 100, "it waits for ever"

    process = SimpleNamespace(poll=lambda: None)
    monkeypatch.setattr(probe_process.time, "sleep", sleep)
    monkeypatch.setattr(probe_process.time, "monotonic", lambda: sum(waited))
    assert probe_process._waited(process, lambda: None, longest, lambda: True) == longest
    assert sum(waited) < 2 * longest + 0.3


def test_links_that_hang_in_the_users_way_are_said_to(measure, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    found, tried, _ = measure(None, "hangs", longest=2.0)
    assert len(tried) == 1 and found.of_links and "IOMMU" in found.remedy


def test_links_that_work_again_are_used_again(measure):
    """After a change of the BIOS, say: another measurement begins with NCCL's own choice."""
    measure(HOST, REFUSED)
    assert settings(ulysses_degree=2) == HOST
    found, tried, shown = measure({}, REFUSED)
    assert found["links"] == "" and tried == [{}] and shown == []
    assert settings(ulysses_degree=2) == {}


def test_gpus_that_work_leave_those_that_do_not_as_they_are(measure):
    measure(HOST, REFUSED)
    measure({}, REFUSED, ParallelConfig(ulysses_degree=2, gpus="2,3"))
    assert settings(ulysses_degree=2) == HOST and settings(ulysses_degree=2, gpus="2,3") == {}


def test_what_the_user_says_of_links_counts(measure, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_LEVEL", "PIX")
    error, tried, _ = measure(None, REFUSED)
    assert tried == [{"NCCL_P2P_LEVEL": "PIX"}] and "also with" not in error.why
    assert settings(ulysses_degree=2) == {"NCCL_P2P_LEVEL": "PIX"}


def test_where_no_way_works_the_first_failure_is_told(measure):
    error, tried, _ = measure(None, REFUSED)
    assert tried == list(nccl_settings.WAYS)
    assert "Cuda failure 217" in error.why
    assert "also with NCCL_P2P_LEVEL=NVL, with NCCL_P2P_DISABLE=1, with NCCL_P2P_DISABLE=1 NCCL" in error.why
    assert settings(ulysses_degree=2) == {}


@pytest.mark.parametrize(
    "config, device, fails",
    [
        (TWO, "cuda", "ModuleNotFoundError: No module named 'yunchang'"),
        (TWO, "cuda", "torch.OutOfMemoryError: CUDA out of memory"),
        (TWO, "cuda", "torch.AcceleratorError: CUDA error: no kernel image is available"),
        (TWO, "cpu", REFUSED),
        (ParallelConfig(), "cuda", REFUSED),
    ],
    ids=["a package", "memory", "a wheel", "CPU", "one GPU"],
)
def test_other_failures_are_not_of_links(measure, config, device, fails):
    error, tried, _ = measure(None, fails, config, device)
    assert len(tried) == 1 and error.why in fails


@pytest.mark.parametrize("written", [{"0,1": [9, 0.0]}, {"0,1": "x"}, {"a": 1}, [1]])
def test_a_file_of_ways_that_is_not_ours_is_none(measure, written):
    nccl_settings.cache_files.write("nccl", nccl_settings.link_key(os.environ), written)
    assert settings(ulysses_degree=2) == {}


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_byte_that_arrives_as_another_one_is_an_error(monkeypatch, is_wrong):
    def all_to_all(chunks, *_):
        received = [chunk.clone() for chunk in chunks]
        received[0][-1] += is_wrong
        return received

    monkeypatch.setattr(probe.comm, "all_to_all", all_to_all)
    alone = probe.Probe.__new__(probe.Probe)
    alone.ranks, alone.sent, alone.device = 1, 1 << 12, torch.device("cpu")
    alone.mesh = SimpleNamespace(ulysses=SimpleNamespace(rank=0))
    alone.control = SimpleNamespace(all_gather_object=lambda value: [value])
    if is_wrong:
        with pytest.raises(probe.LinkError, match="rank 0 received other bytes than rank 0 sent"):
            alone.check_links()
    else:
        alone.check_links()


def test_gpus_compute_for_a_while_before_they_are_measured(monkeypatch):
    now = iter(range(1, 100))
    monkeypatch.setattr(probe.time, "perf_counter", lambda: 0.1 * next(now))
    waits = []
    alone = probe.Probe.__new__(probe.Probe)
    alone.kind, alone.device, alone.dtype = "cuda", torch.device("cpu"), torch.float32
    alone.tokens = alone.width = 2
    monkeypatch.setattr(alone, "_wait", lambda: waits.append(1))
    monkeypatch.setattr(alone, "_compute", lambda: {}[len(waits)])  # the first of what is measured
    with pytest.raises(KeyError) as warm:
        alone.measure()
    assert warm.value.args[0] == len(waits) == int(10 * probe.WARM) - 1


def test_products_are_timed_in_the_type_that_is_asked_for():
    alone, types = probe.Probe.__new__(probe.Probe), []
    alone.device, alone.dtype, alone.tokens, alone.width = torch.device("cpu"), torch.bfloat16, 4, 8

    def clock(action) -> float:
        types.append(action().dtype)
        return 0.5

    assert alone._gemm(clock) == alone._gemm(clock, torch.float32) == 2 * 4 * 8**2 / 0.5
    assert types == [torch.bfloat16, torch.float32]
