"""Tries an attention kernel before a request runs with it: a package that can be imported may have no binary
for the GPU, and cuDNN no plan for its heads. In a block that would end the ranks, again at every request."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...errors import reason
from ...hardware.device_memory import check_not_lost, is_out_of_memory
from .attention_kernels import SDPA, give_up_flash, has_flash
from .kernel_table import MIN_APPROXIMATE_KEYS, activated, flash_of_torch, kernel_of

#: Samples, tokens and heads that are tried. Tokens are no multiple of a kernel's tiles of 64 or 128: a
#: last tile that is not full is a case of its own.
SAMPLES, TOKENS, HEADS = 2, 200, 3
#: Keys of a second try: fewer than half of the queries, as in rings of GPUs that differ and towards prompts.
#: Approximate kernels are given no fewer than MIN_APPROXIMATE_KEYS, and are tried with that many more.
FEW_KEYS = 72
#: Kernels in int8 and fp4 are off by a smaller share of each head's values, and by less in their log-sum-exp.
#: More is a kernel that fails without saying so, or whose log-sum-exp is in base 2 (off by 2 and more here).
MAX_ERROR = 0.5
#: Share of the largest values that a kernel holds up to which it is tried. A sum of few of these is no number
#: in the same type: the kernel has to add in a wider one.
NEAR_LARGEST = 0.9
#: What a trial finds for which memory ran out: nothing is known.
NO_MEMORY = "memory ran out"


@torch.inference_mode()
def failure(name: str, dtype: torch.dtype, head_size: int, lse: bool, device: torch.device) -> str:
    """Return why the kernel ``name`` does not attend here, empty where it does; ``lse``: with the log-sum-exp
    too. NO_MEMORY where memory runs out. Raises where the device is lost."""
    lost = f"attention is {name}, whose trial lost the GPU; set it to auto"
    return _outcome(partial(_wrong, name, dtype, head_size, lse, device), device, lost)


def _wrong(name: str, dtype: torch.dtype, head_size: int, lse: bool, device: torch.device) -> str:
    """Return what is wrong with a kernel's values; empty where nothing is. Fewer keys than queries are tried
    too, and values near the bound of a kernel that has one, as strictly: with the log-sum-exp, and inputs
    that stay as they are. Raises what the kernel does, and where memory runs out."""
    kernel = kernel_of(name)
    least = 0 if kernel.exact else MIN_APPROXIMATE_KEYS
    q, k, v = _numbers(dtype, head_size, device)
    many, *others = _numbers(dtype, head_size, device, TOKENS + 3 * least)
    few_k, few_v = (each[:, :, : FEW_KEYS + least] for each in others)
    trials = {"its values": (q, k, v), f"its values for {FEW_KEYS + least} keys": (many, few_k, few_v)}
    largest = kernel.largest_value
    if largest:
        trials[f"values near {largest:,.0f}"] = (q, k, v.sigmoid() * (NEAR_LARGEST * largest))
    for which, (queries, keys, values) in trials.items():
        before = [given.clone() for given in (queries, keys, values)]
        error, why = _tried(name, queries, keys, values, lse)
        if not all(map(torch.equal, (queries, keys, values), before)):
            # they may be a K/V buffer's; first, since what comes of it may be wrong
            return "it changes the queries, keys or values that it is given"
        if why := _off(error, which) or why:
            return why
    return ""


@torch.inference_mode()
def settle(dtype: torch.dtype, head_size: int, lse: bool, device: torch.device) -> bool:
    """Have torch attend without cuDNN where its own choice of kernels fails or is wrong, and rings (``lse``),
    which call its flash kernel themselves, without that where it is. Return whether that is known: not where
    memory runs out. All of them are exact, so ranks need not agree. Raises where the device is lost."""
    lost = "torch's attention lost the GPU when it was tried; update torch or the driver"
    whys = [_outcome(partial(_wrong_choice, dtype, head_size, device), device, lost)]
    if whys[0] not in ("", NO_MEMORY):
        print(f"torch's attention failed ({whys[0]}), and goes on without cuDNN's")
        torch.backends.cuda.enable_cudnn_sdp(False)
    if lse and dtype != torch.float32 and has_flash(device):
        whys.append(_outcome(partial(_wrong_flash, dtype, head_size, device), device, lost))
        if whys[1] not in ("", NO_MEMORY):
            print(f"torch's flash kernel failed ({whys[1]}), and rings go on without it")
            give_up_flash(device)
    return NO_MEMORY not in whys


def _wrong_choice(dtype: torch.dtype, head_size: int, device: torch.device) -> str:
    """Return what is wrong with the values of torch's own choice of kernels."""
    q, k, v = _numbers(dtype, head_size, device)
    return _off(_error([SDPA(q, k, v)], SDPA(q.float(), k.float(), v.float())))


def _wrong_flash(dtype: torch.dtype, head_size: int, device: torch.device) -> str:
    """Return what is wrong with the values of torch's flash kernel, or with its log-sum-exp."""
    q, k, v = _numbers(dtype, head_size, device)
    scale = head_size**-0.5
    wanted, wanted_sums = _wanted(q, k, v, scale)
    out, sums = flash_of_torch(q, k, v, scale=scale, lse=True)
    return _off(_error([out], wanted)) or _wrong_sums(sums, wanted_sums)


def refusal(name: str, failures: list[str]) -> str:
    """Say that a kernel fails on some ranks; empty where it does on none."""
    if not failures:
        return ""
    kernel = kernel_of(name)
    package = kernel.module
    remedy = f"install a {package} that was built for this GPU" if package else "update torch or the driver"
    is_built_where_it_runs = kernel.torch_impl and kernel.package
    if is_built_where_it_runs:  # FlashAttention 4, of which versions differ in results and in heads
        remedy = kernel.install
    why = f"attention is {name}, which was tried and fails ({'; '.join(failures)})"
    return f"{why}; {remedy}, or set attention to auto."


def _off(error: float, values: str = "its values") -> str:
    """Say by what share of ``values`` a kernel is off; empty where that is little."""
    return "" if error <= MAX_ERROR else f"it is off by {error:.2g} of {values}"  # a NaN is off


def _tried(name: str, q: Tensor, k: Tensor, v: Tensor, lse: bool) -> tuple[float, str]:
    """Return by what share of its values the kernel is off at worst, and what is wrong with its log-sum-exp
    if ``lse``. Raises what it does, and ValueError for no pair or another shape."""
    call = kernel_of(name).call
    assert call is not None, "torch's own kernels are settled"
    scale = q.shape[-1] ** -0.5
    # before the calls, which may change what they are given
    wanted, wanted_sums = _wanted(q, k, v, scale)
    with activated(name):
        # with the log-sum-exp last: sums are its
        results = [call(q, k, v, scale, each) for each in ([False, True] if lse else [False])]
    if any(isinstance(result, Tensor) for result in results):  # which would unpack into its samples
        raise ValueError("it returns a tensor, not a pair of output and log-sum-exp")
    error = _error([out for out, _ in results], wanted)
    return error, _wrong_sums(results[-1][1], wanted_sums) if lse else ""


def _wanted(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return values and log-sum-exp of attention in float32."""
    sums = (q.float() @ k.float().transpose(2, 3) * scale).logsumexp(-1)
    return SDPA(q.float(), k.float(), v.float(), scale=scale), sums


def _wrong_sums(sums: Tensor | None, wanted: Tensor) -> str:
    """Say what is wrong with a log-sum-exp; empty where nothing is."""
    if sums is None or sums.shape != wanted.shape:
        shape = None if sums is None else tuple(sums.shape)
        return f"its log-sum-exp has the shape {shape}, which is not {tuple(wanted.shape)}"
    error = (sums.float() - wanted).abs().max().item()
    return "" if error <= MAX_ERROR else f"its log-sum-exp is off by {error:.2g}"


def _error(outputs: list[Tensor], wanted: Tensor) -> float:
    """Return by what share of its ``wanted`` values the worst head of an output is off: among others one of
    zeros would not count. Raises ValueError for another shape, which arithmetic would broadcast."""
    for out in outputs:
        if out.shape != wanted.shape:
            raise ValueError(f"its output has the shape {tuple(out.shape)}, not {tuple(wanted.shape)}")
    sizes = wanted.norm(dim=(2, 3))
    errors = [(out.float() - wanted).norm(dim=(2, 3)) / sizes for out in outputs]
    return torch.stack(errors).max().item()  # of which a NaN is the largest


def _numbers(
    dtype: torch.dtype, head_size: int, device: torch.device, tokens: int = TOKENS
) -> tuple[Tensor, ...]:
    """Return queries, keys and values (SAMPLES, HEADS, tokens, head_size) as requests lay them out: queries
    and keys next to each other, tokens slower than heads; values as in a K/V buffer."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(SAMPLES, tokens, HEADS, 3 * head_size, generator=generator).to(device, dtype)
    q, k, v = drawn.transpose(1, 2).chunk(3, dim=-1)
    return q, k, v.contiguous()


def _outcome(trial: Callable[[], str], device: torch.device, lost: str) -> str:
    """Return what a trial finds, or why it failed; NO_MEMORY where memory ran out. Raises RuntimeError where
    the device is ``lost``."""
    try:
        return trial()
    except Exception as failed:  # a wheel raises what it likes
        if is_out_of_memory(failed):
            return NO_MEMORY
        why = f"{type(failed).__name__}: {reason(failed, 160)}"
        check_not_lost(device, f"{lost} ({why})")
        return why
