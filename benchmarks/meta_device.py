"""A GPU that computes nothing: meta tensors stand for a device's, and operations on them are counted.

What the host does for a device can be seen without one. Operations are counted (operation_count.py); reads
of a device's values and copies between host and device are counted as waits, with the function at fault.
Collectives are stand-ins that take and return tensors of the right size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from operation_count import Count
from torch import Tensor

from backend.loading import staging
from backend.parallel.attention import attention_kernels
from backend.sampling.noise import FreshNoise

META = torch.device("meta")


class Work:
    """A communication that is done."""

    def wait(self):
        return True

    def is_completed(self):
        return True


def _contiguous(*tensors: Tensor):
    found = [x for x in tensors if isinstance(x, Tensor)]
    assert all(x.is_contiguous() for x in found), "NCCL sends contiguous tensors"


class Event:
    """Stands for torch.cuda.Event: asked twice, the device is there the second time."""

    def __init__(self):
        self.asked = 0

    def record(self):
        pass

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 1


class PeerOperation:
    """Stands for torch.distributed.P2POp."""

    def __init__(self, operation, tensor: Tensor, peer: int, group=None):
        _contiguous(tensor)


def _one_work(*tensors, **named) -> Work:
    _contiguous(*tensors)
    return Work()


def _collective(received, sent, *rest, async_op: bool = False, **named) -> Work | None:
    work = _one_work(sent, received)
    return work if async_op else None


def _attend(query, key, value, mask=None, *rest, **named) -> Tensor:
    return torch.mul(query[..., :1], 1).expand(*query.shape[:3], value.shape[3])  # one kernel


def _attend_lse(kernel, query, key, value, mask, scale) -> tuple[Tensor, Tensor]:
    return torch.mul(query, key[:, :1, :1, :1]), query.new_empty(query.shape[:3], dtype=torch.float32)


def _unique(x: Tensor, sorted=True, return_inverse=False, return_counts=False, dim=None):
    """torch.unique of values, or of rows (``dim`` 0), that all differ."""
    if dim is None:
        values = x.flatten()
        return values, values.nonzero()[:, 0].view(x.shape)  # which waits, as it would
    return x, SimpleNamespace(tolist=lambda: list(range(len(x))))


class NoNoise(FreshNoise):
    """FreshNoise without a generator, of which a meta device has none. What the host draws it draws."""

    def __init__(self, seed: int, batch: int, grid, device: torch.device, *rest):
        super().__init__(seed, batch, grid, torch.device("cpu"), *rest)
        self.device = device

    def draw(self, index: int) -> Tensor:
        return self.grid.to_tokens(torch.empty(self.shape, device=self.device))


#: Reads of values, as methods of Tensor -> what they return of a tensor without values.
READERS: dict[str, Callable[[Tensor], object]] = {
    "__bool__": lambda x: False,
    "__int__": lambda x: 0,
    "__float__": lambda x: 1.0,
    "__index__": lambda x: 0,
    "item": lambda x: 1.0 if x.is_floating_point() else 1,
    "tolist": lambda x: torch.ones(x.shape, dtype=x.dtype).tolist(),
    "cpu": lambda x: torch.ones(x.shape, dtype=x.dtype),
    "bincount": lambda x: torch.tensor([x.numel() // 2, x.numel() - x.numel() // 2]),  # two experts
    "numpy": lambda x: torch.ones(x.shape, dtype=x.dtype).numpy(),
}
#: The names of an all-gather of one tensor that torch has: FSDP2 of torch 2.13 and later calls the second.
GATHERS = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
PEERS = {
    **dict.fromkeys(("isend", "irecv", "broadcast", "all_reduce"), _one_work),
    **dict.fromkeys(GATHERS, _collective),
    "P2POp": PeerOperation,
    "batch_isend_irecv": lambda operations: [Work()],
    "all_to_all_single": _collective,
}


def _is_meta(device) -> bool:
    return device is not None and torch.device(device).type == "meta"


@contextmanager
def meta_device(count: Count) -> Iterator[None]:
    """Let collectives, attention and reads of values work on meta tensors; ``count`` notes the waits."""
    with ExitStack() as stack:

        def replace(where, name: str, stand_in):
            stack.enter_context(patch.object(where, name, stand_in))

        for name, stand_in in PEERS.items():
            replace(dist, name, stand_in)
        replace(torch, "autocast", lambda *rest, **named: nullcontext())  # which knows no meta device
        # every mask is true: sizes are those of the largest result
        stack.enter_context(patch("torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True))
        stack.enter_context(patch("backend.sampling.step_loop.FreshNoise", NoNoise))
        replace(attention_kernels, "SDPA", _attend)
        replace(F, "scaled_dot_product_attention", _attend)
        replace(attention_kernels, "_lse_kernel", _attend_lse)
        replace(torch, "unique", _unique)
        for name, value in READERS.items():
            replace(Tensor, name, _reader(count, name, getattr(Tensor, name), value))
        replace(Tensor, "__getitem__", _indexed(count, Tensor.__getitem__))
        replace(Tensor, "__setitem__", _indexed(count, Tensor.__setitem__))
        replace(Tensor, "to", _to_host(count, Tensor.to))
        replace(torch.cuda, "Event", Event)
        replace(staging, "page_locked", _page_locked)
        replace(torch, "tensor", _from_host(count, torch.tensor))
        replace(torch, "as_tensor", _from_host(count, torch.as_tensor))
        for owner in (torch, Tensor):
            replace(owner, "repeat_interleave", _repeated(count, owner.repeat_interleave))
        replace(Tensor, "new_tensor", _new_tensor(count, Tensor.new_tensor))
        yield


def _reader(count: Count, name: str, own, value):
    def read(self, *rest, **named):
        if self.device.type != "meta":
            return own(self, *rest, **named)
        count.wait(name)
        return value(self)

    return read


def _indexed(count: Count, own):
    @wraps(own)  # subclasses of tensors are told this name
    def access(self, index, *value):
        parts = index if isinstance(index, tuple) else (index,)
        if self.device.type == "meta" and any(isinstance(each, list) for each in parts):
            count.wait("index")  # a list is a tensor of the host first
        return own(self, index, *value)

    return access


def _to_host(count: Count, own):
    def to(self, *rest, **named):
        targets = [x for x in (*rest, named.get("device")) if isinstance(x, (str, torch.device))]
        if self.device.type == "meta" and any(not _is_meta(x) for x in targets):
            count.wait("to")
            return own(torch.ones(self.shape, dtype=self.dtype), *rest, **named)
        return own(self, *rest, **named)

    return to


def _repeated(count: Count, own):
    def repeat(self, repeats, *rest, output_size=None, **named):
        if not (isinstance(repeats, Tensor) and repeats.is_meta):
            return own(self, repeats, *rest, output_size=output_size, **named)
        if output_size is None:
            count.wait("repeat_interleave")
        return self.clone()  # as if each were one

    return repeat


def _from_host(count: Count, own):
    def tensor(data, *rest, **named):
        if _is_meta(named.get("device")) and not (isinstance(data, Tensor) and data.is_meta):
            count.wait("tensor")
        return own(data, *rest, **named)

    return tensor


def _page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out = torch.empty(shape, dtype=dtype)
    vars(out)["is_page_locked"] = True
    return out


def _new_tensor(count: Count, own):
    def new_tensor(self, data, *rest, **named):
        if self.device.type == "meta":
            count.wait("new_tensor")
        return own(self, data, *rest, **named)

    return new_tensor
