"""Results of operations on meta tensors, made from what the same operation made before.

torch computes most results on the meta device in Python, 0.1 to 1 ms each, and a model repeats the same few
hundred operations for every block, step and rank. FakeTensorMode caches its results by the same key.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: What is found of an operation whose result is not to be made here.
UNKNOWN = object()
#: Arguments that say everything by type and value.
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class NotPlain(Exception):
    """An argument is of a kind that no key is made of."""


def _key_of(value, tensors: list[Tensor]):
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise NotPlain
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    kind = type(value)
    if kind in PLAIN or isinstance(value, PLAIN[-3:]):
        return kind, value
    if isinstance(value, (list, tuple)):
        return tuple([_key_of(each, tensors) for each in value])
    raise NotPlain


class Operator(NamedTuple):
    """What is asked of an operator at every call, which takes torch longer to tell than to call it. name:
    with its namespace."""

    name: str
    is_view: bool
    is_known: bool
    writes: bool


@cache
def operator(func) -> Operator:
    """Return the facts of an operator. is_known: results of torch's own can be made again, unless they share
    memory with an argument. writes: into an argument."""
    is_view = func.is_view
    schema = func._schema
    is_known = not is_view and func.namespace == "aten"
    return Operator(schema.name, is_view, is_known, schema.is_mutable)


#: Results that are cached, of about 1 kB each: those of a few families.
MAX_KNOWN = 20_000
#: Operation and metadata of its arguments -> what its result is made of.
_KNOWN: dict[Any, Any] = {}


class Mode(TorchDispatchMode):
    """A mode that looks at operations which ``compute`` does."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled here, and a guard around each operation costs as much as it


def compute(func, args: tuple, kwargs: dict | None):
    """Do an operation. Results of torch's own operations on meta tensors are made from the earlier result,
    where this is a tensor of its own or one of the arguments."""
    named = kwargs or {}
    if not operator(func).is_known:
        return func(*args, **named)
    tensors: list[Tensor] = []
    try:
        key = (func, _key_of(args, tensors))
        if named:
            key += (tuple(named), _key_of(tuple(named.values()), tensors))
    except NotPlain:
        return func(*args, **named)
    known = _KNOWN.get(key)
    if known is None:
        out = func(*args, **named)
        if len(_KNOWN) >= MAX_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = _metadata(out, tensors)
        return out
    if known is UNKNOWN:
        return func(*args, **named)
    if isinstance(known, int):
        return tensors[known]
    shape, stride, dtype = known
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _metadata(out, given: list[Tensor]):
    """Return what a result is made of again: the index of the argument that it is, or metadata."""
    for place, tensor in enumerate(given):
        if out is tensor:  # also a part of another tensor, or a parameter
            return place
    if type(out) is not Tensor or out.device.type != "meta" or out.storage_offset():
        return UNKNOWN
    memory = out.untyped_storage()._cdata
    if any(memory == tensor.untyped_storage()._cdata for tensor in given):
        return UNKNOWN
    if out.untyped_storage().nbytes() != _needed(out):
        return UNKNOWN
    return out.shape, out.stride(), out.dtype


def _needed(x: Tensor) -> int:
    """Bytes from the first to the last element."""
    if not x.numel():
        return 0
    reach = sum((size - 1) * step for size, step in zip(x.shape, x.stride()))
    return (reach + 1) * x.element_size()
