"""Every message survives the wire; everything else is refused before it is believed."""

import json
import random
import socket
import threading
from dataclasses import fields, replace

import pytest
import safetensors.torch
import torch

from backend import protocol
from backend.protocol import MESSAGES, ProtocolError, Sample, framing
from backend.protocol import tensor_body as tensors
from backend.protocol.framing import MAGIC, PREFIX

EXAMPLES = {
    "Hello": protocol.Hello("c"),
    "Challenge": protocol.Challenge("s", "p"),
    "Proof": protocol.Proof("p"),
    "Welcome": protocol.Welcome(2, "cpu", {"pp": 2}, [1, 2]),
    "Arrange": protocol.Arrange({"cfg_degree": 2}),
    "Load": protocol.Load("/a", "bf16", [["/b", 0.5]]),
    "Describe": protocol.Describe("m", [16, 128, 128], 512, 2, 4),
    "Described": protocol.Described(["rank 0"]),
    "Loaded": protocol.Loaded("m", "flux", {"a": 1}),
    "Unload": protocol.Unload("m"),
    "Sample": Sample(
        "m",
        "euler",
        3.5,
        1,
        latent_shapes=[[24, 3, 16, 16], [32, 2, 15]],
        tensors={"noise": torch.randn(1, 2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
    ),
    "ModelCall": protocol.ModelCall(
        "m", cache={"x": "x 0"}, tensors={"x": torch.randn(2, 3), "time": torch.ones(2)}
    ),
    "Progress": protocol.Progress(1, 2, {"x0": torch.zeros(1)}),
    "Result": protocol.Result({"seconds": 1.5}, {"samples": torch.ones(2)}),
    "Cancel": protocol.Cancel(),
    "Cancelled": protocol.Cancelled(3),
    "Waiting": protocol.Waiting("Sample", 3, 20, 1),
    "Begun": protocol.Begun(),
    "Failure": protocol.Failure("no", True, [[0, 1 << 40]]),
    "Release": protocol.Release([0, 2], ["0f", "1e"]),
    "Ping": protocol.Ping(),
    "Status": protocol.Status(),
    "Report": protocol.Report(
        9.5, {"a1": "/m/flux"}, [{"rank": 0, "pid": 7}], "Sample", 1.5, 2, {"Load": 1}, "cfg is NaN"
    ),
    "Pong": protocol.Pong(["m"]),
    "Shutdown": protocol.Shutdown(),
}


def through_socket(data: bytes, limit: int = framing.MAX_BODY):
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=lambda: (left.sendall(data), left.shutdown(socket.SHUT_WR)))
        sender.start()
        try:
            return framing.receive(right, limit)
        finally:
            sender.join()


class SteadyLink:
    """As much of a socket as sending needs, whose link takes 1 KiB a second and whose time is a number."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.sent = bytearray()

    def send(self, data) -> int:
        self.sent += bytes(data[:1024])
        return min(len(data), 1024)

    def sendall(self, data):
        if len(data) / 1024 > self.timeout:  # Python's is for all of the data
            raise TimeoutError("timed out")
        self.sent += bytes(data)


def test_a_slow_link_that_goes_on_is_no_lost_one():
    message = Sample("m", "euler", 1.0, 7, tensors={"noise": torch.randn(1, 100_000)})
    link = SteadyLink(timeout=60)
    framing.send(link, message)
    assert bytes(link.sent) == b"".join(framing.encode(message))


class Stream:
    """As much of a socket as receiving needs, over bytes."""

    def __init__(self, data: bytes):
        self.left = memoryview(data)

    def recv_into(self, view) -> int:
        count = min(len(view), len(self.left))
        view[:count], self.left = self.left[:count], self.left[count:]
        return count


def frame(header: bytes, body: bytes = b"") -> bytes:
    return PREFIX.pack(MAGIC, len(header), len(body)) + header + body


def body(table, data: bytes = b"") -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return tensors.LENGTH.pack(len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize("name", MESSAGES)
def test_round_trip(name):
    sent = EXAMPLES[name]
    got = through_socket(b"".join(framing.encode(sent)))
    tensors = getattr(sent, "tensors", {})
    assert type(got) is type(sent)
    assert all(getattr(got, f.name) == getattr(sent, f.name) for f in fields(sent) if f.name != "tensors")
    assert all(got.tensors[k].equal(v) and got.tensors[k].dtype == v.dtype for k, v in tensors.items())


HEADER = {"type": "Sample", "model": "m", "sampler": "euler", "seed": 0}
NONSENSE = {
    "other magic": b"HTTP" + bytes(40),
    "no json": frame(b"{"),
    "no type": frame(b"{}"),
    "unknown type": frame(b'{"type": "Exec"}'),
    "unknown field": frame(b'{"type": "Ping", "shell": "ls"}'),
    "missing field": frame(b'{"type": "Hello"}'),
    "field of another type": frame(json.dumps({"type": "Hello", "token": 5}).encode()),
    "a list": frame(b"[1]"),
    "body that is no safetensors": frame(b'{"type": "Result"}', b"\x80\x04pickle"),
    "body for a message without tensors": frame(
        b'{"type": "Ping"}', b"".join(framing.encode(EXAMPLES["Result"])[2:])
    ),
    "NaN for a number": frame(json.dumps({**HEADER, "cfg": float("nan")}).encode()),
    "infinity in disguise": frame(json.dumps({**HEADER, "cfg": 0.5}).encode().replace(b"0.5", b"1e999")),
    "a number of 1000 digits": frame(b'{"type": "Cancelled", "step": 1%s}' % (b"0" * 1000)),
    "deep nesting": frame(b"[" * 100_000),
    "unhashable type": frame(b'{"type": []}'),
    "tensors in the header": frame(b'{"type": "Result", "tensors": {"samples": 1}}'),
    "header over the limit": PREFIX.pack(MAGIC, 1 << 30, 0),
    "body over the limit": PREFIX.pack(MAGIC, 2, 1 << 60) + b"{}",
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused(data):
    with pytest.raises(ProtocolError):
        through_socket(data)


BODIES = {
    "shorter than its table's length": b"\0\0\0",
    "table longer than the body": tensors.LENGTH.pack(100) + b"{}",
    "table longer than anything": tensors.LENGTH.pack(2**64 - 1) + b"{}",
    "table over the limit": tensors.LENGTH.pack(framing.MAX_HEADER + 8) + bytes(framing.MAX_HEADER + 8),
    "table that is no JSON": body(b"\x80\x04pickle"),
    "table that is no text": body(b"\xff\xfe"),
    "table that is a list": body([1]),
    "deep nesting": body(b"[" * 100_000),
    "overlap": body({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": body({"a": entry(), "b": entry()}, bytes(8)),
    "gap": body({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "data that nobody names": body({"a": entry()}, bytes(12)),
    "data past the end": body({"a": entry()}, bytes(4)),
    "data without a table": body({}, bytes(4)),
    "one name twice": body(
        b'{"a": %s, "a": %s}' % (json.dumps(entry()).encode(), json.dumps(entry(offsets=(8, 16))).encode()),
        bytes(16),
    ),
    "negative offsets": body({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "offsets backwards": body({"a": entry(offsets=(8, 0))}, bytes(8)),
    "offsets that are no integers": body({"a": entry(offsets=(0.0, 8.0))}, bytes(8)),
    "three offsets": body({"a": entry(offsets=(0, 4, 8))}, bytes(8)),
    "shape of other size": body({"a": entry(shape=(3,))}, bytes(8)),
    "negative shape": body({"a": entry(shape=(-1, -2))}, bytes(8)),
    "shape of truths": body({"a": entry(shape=(True, 2))}, bytes(8)),
    "shape that overflows": body({"a": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}),
    "shape that wraps round": body({"a": entry(shape=(2**62, 4), offsets=(0, 0))}),
    "too many dimensions": body({"a": entry(shape=(1,) * 1000 + (2,))}, bytes(8)),
    "unknown dtype": body({"a": entry(dtype="NaN")}, bytes(8)),
    "dtype that is no name": body({"a": entry(dtype=["F32"])}, bytes(8)),
    "complex": body({"a": entry(dtype="C64", shape=(1,))}, bytes(8)),
    "not aligned": body({"a": entry("U8", (1,), (0, 1)), "b": entry("F32", (1,), (1, 5))}, bytes(5)),
    "more than an entry has": body({"a": entry(file="/etc/passwd")}, bytes(8)),
    "entry that is no object": body({"a": 5}),
}


@pytest.mark.parametrize("data", BODIES.values(), ids=BODIES)
def test_malformed_bodies_are_refused_before_their_data_is_read(data):
    stream = Stream(frame(b'{"type": "Result"}', data))
    with pytest.raises(ProtocolError, match="body of a Result"):
        framing.receive(stream)
    payload = data[8 + int.from_bytes(data[:8], "little") :]
    assert len(stream.left) >= len(payload)


def test_random_damage_is_refused_or_read_as_a_message():
    """Every byte of the header and of the table has its turn; nothing but our own error may come out."""
    whole, random_ = b"".join(framing.encode(EXAMPLES["Sample"])), random.Random(7)
    for turn in range(4000):
        damaged = bytearray(whole)
        for _ in range(random_.choice((1, 1, 2, 8))):
            damaged[random_.randrange(len(damaged)) if turn % 2 else turn % len(damaged)] = random_.randrange(
                256
            )
        try:
            got = framing.receive(
                Stream(bytes(damaged[: len(damaged) if turn % 3 else random_.randrange(len(damaged))]))
            )
        except ConnectionError:
            continue
        assert type(got) in MESSAGES.values()
        assert all(
            tensor.untyped_storage().nbytes() <= len(whole) for tensor in getattr(got, "tensors", {}).values()
        )


TENSORS = {
    "f32": torch.randn(3, 5),
    "bf16": torch.randn(7).bfloat16(),
    "half": torch.randn(1).half(),
    "f64": torch.randn(2).double(),
    "truth": torch.tensor([True, False, True]),
    "i64": torch.arange(3),
    "u8": torch.arange(5, dtype=torch.uint8),
    "fp8": torch.randn(3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "turned": torch.randn(4, 6).T,
    "wide": torch.randn(3, 1).expand(3, 4),
    "grad": torch.randn(2, requires_grad=True),
    "name \u00e4\u2026": torch.ones(1),
}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].float(), b[k].float()) and a[k].shape == b[k].shape
        for k in a
    )


def test_bodies_are_safetensors_both_ways():
    """The library reads what we write, and we read what it writes."""
    _, header, *parts = framing.encode(protocol.Result(tensors=TENSORS))
    assert same(safetensors.torch.load(b"".join(parts)), TENSORS)
    theirs = safetensors.torch.save(
        {k: v.detach().clone().contiguous() for k, v in TENSORS.items()}, metadata={"format": "pt"}
    )
    assert same(through_socket(frame(header, theirs)).tensors, TENSORS)


def test_nothing_is_copied():
    sent = {"noise": torch.randn(1, 4, 8), "text": torch.randn(2, 3).bfloat16()}
    parts = framing.encode(Sample("m", "euler", 1.0, 0, tensors=sent))[3:]
    for tensor in sent.values():
        tensor.zero_()
    assert not any(any(part) for part in parts)
    got = through_socket(b"".join(framing.encode(EXAMPLES["Sample"])))
    assert len({tensor.untyped_storage().data_ptr() for tensor in got.tensors.values()}) == 1
    assert len(framing.encode(got)[3:]) == 1  # and travels on as one part
    assert b"".join(framing.encode(got)) == b"".join(framing.encode(EXAMPLES["Sample"]))
    assert (
        framing.decode(
            *framing.encode(replace(got, seed=7))[1:3],
            torch.cat([torch.frombuffer(part, dtype=torch.uint8) for part in framing.encode(got)[3:]]),
        ).seed
        == 7
    )


def test_a_byte_that_is_no_truth_value():
    """Indexing with a bool tensor that holds a 2 would count it wrongly."""
    got = framing.receive(
        Stream(frame(b'{"type": "Result"}', body({"a": entry("BOOL", (3,), (0, 3))}, b"\0\2\1")))
    )
    assert got.tensors["a"].view(torch.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "message",
    [
        protocol.Result({"seconds": float("nan")}),
        protocol.Result(tensors={"a": torch.ones(1, dtype=torch.complex64)}),
    ],
    ids=["NaN", "dtype"],
)
def test_what_cannot_be_read_is_not_written(message):
    with pytest.raises(ProtocolError, match="a Result cannot be written"):
        framing.encode(message)


def test_end_of_stream_in_a_frame():
    with pytest.raises(ConnectionError):
        through_socket(b"".join(framing.encode(EXAMPLES["Sample"]))[:-3])


def test_a_length_alone_allocates_nothing():
    """A peer that announces 16 GB and sends nothing costs us one small buffer."""
    with pytest.raises(ConnectionError):
        through_socket(PREFIX.pack(MAGIC, 16, framing.MAX_BODY) + bytes(16))


def test_memory_is_allocated_as_bytes_arrive(monkeypatch):
    asked, allocate = [], framing._allocate
    monkeypatch.setattr(framing, "MAX_UNSEEN", 1000)
    monkeypatch.setattr(framing, "_allocate", lambda size: asked.append(size) or allocate(size))
    noise = torch.randn(1, 1500)
    whole = b"".join(framing.encode(Sample("m", "euler", 1.0, 0, tensors={"noise": noise})))
    assert through_socket(whole).tensors["noise"].equal(noise) and asked == [1000, 2000, 4000, 6000]
    asked.clear()
    with pytest.raises(ConnectionError):
        through_socket(whole[:-4500])
    assert asked == [1000, 2000]


def test_no_memory_for_a_frame(monkeypatch):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ProtocolError, match="no memory for a frame of"):
        framing.receive(Stream(b"".join(framing.encode(EXAMPLES["Result"]))))


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="over the limits"):
        framing.encode(protocol.Load("p" * (framing.MAX_HEADER + 1)))


def test_one_tensor_under_two_names():
    one = torch.randn(4)
    got = through_socket(
        b"".join(framing.encode(Sample("m", "euler", 1.0, 0, tensors={"a": one, "b": one, "c": one[1:3]})))
    )
    assert got.tensors["b"].equal(one) and got.tensors["c"].equal(one[1:3])
