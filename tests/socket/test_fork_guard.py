"""What a process that is forked from ComfyUI's must not hold."""

import os
import select
import time
from pathlib import Path

import forking
import handshakes

from backend.client.auto import preflight
from backend.client.client import BackendClient
from backend.client.launching import fork_guard, private_folder
from backend.config import ParallelConfig


def test_a_fork_that_lives_on_does_not_keep_ranks_alive():
    """Its end of the pipe by which ranks see that ComfyUI has ended."""
    reading, writing = os.pipe()
    end = os.fdopen(writing, "wb")
    fork_guard.hold(end)
    go, pid = os.pipe(), os.fork()
    if not pid:
        os.read(go[0], 1)  # until the test is over
        os._exit(0)
    try:
        end.close()
        seen = select.poll()
        seen.register(reading)
        assert seen.poll(5000) == [(reading, select.POLLHUP)]
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        for descriptor in (reading, *go):
            os.close(descriptor)


def test_a_fork_does_not_keep_a_client_connected(server):
    """Rank 0 sees its client go, also where that has only hung up: a request that nobody waits for stops."""
    token = handshakes.TOKEN
    killed, closed = (BackendClient(f"unix:{server.path}", token) for _ in range(2))
    go, pid = os.pipe(), os.fork()
    if not pid:
        os.read(go[0], 1)  # until the test is over
        os._exit(0)
    try:
        closed.close()
        killed._socket.close()  # as where its process is killed
        deadline = time.monotonic() + 60
        while server.members and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not server.members
    finally:
        os.write(go[1], b"x")
        os.waitpid(pid, 0)
        for descriptor in go:
            os.close(descriptor)


def test_a_fork_does_not_keep_a_folder_from_being_swept(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = private_folder.private_folder()
    ready, pid = os.pipe(), os.fork()
    if not pid:
        os.write(ready[1], b"x")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(ready[0], 1)  # what forks do at once has been done
        assert folder._lock is not None and folder._open is not None
        folder._lock.close()  # as where its launcher is killed
        os.close(folder._open)
        folder._lock = folder._open = None
        private_folder.sweep(Path(tmp_path))
        assert not folder.path.exists()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        for descriptor in ready:
            os.close(descriptor)


def test_a_fork_does_not_keep_the_process_that_reads_headers():
    """Of another custom node, say; it ends by its pipe."""
    reader = preflight._Reader(ParallelConfig(device="cpu"))
    with forking.living_fork():
        reader.close()
        assert reader.process.wait(120) == 0
