"""What rank 0 does with a frame, without a socket and without peers: for the fuzz of the suite and the long
one (scripts/fuzz_protocol.py). fuzz_frames.py makes the frames."""

import signal
from functools import lru_cache
from types import SimpleNamespace
from unittest import mock

import torch

from backend import engine
from backend.config import ParallelConfig
from backend.loading.model_key import model_key
from backend.parallel import mesh
from backend.protocol import Load, ModelCall, Report, Sample, Shutdown, Welcome, framing, handshake
from backend.rank.admission import Admission
from backend.rank.leader import Leader
from backend.rank.served_models import NamedModels, ServedFile
from backend.sampling.model_call import build_call
from backend.sampling.request import build
from backend.serving.job_queue import JobQueue
from backend.serving.server import Connection

#: What one frame may cost: seconds of this process, and bytes.
SECONDS, BYTES = 5.0, 1 << 28
#: Linux: "5" written here forgets the most memory that the process has had.
CLEAR = "/proc/self/clear_refs"
#: The file with that number, read twice for each frame: a sixth of the fuzz if by pathlib and line by line.
STATUS = "/proc/self/status"


class Told(BaseException):
    """A message has passed every check: the other ranks would receive it now. No check may catch this."""


class TooMuch(BaseException):
    """A frame costs more than SECONDS or BYTES."""


class Stream:
    """A socket on which ``data`` has arrived and the peer has hung up."""

    def __init__(self, data: bytes):
        self.left = memoryview(data)

    def recv_into(self, view: memoryview) -> int:
        count = min(len(view), len(self.left))
        view[:count], self.left = self.left[:count], self.left[count:]
        return count


class Rank0(Leader):
    """Rank 0 of one rank with the transformer at ``path`` loaded as ``model``, where every message that
    passes the checks raises Told."""

    rank = 0  # as a control channel's

    def __init__(self, path: str):
        self.device, self.mesh = "cpu", mesh.single()
        self.engine, self.control = engine.Engine(ParallelConfig(), self.mesh), self
        self.opened = lru_cache(engine.open_checkpoint)
        self.model = model_key(Load(path))
        self.engine.load(self.model, path, "default")
        self.path = path
        self.admission = Admission(ParallelConfig(), self, self.engine.memory)
        self.files = {self.model: ServedFile(path, engine.open_checkpoint(path))}
        self.reports = {self.model: []}
        self.named = NamedModels()
        welcome = Welcome(1, "cpu", ParallelConfig().degrees, [0])
        self.server = SimpleNamespace(
            welcome=welcome,
            running_for=None,
            jobs=JobQueue(),
            models=lambda: {self.model: path},
            last_error="",
            status=lambda: Report(0.0, {self.model: path}, [], "", 0.0, 0, {}, ""),
            send_to_all=lambda message: None,
            token="",
        )

    def broadcast(self, message):
        """In the control channel's place."""
        raise Told

    def all_gather_object(self, value) -> list:
        """In the control channel's place."""
        return [value]

    def take(self, data: bytes) -> str:
        """What comes of a frame: "no frame", "refused", "answered" or "accepted". Raises what would end rank
        0, and TooMuch."""
        with open(CLEAR, "wb", buffering=0) as file:
            file.write(b"5")  # the peak begins again at what is in use now
        before = _peak()
        signal.signal(signal.SIGVTALRM, _too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
        try:
            # frames are odd here, files are not
            with mock.patch.object(engine, "open_checkpoint", self.opened):
                return self._take(data)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if _peak() - before > BYTES:
                raise TooMuch(f"{_peak() - before} bytes for a frame of {len(data)}")

    def _take(self, data):
        try:
            framing.receive(Stream(data), limit=handshake.MAX_HELLO)
        except ConnectionError:
            pass  # of a peer that is not let in yet: nothing more is done with it
        try:
            message = framing.receive(Stream(data))
        except ConnectionError:
            return "no frame"
        client = Connection(None, self.server)
        client._handle(message)
        outcome = "answered"
        while (job := self.server.jobs.next(0)) is not None:
            try:
                outcome = self._run(job)
            finally:
                self.server.jobs.finish(job)
        while not client.outbox.empty():
            framing.encode(client.outbox.get())
        return outcome

    def _run(self, job):
        if isinstance(job.message, Shutdown):
            return "answered"
        try:
            self.run(job)
        except Told:
            self._follow(job.message)
            return "accepted"
        assert not job.client.outbox.empty(), "no answer"
        return "refused"

    def _follow(self, message):
        """What every rank does next with an accepted message, as far as it is quick."""
        _, header, table, *data = framing.encode(message)
        parts = [torch.frombuffer(part, dtype=torch.uint8) for part in data]
        heard = framing.decode(
            header, table, torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        )
        assert type(heard) is type(message)
        if not isinstance(heard, (Sample, ModelCall)):
            return
        model, device = self.engine.models[heard.model], self.mesh.device
        if isinstance(heard, Sample):
            build(heard, self.engine.config, model.checkpoint, model.dtype, device)
        else:
            filled = self.engine.argument_cache.filled(heard)
            build_call(filled, model.checkpoint, model.dtype, device, [0])


def _peak() -> int:
    """Most memory that this process has had, as backend.loading.load_report.peak_bytes finds it."""
    with open(STATUS, "rb", buffering=0) as file:
        text = file.read(1 << 14)
    return 1024 * int(text.partition(b"VmHWM:")[2].partition(b"kB")[0])


def _too_long(*_):
    raise TooMuch(f"more than {SECONDS} s")
