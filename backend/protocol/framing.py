"""The framing of messages: a fixed prefix (magic, header length, body length), a JSON header and a
safetensors body (tensor_body.py) with the message's ``tensors``. No pickle on the wire."""

import json
import math
import struct
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from . import tensor_body as bodies
from .messages import MESSAGES
from .protocol_errors import ProtocolError

MAGIC = b"PDT1"
PREFIX = struct.Struct("!4sIQ")
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 34
#: What a declared length makes us allocate before bytes arrive; later it is at most twice what arrived.
MAX_UNSEEN = 1 << 28
#: Chunks of a frame below this size are joined: a system call each would cost more.
SMALL_CHUNK = 1 << 15
#: Attribute of a received message: the buffers of its frame.
CAME = "_came"
#: Longest integer in a header, enough for 64 bits and a sign.
MAX_DIGITS = 21


def encode(message) -> list:
    """Return a message's frame as buffers: prefix, header, table, and views of the tensors' memory. A message
    that was received keeps its frame. Raises ProtocolError for what has no frame."""
    if came := getattr(message, CAME, None):
        return came
    name = type(message).__name__
    values = {f.name: getattr(message, f.name) for f in fields(message)}
    tensors = values.pop("tensors", None)
    try:
        text = json.dumps({"type": name, **values}, allow_nan=False).encode()
        table, data = bodies.pack(tensors) if tensors else (b"", [])
    except ValueError as error:
        raise ProtocolError(f"a {name} cannot be written: {error}") from None
    body = len(table) + sum(map(len, data))
    if max(len(text), len(table)) > MAX_HEADER or body > MAX_BODY:
        limits = f"over the limits of {MAX_HEADER} + {MAX_BODY}"
        raise ProtocolError(f"a {name} of {len(text)} + {body} bytes is too large, {limits}.")
    return [PREFIX.pack(MAGIC, len(text), body), text, table, *data]


def decode(header: bytes, table: bytes, data: Tensor):
    """Return the message of a frame whose body is ``table`` and ``data`` (uint8); its tensors are views of
    ``data``. Raises ProtocolError."""
    cls, values = _open(header)
    if table:
        values["tensors"] = bodies.unpack(_entries(cls, table, len(data)), data)
    return _message(cls, values)


def _open(header: bytes) -> tuple[type, dict]:
    """Return class and fields of a frame's header."""
    try:
        values = json.loads(header, parse_constant=_no_number, parse_float=_finite, parse_int=_whole)
        return MESSAGES[values.pop("type")], values
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"not a message of this protocol: {type(error).__name__}: {error}") from None


def _no_number(text: str):
    raise ValueError(f"{text[:MAX_DIGITS]} is no number of this protocol")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


def _whole(text: str) -> int:
    return int(text) if len(text) <= MAX_DIGITS else _no_number(text)


def _message(cls: type, values: dict):
    try:
        message = cls(**values)
    except TypeError as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from None
    for f in fields(cls):
        kind: Any = f.type  # a class: the messages' annotations are not strings
        accepted = (int, float) if kind is float else kind
        if not isinstance(getattr(message, f.name), accepted):
            raise ProtocolError(f"{cls.__name__}.{f.name} is not of type {kind.__name__}")
    return message


def _entries(cls: type, table: bytes, size: int) -> list[bodies.TensorEntry]:
    """Return where the tensors of a ``cls`` lie in ``size`` bytes of data. Raises ProtocolError."""
    try:
        return bodies.entries(table[bodies.LENGTH.size :], size)
    except (ValueError, RecursionError) as error:
        why = f"the body of a {cls.__name__} is no safetensors of this protocol: {error}"
        raise ProtocolError(why) from None


def send(sock, message):
    """Write one message to a connected socket, whose timeout is that of a wait for the peer to take more:
    sendall's is one for all of a chunk, which a slow link may need minutes for."""
    for chunk in _joined(encode(message)):
        left = memoryview(chunk)
        while left:
            left = left[sock.send(left) :]


def _joined(chunks: list):
    """Yield ``chunks`` with small neighbours in one; none is empty: a write of nothing fails too."""
    small = b""
    for chunk in chunks:
        if len(chunk) < SMALL_CHUNK:
            small += chunk
            continue
        yield from filter(None, [small, chunk])
        small = b""
    yield from filter(None, [small])


def receive(sock, limit: int = MAX_BODY):
    """Read one message. ``limit`` bounds header and body before they are read; header and table are checked
    before the data is read. Raises ConnectionError at the end of the stream, ProtocolError for no frame."""
    magic, header_size, body_size = PREFIX.unpack(_read(sock, PREFIX.size))
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {MAGIC!r}, not {bytes(magic)!r}")
    if header_size > min(MAX_HEADER, limit) or body_size > limit:
        raise ProtocolError(f"a frame of {header_size} + {body_size} bytes is over the limit of {limit}")
    header = _read(sock, header_size)
    cls, values = _open(header)
    if "tensors" in values or (body_size and "tensors" not in cls.__dataclass_fields__):
        raise ProtocolError(f"{cls.__name__}: tensors travel in the body of a message that has some")
    table = b""
    data = []
    if body_size:
        values["tensors"], table, data = _read_tensors(sock, cls, body_size)
    message = _message(cls, values)
    object.__setattr__(message, CAME, [PREFIX.pack(MAGIC, header_size, body_size), header, table, *data])
    return message


def _read_tensors(sock, cls: type, size: int) -> tuple[dict, bytes, list[memoryview]]:
    """Read the tensors, their table and the memory that they are in."""
    left = size - bodies.LENGTH.size
    length = _read(sock, bodies.LENGTH.size) if left >= 0 else b""
    if not length or bodies.LENGTH.unpack(length)[0] > min(MAX_HEADER, left):
        raise ProtocolError(f"the body of a {cls.__name__} is shorter than its table")
    table = length + _read(sock, bodies.LENGTH.unpack(length)[0])
    entries = _entries(cls, table, size - len(table))
    data = _read_data(sock, size - len(table))
    return bodies.unpack(entries, data), table, [data.numpy().data] if len(data) else []


def _read(sock, size: int) -> bytes:
    data = bytearray(size)
    _fill(sock, memoryview(data))
    return bytes(data)


def _read_data(sock, size: int) -> Tensor:
    """Read ``size`` bytes as a tensor, in memory of their own."""
    data = _allocate(min(size, MAX_UNSEEN))
    done = 0
    while True:
        _fill(sock, data.numpy().data[done:])
        done = len(data)
        if done == size:
            return data
        grown = _allocate(min(size, 2 * done))
        grown[:done] = data
        data = grown


def _allocate(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8)
    except RuntimeError:
        raise ProtocolError(f"there is no memory for a frame of {size} bytes") from None


def _fill(sock, view: memoryview):
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:])
        if not count:
            raise ConnectionError("the connection was closed")
        done += count
