"""Faults of clients, files and of the process that launched the ranks, and the table of all faults (faults.py
has those of the ranks)."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from fault_files import (
    a_pipe,
    another_lora,
    bad_lora,
    lora_gone_bad_after_its_load,
    missing,
    of_nan,
    overwrite,
    truncated,
    while_it_is_read,
)
from faults import (
    LONG,
    PATIENCE,
    Fault,
    Once,
    Outcome,
    Scene,
    cancel_of_a_stopped_rank,
    cancel_while_another_samples,
    full_disk,
    full_disk_at_start,
    measured,
    no_descriptors,
    no_memory,
    no_memory_to_load,
    no_shared_memory,
    rank,
    send,
    stop_all,
)

from backend import protocol
from backend.client import pool
from backend.client.client import BackendClient
from backend.client.open_socket import open_socket
from backend.client.silence import process_state
from backend.protocol import framing

ROOT = Path(__file__).resolve().parents[1]
#: A process that launches a backend and samples for minutes.
LAUNCHER = """
import sys; sys.path[:0] = [{root!r}, {root!r} + "/scripts", {root!r} + "/tests/support"]
from pathlib import Path
from faults import LONG, Scene
scene = Scene(Path({folder!r}))
backend = scene.backend
print(*backend.welcome.pids, scene.agent(), backend.process.folder, flush=True)
backend.sample(scene.request(LONG), lambda progress: print("", flush=True))
"""
#: A process that connects to the backend of another one and sends it the request in a file.
SCRIPT = """
import sys; sys.path.insert(0, {root!r})
from pathlib import Path
from backend.client.client import BackendClient
client = BackendClient({address!r}, {token!r})
client._socket.sendall(Path({frame!r}).read_bytes())
while True:
    if client._next() is not None:
        print("", flush=True)
"""


# ---------------------------------------------------------------------- clients
def goes_on(scene: Scene, began: float) -> Outcome:
    """A request of the client that did nothing wrong."""
    request = scene.request()
    return measured(lambda: scene.backend.sample(request), lambda: began)


def killed_script(scene: Scene) -> Outcome:
    """A script that samples is killed: its request ends, and the next one begins."""
    backend = scene.backend
    assert backend.process is not None
    frame = scene.folder / "script.frame"
    frame.write_bytes(b"".join(framing.encode(scene.request(LONG))))
    program = SCRIPT.format(
        root=str(ROOT), address=backend.process.address, token=backend.process._token, frame=str(frame)
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None and script.stdout.readline() == "\n"
        script.kill()
        return goes_on(scene, time.monotonic())


def silent_reader(scene: Scene) -> Outcome:
    """A client that asks for a preview of every step and reads none of them."""
    script = scene.raw_client()
    script.send(protocol.Sample(**{**vars(scene.request(40)), "preview_seconds": 1e-9}))
    outcome = goes_on(scene, time.monotonic())
    script.close()
    return outcome


def half_a_frame(scene: Scene) -> Outcome:
    """A client that hangs up in the middle of its request."""
    script = scene.raw_client()
    frame = b"".join(framing.encode(scene.request()))
    script._socket.sendall(frame[: len(frame) // 2])
    script.close()
    return goes_on(scene, time.monotonic())


def garbage(scene: Scene) -> Outcome:
    """What is no frame, from a client that is let in."""
    script = scene.raw_client()
    began = time.monotonic()
    script._socket.sendall(b"GET / HTTP/1.1\r\n\r\n" * 200)
    return measured(lambda: str(framing.receive(script._socket).message), lambda: began)


def wrong_token(scene: Scene) -> Outcome:
    """A client with another token."""
    assert scene.backend.process is not None
    address = scene.backend.process.address
    began = time.monotonic()
    return measured(lambda: BackendClient(address, "0" * 64), lambda: began)


def crowd(scene: Scene) -> Outcome:
    """Forty connections that say nothing."""
    assert scene.backend.process is not None
    address = scene.backend.process.address
    began = time.monotonic()
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(open_socket(address))
        friend = scene.raw_client()
        pong = friend.request(protocol.Ping())
        friend.close()
    return measured(lambda: "none" if isinstance(pong, protocol.Pong) else "", lambda: began)


def bad_request(scene: Scene) -> Outcome:
    """A latent that does not fit its noise."""
    request = scene.request(noise=torch.zeros(1, 16, 8, 8))
    began = time.monotonic()
    return measured(lambda: scene.backend.sample(request), lambda: began)


def lost_socket(scene: Scene) -> Outcome:
    """The client's end of the socket breaks while it waits."""
    backend = scene.backend
    request = scene.request(LONG)
    hit = Once(lambda: backend.client._socket.shutdown(socket.SHUT_RDWR))
    return measured(lambda: backend.sample(request, hit), hit.began)


# ---------------------------------------------------------------------- the process that launched the ranks
def killed_parent(stopped: bool):
    """Kill what launched a backend, such as ComfyUI, in a sample; ``stopped``: rank 1 cannot see it."""

    def make(scene: Scene) -> Outcome:
        program = LAUNCHER.format(root=str(ROOT), folder=str(scene.folder))
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            *pids, folder = parent.stdout.readline().split()
            assert parent.stdout.readline() == "\n"
            if stopped:
                os.kill(int(pids[1]), signal.SIGSTOP)
            parent.kill()
            began = time.monotonic()
        while any(process_state(int(pid)) not in ("", "Z") for pid in pids):
            if time.monotonic() - began > PATIENCE:
                return Outcome(f"still there: {pids}", PATIENCE)
            time.sleep(0.05)
        seconds = time.monotonic() - began
        pool.close_all()
        _ = scene.backend  # the next start, which removes what is left
        return Outcome(
            "still there: " + folder if Path(folder).exists() else "nobody is left to be told", seconds
        )

    return make


def suspended(scene: Scene) -> Outcome:
    """Every process stands still for 20 s, that which launched the ranks too, as on a suspended machine."""
    backend = scene.backend
    every = [scene.agent(), *backend.welcome.pids, os.getpid()]
    request = scene.request()
    wake = f"sleep 20; kill -CONT {' '.join(map(str, every))}"
    with subprocess.Popen(["sh", "-c", wake]) as alarm:
        began = time.monotonic()
        for pid in every:  # this process is the last
            os.kill(pid, signal.SIGSTOP)
        alarm.wait()
    time.sleep(2)
    return measured(lambda: backend.sample(request), lambda: began)


KILLED = "was killed by SIGKILL"
SILENT = "has been silent for"
FAULTS = (
    *(
        Fault(
            f"rank {n} killed (SIGKILL), {when}",
            send(rank(n), signal.SIGKILL, when),
            f"rank {n} {KILLED}",
            True,
        )
        for when in ("idle", "sampling", "loading")
        for n in (0, 1)
    ),
    Fault(
        "rank 1 told to end (SIGTERM), sampling",
        send(rank(1), signal.SIGTERM, "sampling"),
        "rank 1 was killed by SIGTERM",
        True,
    ),
    Fault(
        "rank 1 crashes (SIGSEGV), sampling",
        send(rank(1), signal.SIGSEGV, "sampling"),
        "rank 1 was killed by SIGSEGV",
        True,
    ),
    *(
        Fault(
            f"rank {n} stopped (SIGSTOP), {when}",
            send(rank(n), signal.SIGSTOP, when),
            f"rank {n} {SILENT}",
            True,
        )
        for n, when in ((0, "idle"), (1, "idle"), (0, "sampling"), (1, "sampling"), (1, "loading"))
    ),
    Fault("all ranks and torchrun stopped, sampling", stop_all, f"rank 0 {SILENT}", True),
    Fault("Cancel when rank 1 is stopped", cancel_of_a_stopped_rank, "interrupted", True),
    Fault("everything stopped for 20 s, ComfyUI too", suspended, "none", False),
    Fault(
        "torchrun killed, idle",
        send(Scene.agent, signal.SIGKILL, "idle"),
        "its launcher exited with code -9",
        True,
    ),
    Fault(
        "torchrun killed, sampling", send(Scene.agent, signal.SIGKILL, "sampling"), "exited with code", True
    ),
    Fault("torchrun killed, loading", send(Scene.agent, signal.SIGKILL, "loading"), "exited with code", True),
    Fault(
        "torchrun told to end (SIGTERM), sampling",
        send(Scene.agent, signal.SIGTERM, "sampling"),
        "exited with code",
        True,
    ),
    Fault("torchrun stopped, sampling", send(Scene.agent, signal.SIGSTOP, "sampling"), "none", False),
    Fault("ComfyUI killed, sampling", killed_parent(False), "nobody", False),
    Fault("ComfyUI killed when rank 1 is stopped", killed_parent(True), "nobody", False),
    Fault("no memory left in a sample", no_memory, "rank 1 failed with", True),
    Fault("no memory left in a load", no_memory_to_load, "could not be loaded (rank 1:", False),
    Fault("no shared memory", no_shared_memory, "none", False),
    Fault("no descriptors left on rank 0", no_descriptors, "none", False),
    Fault("disk of the logs full, rank 1 killed (no log can name it)", full_disk, "is full", True),
    Fault("disk of the logs full at the start", full_disk_at_start, "make room there", False),
    Fault("connection lost, sampling", lost_socket, "connection was lost", True),
    Fault("queued sample of a script cancelled", cancel_while_another_samples, "interrupted", False),
    Fault("script killed, sampling", killed_script, "none", False),
    Fault("script reads no replies", silent_reader, "none", False),
    Fault("script hangs up in the middle of a frame", half_a_frame, "none", False),
    Fault("script sends what is no frame", garbage, "a frame starts with", False),
    Fault("wrong token", wrong_token, "token", False),
    Fault("40 connections that say nothing", crowd, "none", False),
    Fault("request that does not fit", bad_request, "noise", False),
    Fault("file cut short", truncated, "truncated", False),
    Fault("file of NaN", of_nan, "NaN", False),
    Fault("file that is gone", missing, "there is no model", False),
    Fault("named pipe in a file's place", a_pipe, "not a regular file", False),
    Fault(
        "file overwritten while it is read",
        while_it_is_read(overwrite),
        "was changed while it was read",
        False,
    ),
    Fault(
        "file cut short while it is read",
        while_it_is_read(lambda weights: os.truncate(weights, 4096)),
        "was killed by SIGBUS",
        True,
    ),
    Fault("another LoRA written over one that is in use", another_lora, "none", False),
    Fault(
        "LoRA in use overwritten by noise",
        bad_lora(lambda p: p.write_bytes(b"?" * 512)),
        "lora.safetensors",
        False,
    ),
    Fault(
        "LoRA in use cut short",
        bad_lora(lambda p: os.truncate(p, p.stat().st_size // 2)),
        "lora.safetensors",
        False,
    ),
    Fault("LoRA in use removed", bad_lora(Path.unlink), "there is no LoRA at", False),
    Fault("LoRA cut short between load and sample", lora_gone_bad_after_its_load, "late.safetensors", False),
)
