"""The client's record of what the ranks have cached of a sampling's conditioning, which is then sent once
and not at every step.

Imports neither ComfyUI nor torch.distributed.
"""

import secrets
from dataclasses import replace

import numpy
import torch

from ..protocol import ModelCall

#: Smaller tensors are sent each time: that costs less than looking.
LEAST_BYTES = 1 << 16
#: Places, of eight bytes each, that make up a value's sparse fingerprint.
PROBES = 1 << 8
#: Values of one argument that are cached: a step may call the model several times, with other prompts.
MOST_VALUES = 8


class ArgumentCache:
    """Replace arguments that the ranks have cached by their keys.

    Values are compared, not identities: a node may change a prompt in place, or between two steps. A value is
    matched by a sparse fingerprint; ``holds`` verifies it fully while the ranks compute, since reading a
    prompt of 1024 px takes longer than sending the latent.
    """

    def __init__(self):
        self.reset()

    def reset(self):
        """Forget everything that was sent before."""
        self.client = secrets.token_hex(8)
        self.count = 0
        self.known: dict[str, dict[str, tuple[torch.Tensor, numpy.ndarray]]] = {}
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def holds(self) -> bool:
        """Verify every byte of the values that the last call left out against the cached ones.

        False: discard the call's result, ``reset`` and call again.
        """
        return all(_same(copy, value) for copy, value in self.taken)

    def shortened(self, call: ModelCall) -> ModelCall:
        """Return ``call`` without the arguments that the ranks have cached; ``reset`` if it is not sent."""
        keep = {}
        cached = {}
        forget = []
        self.taken = []
        for name, value in call.tensors.items():
            if not name.startswith("cond.") or value.numel() * value.element_size() < LEAST_BYTES:
                continue
            known = self.known.setdefault(name, {})
            probes = _probes(value)
            key = next(
                (
                    key
                    for key, (copy, own) in known.items()
                    if copy.shape == value.shape
                    and copy.dtype == value.dtype
                    and numpy.array_equal(own, probes)
                ),
                None,
            )
            if key is not None:
                cached[name] = key
                self.taken.append((known[key][0], value))
                continue
            keep[name], self.count = f"{name} {self.count}", self.count + 1
            known[keep[name]] = (value.clone(), probes)
            if len(known) > MOST_VALUES:
                forget.append(next(iter(known)))
                del known[forget[-1]]
        tensors = {name: value for name, value in call.tensors.items() if name not in cached}
        return replace(call, client=self.client, keep=keep, kept=cached, forget=forget, tensors=tensors)


def _probes(value: torch.Tensor) -> numpy.ndarray:
    """Eight bytes each at about PROBES places of a tensor of at least LEAST_BYTES, wherever it is."""
    words = value.numel() * value.element_size() // 8
    if value.device.type == "cpu":
        return (
            _bytes(value)[: 8 * words].view(numpy.int64)[:: max(1, words // PROBES) | 1].copy()
        )  # an odd step: not the same column of every row
    step = max(1, value.numel() // PROBES) | 1
    return _bytes(value.reshape(-1)[::step].cpu())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Are all bytes of two tensors of one shape and type the same? numpy compares them at the speed of
    memory, torch.equal at a third of it."""
    if a.device.type != "cpu" or b.device.type != "cpu":
        return torch.equal(a, b)
    x = _bytes(a)
    y = _bytes(b)
    whole = len(x) // 8 * 8
    return numpy.array_equal(x[:whole].view(numpy.int64), y[:whole].view(numpy.int64)) and numpy.array_equal(
        x[whole:], y[whole:]
    )


def _bytes(value: torch.Tensor) -> numpy.ndarray:
    return value.contiguous().view(-1).view(torch.uint8).numpy()
