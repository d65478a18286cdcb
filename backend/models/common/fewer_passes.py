"""Arithmetic of diffusers' blocks in fewer passes over 16-bit activations.

diffusers stores float32 copies of them between operators. These functions compute in float32 as well, and
store the type of the activations alone, rounded once, as ComfyUI's do. Float32 models stay the same but for
the last bit. A compiler fuses the operators of diffusers' forms, so compiled blocks keep those, but for RMS
norms, which torch takes apart for it, and complex numbers.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models import embeddings, normalization
from torch import Tensor, nn

from .replaced_classes import imported, replaced_names

THEIRS = embeddings.apply_rotary_emb
TRANSFORMER = "diffusers.models.transformers.transformer_"
#: Modules that call it by a name of their own, as far as they are imported.
CALLERS = (
    "diffusers.models.embeddings",
    *(f"{TRANSFORMER}{name}" for name in ("flux", "flux2", "flux3", "krea2", "lumina2")),
)
#: Modules with a function of their own, which multiplies complex numbers.
QWEN = tuple(f"{TRANSFORMER}{name}" for name in ("qwenimage", "qwenimage21"))


#: Values of a thread that are normed at a time: a megabyte read and written, which second-level caches hold.
NORM_VALUES = 2**17


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """Return F.rms_norm's bits. torch has no kernel for CPUs: it makes tensors of the squares, of the
    products by their roots, and of those by the weight. Here they share memory, some tokens at a time."""
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() and len(shape) == 1
    other_weight = weight is not None and weight.dtype != x.dtype
    recorded = torch.is_grad_enabled() or torch.compiler.is_compiling()
    if eps is None or other_weight or recorded or not is_plain:
        return F.rms_norm(x, list(shape), weight, eps)
    assert tuple(shape) == x.shape[-1:], "a weight a feature"
    out = torch.empty_like(x)
    count = max(1, NORM_VALUES * torch.get_num_threads() // x.shape[-1])
    for some, to in zip(x.view(-1, *shape).split(count), out.view(-1, *shape).split(count), strict=True):
        roots = torch.pow(some, 2, out=to).mean(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(some, roots, out=to)
        if weight is not None:
            to.mul_(weight)
    return out


class TorchRMSNorm(nn.RMSNorm):
    """torch's norm of queries and keys, in half its time on CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


class RMSNorm(normalization.RMSNorm):
    """The norm of queries and keys: 4 bytes a value are moved for 34."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        if self.bias is not None or (weight is not None and weight.dtype != hidden_states.dtype):
            return super().forward(hidden_states)
        return rms_norm(hidden_states, self.dim, weight, self.eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize tokens x (..., D), with a weight and a bias (D,) of any type: those of x, as ComfyUI casts
    them. GPUs read mixed types one by one, six times as slowly."""
    weight, bias = (None if each is None else each.to(x.dtype) for each in (weight, bias))
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Return what ``norm``, a LayerNorm that may stay in float32, makes of x."""
    return layer_norm(x, norm.weight, norm.bias, norm.eps) if isinstance(norm, nn.LayerNorm) else norm(x)


def modulated(norm: nn.LayerNorm, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return norm(x) * scale + shift, of tokens x (B, S, D) and a norm without weights. scale and shift
    broadcast to x."""
    if scale.numel() == x.shape[-1]:  # one sample's, and all of its tokens'
        return layer_norm(x, scale.flatten(), shift.flatten(), norm.eps)
    return torch.addcmul(shift.to(x.dtype), normed(norm, x), scale.to(x.dtype))


def adapted(norm: Any, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return norm(x) * (1 + scale) + shift (adaLN), of shift and scale (B, D) and a norm without weights."""
    if len(scale) > 1:  # one sample's are all of its tokens' as they are
        shift = shift[:, None]
        scale = scale[:, None]
    return modulated(norm, x, 1 + scale, shift)


def rms_scaled(norm: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """Return norm(x) * scale, of tokens x (B, S, D) and an RMS norm; scale may broadcast."""
    of_all = scale.numel() == x.shape[-1]
    if not (of_all and isinstance(norm, RMSNorm)) or norm.bias is not None or norm.weight is None:
        return norm(x) * scale
    return rms_norm(x, norm.dim, (norm.weight * scale.flatten()).to(x.dtype), norm.eps)


def gated(x: Tensor, change: Tensor, gate: Tensor) -> Tensor:
    """Return x + change * gate."""
    return torch.addcmul(x, change, gate.to(x.dtype))


def angles_of(tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return cosines and sines (..., D), of which two neighbours are equal, as complex numbers (..., D / 2).
    The tables keep them: every block of every step is given the same ones."""
    cos, sin = tables
    known = vars(cos).get("angles_with")
    if known is None or known[0] is not sin:
        known = sin, torch.complex(cos[..., ::2], sin[..., ::2])
        vars(cos)["angles_with"] = known
    return known[1]


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of neighbours in x (..., D) by complex ``angles`` (..., D / 2): rotary embedding in 20 bytes
    a value for diffusers' 34 to 54."""
    wide = x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    pairs = pairs * angles if wide is x else pairs.mul_(angles)
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype)


def turned_in_graph(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of neighbours in x (..., D) by complex ``angles`` (..., D / 2): compilers generate no code
    for complex numbers, and fuse nothing with their products."""
    real, imaginary = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = torch.view_as_real(angles).unbind(-1)
    turned = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def apply_rotary_emb(
    x: Tensor,
    freqs_cis: Any,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
    sequence_dim: int = 2,
) -> Tensor:
    """Take the place of diffusers' function of this name where pairs are neighbours: x (B, S, H, D) or
    (B, H, S, D), cosines and sines (S, D), of which two neighbours are equal."""
    compiles = torch.compiler.is_compiling()
    if compiles and not use_real:  # Lumina's, (B, S, D / 2)
        return turned_in_graph(x, freqs_cis.unsqueeze(2))
    if not use_real or use_real_unbind_dim != -1 or compiles:
        return cast(Tensor, THEIRS(x, freqs_cis, use_real, use_real_unbind_dim, sequence_dim))
    angles = angles_of(freqs_cis)
    return turned(x, angles[:, None] if sequence_dim == 1 else angles)


@cache  # compiled blocks are guarded by its identity
def of_qwen(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what takes the place of Qwen-Image's function, of which graphs have real numbers, and which
    fails without tokens: x (B, S, H, D), angles (S, D / 2)."""

    def apply_rotary_emb_qwen(x: Tensor, freqs_cis: Any, use_real: bool = True, **how) -> Tensor:
        if not x.shape[1]:
            return x
        if use_real or not torch.compiler.is_compiling():
            return theirs(x, freqs_cis, use_real, **how)
        return turned_in_graph(x, freqs_cis.unsqueeze(1))

    return apply_rotary_emb_qwen


def rotary() -> AbstractContextManager[None]:
    """Have diffusers' blocks call these functions, as they call the attention of a request."""
    ours: list[tuple[ModuleType, str, Callable]] = []
    for module in imported(CALLERS):
        if getattr(module, "apply_rotary_emb", None) is THEIRS:  # in another diffusers it may not be
            ours.append((module, "apply_rotary_emb", apply_rotary_emb))
    for module in imported(QWEN):
        theirs = getattr(module, "apply_rotary_emb_qwen", None)
        if theirs is not None:
            ours.append((module, "apply_rotary_emb_qwen", of_qwen(theirs)))
    return replaced_names(ours)
