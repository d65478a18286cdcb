"""Operations on meta tensors, counted by a TorchDispatchMode: those of a device and of the host, and those
for which the host waits for the device, with the function at fault."""

import time
import traceback
from collections import Counter
from pathlib import Path

import torch
from meta_shapes import Mode, compute, operator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
#: Operations that make no kernel, besides views.
NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
#: Operations whose result has a size that the host reads from the device.
READS = {"nonzero", "masked_select", "unique_dim", "_unique2", "_local_scalar_dense", "bincount", "equal"}
#: Operations that copy, from wherever their tensor is.
COPIES = {"to", "_to_copy", "copy_"}


def tensors_in(value) -> list[Tensor]:
    """Return the tensors of nested arguments."""
    tensors: list[Tensor] = []
    # no generator: this is called several times for every operation
    for element in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(element, Tensor):
            tensors.append(element)
        elif isinstance(element, (list, tuple)):
            tensors += tensors_in(element)
    return tensors


def given_to(args: tuple, kwargs: dict | None) -> list[Tensor]:
    """Return the tensors of an operation's arguments."""
    return tensors_in(args) + tensors_in(list(kwargs.values())) if kwargs else tensors_in(args)


def place() -> str:
    """Name the innermost function of the backend or of diffusers that runs now, as file.function."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if ROOT / "backend" in path.parents or "diffusers" in path.parts:
            return f"{path.stem}.{frame.name}"
    return "?"


class Count(Mode):
    """Counts while it is ``active``. waits: (what, file.function) -> how often; device, host: operation ->
    how often."""

    def __init__(self):
        super().__init__()
        self.active = False
        self.reset()

    def reset(self):
        """Count from zero."""
        self.waits: Counter[str] = Counter()
        self.device: Counter[str] = Counter()
        self.host: Counter[str] = Counter()

    def wait(self, what: str):
        """Note that the host waits for the device here."""
        if self.active:
            self.waits[f"{what} in {place()}"] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # a copy to the host leaves its memory as it is
        out = args[0] if _leaves(func, args) else compute(func, args, kwargs)
        if self.active:
            self._note_call(func, args, kwargs, out)
        return out

    def watched(self, func, args: tuple, kwargs: dict | None):
        """Compute an operation for a mode inside of this one, which torch may hand on to this; count it
        once."""
        was_active, self.active = self.active, False
        try:
            out = compute(func, args, kwargs)
        finally:
            self.active = was_active
        if self.active:
            self._note_call(func, args, kwargs, out)
        return out

    def _note_call(self, func, args: tuple, kwargs: dict | None, out):
        if _leaves(func, args):
            self._leave(*args)
            return
        given = given_to(args, kwargs)
        if _is_sent(func, given, args, kwargs):
            given = given[:-1]
        self._note(func, given, tensors_in(out))

    def _leave(self, onto: Tensor, x: Tensor, non_blocking: bool = False):
        """Count a copy from the device to the host, for which nobody waits where the host's memory is
        page-locked."""
        if not (non_blocking and getattr(onto, "is_page_locked", False)):
            self.wait("copy_")
        self.device["copy_"] += 1

    def _note(self, func, given: list[Tensor], made: list[Tensor]):
        facts = operator(func)
        name = facts.name.partition("::")[2]
        every = given + made
        if not any(x.is_meta for x in every):
            self.host[name] += bool(every)
            return
        # a number of the host travels with a kernel, but is no copy
        is_copy = name in COPIES and any(x.is_meta for x in made)
        from_host = any(x.is_cpu and (x.ndim or is_copy) for x in given)
        by_mask = name.startswith("index") and any(x.dtype == torch.bool for x in given[1:])
        if from_host or name in READS or by_mask:
            self.wait(name)
        if name not in NO_KERNEL and (facts.writes or not _share_memory(given, made)):
            self.device[name] += 1


def _leaves(func, args: tuple) -> bool:
    """Does an operation copy from the device to the host?"""
    return func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta


def _is_sent(func, given: list[Tensor], args: tuple, kwargs: dict | None) -> bool:
    """Does an operation copy its last tensor, page-locked memory of the host, so that nobody waits for it?"""
    if not given or not getattr(given[-1], "is_page_locked", False):
        return False
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args)), **(kwargs or {})}.get("non_blocking", False)


def _share_memory(given: list[Tensor], made: list[Tensor]) -> bool:
    """Is a result a view of an argument? In inference mode reshape, contiguous and to are seen as such, and
    copy or not."""
    before = {x.untyped_storage()._cdata for x in given}
    return any(x.untyped_storage()._cdata in before for x in made)


class Clock(TorchDispatchMode):
    """Adds up the seconds inside operations, which on meta tensors are Python of torch's own."""

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        started = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - started
        return out
