"""Messages between a client (the nodes, a script) and rank 0, and their framing.

A frame is a fixed prefix (magic, header length, body length), a JSON header and a safetensors body: no pickle on the wire.
Every message is a frozen dataclass; its ``tensors`` travel in the body, its other fields in the header.
"""

import json
import struct
from dataclasses import dataclass, field, fields

import safetensors
import safetensors.torch

MAGIC = b"PDT1"
PREFIX = struct.Struct("!4sIQ")
MAX_HEADER = 1 << 20
MAX_BODY = 1 << 34
#: Before a peer has shown the token it may not make us allocate more than this.
MAX_HELLO = 4096
VERSION = 1


class ProtocolError(ConnectionError):
    """The peer does not speak this protocol; the connection is closed."""


class BackendError(RuntimeError):
    """The backend ended or cannot be reached; the message names the rank and the log where they are known."""


class RefusedError(ValueError):
    """The backend refused a request and stays warm; the message says what, why and the remedy."""


@dataclass(frozen=True)
class Hello:
    """First message of a client: proves that it knows the session's token."""
    token: str
    version: int = VERSION


@dataclass(frozen=True)
class Welcome:
    """Answer to Hello: what runs behind this socket."""
    world_size: int
    device: str
    degrees: dict
    pids: list


@dataclass(frozen=True)
class Load:
    """Load the transformer at ``path`` (a file or a diffusers folder); a no-op where it is loaded already."""
    path: str
    weight_dtype: str = "default"


@dataclass(frozen=True)
class Loaded:
    """``model`` names the loaded transformer in later requests; ``info`` is the family's facts for the client."""
    model: str
    family: str
    info: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Unload:
    """Free the transformer ``model`` on every rank (no error where it is not loaded)."""
    model: str


@dataclass(frozen=True)
class Sample:
    """Denoise one latent.

    tensors: ``noise`` and ``latent`` (B, C, [T,] H, W) in the model's latent space, ``sigmas`` (steps + 1,), ``denoise_mask``
    (broadcast to the latent's shape) where there is one, ``percent_sigmas`` (the model's noise levels after the parts of sampling
    solver_names.PERCENTS, float64) for the solvers that need them, and the conditioning as ``positive.KEY`` / ``negative.KEY`` with ComfyUI's names of
    model arguments (``c_crossattn``, ``y``, ``guidance``, ...).
    ``preview_seconds`` is the least time between two x0 previews; 0 sends none.
    """
    model: str
    sampler: str
    cfg: float
    seed: int
    num_pipeline_patch: int = 0
    warmup_steps: int = 1
    stale_kv: str = "reuse"
    attention: str = "auto"
    preview_seconds: float = 0.0
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """``step`` of ``total`` steps are done; tensors may hold ``x0`` (B, C, [T,] H, W), the latest denoised prediction."""
    step: int
    total: int
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """tensors: ``samples`` (B, C, [T,] H, W), float32, in the model's latent space. ``stats``: seconds and counters."""
    stats: dict = field(default_factory=dict)
    tensors: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Cancel:
    """Stop the running request of this connection at the next step."""


@dataclass(frozen=True)
class Cancelled:
    """The request stopped at ``step``; the model stays loaded."""
    step: int = 0


@dataclass(frozen=True)
class Failure:
    """A request that was refused (``fatal`` False, the backend stays warm) or that ended the backend (``fatal`` True)."""
    message: str
    fatal: bool = False
    rank: int = 0


@dataclass(frozen=True)
class Ping:
    """Is the backend alive?"""


@dataclass(frozen=True)
class Pong:
    models: list = field(default_factory=list)


@dataclass(frozen=True)
class Shutdown:
    """End every rank."""


MESSAGES = {cls.__name__: cls for cls in (
    Hello, Welcome, Load, Loaded, Unload, Sample, Progress, Result, Cancel, Cancelled, Failure, Ping, Pong, Shutdown)}


def encode(message) -> list[bytes]:
    """The frame of a message, as buffers to be sent in order."""
    body = b""
    header = {"type": type(message).__name__}
    for f in fields(message):
        value = getattr(message, f.name)
        if f.name == "tensors":
            body = safetensors.torch.save(_own_memory(value)) if value else b""
        else:
            header[f.name] = value
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER or len(body) > MAX_BODY:
        raise ProtocolError(f"a {header['type']} of {len(text)} + {len(body)} bytes is over the limits of {MAX_HEADER} + {MAX_BODY}.")
    return [PREFIX.pack(MAGIC, len(text), len(body)), text, body]


def _own_memory(tensors: dict) -> dict:
    """The tensors on the CPU, each in memory of its own: safetensors refuses to write what two names share (one prompt in two places)."""
    found, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


def decode(header: bytes, body: bytes):
    """The message of a frame; ProtocolError where it is not one of ours."""
    try:
        values = json.loads(header)
        cls = MESSAGES[values.pop("type")]
        if body:
            values["tensors"] = safetensors.torch.load(bytes(body))
        message = cls(**values)
    except (ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        raise ProtocolError(f"not a message of this protocol: {type(error).__name__}: {error}") from None
    for f in fields(cls):
        if not isinstance(getattr(message, f.name), _wire_types(f.type)):
            raise ProtocolError(f"{cls.__name__}.{f.name} is not of type {f.type.__name__}")
    return message


def _wire_types(kind):
    return (int, float) if kind is float else kind


def send(sock, message):
    """Write one message to a connected socket."""
    for part in filter(None, encode(message)):
        sock.sendall(part)


def receive(sock, limit: int = MAX_BODY):
    """Read one message; ConnectionError at the end of the stream, ProtocolError for anything that is not a frame.

    ``limit`` bounds header and body before they are read, so that a peer cannot make us allocate more.
    """
    magic, header_size, body_size = PREFIX.unpack(_read(sock, PREFIX.size))
    if magic != MAGIC:
        raise ProtocolError(f"a frame starts with {MAGIC!r}, not {bytes(magic)!r}")
    if header_size > min(MAX_HEADER, limit) or body_size > limit:
        raise ProtocolError(f"a frame of {header_size} + {body_size} bytes is over the limit of {limit}")
    return decode(bytes(_read(sock, header_size)), _read(sock, body_size))


def _read(sock, size: int) -> bytearray:
    # grown as bytes arrive: a length alone never makes us allocate
    data = bytearray(min(size, 1 << 24))
    done = 0
    while done < size:
        if done == len(data):
            data.extend(bytes(min(size - done, 1 << 28)))
        with memoryview(data) as view:
            count = sock.recv_into(view[done:], min(size - done, len(data) - done))
        if not count:
            raise ConnectionError("the connection was closed")
        done += count
    return data
