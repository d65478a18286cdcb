"""Regional compilation, as diffusers' compile_repeated_blocks: the blocks of a kind share their graphs."""

import errno
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.exc
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes

from ..errors import reason
from ..hardware.device_memory import is_out_of_memory
from ..runtime.opaque_ops import RUNNING, opaque_layers, unavailable
from ..units import ranks_text
from .effect_order import in_order

#: What compiles the graphs: a name of torch.compiler.list_backends().
BACKEND = INDUCTOR = "inductor"
#: Most graphs of one kind of block: the whole sequence and patches, with text and without, batch sizes.
MAX_GRAPHS = 64
#: In the place of kinds of blocks, where none is compiled.
ALL_BLOCKS = "blocks"
#: Where an error of torch's goes on with where it arose, and advice for developers.
ADVICE = re.compile(r"\s*(?:from user code:|Set TORCHDYNAMO_VERBOSE)")
#: Causes that pass, as disks that are full: what they made fail is compiled in the next request.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


@dataclass
class Compiler:
    """Compiles the blocks of this process, and knows what that has cost.

    graphs: how many were compiled, in so many seconds. compiled: a class's forward -> the compiled one.
    failed: the same -> why it runs uncompiled. passing: those of failed that the next request tries again.
    began: whether the graph of the block that runs has.
    """

    graphs: int = 0
    seconds: float = 0.0
    compiled: dict[Callable, Callable] = field(default_factory=dict)
    failed: dict[Callable, str] = field(default_factory=dict)
    passing: set[Callable] = field(default_factory=set)
    began: bool = False

    def run(self, block: nn.Module, layers: dict[str, Callable], args: tuple, kwargs: dict, first: bool):
        """Run a block, compiled where that works. ``layers``: its opaque layers; ``first``: of the rank."""
        forward = type(block).forward
        if forward in self.failed:
            return forward(block, *args, **kwargs)
        RUNNING.layers = layers
        args = tuple(_plain(each, first) for each in args)
        kwargs = {name: _plain(each, first) for name, each in kwargs.items()}
        self.began = False
        try:
            if forward not in self.compiled:
                self.compiled[forward] = torch.compile(
                    forward, fullgraph=True, dynamic=True, backend=self._backend
                )
            return self.compiled[forward](block, *args, **kwargs)
        except Exception as error:  # of any class: torch wraps not all that its compiler raises
            if self.began:  # of the block itself, which may have sent
                raise
            self._note(block, error)
        return forward(block, *args, **kwargs)

    def forget_passing(self):
        """Have the next request try again what failed for a cause that may be over."""
        for forward in self.passing:
            self.failed.pop(forward, None)
        self.passing.clear()

    def _note(self, block: nn.Module, error: Exception):
        """Note why a block runs uncompiled, from now on or in this request."""
        why = reason(ADVICE.split(str(error), maxsplit=1)[0] or type(error).__name__)
        if isinstance(error, torch._dynamo.exc.FailOnRecompileLimitHit):
            why = f"its inputs differ in more ways than the {MAX_GRAPHS} graphs that are compiled of it"
        forward = type(block).forward
        is_passing = is_out_of_memory(error) or any(os.strerror(code) in str(error) for code in PASSING)
        if is_passing:
            self.passing.add(forward)
        until = "" if is_passing else ", until the ranks are stopped"
        self.failed[forward] = f"{why.rstrip('.')}{until}"

    def failures(self, blocks: Iterable[nn.Module]) -> dict[str, list[str]]:
        """Return why some ``blocks`` run uncompiled: each reason, and the kinds of blocks."""
        kinds: dict[str, list[str]] = {}
        for kind in dict.fromkeys(map(type, blocks)):
            if kind.forward in self.failed:
                kinds.setdefault(self.failed[kind.forward], []).append(kind.__name__)
        return kinds

    def _backend(self, graph, inputs):
        """Compile one graph, and count it. Raises RuntimeError for what Inductor would leave to eager frames,
        which begin the block a second time: bfloat16 on GPUs that only emulate it."""
        started = time.perf_counter()
        try:
            with in_order() if BACKEND == INDUCTOR else nullcontext():
                run_graph = torch._dynamo.lookup_backend(BACKEND)(graph, inputs)
        except torch._dynamo.exc.SkipFrame as error:
            raise RuntimeError(str(error)) from error
        self.graphs += 1
        self.seconds += time.perf_counter() - started

        # without functools.wraps, by whose marks Dynamo of older versions would call ``run_graph`` itself
        def begun(*args):
            self.began = True
            return run_graph(*args)

        return begun


COMPILER = Compiler()


@dataclass(frozen=True)
class Outcome:
    """How compiling went on this rank in a request. made: the new graphs, in a sentence; empty without any.
    failures: each reason why blocks run uncompiled -> their kinds."""

    made: str = ""
    failures: dict[str, list[str]] = field(default_factory=dict)


def failure_lines(of_ranks: list[dict[str, list[str]]]) -> list[str]:
    """Return a line for each reason of any rank (Outcome.failures): which blocks it leaves uncompiled."""
    kinds: dict[str, dict[str, None]] = {}
    ranks: dict[str, list[int]] = {}
    for rank, failures in enumerate(of_ranks):
        for why, names in failures.items():
            ranks.setdefault(why, []).append(rank)
            kinds.setdefault(why, {}).update(dict.fromkeys(names))
    lines = []
    for why, names in kinds.items():
        where = f"{ranks_text(ranks[why])}: " if len(of_ranks) > 1 else ""
        is_one = len(names) == 1 and ALL_BLOCKS not in names
        lines.append(f"{where}{', '.join(names)} run{'s' * is_one} uncompiled: {why}")
    return lines


def _plain(value: Any, first: bool) -> Any:
    """Return an argument as graphs are made for: with usual strides, and sizes that do not change marked."""
    if isinstance(value, tuple):  # cosines and sines of positions, (S, D), (B, S, 1, D) or (B, H, S, D)
        for table in value:
            if isinstance(table, Tensor) and table.ndim > 1:
                _fix_features(table)
        return value
    if not isinstance(value, Tensor):
        return value
    value = _usual_strides(value, first)
    if value.ndim == 3 and value.shape[1] != 1 and value.is_floating_point():  # (B, 1, S) may be a mask
        _fix_features(value)
    return value


def _fix_features(value: Tensor):
    """Tell the compiler that features and heads are fixed: it traces LTX-2's block in 2 s instead of 9."""
    torch._dynamo.mark_static(value, value.ndim - 1)
    if value.ndim == 4 and value.shape[2] != 1:
        torch._dynamo.mark_static(value, 1)


def _usual_strides(value: Tensor, first: bool) -> Tensor:
    """Return the tensor with the strides that it has in most calls, since graphs are guarded by strides.

    Dimensions of size 1 get the stride of a contiguous tensor: a view may leave any number there. Tokens are
    copied if their features were cut from wider ones. For the ``first`` block other views are copied, too, as
    embedders and pipelines return them. Between blocks, strides are the same in every call.
    """
    is_cut = value.ndim == 3 and value.stride(1) != value.shape[2]
    if is_cut or (first and value.ndim == 3 and (value.storage_offset() or not value.is_contiguous())):
        return value.clone(memory_format=torch.contiguous_format)
    if 1 not in value.shape:
        return value
    strides = list(value.stride())
    for dim in reversed(range(value.ndim)):
        if value.shape[dim] == 1:
            strides[dim] = strides[dim + 1] * value.shape[dim + 1] if dim + 1 < value.ndim else 1
    return value if tuple(strides) == value.stride() else value.as_strided(value.shape, strides)


@contextmanager
def compiled(blocks: Iterable[nn.Module]) -> Iterator[Callable[[], Outcome]]:
    """Have ``blocks`` run compiled; yield what says how that went. Their hooks, as FSDP's, run uncompiled."""
    blocks = list(blocks)
    graphs = COMPILER.graphs
    seconds = COMPILER.seconds
    COMPILER.forget_passing()
    why_not = unavailable()
    if why_not:
        yield lambda: Outcome(failures={why_not: [ALL_BLOCKS]})
        return

    def outcome() -> Outcome:
        made = COMPILER.graphs - graphs
        took = COMPILER.seconds - seconds
        new = f"compiled {made} graph{'s' * (made > 1)} of blocks in {took:.1f} s" if made else ""
        return Outcome(new, COMPILER.failures(blocks))

    torch._dynamo.config.recompile_limit = MAX_GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = 8 * MAX_GRAPHS
    # a prompt as long as an image is wide says nothing of the next one
    shapes.use_duck_shape = False
    for block in blocks:
        vars(block)["forward"] = _compiled_forward(block, block is blocks[0])
    try:
        yield outcome
    finally:
        RUNNING.layers = {}  # they hold weights, which may be unloaded
        for block in blocks:
            del vars(block)["forward"]


def _compiled_forward(block: nn.Module, first: bool) -> Callable:
    layers = opaque_layers(block)

    @wraps(block.forward)
    def forward(*args, **kwargs):
        return COMPILER.run(block, layers, args, kwargs, first)

    return forward
