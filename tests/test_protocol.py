"""Every message survives the wire; everything else is refused before it is believed."""

import json
import socket
import threading

import pytest
import torch
from backend import protocol
from backend.protocol import MAGIC, MESSAGES, PREFIX, ProtocolError, Sample

EXAMPLES = {
    "Hello": protocol.Hello("t"), "Welcome": protocol.Welcome(2, "cpu", {"pp": 2}, [1, 2]), "Load": protocol.Load("/a"),
    "Loaded": protocol.Loaded("m", "flux", {"a": 1}), "Unload": protocol.Unload("m"),
    "Sample": Sample("m", "euler", 3.5, 1, tensors={"noise": torch.randn(1, 2, 3), "half": torch.ones(2, dtype=torch.bfloat16)}),
    "Progress": protocol.Progress(1, 2, {"x0": torch.zeros(1)}), "Result": protocol.Result({"seconds": 1.5}, {"samples": torch.ones(2)}),
    "Cancel": protocol.Cancel(), "Cancelled": protocol.Cancelled(3), "Failure": protocol.Failure("no", True, 1), "Ping": protocol.Ping(),
    "Pong": protocol.Pong(["m"]), "Shutdown": protocol.Shutdown(),
}


def through_socket(data: bytes, limit: int = protocol.MAX_BODY):
    left, right = socket.socketpair()
    with left, right:
        sender = threading.Thread(target=lambda: (left.sendall(data), left.shutdown(socket.SHUT_WR)))
        sender.start()
        try:
            return protocol.receive(right, limit)
        finally:
            sender.join()


def frame(header: bytes, body: bytes = b"") -> bytes:
    return PREFIX.pack(MAGIC, len(header), len(body)) + header + body


@pytest.mark.parametrize("name", MESSAGES)
def test_round_trip(name):
    sent = EXAMPLES[name]
    got = through_socket(b"".join(protocol.encode(sent)))
    tensors = getattr(sent, "tensors", {})
    assert type(got) is type(sent)
    assert {k: v for k, v in vars(got).items() if k != "tensors"} == {k: v for k, v in vars(sent).items() if k != "tensors"}
    assert all(got.tensors[k].equal(v) and got.tensors[k].dtype == v.dtype for k, v in tensors.items())


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
    "body for a message without tensors": frame(b'{"type": "Ping"}', b"".join(protocol.encode(EXAMPLES["Result"])[2:])),
    "header over the limit": PREFIX.pack(MAGIC, 1 << 30, 0),
    "body over the limit": PREFIX.pack(MAGIC, 2, 1 << 60) + b"{}",
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused(data):
    with pytest.raises(ProtocolError):
        through_socket(data)


def test_end_of_stream_in_a_frame():
    with pytest.raises(ConnectionError):
        through_socket(b"".join(protocol.encode(EXAMPLES["Sample"]))[:-3])


def test_a_length_alone_allocates_nothing():
    """A peer that announces 16 GB and sends nothing costs us one small buffer."""
    with pytest.raises(ConnectionError):
        through_socket(PREFIX.pack(MAGIC, 16, protocol.MAX_BODY) + bytes(16))


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError, match="over the limits"):
        protocol.encode(protocol.Load("p" * (protocol.MAX_HEADER + 1)))


def test_one_tensor_under_two_names():
    one = torch.randn(4)
    got = through_socket(b"".join(protocol.encode(Sample("m", "euler", 1.0, 0, tensors={"a": one, "b": one, "c": one[1:3]}))))
    assert got.tensors["b"].equal(one) and got.tensors["c"].equal(one[1:3])
