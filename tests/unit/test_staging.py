"""Weights travel to a GPU through two page-locked buffers in turn, noise through memory of its own, previews
from it into page-locked memory. No GPU: the CPU or a meta device stands for one."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from backend.loading import staging
from backend.loading.staging import Download, Staging, lock_ahead, upload, upload_parameters
from backend.protocol import Sample
from backend.sampling import runs
from backend.sampling.step_loop import Callbacks

CPU = torch.device("cpu")


class FakeEvent:
    """Writes down in ``log`` when it is waited for and recorded, with what its buffer holds then."""

    def __init__(self, log: list, buffers: list):
        self.log = log
        self.index = len(buffers) - 1  # of the buffer that was just made
        self.buffers = buffers

    def synchronize(self):
        self.log.append(("wait", self.index, int(self.buffers[self.index][0])))

    def record(self):
        self.log.append(("record", self.index, int(self.buffers[self.index][0])))


def recorded(monkeypatch, piece: int) -> tuple[Staging, list, list]:
    """Buffers of so many bytes, what is done with them in order, and how they were asked for."""
    monkeypatch.setattr(staging, "PIECE", piece)
    log, buffers, asked = [], [], []

    def empty(size, **how):
        asked.append(how)
        buffers.append(torch.zeros(size, dtype=how["dtype"]))
        return buffers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "Event", lambda: FakeEvent(log, buffers))
        return Staging(), log, asked


def test_a_buffer_is_written_when_what_it_held_has_left(monkeypatch):
    found, log, asked = recorded(monkeypatch, 4)
    assert asked == [{"dtype": torch.uint8, "pin_memory": True}] * 2
    sent = torch.arange(1, 15, dtype=torch.uint8)  # 4, 4, 4 and 2 bytes
    assert found.copy(sent, CPU).equal(sent)
    assert log == [
        *(("wait", 0, 0), ("record", 0, 1)),
        *(("wait", 1, 0), ("record", 1, 5)),
        *(("wait", 0, 1), ("record", 0, 9)),  # still what it held before
        *(("wait", 1, 5), ("record", 1, 13)),
    ]
    found.copy(sent[:4], CPU)
    assert log[-2] == ("wait", 0, 9)  # the next tensor goes on in turn


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 5),
        torch.randn(7, 5).t(),
        torch.randn(3, 3, dtype=torch.bfloat16),
        torch.randn(9).to(torch.float8_e4m3fn),
        torch.tensor(2.5, dtype=torch.float64),
        torch.zeros(0, 4),
    ],
    ids=["float32", "transposed", "bfloat16", "float8", "a number", "nothing"],
)
def test_every_tensor_arrives_as_it_was(tensor, monkeypatch):
    found, _, _ = recorded(monkeypatch, 16)
    came = found.copy(tensor, CPU)
    assert came.dtype == tensor.dtype and came.shape == tensor.shape and came.is_contiguous()
    assert came.reshape(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8))


def test_the_cpu_reads_the_file_itself():
    tensor = torch.randn(3)
    assert upload(tensor, "cpu") is tensor


def test_each_gpu_tensor_goes_through_the_buffers(monkeypatch):
    asked = []

    class Recorded:
        def copy(self, tensor, device):
            asked.append(device)
            return tensor

    monkeypatch.setattr(staging, "_staging", lambda: Recorded())
    upload(torch.zeros(2), "cuda:1")
    assert asked == [torch.device("cuda:1")]


def test_parameters_go_through_the_buffers_where_they_are_on_the_cpu(monkeypatch):
    """In place, since FSDP and LoRAs know them. Those on the device, for which meta stands, stay."""
    block = torch.nn.ModuleDict({"norm": torch.nn.Linear(2, 6, device="meta"), "out": torch.nn.Linear(2, 2)})
    before = dict(block.named_parameters())
    sent = []

    class Recorded:
        def copy(self, tensor, device):
            sent.append(tensor.shape)
            return torch.full_like(tensor, 3)

    monkeypatch.setattr(staging, "_staging", lambda: Recorded())
    upload_parameters(block, CPU)
    assert not sent
    upload_parameters(block, torch.device("cuda"))
    assert sent == [(2, 2), (2,)]
    assert all(parameter is before[name] for name, parameter in block.named_parameters())
    assert block["norm"].weight.is_meta and block["out"].weight.eq(3).all()


class Host(torch.Tensor):
    """Page-locked memory that writes down in ``log`` what is copied into it, and how."""

    log: list

    def copy_(self, tensor, **how):
        self.log.append(("copy", tensor.device.type, how))
        return self


class Staged(torch.Tensor):
    """Page-locked memory that writes down in ``log`` what it holds as it is copied from, and how."""

    log: list

    def to(self, device, **how):
        self.log.append((self.tolist(), device.type, how))
        return torch.empty(self.shape, device=device)


def test_what_is_sent_has_memory_of_its_own_and_nobody_waits_for_it(monkeypatch):
    log, memory = [], []

    def page_locked(shape, dtype):
        memory.append(torch.empty(shape, dtype=dtype).as_subclass(Staged))
        memory[-1].log = log
        return memory[-1]

    monkeypatch.setattr(staging, "page_locked", page_locked)
    first, second = torch.ones(2), torch.zeros(2)
    for tensor in (first, second):
        assert staging.send(tensor, torch.device("meta")).is_meta
    assert log == [([1, 1], "meta", {"non_blocking": True}), ([0, 0], "meta", {"non_blocking": True})]
    assert [each.tolist() for each in memory] == [[1, 1], [0, 0]]
    assert staging.send(first, CPU) is first and len(memory) == 2


def test_a_download_is_started_and_asked_but_not_waited_for(monkeypatch):
    log = []

    class Event:
        here = False

        def record(self):
            log.append("record")

        def query(self):
            log.append("query")
            return self.here

    def empty(shape, **how):
        log.append(how)
        host = torch.zeros(shape, dtype=how["dtype"]).as_subclass(Host)
        host.log = log
        return host

    latent = torch.zeros(2, 3, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    coming = Download(latent)
    assert log == [
        {"dtype": torch.bfloat16, "pin_memory": True},
        ("copy", "meta", {"non_blocking": True}),
        "record",
    ]
    assert coming.arrived() is None
    Event.here = True
    came = coming.arrived()
    assert came is not None and came.shape == (2, 3) and came.device.type == "cpu"
    assert log[3:] == ["query", "query"]


def test_pages_of_several_downloads_are_locked_at_once_ahead_of_them(monkeypatch):
    """One that is freed before the next is asked for would be the same."""
    made, alive = [], []

    def empty(shape, **how):
        assert how == {"dtype": torch.bfloat16, "pin_memory": True}
        page = torch.zeros(shape)
        made.append(weakref.ref(page))
        alive.append(sum(each() is not None for each in made))
        return page

    latent = torch.zeros(2, 3, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(torch, "empty", empty)
    lock_ahead(latent, 2)
    assert alive == [1, 2] and [each() for each in made] == [None, None]


def test_none_are_locked_for_a_client_that_takes_no_previews(monkeypatch):
    class Begins(Exception):
        """Where the request goes on."""

    def begin(*_):
        raise Begins

    asked = []
    monkeypatch.setattr(runs, "lock_ahead", lambda like, copies: asked.append(copies))
    monkeypatch.setattr(runs, "running", begin)
    gpu = SimpleNamespace(rank=0, device=torch.device("cuda"))
    request = SimpleNamespace(grid=SimpleNamespace(to_latent=lambda tokens: tokens), noise=torch.zeros(1))
    prepared = runs.Prepared(SimpleNamespace(), request)
    for seconds in (0.0, 0.5):
        with pytest.raises(Begins):
            runs.run_request(
                gpu, prepared, Sample("m", "euler", 1.0, 1, preview_seconds=seconds), Callbacks()
            )
    assert asked == [runs.PREVIEWS]


def test_a_download_of_the_cpu_is_a_copy_that_is_there():
    tensor = torch.ones(3)
    came = Download(tensor).arrived()
    tensor.zero_()
    assert came is not None and came.equal(torch.ones(3))


def limited(*shape, pin_memory=False, **how):
    """torch.empty, where the system lets no memory be page locked."""
    if pin_memory:
        raise RuntimeError("CUDA error: out of memory")
    return torch.zeros(*shape, **how)


def test_files_are_copied_straight_where_nothing_can_be_page_locked(monkeypatch, capsys):
    class Mapped:
        def to(self, place):
            return "straight", place.type

    monkeypatch.setattr(torch, "empty", limited)
    staging._staging.cache_clear()
    try:
        assert [upload(Mapped(), "cuda:0") for _ in range(2)] == [("straight", "cuda")] * 2
    finally:
        staging._staging.cache_clear()
    assert capsys.readouterr().err.count("page locked (CUDA error: out of memory): loading is slower") == 1
    assert staging.page_locked((2,), torch.float32).shape == (2,)  # previews come too
