"""Faults of a live two-rank backend on the CPU: each is made with real processes, files and sockets, and says
what its user is told. reliability.py runs them all, tests/socket/test_faults.py those that spare the ranks.
"""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import psutil
import torch
from shallow import shallow_request
from tiny import write_shallow_flux

from backend import protocol
from backend.client import pool
from backend.client.client import BackendClient
from backend.client.pool import Backend
from backend.config import ParallelConfig

CONFIG = ParallelConfig(pipefusion_degree=2, device="cpu")
#: Steps that a request waits behind, steps that take seconds, also where other processes want the machine,
#: and steps that outlast every fault. With more of them a request only begins later: the modulation of all
#: is computed first.
SHORT, SECONDS, LONG = 20, 250, 300
#: A Flux of 177M parameters.
LARGE: dict = dict(
    in_channels=64,
    num_layers=4,
    num_single_layers=10,
    attention_head_dim=64,
    num_attention_heads=12,
    joint_attention_dim=768,
    pooled_projection_dim=768,
    axes_dims_rope=(8, 28, 28),
)
#: The message of a request that gives its result.
FINISHED = "none"
#: The golden case whose request is sampled.
CASE = "euler_simple"
#: Longest wait for what has to come.
PATIENCE = 90.0


class Scene:
    """Files for the faults in ``folder``, and the backend at hand."""

    def __init__(self, folder: Path):
        self.folder = folder
        pool.allow(folder)
        self.checkpoint = str(write_shallow_flux(folder / "model.safetensors"))

    @property
    def backend(self) -> Backend:
        """The live backend, launched where there is none."""
        return pool.backend_for(CONFIG)

    def request(self, steps: int = 6, **tensors) -> protocol.Sample:
        """A request for the file of this scene, which is loaded where it is not."""
        return self.request_for(self.backend.load(self.checkpoint).model, steps, **tensors)

    @staticmethod
    def request_for(model: str, steps: int, **tensors) -> protocol.Sample:
        """A request for ``model``; ``expected`` has the latent of one of six steps."""
        sample, _ = shallow_request(CASE, model)
        if steps != 6:
            tensors["sigmas"] = torch.linspace(1, 0, steps + 1)
        return replace(sample, num_pipeline_patch=1, tensors={**sample.tensors, **tensors})

    @staticmethod
    def expected() -> torch.Tensor:
        """The latent of ``request``, in VAE units."""
        return shallow_request(CASE)[1]

    def large_file(self) -> str:
        """A folder of 700 MB, which is read for a second where it becomes bf16."""
        path = self.folder / "large"
        if not path.exists():
            from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

            FluxTransformer2DModel(**LARGE).save_pretrained(path)
        return str(path)

    def raw_client(self) -> BackendClient:
        """Another connection to the backend's socket."""
        process = self.backend.process
        assert process is not None
        return BackendClient(process.address, process._token)

    def agent(self) -> int:
        """The process id of torchrun's agent."""
        assert self.backend.process is not None
        return self.backend.process._agent.pid


@dataclass(frozen=True)
class Outcome:
    """What somebody is told, so many seconds after the fault."""

    message: str
    seconds: float


@dataclass(frozen=True)
class Fault:
    """``make`` it in a scene; ``says``: a part of the message; ``ends``: does the backend end by it?"""

    name: str
    make: Callable[[Scene], Outcome]
    says: str
    ends: bool


def measured(action: Callable[[], object], began: Callable[[], float]) -> Outcome:
    """Return what ``action`` says or raises, since the time that ``began`` gives then."""
    try:
        result = action()
        message = "interrupted" if result is None else result if isinstance(result, str) else FINISHED
    except (protocol.BackendError, protocol.RefusedError) as error:
        message = str(error)
    return Outcome(message, time.monotonic() - began())


class Once:
    """Calls ``act`` the first time that it is called, and keeps when."""

    def __init__(self, act: Callable[[], object]):
        self.act = act
        self.at = 0.0

    def __call__(self, *_):
        if not self.at:
            self.at = time.monotonic()
            self.act()

    def began(self) -> float:
        return self.at


def send(pid: Callable[[Scene], int], number: int, when: str) -> Callable[[Scene], Outcome]:
    """Send a signal to a process while the ranks are idle, sample or load."""

    def make(scene: Scene) -> Outcome:
        backend = scene.backend
        target = pid(scene)
        hit = Once(lambda: os.kill(target, number))
        if when == "sampling":
            request = scene.request(SECONDS if target == scene.agent() else LONG)
            return measured(lambda: backend.sample(request, hit), hit.began)
        if when == "loading":
            large = scene.large_file()
            return measured(lambda: backend.load(large, "bf16", on_progress=hit) and "none", hit.began)
        hit()
        return noticed_when_idle(backend, hit)

    return make


def noticed_when_idle(backend: Backend, hit: Once) -> Outcome:
    """Wait until the backend has ended, which the next run then says first."""
    deadline = time.monotonic() + PATIENCE
    while backend.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    return Outcome("nobody asked", time.monotonic() - hit.at)


def rank(number: int) -> Callable[[Scene], int]:
    """The process id of a rank."""
    return lambda scene: scene.backend.welcome.pids[number]


def stop_all(scene: Scene) -> Outcome:
    """Every process of the backend at once, torchrun's too."""
    backend = scene.backend
    every = [scene.agent(), *backend.welcome.pids]
    hit = Once(lambda: [os.kill(pid, signal.SIGSTOP) for pid in every])
    request = scene.request(LONG)
    return measured(lambda: backend.sample(request, hit), hit.began)


def cancel_of_a_stopped_rank(scene: Scene) -> Outcome:
    """Somebody presses Cancel at the moment in which rank 1 is stopped."""
    backend = scene.backend
    hit = Once(lambda: os.kill(backend.welcome.pids[1], signal.SIGSTOP))
    request = scene.request(LONG)
    return measured(lambda: backend.sample(request, hit, lambda: bool(hit.at)), hit.began)


def cancel_while_another_samples(scene: Scene) -> Outcome:
    """A script's sample that waits behind another client's."""
    backend, script = scene.backend, scene.raw_client()
    request = scene.request(SHORT)
    backend.client.send(request)
    pressed = Once(lambda: None)

    def cancel():
        pressed()
        return True

    outcome = measured(lambda: script.sample(request, should_cancel=cancel), pressed.began)
    while not isinstance(reply := backend.client._next(), protocol.Result):
        assert reply is None or isinstance(reply, protocol.Progress), reply
    script.close()
    return outcome


# ---------------------------------------------------------------------- memory, disk, descriptors
def no_memory(scene: Scene) -> Outcome:
    """Rank 1 may have no more memory than it has, and a request needs more."""
    backend = scene.backend
    side = 192
    noise = {key: torch.randn(1, 16, side, side) for key in ("noise", "latent")}
    request = scene.request(LONG, **noise)
    pid = backend.welcome.pids[1]
    hit = Once(lambda: resource.prlimit(pid, resource.RLIMIT_AS, (used(pid) + (1 << 20), -1)))
    hit()
    return measured(lambda: backend.sample(request), hit.began)


def no_memory_to_load(scene: Scene) -> Outcome:
    """As before, while a model is read."""
    backend = scene.backend
    large, pid = scene.large_file(), backend.welcome.pids[1]
    hit = Once(lambda: resource.prlimit(pid, resource.RLIMIT_AS, (used(pid) + (1 << 24), -1)))
    hit()
    try:
        return measured(lambda: backend.load(large, "bf16") and "none", hit.began)
    finally:
        resource.prlimit(pid, resource.RLIMIT_AS, (-1, -1))


def used(pid: int) -> int:
    """Bytes of address space of a process."""
    return psutil.Process(pid).memory_info().vms


def no_shared_memory(scene: Scene) -> Outcome:
    """Ranks that may make no file of 64 MiB, so that bodies go by broadcast."""
    pool.close_all()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 25, limit[1]))
    try:
        began = time.monotonic()
        request = scene.request()
        return measured(lambda: scene.backend.sample(request), lambda: began)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def no_descriptors(scene: Scene) -> Outcome:
    """Rank 0 can open nothing more, so it lets nobody else in; who is in goes on."""
    pid = scene.backend.welcome.pids[0]
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    request = scene.request()
    began = time.monotonic()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), before[1]))
    try:
        return measured(lambda: scene.backend.sample(request), lambda: began)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def full_disk(scene: Scene) -> Outcome:
    """The disk of logs is full when a rank is killed; what filled it goes before the next run."""
    pool.close_all()
    with small_disk(scene.folder / "disk") as place:
        with mock.patch.dict(os.environ, TMPDIR=str(place)), mock.patch("tempfile.tempdir", str(place)):
            backend = scene.backend
            request = scene.request(LONG)
        fill(place)
        hit = Once(lambda: os.kill(backend.welcome.pids[1], signal.SIGKILL))
        outcome = measured(lambda: backend.sample(request, hit), hit.began)
        pool.close_all()
    return outcome


def full_disk_at_start(scene: Scene) -> Outcome:
    """No room for a folder of logs."""
    pool.close_all()
    with small_disk(scene.folder / "disk") as place:
        fill(place)
        began = time.monotonic()
        with mock.patch.dict(os.environ, TMPDIR=str(place)), mock.patch("tempfile.tempdir", str(place)):
            return measured(lambda: pool.backend_for(CONFIG) and "none", lambda: began)


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mount a tmpfs of 4 MiB at ``place``; unmount it in the end."""
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=4m,mode=0700", "tmpfs", str(place)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path):
    """Write until nothing more fits."""
    with open(place / "filler", "wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
