"""Attention kernels as a table: what each can compute, on which GPUs, and how it is called.

Capabilities are those of the packages' sources: flash_attn_interface.py of flash-attn 2.8.3, torch's
nn/attention/_fa3.py and _fa4.py, cute/interface.py of flash-attn-4 from 4.0.0b5 to b36, core.py of
sageattention at d1a57a54 (later than the tag v2.2.0), api.py and api.cu of sageattn3 1.0.0. None but torch's
was run here: of GPUs there was an H200 without the packages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...config import ParallelConfig
from ...hardware.gpu_kernels import Capability
from ...runtime.install_command import install_command
from ...runtime.torch_version import has_torch

aten = torch.ops.aten
#: diffusers' transformers all end in this function (by attribute of torch.nn.functional): the hook replaces
#: it, the kernels keep the original.
SDPA = F.scaled_dot_product_attention
#: What packages compute in.
HALF = (torch.float16, torch.bfloat16)
#: Least keys of a call, in a ring of a hop, for an approximate kernel: fewer take little time in any, and
#: ComfyUI met what is no number in SageAttention's of Wan's 257 of an image (comfy/ldm/wan/model.py).
MIN_APPROXIMATE_KEYS = 1024
#: Where SageAttention's own choice is a Triton kernel that adds 64 products in float16: black images of
#: Qwen-Image (Comfy-Org/ComfyUI#9773). Its CUDA kernel, its choice on 8.0, adds them in float32.
ADDS_IN_FLOAT16 = (8, 6)
#: torch from which its bridge to FlashAttention 4 takes any number of results; before, it takes two, and
#: 4.0.0b18 is the last to return no more.
TAKES_ALL_RESULTS = (2, 14)
#: Beyond every compute capability.
ANY = (99, 9)
#: The kernel of "auto", and of what others cannot compute.
TORCH = "sdpa"

#: (q, k, v, scale, is the log-sum-exp wanted?) -> out (B, H, S, D), and lse (B, H, S) or None.
Call = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Kernel:
    """A row of the table.

    what: its name in sentences. call: None where torch chooses by itself. module, function: what is imported,
    empty for torch's own; package: its name on PyPI, with the version where that matters; build: how it is
    built, where PyPI lacks it. parameter: one that the function has, and older: what a package is whose
    function lacks it. results: how many of the function's this torch takes; 0 for all. gpus: first and last
    compute capability of each run that has kernels. head_size: the largest; multiple: of which head sizes are
    multiples; larger_head: one that there is besides; head_sizes: those that there are, where they are few.
    least_keys: that it attends to. lse: it returns the log-sum-exp, by which rings merge. exact: it computes
    in the type of its inputs. largest_value: of V, where it holds less than their type; 0 for all. rocm:
    torch for AMD's GPUs may have it. torch_impl: its name in torch.nn.attention.
    """

    what: str
    call: Call | None = None
    module: str = ""
    function: str = ""
    package: str = ""
    build: str = ""
    parameter: str = ""
    older: str = ""
    results: int = 0
    gpus: tuple[tuple[Capability, Capability], ...] = ()
    head_size: int = 256
    multiple: int = 1
    larger_head: int = 0
    head_sizes: tuple[int, ...] = ()
    least_keys: int = 1
    lse: bool = True
    exact: bool = True
    largest_value: float = 0.0
    rocm: bool = True
    torch_impl: str = ""

    @property
    def install(self) -> str:
        """What to do to get it for the Python of this process."""
        return self.build or f"run: {install_command([self.package])}"

    def has_head(self, size: int) -> bool:
        """Return whether it runs on heads of ``size`` features."""
        sizes = self.head_sizes or range(self.multiple, self.head_size + 1, self.multiple)
        return size in sizes or size == self.larger_head > 0

    def has_gpu(self, gpu: Capability) -> bool:
        """Return whether it runs on GPUs of this compute capability."""
        return any(first <= gpu <= last for first, last in self.gpus)

    @property
    def heads_in_words(self) -> str:
        if self.head_sizes:
            return f"heads of {' or '.join(map(str, self.head_sizes))} features"
        multiples = f", in multiples of {self.multiple}" if self.multiple > 1 else ""
        larger = f", or of {self.larger_head}" if self.larger_head else ""
        return f"heads of up to {self.head_size} features{multiples}{larger}"

    @property
    def gpus_in_words(self) -> str:
        return ", ".join(_run_in_words(*run) for run in self.gpus)


def _run_in_words(first: Capability, last: Capability) -> str:
    if last == ANY:
        return f"{first[0]}.{first[1]} or higher"
    return f"{first[0]}.{first[1]}" if first == last else f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"


# ------------------------------------------------------------------ calls
def whole_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat grouped keys and values, for kernels that take as many heads as queries have."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))


def _flash(q, k, v, scale, lse):
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]  # optional

    tokens_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    found = flash_attn_func(*tokens_first, softmax_scale=scale, return_attn_probs=lse)
    out, sums = found[:2] if lse else (found, None)
    return out.transpose(1, 2), sums


def flash_of_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, lse: bool) -> tuple[Tensor, Tensor]:
    """Call torch's flash operator: FlashAttention 2, or what ``activated`` put in its place."""
    k, v = whole_heads(q, k, v)
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, scale=scale)[:2]


def _cudnn(q, k, v, scale, lse):
    k, v = whole_heads(q, k, v)
    # diffusers 0.42.1 copies too (attention_dispatch.py): it saw the operator be wrong with other strides.
    # Until a GPU has shown that it is not, these copies stay. They are freed before a block holds most, or
    # raise that by a tenth (tests/unit/test_cudnn_memory.py): no plan counts them.
    q, k, v = (each.contiguous() for each in (q, k, v))
    if not lse:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return SDPA(q, k, v, scale=scale), None
    operator = aten._scaled_dot_product_cudnn_attention
    out, sums, *_ = operator(q, k, v, None, True, 0.0, False, False, scale=scale)
    return out, sums.reshape(q.shape[:3])  # from (B, H, S, 1) since torch 2.9


def _sage(q, k, v, scale, lse) -> Any:
    import sageattention  # pyright: ignore[reportMissingImports]  # optional

    call = sageattention.sageattn
    if q.is_cuda and torch.cuda.get_device_capability(q.device) == ADDS_IN_FLOAT16:
        call = partial(sageattention.sageattn_qk_int8_pv_fp16_cuda, pv_accum_dtype="fp32")
    # Tokens first: of heads first 2.2.0 corrects the log-sum-exp by counts of tokens that it takes for heads,
    # and fails where queries are twice as many as keys or more, as in a ring of GPUs that differ.
    tokens_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    found = call(*tokens_first, tensor_layout="NHD", is_causal=False, sm_scale=scale, return_lse=lse)
    # the natural logarithm (B, H, S), with the mean that it takes off the keys added back
    if lse and isinstance(found, Tensor):  # a fork that ignores return_lse: its trial says so
        return found
    out, sums = found if lse else (found, None)
    return out.transpose(1, 2), sums


def _sage3(q, k, v, scale, lse):
    from sageattn3 import sageattn3_blackwell  # pyright: ignore[reportMissingImports]  # optional

    usual = q.shape[-1] ** -0.5  # the only scale that it knows
    if scale != usual:
        q = q * (scale / usual)
    k, v = whole_heads(q, k, v)
    # it takes the mean off the keys in place, and they may be a K/V buffer's
    return sageattn3_blackwell(q, k.clone(), v, is_causal=False), None


#: Name in ParallelConfig.attention -> kernel.
KERNELS = {
    TORCH: Kernel("torch's own kernels (flash, cuDNN, memory-efficient)"),
    "cudnn": Kernel(
        "cuDNN's attention",
        call=_cudnn,
        gpus=(((8, 0), ANY),),
        head_size=128,
        multiple=8,
        least_keys=2,
        rocm=False,
    ),
    "flash-attn": Kernel(
        "FlashAttention 2",
        call=_flash,
        module="flash_attn",
        function="flash_attn_func",
        package="flash-attn",
        gpus=(((8, 0), ANY),),
    ),
    "flash-attn-3": Kernel(
        "FlashAttention 3",
        call=flash_of_torch,
        module="flash_attn_interface",
        function="flash_attn_func",
        build="build the folder hopper of github.com/Dao-AILab/flash-attention",
        gpus=(((9, 0), (9, 9)),),
        multiple=8,
        torch_impl="FA3",
    ),
    "flash-attn-4": Kernel(
        "FlashAttention 4",
        call=flash_of_torch,
        module="flash_attn.cute.interface",
        function="_flash_attn_fwd",
        package="flash-attn-4>=4.0.0b11" if has_torch(*TAKES_ALL_RESULTS) else "flash-attn-4==4.0.0b18",
        parameter="return_lse",
        older="the early FlashAttention 4 of FlashAttention 2.8, whose function torch cannot call",
        results=0 if has_torch(*TAKES_ALL_RESULTS) else 2,
        gpus=(((9, 0), (10, 9)),),
        head_size=128,
        multiple=8,
        larger_head=256,  # on 10.x from 4.0.0b11 on: of an older one the trial says so; 9.x has all up to it
        torch_impl="FA4",
    ),
    "sage": Kernel(
        "SageAttention 2 (int8)",
        call=_sage,
        module="sageattention",
        function="sageattn",
        # PyPI's 1.0.6 takes the mean off the keys in place, and swallows return_lse among **kwargs
        build="build version 2 from github.com/thu-ml/SageAttention (pip installs version 1)",
        parameter="return_lse",
        older="SageAttention 1, which changes the keys that it is given and returns no log-sum-exp",
        gpus=tuple((gpu, gpu) for gpu in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0), (12, 1))),
        head_size=128,
        exact=False,
        largest_value=torch.finfo(torch.float16).max,  # on 8.0 and 8.6; float8 has a scale of its own
    ),
    "sage-3": Kernel(
        "SageAttention 3 (fp4)",
        call=_sage3,
        module="sageattn3",
        function="sageattn3_blackwell",
        build="build the folder sageattention3_blackwell of github.com/thu-ml/SageAttention",
        gpus=(((12, 0), (12, 1)),),  # it is built for 10.0 too, where its api.cu refuses to run
        head_sizes=(64, 128),
        lse=False,
        exact=False,
        largest_value=448.0 * 6,  # of a scale in float8 and of fp4
    ),
}


def kernel_of(name: str) -> Kernel:
    """Return the kernel of this name; torch's for "auto"."""
    return KERNELS[TORCH if name == "auto" else name]


def merges(config: ParallelConfig) -> bool:
    """Return whether rings merge by the log-sum-exp; PipeFusion's gather keys and values instead."""
    return config.ring_degree > 1 and not config.has_stale_kv


def fits(name: str, query: Tensor, key: Tensor, masked: bool, lse: bool) -> bool:
    """Return whether the kernel ``name`` computes this call; else torch's own does."""
    kernel = kernel_of(name)
    able = kernel.call is not None and (kernel.lse or not lse) and not masked
    pays = key.shape[2] >= (kernel.least_keys if kernel.exact else MIN_APPROXIMATE_KEYS)
    return able and pays and query.dtype in HALF and kernel.has_head(query.shape[-1])


@contextmanager
def activated(name: str) -> Iterator[None]:
    """Have torch's flash operator call the kernel ``name``, where it is one that torch activates."""
    implementation = kernel_of(name).torch_impl
    if not implementation:
        yield
        return
    torch.nn.attention.activate_flash_attention_impl(implementation)
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()
