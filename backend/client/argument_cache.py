"""The client's record of what the ranks have cached of a sampling's conditioning, so that it is sent once."""

import secrets
from collections import deque
from dataclasses import replace

import numpy
import torch

from ..protocol import ModelCall

#: Smaller tensors are sent each time: that costs less than comparing.
MIN_BYTES = 1 << 16
#: Places of eight bytes that make up a value's sparse fingerprint.
FINGERPRINT_WORDS = 1 << 8
#: Values of one argument that are cached: a step may call the model several times, with other prompts.
MAX_VALUES = 8
#: Bytes of those but for the newest, here and on each rank: of a video's control images one may have 200 MB.
MAX_BYTES = 1 << 28
#: Ids from before a reset that are still to be forgotten: ranks cache for as many clients (serving's
#: MAX_CACHED_CLIENTS).
MAX_EARLIER = 4


class ArgumentCache:
    """Replace arguments that the ranks have cached by their keys. Values are compared, not identities: a node
    may change a prompt in place. A value is matched by a sparse fingerprint; ``holds`` verifies it fully
    while the ranks compute, since that takes longer than sending."""

    def __init__(self):
        self._earlier: deque[str] = deque(maxlen=MAX_EARLIER)
        self._begin()

    @property
    def ids(self) -> list[str]:
        """Return the ids under which ranks may have something cached, those from before a reset first."""
        return [*self._earlier, *([self.client] if self.known else [])]

    def reset(self):
        """Send everything again, under another id; ranks keep what they have until it is ``forgotten``."""
        self._earlier.extend([self.client] if self.known else [])
        self._begin()

    def forgotten(self):
        """Begin anew: ranks have freed what they had under all ``ids``."""
        self._earlier.clear()
        self._begin()

    def _begin(self):
        self.client = secrets.token_hex(8)
        self.count = 0
        self.known: dict[str, dict[str, tuple[torch.Tensor, numpy.ndarray]]] = {}
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []

    def holds(self) -> bool:
        """Verify every byte that the last call left out. False: discard its result, ``reset``, call again."""
        return all(_same(copy, value) for copy, value in self.taken)

    def shortened(self, call: ModelCall) -> ModelCall:
        """Return ``call`` without the arguments that the ranks have cached; ``reset`` if it is not sent."""
        cache = {}
        cached = {}
        forget = []
        self.taken = []
        for name, value in call.tensors.items():
            if not name.startswith("cond.") or value.nbytes < MIN_BYTES:
                continue
            known = self.known.setdefault(name, {})
            fingerprint = _fingerprint(value)
            alike = next((key for key, each in known.items() if _is_alike(each, value, fingerprint)), None)
            if alike:
                cached[name] = alike
                self.taken.append((known[alike][0], value))
                continue
            cache[name] = f"{name} {self.count}"
            self.count += 1
            known[cache[name]] = (value.clone(), fingerprint)
            while len(known) > 1 and (len(known) > MAX_VALUES or _size(known) > MAX_BYTES):
                forget.append(next(iter(known)))
                del known[forget[-1]]
        tensors = {name: value for name, value in call.tensors.items() if name not in cached}
        return replace(call, client=self.client, cache=cache, cached=cached, forget=forget, tensors=tensors)


def _size(known: dict[str, tuple[torch.Tensor, numpy.ndarray]]) -> int:
    return sum(copy.nbytes for copy, _ in known.values())


def _is_alike(
    known: tuple[torch.Tensor, numpy.ndarray], value: torch.Tensor, fingerprint: numpy.ndarray
) -> bool:
    """Return whether a known value, with its fingerprint, may be this one."""
    copy, own = known
    is_of_form = copy.shape == value.shape and copy.dtype == value.dtype
    return is_of_form and numpy.array_equal(own, fingerprint)


def _fingerprint(value: torch.Tensor) -> numpy.ndarray:
    """Return eight bytes each at about FINGERPRINT_WORDS places of a tensor of at least MIN_BYTES."""
    # steps are odd: not the same column of every row
    if value.device.type == "cpu":
        words = value.nbytes // 8
        step = max(1, words // FINGERPRINT_WORDS) | 1
        return _bytes(value)[: 8 * words].view(numpy.int64)[::step].copy()
    step = max(1, value.numel() // FINGERPRINT_WORDS) | 1
    return _bytes(value.reshape(-1)[::step].cpu())


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare all bytes of two tensors of one form. numpy is three times as fast as torch.equal."""
    if a.device.type != "cpu" or b.device.type != "cpu":
        return torch.equal(a, b)
    x = _bytes(a)
    y = _bytes(b)
    end = len(x) // 8 * 8
    words_equal = numpy.array_equal(x[:end].view(numpy.int64), y[:end].view(numpy.int64))
    return words_equal and numpy.array_equal(x[end:], y[end:])


def _bytes(value: torch.Tensor) -> numpy.ndarray:
    return value.contiguous().view(-1).view(torch.uint8).numpy()
