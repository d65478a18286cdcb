"""Stand-ins for the packages of attention kernels: with the signatures, the layouts and the results of their
sources, they compute attention as those define it."""

from collections.abc import Callable
from types import ModuleType

from recorded_signatures import FLASH_ATTN, SAGE, SAGE_1, SAGE_3, SAGE_ON_8_0, Recorded, stand_in

from backend.parallel.attention.kernel_table import HALF, SDPA


def lse_of(q, k, scale):
    """The natural logarithm, (B, H, S) in float32, for heads first."""
    groups = q.shape[1] // k.shape[1]
    keys = k.float().repeat_interleave(groups, 1)
    return (q.float() @ keys.transpose(2, 3) * scale).logsumexp(dim=-1)


def swapped(*tensors):
    """Turn (B, S, H, D) into (B, H, S, D), and back."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _flash_attn_func(q, k, v, softmax_scale, return_attn_probs):
    """(B, S, H, D); with probabilities (out, lse, S_dmask)."""
    q, k, v = swapped(q, k, v)
    (out,) = swapped(SDPA(q, k, v, scale=softmax_scale, enable_gqa=True))
    return (out, lse_of(q, k, softmax_scale), None) if return_attn_probs else out


def _sageattn(q, k, v, tensor_layout, sm_scale, return_lse):
    """(B, H, S, D) as HND, (B, S, H, D) as NHD; the log-sum-exp is (B, H, S) of both. To correct it by the
    mean that it takes off the keys, 2.2.0 repeats that by tokens where it means heads, if they are HND."""
    assert q.dtype in HALF and tensor_layout in ("HND", "NHD") and q.stride(-1) == 1
    repeats = max(1, q.shape[2] // k.shape[2])  # of HND these are tokens
    if tensor_layout == "NHD":
        q, k, v = swapped(q, k, v)
    out = SDPA(q, k, v, scale=sm_scale, enable_gqa=True)
    out = out.transpose(1, 2) if tensor_layout == "NHD" else out
    if not return_lse:
        return out
    if k.shape[1] * repeats != q.shape[1]:
        raise RuntimeError(
            f"The size of tensor a ({q.shape[1]}) must match that of b ({k.shape[1] * repeats})"
        )
    return out, lse_of(q, k, sm_scale)


def _sageattn_on_8_0(q, k, v, tensor_layout, sm_scale, return_lse, pv_accum_dtype):
    assert pv_accum_dtype == "fp32", "the others add in float16"
    return _sageattn(q, k, v, tensor_layout, sm_scale, return_lse)


def _sageattn_1(q, k, v, tensor_layout, sm_scale, kwargs):
    """Takes the mean off the keys in place, and swallows return_lse among ``kwargs``."""
    tokens = 1 if tensor_layout == "NHD" else 2
    k -= k.mean(dim=tokens, keepdim=True)
    return _sageattn(q, k, v, tensor_layout, sm_scale, False)


def _sageattn3(q, k, v):
    """Takes the mean off the keys in place; knows no scale but the usual one, and no grouped keys."""
    assert q.shape[1] == k.shape[1]
    k -= k.mean(dim=-2, keepdim=True)
    return SDPA(q, k, v)


#: Name in ParallelConfig.attention -> the functions of its package, of those that torch does not activate.
FUNCTIONS = {
    "flash-attn": {FLASH_ATTN: _flash_attn_func},
    "sage": {SAGE: _sageattn, SAGE_ON_8_0: _sageattn_on_8_0},
    "sage-3": {SAGE_3: _sageattn3},
}
VERSION_1 = {SAGE_1: _sageattn_1}


def package(functions: dict[Recorded, Callable]) -> ModuleType:
    """Return a module that has stand-ins for ``functions``."""
    (name,) = {recorded.module for recorded in functions}
    module = ModuleType(name)
    for recorded, body in functions.items():
        setattr(module, recorded.function, stand_in(recorded, body))
    return module
