"""Operators through which a compiled block calls what the engine put into it: attention over ranks and
patches, cached and sharded layers, token mixing.

To torch.compile each is one opaque node (torch.library.custom_op). What it does is read when it runs, from
RUNNING, so the same graph serves every block of a kind, every step and every request. Ordered effects keep
them in the order of the code: each may send, and ranks whose graphs differ in size must send alike.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .torch_version import host_compiler

#: Namespace of the operators.
NAMESPACE = "parallel_dit"
#: Name of a layer's answer to a second input (CachedLayer.second).
SECOND = "+"


@dataclass(eq=False)  # whose hash the compiler asks for
class Running:
    """What compiled blocks call now. attention: as F.scaled_dot_product_attention. linear_state: as
    models/common/token_mixing.py. layers: opaque layers of the block that runs, by their name in it. text: an
    empty tensor of shape (2 + local text tokens, 0). A count in a shape causes no recompilation, unless it is
    0 or 1: hence the 2. meanwhile: work of an eager block that attention may do while it waits for others."""

    attention: Callable[..., Tensor] | None = None
    linear_state: Callable[[Tensor, Tensor], Tensor] | None = None
    layers: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    text: Tensor | None = None
    meanwhile: Callable[[], Any] | None = None


RUNNING = Running()


class Meanwhile:
    """Offers a product to the attention within this context, which has it computed once its queries and keys
    are on their way to other ranks (Attention.overlaps). It comes before other attention, as in compiled
    blocks."""

    def __init__(self, layer: Callable[[Tensor], Tensor], x: Tensor):
        self.layer = layer
        self.x = x
        self.made: Tensor | None = None

    def __enter__(self) -> "Meanwhile":
        if getattr(RUNNING.attention, "overlaps", False):
            RUNNING.meanwhile = self.run
        else:
            self.run()
        return self

    def __exit__(self, *error):
        RUNNING.meanwhile = None

    def run(self):
        """Compute the product."""
        self.made = self.layer(self.x)

    def take(self) -> Tensor:
        """Return the product, which is not held here any longer."""
        made = self.layer(self.x) if self.made is None else self.made
        self.made = None
        return made


def run_meanwhile():
    """Do what the block that runs has offered, once."""
    if offered := RUNNING.meanwhile:
        RUNNING.meanwhile = None
        offered()


def unavailable() -> str | None:
    """Say why blocks cannot be compiled with this torch, as one sentence; None where they can."""
    if _ordered is None:
        return f"torch {torch.__version__} has no operators with ordered effects, which 2.13 has"
    return None


def compiles_on_gpus() -> bool:
    """Return whether compiled blocks can run on GPUs, with what is installed here."""
    # Triton for Windows brings a compiler of its own
    has_compiler = sys.platform == "win32" or bool(host_compiler())
    return unavailable() is None and find_spec("triton") is not None and has_compiler


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend in the place of F.scaled_dot_product_attention: one function for all requests, since compiled
    blocks are guarded by its identity."""
    if torch.compiler.is_compiling():
        assert not is_causal and not dropout_p, "denoisers attend in both directions, without dropout"
        return torch.ops.parallel_dit.attend(query, key, value, attn_mask, scale, enable_gqa)
    assert RUNNING.attention is not None, "installed while a request runs"
    return RUNNING.attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def state_over_ranks(keys: Tensor, values: Tensor) -> Tensor:
    """Return the state of linear attention in the place of token_mixing.linear_state, as ``attention``."""
    if torch.compiler.is_compiling():
        return torch.ops.parallel_dit.linear_state(keys, values)
    assert RUNNING.linear_state is not None, "installed while a request runs"
    return RUNNING.linear_state(keys, values)


def local_text_tokens(whole: int) -> int:
    """Count local text tokens in the place of token_mixing.local_text_tokens, as ``attention``."""
    return whole if RUNNING.text is None else RUNNING.text.shape[0] - 2


@lru_cache(maxsize=64)
def text_count_tensor(count: int) -> Tensor:
    """Return a tensor for Running.text."""
    return torch.empty(2 + count, 0)


def opaque(forward: Callable, suffix: str = "") -> Callable:
    """Decorate the ``forward`` of a module, (..., D) -> (..., features): compiled blocks call it as one
    node, by the name that ``opaque_layers`` gives it, and ``suffix``."""

    @wraps(forward)
    def run(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return torch.ops.parallel_dit.layer(args[0], self.opaque_name + suffix, self.opaque_features)
        return forward(self, *args, **kwargs)

    vars(run)["is_opaque"] = True
    return run


def opaque_layers(block: torch.nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the opaque layers of a block by their names, which they are told, with the features of what
    they return (module.opaque_width(); those of the input where there is no such method)."""
    layers: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, module in block.named_modules():
        if not getattr(type(module).forward, "is_opaque", False):
            continue
        width: Callable[[], int] = getattr(module, "opaque_width", int)
        vars(module).update(opaque_name=name, opaque_features=width())
        layers[name] = module
        if second := getattr(module, "second", None):
            layers[name + SECOND] = second
    return layers


@torch.library.custom_op(f"{NAMESPACE}::attend", mutates_args=())
def opaque_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, gqa: bool
) -> Tensor:
    """Attend, (B, H, S, D) in and out, with tokens before heads in memory, as the projection takes them."""
    assert RUNNING.attention is not None, "installed while a request runs"
    out = RUNNING.attention(query, key, value, mask, 0.0, False, scale, gqa)
    return _own(out.transpose(1, 2), query, key, value).transpose(1, 2)


@opaque_attend.register_fake
def _(query, key, value, mask, scale, gqa):
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[3]).transpose(1, 2)


@torch.library.custom_op(f"{NAMESPACE}::layer", mutates_args=())
def layer(x: Tensor, name: str, features: int) -> Tensor:
    """Call the layer ``name`` of the block that runs; its answer is copied if somebody keeps it."""
    module = RUNNING.layers[name]
    out = module(x)
    if getattr(module, "caches_outputs", name.endswith(SECOND)):  # the graph may write into what it is given
        return out.clone(memory_format=torch.contiguous_format)
    return _own(out, x)


@layer.register_fake
def _(x, name, features):
    return x.new_empty(*x.shape[:-1], features or x.shape[-1])


@torch.library.custom_op(f"{NAMESPACE}::linear_state", mutates_args=())
def linear_state(keys: Tensor, values: Tensor) -> Tensor:
    """Sum keys^T values over all tokens of the sequence: (B, H, n, D), (B, H, n, E) -> (B, H, D, E)."""
    assert RUNNING.linear_state is not None, "installed while a request runs"
    return _own(RUNNING.linear_state(keys, values), keys, values)


@linear_state.register_fake
def _(keys, values):
    return keys.new_empty(*keys.shape[:2], keys.shape[3], values.shape[3])


def _own(out: Tensor, *inputs: Tensor) -> Tensor:
    """Return ``out`` contiguous, and in memory of its own, as an operator must."""
    out = out.contiguous()
    memory = out.untyped_storage().data_ptr()
    is_shared = any(memory == each.untyped_storage().data_ptr() for each in inputs)
    return out.clone() if is_shared else out


def _register() -> Any:
    """Keep the operators in order; None where this torch cannot."""
    try:
        from torch._library.effects import EffectType  # no public name yet

        for operator in (opaque_attend, layer, linear_state):
            operator.register_effect(EffectType.ORDERED)
    except (ImportError, AttributeError):  # some versions have the type, and no method that takes it
        return None
    return EffectType.ORDERED


_ordered = _register()
