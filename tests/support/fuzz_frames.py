"""Frames for a fuzz: good ones of every message, and mutations of bytes, of lengths, of the header's values,
and of the tensors' types, shapes and values that leave the rest in order, so that they reach the checks
behind the decoder."""

import json
import math
import random
from dataclasses import dataclass, fields

import torch

from backend.protocol import MESSAGES, Arrange, Describe, Load, ModelCall, Sample, Unload, framing
from backend.protocol.tensor_body import DTYPES

#: Text that json does not write -> the string that stands for it.
RAW = {
    "@nan": "NaN",
    "@infinity": "-Infinity",
    "@beyond": "1e999",
    "@digits": "7" * 5000,
    "@deep": "[" * 100_000 + "]" * 100_000,
    "@deep object": '{"a":' * 100_000 + "1" + "}" * 100_000,
    "@nested": "[" * 300 + "]" * 300,
}
STRINGS = [
    *("", "\0", "/a\0b", "\ud800", "a" * 5000, "/" + "b" * 5000, "/tmp", "/dev/zero", "/dev/null/a", "../.."),
    *(
        "1,2",
        ",",
        "12" * 9999,
        "auto",
        "sdpa",
        "sage",
        "cpu",
        "cuda",
        "megatron",
        "2d",
        "reuse",
        "extrapolate",
    ),
    *("euler", "heun", "dpmpp_2m", "dpmpp_sde", "uni_pc", "ddim", "euler_cfg_pp", "lcm", "bf16", "fp16", "+"),
]
NUMBERS = [
    *(0, 1, -1, 2, 3, 4, 7, 16, 63, 64, 255, 4096, 4097, 65536, 2**31 - 1, 2**31, 2**32, 2**40, 2**53),
    *(2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**20, -(10**19), 10**21, 10**400),
    *(0.5, -0.0, 1e-320, 1e30, -1e30, 1e38, 1e300, 1.7e308, 1e6, 7.5, True, False, None),
]
OTHERS = [
    [],
    {},
    [[]],
    [0],
    [1, 2],
    [16, 8, 8],
    [[16, 8, 8]],
    [0] * 2000,
    {"": {}},
    {"strength": 2},
    [["a", 1]],
]
#: Type -> those of it.
ALIKE: dict[type, list] = {}
for _value in (*STRINGS, *NUMBERS, *OTHERS):
    ALIKE.setdefault(type(_value), []).append(_value)
NAMES = [
    *("noise", "latent", "sigmas", "denoise_mask", "percent_sigmas", "positive.y", "positive.guidance"),
    *("positive.c_crossattn", "negative.c_crossattn", "positive2.c_crossattn", "positive.ref_latents.0"),
    *("weight.positive", "weight.x", "positive99999.y", "positive.", ".", "", "\ud800", "x", "time"),
    *("cond.y", "cond.c_crossattn", "cond.guidance", "cond.", "__metadata__", "positive.attention_mask"),
]
#: A Sample or a ModelCall is this many of the good frames: it has the most to check.
REQUESTS = 5
#: Bytes that a tensor is filled with: zeros, NaN, infinity, ones.
FILLS = [b"\0", b"\xff", b"\0\0\x80\x7f", b"\0\0\x80\x3f", b"\x01"]
LENGTHS = [0, 1, 7, 8, 9, 16, 255, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 1 << 28, 1 << 32, (1 << 34) + 1]


@dataclass
class Parts:
    """A frame that is still one: the header's values, and [name, dtype, shape, bytes] of each tensor."""

    header: dict
    tensors: list[list]

    def join(self) -> bytes:
        """The frame."""
        table, data = {}, b""
        for name, dtype, shape, values in sorted(self.tensors, key=_size, reverse=True):
            table[name] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [len(data), len(data) + len(values)],
            }
            data += values
        return framed(text(self.header), text(table) if table else None, data)


def _size(entry) -> int:
    return DTYPES[entry[1]].itemsize if entry[1] in DTYPES else 0


def text(value) -> bytes:
    """JSON, with what stands in RAW."""
    written = json.dumps(value)
    if '"@' in written:
        for name, raw in RAW.items():
            written = written.replace(f'"{name}"', raw)
    return written.encode()


def framed(header: bytes, table: bytes | None, data: bytes = b"") -> bytes:
    """A frame of these bytes with the lengths that belong to them."""
    body = b"" if table is None else len(table).to_bytes(8, "little") + table + data
    return framing.PREFIX.pack(framing.MAGIC, len(header), len(body)) + header + body


def parse(frame: bytes) -> Parts | None:
    """The parts of a frame that was not damaged."""
    try:
        _, size, body = framing.PREFIX.unpack_from(frame)
        start = framing.PREFIX.size + size
        header = json.loads(frame[framing.PREFIX.size : start])
        table, data = {}, b""
        if body:
            length = int.from_bytes(frame[start : start + 8], "little")
            table, data = json.loads(frame[start + 8 : start + 8 + length]), frame[start + 8 + length :]
        tensors = [
            [name, e["dtype"], e["shape"], data[slice(*e["data_offsets"])]] for name, e in table.items()
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, framing.struct.error):
        return None
    return Parts(header, tensors) if isinstance(header, dict) else None


def seeds(model: str, path: str, sample: Sample) -> list[bytes]:
    """Good frames: one of every message, and the requests of a client for the loaded ``model``; ``sample``
    shall be small."""
    x = sample.tensors["noise"]
    conditioning = {
        key.partition(".")[2]: v for key, v in sample.tensors.items() if key.startswith("positive.")
    }
    call = {"x": x, "time": torch.full((x.shape[0],), 0.5)} | {
        f"cond.{k}": v for k, v in conditioning.items()
    }
    mixed = {f"positive2.{key}": value for key, value in conditioning.items()}
    messages = [
        sample,
        Sample(
            **vars(sample)
            | {"prompts": {"positive2": {"strength": 0.5, "from": 1.0}}, "tensors": sample.tensors | mixed}
        ),
        Sample(**vars(sample) | {"tensors": sample.tensors | {"denoise_mask": torch.ones_like(x)}}),
        ModelCall(model, client="c", cache={"cond.y": "k"}, tensors=call),
        ModelCall(model, client="c", cached={"cond.y": "k"}, forget=["k"], tensors=call),
        Describe(model, list(x.shape[1:]), 4, 1),
        Arrange({"ulysses_degree": 1, "attention": "auto", "gpus": ""}),
        Load(path),
        Load(path, loras=[["/nowhere.safetensors", 1.0]]),
        Unload(model),
    ]
    plain = {str: "m", int: 1, float: 1.0, bool: False, list: [], dict: {}}
    for kind in MESSAGES.values():
        names = {field.name: plain[field.type] for field in fields(kind) if field.name != "tensors"}
        messages.append(kind(**names))
    frames = [b"".join(map(bytes, framing.encode(message))) for message in messages]
    return frames[:5] * REQUESTS + frames[5:]


class Mutator:
    """Damages frames, the same for the same ``seed``."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def mutate(self, frame: bytes, other: bytes) -> bytes:
        """``frame`` with one to four changes, perhaps with parts of ``other``."""
        parts = parse(frame) if self.random.random() < 0.85 else None
        if parts is None:
            return self._damage(frame)
        for _ in range(self.random.choice((1, 1, 2, 4))):
            self._change(parts, other)
        frame = parts.join()
        return self._damage(frame) if self.random.random() < 0.1 else frame

    def _change(self, parts: Parts, other: bytes):
        turn = self.random.random()
        if turn < 0.5 or not parts.tensors:
            self._change_value(parts.header)
        elif turn < 0.95:
            self._change_tensor(parts)
        elif found := parse(other):
            parts.tensors += [list(each) for each in found.tensors]

    def _odd(self, value=None):
        """Something else in place of ``value``, most often of its type, which the decoder lets through."""
        alike = ALIKE.get(type(value))
        if self.random.random() < 0.7 and alike:
            return self.random.choice(alike)
        turn = self.random.random()
        if turn < 0.02:
            return self.random.choice(list(RAW))
        known = STRINGS if turn < 0.3 else NUMBERS if turn < 0.8 else OTHERS
        return self.random.choice(known)

    def _change_value(self, header: dict):
        """One value anywhere in the header, or a name."""
        places = []
        _walk(header, places)
        if not places:
            header[self.random.choice(STRINGS)] = self._odd()
            return
        container, key = self.random.choice(places)
        if key == "type" and self.random.random() < 0.9:
            return
        turn = self.random.random()
        if turn < 0.85:
            container[key] = json.loads(json.dumps(self._odd(container[key])))
        elif turn < 0.92:
            del container[key]
        elif isinstance(container, dict):
            container[self.random.choice(STRINGS + NAMES)] = container.pop(key)
        else:
            container += container[: 1 << 10]

    def _change_tensor(self, parts: Parts):
        entry = self.random.choice(parts.tensors)
        turn = self.random.randrange(8)
        if turn == 0:
            entry[0] = self.random.choice(NAMES)
        elif turn == 1:
            parts.tensors.remove(entry)
        elif turn == 2:
            entry[1] = self.random.choice([*DTYPES, "C64", 5, None, "@nan"])
        elif turn == 3 and entry[2]:
            entry[2] = [*entry[2]]
            entry[2][self.random.randrange(len(entry[2]))] = self._odd()
        elif turn == 4:
            parts.tensors.append([self.random.choice(NAMES), *entry[1:]])
        elif turn == 5 and entry[3]:
            fill = self.random.choice(FILLS)
            entry[3] = (fill * len(entry[3]))[: len(entry[3])]
        else:
            self._reshape(entry)

    def _reshape(self, entry: list):
        """Another type and shape of as many bytes as they need, some of them new."""
        dtype = self.random.choice([entry[1] if entry[1] in DTYPES else "F32", *DTYPES])
        shape = [self.random.choice((0, 1, 1, 2, 3, 4, 8, 16, 64)) for _ in range(self.random.randrange(6))]
        if self.random.random() < 0.6 and all(type(side) is int for side in entry[2]):
            shape = [*entry[2]]
            at = self.random.randrange(len(shape) + 1)
            shape[at : at + self.random.randrange(2)] = [self.random.choice((1, 2, 16))][
                : self.random.randrange(3)
            ]
        size = math.prod(shape) * DTYPES[dtype].itemsize
        if 0 <= size < 1 << 20:
            entry[1:] = [dtype, shape, (entry[3] or b"\0") * (size // max(1, len(entry[3])) + 1)]
            entry[3] = entry[3][:size]

    def _damage(self, frame: bytes) -> bytes:
        """Bytes, lengths, and the end."""
        data, turn = bytearray(frame), self.random.randrange(6)
        at = self.random.randrange(len(data)) if self.random.random() < 0.5 else self._near_the_start(data)
        if turn == 0:
            data[at] ^= 1 << self.random.randrange(8)
        elif turn == 1:
            data[at : at + self.random.randrange(9)] = self.random.randbytes(self.random.randrange(9))
        elif turn == 2:
            del data[at:]
        elif turn == 3:
            data[4:8] = (self.random.choice(LENGTHS) & 0xFFFFFFFF).to_bytes(4, "big")
        elif turn == 4:
            data[8:16] = self.random.choice(LENGTHS).to_bytes(8, "big")
        else:
            start = framing.PREFIX.size + int.from_bytes(data[4:8], "big")
            data[start : start + 8] = self.random.choice(LENGTHS).to_bytes(8, "little")
        return bytes(data)

    def _near_the_start(self, data) -> int:
        return self.random.randrange(min(len(data), 600))


def _walk(value, places: list):
    """Every (container, key) below ``value``."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys)[:50]:
        places.append((value, key))
        _walk(value[key], places)
