"""A real backend of two ranks: cancel, other degrees, a killed rank, a killed parent."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import forking
import pytest
import torch
from live_backend import (  # noqa: F401  # fixtures
    CONFIG,
    backend,
    checkpoint,
    free_at_the_end,
    request_for,
    with_tensors,
)
from tiny import error_in_std, to_vae_units

from backend import protocol
from backend.client import pool
from backend.client.launching import private_folder
from backend.client.launching.launcher import ClosedError
from backend.config import ParallelConfig
from backend.quantization import dequantized_cache

#: Seconds, also where other processes want the machine. Ranks that only wait for a dead one would wait for
#: two hours (mesh.TIMEOUT).
SOON = 60
#: Steps that outlast what a test does to them. With more, a request only begins later: their modulation is
#: computed first.
LONG = 150
#: A silent rank is found within so many seconds, and Cancel of a hung backend takes so many at most.
DETECTED, CANCELLED = 15, 5


@pytest.fixture(scope="module", autouse=True)
def orphans():
    """Those of a parent killed while rank 1 was stopped. torchrun waits 30 s for it: other tests run."""
    if sys.platform != "linux":
        return None
    found = Orphans()
    os.kill(found.pids[1], signal.SIGSTOP)
    found.kill_parent()
    private_folder.sweep(found.folder.parent)
    found.stayed = found.folder.exists() and alive(found.pids[2])
    return found


@pytest.mark.parametrize("patches", [1, 4])
def test_cancel_stops_every_rank_and_keeps_the_weights(backend, checkpoint, patches):
    long, seen = long_request(backend, checkpoint, num_pipeline_patch=patches), []
    assert backend.sample(long, lambda p: seen.append(p.step), lambda: len(seen) >= 3) is None
    assert max(seen) < LONG / 2
    assert backend.client.request(protocol.Ping()).models == [long.model]
    request, expected = request_for(backend, checkpoint)
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4


def long_request(backend, checkpoint, points=LONG, **changes):
    request, _ = request_for(backend, checkpoint, **changes)
    return with_tensors(request, sigmas=torch.linspace(1, 0, points))


def wait_until(is_so):
    deadline = time.monotonic() + SOON
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert is_so()


def cancelled(backend, request) -> tuple[int, float]:
    """The step before which a request ends that is cancelled at the sight of its third, and when rank 0 has
    heard of it. Rank 1 stands still until then, and rank 0 waits for it, however long this client takes."""
    client, other = backend.client, backend.welcome.pids[1]
    step, heard = None, 0.0
    client.send(request)
    while step is None or not heard:
        reply = client._next()
        if isinstance(reply, protocol.Cancelled):
            step = reply.step
        elif isinstance(reply, protocol.Report):  # which is answered after the Cancel
            heard = time.monotonic()
            os.kill(other, signal.SIGCONT)
        elif isinstance(reply, protocol.Progress) and reply.step == 3:
            os.kill(other, signal.SIGSTOP)
            client.send(protocol.Cancel())
            client.send(protocol.Status())
        assert not isinstance(reply, (protocol.Failure, protocol.Result)), reply
    return step, heard


@pytest.mark.parametrize(
    "degrees, patches",
    [
        ({"pipefusion_degree": 2}, 1),
        ({"pipefusion_degree": 2}, 4),
        ({"ulysses_degree": 2}, 1),
        ({"cfg_degree": 2}, 1),
    ],
    ids=str,
)
def test_cancel_takes_one_step_at_most_and_the_weights_stay(checkpoint, degrees, patches):
    """All ranks end before the same step; rank 0 begins no other one once it has heard of the Cancel."""
    backend = pool.backend_for(ParallelConfig(device="cpu", **degrees))
    long = long_request(backend, checkpoint, num_pipeline_patch=patches)
    step, heard = cancelled(backend, long)
    assert backend.client.request(protocol.Ping()).models == [long.model]
    request, expected = request_for(backend, checkpoint)
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4
    for rank in (0, 1):
        begun = backend.process.heartbeats.step_times(rank)
        of_long = [each for each in begun if each.request == begun[-1].request - 1]
        assert of_long[-1].step == step
        assert rank != 0 or not [each for each in of_long if each.begin > heard and each.step != step]


def test_degrees_change_on_the_same_ranks(checkpoint, monkeypatch):
    """From Ulysses to CFG and back every rank keeps its weights, and reads nothing; in a pipeline each reads
    its stage. No process starts again. float8 on the wire comes and goes. Each rank has its own hash seed."""

    def changed(**degrees):
        backend, seen = pool.backend_for(ParallelConfig(device="cpu", **degrees)), []
        left = backend.client.request(protocol.Ping()).models
        loaded = backend.load(checkpoint, on_progress=seen.append)
        request, expected = request_for(backend, checkpoint)
        assert backend.client.request(protocol.Ping()).models == [request.model] == [loaded.model]
        assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4
        assert backend.welcome.degrees == ParallelConfig(**degrees).degrees
        return backend, left, [rank["bytes_read"] for rank in loaded.info["ranks"]], bool(seen)

    pool.close_all()
    forking.launch_really(monkeypatch)
    backend, *_ = changed(ulysses_degree=2)
    pids = backend.welcome.pids
    for degrees in ({"cfg_degree": 2}, {"ulysses_degree": 2}, {"ring_degree": 2}):
        same, left, read, progress = changed(**degrees)
        assert same is backend and left and read == [0, 0] and not progress
        request, expected = request_for(backend, checkpoint)
        packed = replace(request, wire="fp8")
        if "cfg_degree" in degrees:
            with pytest.raises(protocol.RefusedError, match="wire is fp8 but ulysses_degree and ring_degree"):
                backend.sample(packed)
            continue
        assert pool.backend_for(ParallelConfig(device="cpu", wire="fp8", **degrees)) is backend
        assert 1e-3 < error_in_std(to_vae_units(backend.sample(packed).tensors["samples"]), expected) < 0.1
    for degrees in ({"tensor_parallel_degree": 2}, {"pipefusion_degree": 2}):
        same, left, read, progress = changed(**degrees)
        assert same is backend and not left and progress
        assert all(0 < size < 0.75 * Path(checkpoint).stat().st_size for size in read)
    assert backend.welcome.pids == pids


@pytest.mark.parametrize(
    "config, words",
    [
        ({"ulysses_degree": 3}, "= 3 ranks, but this backend has 2"),
        ({"degree": 2}, "not one of this version"),
        ({"cfg_degree": 3}, "two branches"),
    ],
)
def test_changes_that_cannot_be_are_refused(backend, checkpoint, config, words):
    with pytest.raises(protocol.RefusedError, match=words):
        backend.client.request(protocol.Arrange(config))
    request, expected = request_for(backend, checkpoint)
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's memory")
def test_memory_that_runs_out_in_a_request_is_named_with_numbers(backend, checkpoint, monkeypatch):
    """A real allocation fails on rank 1 while rank 0 waits; the next ranks are new, and lend nothing."""
    monkeypatch.setattr(dequantized_cache, "_have_run_out", False)
    request, _ = request_for(backend, checkpoint)
    large = {key: torch.randn(1, 16, 192, 192) for key in ("noise", "latent")}
    sizes = Path(f"/proc/{backend.welcome.pids[1]}/statm").read_text().split()
    limit = int(sizes[0]) * resource.getpagesize() + (16 << 20)
    resource.prlimit(backend.welcome.pids[1], resource.RLIMIT_AS, (limit, limit))
    with pytest.raises(
        protocol.BackendError, match=r"rank 1 ran out of memory .* with [0-9.]+ GB free"
    ) as error:
        backend.sample(with_tensors(request, **large))
    assert "can't allocate memory: you tried to allocate" in str(error.value)
    assert not dequantized_cache.may_cache_dequantized() and is_exact(checkpoint)


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_named_and_the_next_request_works(backend, checkpoint, rank):
    request, killed = long_request(backend, checkpoint), []

    def kill_once(progress):
        if not killed:
            os.kill(backend.welcome.pids[rank], signal.SIGKILL)
            killed.append(time.monotonic())

    for ask in (lambda: backend.sample(request, kill_once), lambda: backend.load(checkpoint)):
        with pytest.raises(protocol.BackendError, match=f"rank {rank} was killed by SIGKILL"):
            ask()
    assert time.monotonic() - killed[0] < SOON
    assert is_exact(checkpoint)


def test_rank_killed_between_requests_is_told_and_its_log_stays(backend, caplog):
    os.kill(backend.welcome.pids[1], signal.SIGKILL)
    wait_until(lambda: not backend.process.running)
    told = []
    fresh = pool.backend_for(CONFIG, warn=told.append)
    assert (
        len(told) == 1 and "rank 1 was killed by SIGKILL" in told[0] and str(backend.process.log) in told[0]
    )
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [f"parallel-dit: {told[0]}"]
    assert backend.process.log.exists()
    assert fresh.alive() and pool.backend_for(CONFIG, warn=told.append) is fresh and len(told) == 1
    shutil.rmtree(backend.process.folder)


def is_exact(checkpoint) -> bool:
    """Does the next run, on a fresh backend if need be, give one process's latent?"""
    backend = pool.backend_for(CONFIG)
    request, expected = request_for(backend, checkpoint)
    return error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4


def test_a_rank_stopped_while_it_samples_is_named_and_the_next_request_works(backend, checkpoint):
    """Rank 0, which answers nobody any more; torchrun sees nothing."""
    stopped, pids = [], backend.welcome.pids

    def stop_once(progress):
        if not stopped:
            os.kill(pids[0], signal.SIGSTOP)
            stopped.append(time.monotonic())

    with pytest.raises(protocol.BackendError, match="rank 0 has been silent for .* stopped, as by SIGSTOP"):
        backend.sample(long_request(backend, checkpoint), stop_once)
    assert time.monotonic() - stopped[0] < DETECTED
    assert is_exact(checkpoint)
    assert not any(map(alive, pids))


def test_a_rank_stopped_between_requests_is_told(backend, checkpoint):
    backend.process.watch.limit /= 2  # the test above has the whole
    os.kill(backend.welcome.pids[1], signal.SIGSTOP)
    began, told = time.monotonic(), []
    wait_until(lambda: not backend.process.running)
    assert time.monotonic() - began < DETECTED
    fresh = pool.backend_for(CONFIG, warn=told.append)
    assert fresh is not backend and len(told) == 1 and "rank 1 has been silent" in told[0]
    assert is_exact(checkpoint)
    shutil.rmtree(backend.process.folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_cancel_of_a_hung_backend_is_no_error_and_takes_seconds(backend, checkpoint, rank):
    seen, stopped, pids = [], [], backend.welcome.pids

    def stopped_for_a_second():
        if seen and not stopped:
            os.kill(pids[rank], signal.SIGSTOP)
            stopped.append(time.monotonic())
        return bool(stopped) and time.monotonic() - stopped[0] > 1

    result = backend.sample(long_request(backend, checkpoint), seen.append, stopped_for_a_second)
    assert result is None and time.monotonic() - stopped[0] < 1 + CANCELLED
    assert backend.loss() == ""
    assert is_exact(checkpoint)
    assert not any(map(alive, pids))


@pytest.mark.parametrize("waits", ["sample", "load"])
def test_our_own_close_is_no_failure(backend, checkpoint, waits):
    """As at ComfyUI's end: one thread waits for the ranks while another one ends them."""
    long = long_request(backend, checkpoint, points=20 * LONG)  # longer than the ranks' three seconds
    works = threading.Event()
    with ThreadPoolExecutor() as threads:
        if waits == "sample":
            waiting = threads.submit(backend.sample, long, lambda progress: works.set())
        else:  # a load that waits behind it
            backend.client.send(long)
            waiting = threads.submit(backend.load, checkpoint, check=works.set)
        assert works.wait(SOON)
        backend.process.close()
        if waits == "sample":
            assert waiting.result(SOON) is None
        else:
            with pytest.raises(ClosedError):
                waiting.result(SOON)
    assert backend.loss() == "" and not backend.process.folder.exists()


PARENT = """
import sys; sys.path.insert(0, {root!r})
import os, time
from backend.client import pool
from backend.config import ParallelConfig
backend = pool.backend_for(ParallelConfig(ulysses_degree=2, device="cpu"))
print(backend.process.folder, *backend.welcome.pids, backend.process._agent.pid, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it ends while it is read
        return False


class Orphans:
    """A parent that has started a backend, and its processes; ``pids``: of the ranks and of torchrun."""

    def __init__(self):
        code = PARENT.format(root=str(Path(__file__).parents[2]))
        self.parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        folder, *pids = self.parent.stdout.readline().split()
        self.folder = Path(folder)
        self.pids = [int(pid) for pid in pids]
        assert len(self.pids) == 3 and all(map(alive, self.pids))

    def kill_parent(self):
        self.parent.kill()
        self.parent.wait()

    def check_all_end(self):
        """And their folder is removed by another launcher's start."""
        wait_until(lambda: not any(map(alive, self.pids)))
        private_folder.sweep(self.folder.parent)
        assert not self.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_no_process_outlives_a_killed_parent():
    orphans = Orphans()
    orphans.kill_parent()
    orphans.check_all_end()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_stopped_rank_does_not_outlive_a_killed_parent(orphans):
    """It does not see the parent's end, and torchrun kills it. So long another launcher's start leaves the
    folder through which they meet."""
    assert orphans.stayed
    orphans.check_all_end()
