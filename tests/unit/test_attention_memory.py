"""What is held while a rank attends: tensors of Ulysses and of rings are freed once they are done with."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from live_memory import LiveMemory

from backend.parallel.attention import attention_kernels, ulysses_ring
from backend.parallel.attention.attention_hook import Attention, BlockCall
from backend.parallel.mesh import Axis, single
from backend.parallel.sequence import SequenceLengths, Span, whole_sequence
from backend.parallel.step_context import StepContext
from backend.parallel.wire_bytes import FP8, FULL

HEADS, SIZE, TOKENS, TEXT = 4, 8, 12, 3
#: Every test's axis of several ranks; nothing is sent.
GROUP = object()


class Done:
    """A communication that is done."""

    def wait(self):
        return True


class Messages:
    """Stands for the all-to-alls of one rank: notes which of their tensors are alive at each attention, and
    as each is sent."""

    def __init__(self, monkeypatch):
        self.tensors: dict[str, weakref.ref] = {}
        self.alive: list[set[str]] = []
        self.alive_before: list[set[str]] = []
        monkeypatch.setattr(dist, "all_to_all_single", self.all_to_all)
        for module, name in ((attention_kernels, "attend"), (ulysses_ring, "attend_lse")):
            monkeypatch.setattr(module, name, self.looked_at(getattr(module, name)))

    def all_to_all(self, received, sent, *_, **__):
        self.alive_before.append(self.living())
        number = len(self.tensors) // 2
        received.normal_() if received.is_floating_point() else received.zero_()
        for name, tensor in (("sent", sent), ("received", received)):
            self.tensors[f"{name} {number}"] = weakref.ref(tensor.untyped_storage())
        return Done()

    def living(self) -> set[str]:
        return {name for name, storage in self.tensors.items() if storage() is not None}

    def looked_at(self, attend):
        def look(*args, **named):
            self.alive.append(self.living())
            return attend(*args, **named)

        return look


def attention_of(axis_name: str, ranks: int, wire: str = FULL) -> Attention:
    axis = Axis(GROUP, 0, ranks, tuple(range(ranks)))  # pyright: ignore[reportArgumentType]  # unused
    mesh = replace(single(), **{axis_name: axis, "sp": axis})
    return Attention(mesh, head_size=SIZE, wire=wire)


def call_of(ranks: int, text: int = 0, static_text: bool = False) -> BlockCall:
    sequence = SequenceLengths(text, TOKENS, "first" if text else None)
    context = StepContext("positive", 0, Span(0, 1))
    tokens = whole_sequence(sequence, 0, ranks)
    return BlockCall(0, context, tokens, ("joint" if text else "image",), static_text=static_text)


@pytest.fixture
def messages(monkeypatch):
    monkeypatch.setattr(ulysses_ring, "head_chunks", lambda *_, **__: 2)
    return Messages(monkeypatch)


def numbers(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, tokens, SIZE) for _ in range(3)]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("wire", [FULL, FP8])
def test_ulysses_holds_what_has_still_to_go_or_to_be_attended_to(messages, wire, early):
    """Of two chunks of heads: what was sent until it has gone, what came until its attention has ended."""
    attention = attention_of("ulysses", 2, wire)
    attention.call = call_of(2)
    q, k, v = numbers(TOKENS // 2)
    first = 1 if early else 0  # values go before, in a message of their own
    if early:
        attention.note_values(0, 1, v.transpose(1, 2).flatten(2))
    out = attention(q, k, v)
    assert out.shape == q.shape
    values = {"received 0"} if early and wire == FULL else set()
    chunks = [f"received {first}", f"received {first + 1}"]
    coming = {chunks[1], f"sent {first + 1}"}
    attended = [{chunks[0]}, {chunks[1]}] if wire == FULL else [set(), set()]  # else unpacked, in a copy
    outputs = {f"sent {first + 2}", f"received {first + 2}"}
    assert messages.alive == [coming | attended[0] | values, outputs | attended[1] | values]
    assert messages.alive_before[-2:] == [coming | values, outputs]  # their outputs are sent


@pytest.mark.parametrize("static_text", [False, True])
def test_a_ring_holds_two_hops(messages, static_text):
    """What it attends to and what is coming; its own keys and values for the first hop alone."""
    ranks = 4
    attention = attention_of("ring", ranks)
    attention.call = call_of(ranks, TEXT * ranks if static_text else 0, static_text)
    tokens = TOKENS // ranks + (TEXT if static_text else 0)
    assert attention(*numbers(tokens)).shape == (1, HEADS, tokens, SIZE)
    # what is sent is what came in the hop before
    assert messages.alive == [
        {"sent 0", "received 0"},
        {"received 0", "sent 1", "received 1"},
        {"received 1", "sent 2", "received 2"},
        {"received 2"},
    ]


def test_a_ring_merges_in_one_float32_copy_of_a_block(monkeypatch):
    """Besides the output and the block itself, in bf16; the library's merge makes three."""
    ranks = 3
    q, k, v = (torch.randn(1, HEADS, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    keys = [torch.stack([k, v]) + index for index in range(ranks)]
    arriving = iter(keys[1:])
    monkeypatch.setattr(ulysses_ring, "pass_on", lambda *_: lambda: next(arriving))
    axis = Axis(GROUP, 0, ranks, (0, 2, 1))  # pyright: ignore[reportArgumentType]  # nothing is sent
    with torch.inference_mode(), LiveMemory() as memory:
        found = ulysses_ring.ring_attend("auto", q, [keys[0]], [512] * ranks, axis, [None] * ranks, None)
    one = q.numel() * torch.float32.itemsize
    assert memory.peak < 2.6 * one
    want = F.scaled_dot_product_attention(q.float(), *torch.cat(keys, dim=3).float())
    assert (found.float() - want).norm() < 0.01 * want.norm()
