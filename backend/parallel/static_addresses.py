"""Inputs of blocks at addresses that stay from step to step, as CUDA graphs read them: a graph replays its
kernels on the memory that it was captured with.

Prepared, and switched off: no CUDA graph is captured yet (docs/design/compile.md). What is received and keys
and values stay where they are in any case (comm.Pipe, kv_buffers.py). Tables of positions keep their angles
(fewer_passes.py), which would have to be made before a graph is captured.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from .step_context import StepContext

#: Whether blocks are given copies at addresses that stay.
ENABLED = False


class StaticInputs:
    """Buffers of one request: (micro-batch, argument) -> the memory in which blocks find it."""

    def __init__(self):
        self.buffers: dict[tuple, Tensor] = {}
        self.copied: dict[int, tuple[Tensor, Tensor]] = {}
        self.context: StepContext | None = None

    def placed(
        self, index: int, call: dict[str, Any], streams: tuple[str, ...], context: StepContext
    ) -> dict[str, Any]:
        """Return the arguments of block ``index`` in their buffers; ``streams``: names of those that another
        block of this stage returned, which are a graph's own memory. An argument that several blocks are
        given is copied once a forward."""
        if self.context is not context:
            self.context = context
            self.copied.clear()
        arguments = {}
        for name, value in call.items():
            leaves, structure = _pytree.tree_flatten(value)
            if name not in streams:
                leaves = [self._placed((index, name, i), leaf) for i, leaf in enumerate(leaves)]
            arguments[name] = _pytree.tree_unflatten(leaves, structure)
        return arguments

    def _placed(self, argument: tuple, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self.copied:
            context = self.context
            assert context is not None, "set by placed"
            where = (context.prompt, context.sample_span, context.image, *argument, value.shape, value.dtype)
            if where not in self.buffers:
                self.buffers[where] = torch.empty_like(value)
            # keep the value alive: its id is the key
            self.copied[id(value)] = value, self.buffers[where].copy_(value)
        return self.copied[id(value)][1]
