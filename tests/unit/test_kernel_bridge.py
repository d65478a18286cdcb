"""Torch's own bridge to FlashAttention 3 and 4, which `activate_flash_attention_impl` puts behind its flash
operator, runs against stand-ins with the signatures and results of the packages' sources.

Stand-ins for GPUs are CPU tensors that say they are CUDA's: the dispatcher is told to call CUDA's kernel."""

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from attention_packages import lse_of, swapped
from recorded_signatures import (
    FLASH_ATTN_3,
    FLASH_ATTN_3_SCHEMA,
    FLASH_ATTN_4,
    FLASH_ATTN_4_OF_2,
    FLASH_ATTN_4_OF_TWO,
    stand_in,
)

from backend.parallel.attention import kernel_table as table
from backend.parallel.attention import kernel_trial
from backend.parallel.attention.kernel_choice import import_error, why_unavailable
from backend.parallel.attention.kernel_table import KERNELS, SDPA
from backend.runtime.install_command import install_command
from backend.runtime.torch_version import has_torch

BRIDGES = [f"torch.nn.attention._{name}" for name in ("fa3", "fa4")]
if not all(map(importlib.util.find_spec, BRIDGES)):
    pytest.skip("this torch has no bridge to FlashAttention 3 and 4", allow_module_level=True)

CPU = torch.device("cpu")
SCALE = 0.3
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class OnGpu(torch.Tensor):
    is_cuda = True


def on_gpu(q, k, v, *others, **options):
    """torch's flash operator, by the kernel that is registered for CUDA."""
    q, k, v = (tensor.as_subclass(OnGpu) for tensor in (q, k, v))
    results = FLASH.redispatch(CUDA, q, k, v, *others, **options)
    return tuple(each.as_subclass(torch.Tensor) for each in results[:2])


@pytest.fixture
def packages(monkeypatch):
    """Stands for a GPU of 9.0; returns what puts a module where Python finds it."""
    cached = [
        getattr(importlib.import_module(bridge), name)
        for bridge in BRIDGES
        for name in ("_get_device_major", "_fa4_import_module")
        if hasattr(importlib.import_module(bridge), name)
    ]
    monkeypatch.setattr(table, "aten", SimpleNamespace(_scaled_dot_product_flash_attention=on_gpu))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def put(name, **functions):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__spec__ = ModuleSpec(module.__name__, None)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(sys.modules[name]).update(functions)

    for function in (*cached, import_error):
        function.cache_clear()
    yield put
    for function in (*cached, import_error):
        function.cache_clear()


def attended(q, k, v, softmax_scale, out):
    """Write attention of (B, S, H, D) into ``out``; return the log-sum-exp (B, H, S)."""
    assert out.shape == q.shape and out.dtype == q.dtype
    q, k, v = swapped(q, k, v)
    out.copy_(SDPA(q, k, v, scale=softmax_scale).transpose(1, 2))
    return lse_of(q, k, softmax_scale)


@pytest.fixture(scope="module")
def operators():
    """FlashAttention 3's, which its import registers; torch wants that for gradients too."""
    names = []

    def forward(*given):
        call = dict(zip(names, given, strict=False))
        q = call["q"]
        assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (q.shape[1], call["k"].shape[1])
        assert call["is_causal"] is False and call.get("num_splits", 0) == 0
        assert (call["window_size_left"], call["window_size_right"]) == (-1, -1)
        lse = attended(q, call["k"], call["v"], call["softmax_scale"], call["out"])
        return call["out"], lse, q.new_empty(0), q.new_empty(0)

    with torch.library._scoped_library("flash_attn_3", "DEF") as library:
        library.define(FLASH_ATTN_3_SCHEMA)
        library.define("bwd(Tensor dout) -> Tensor")
        names += [each.name for each in torch.ops.flash_attn_3.fwd.default._schema.arguments]
        library.impl("fwd", forward, "CPU")
        yield


def flash_3(put):
    put("flash_attn_interface", flash_attn_func=stand_in(FLASH_ATTN_3, print))


def flash_4(recorded, results, annotated=None):
    """Return what puts a FlashAttention 4 in place that returns so many ``results``."""

    def forward(q, k, v, max_seqlen_q, max_seqlen_k, softmax_scale, return_lse, out):
        assert (max_seqlen_q, max_seqlen_k) == (q.shape[1], k.shape[1]) and return_lse
        return out, attended(q, k, v, softmax_scale, out), *[None] * (results - 2)

    def early(q, k, v, softmax_scale):
        out = torch.empty_like(q)
        return out, attended(q, k, v, softmax_scale, out)

    types = tuple[(torch.Tensor,) * (annotated or results)]
    function = stand_in(recorded, early if recorded is FLASH_ATTN_4_OF_2 else forward, types)
    return lambda put: put(recorded.module, _flash_attn_fwd=function, _flash_attn_bwd=print)


#: Packages that any torch with a bridge can call, and those of more results than it may take.
FIT = {
    "flash-attn-3": ("flash-attn-3", flash_3),
    "flash-attn-4 of two results": ("flash-attn-4", flash_4(FLASH_ATTN_4_OF_TWO, 2)),
}
LATER = {results: flash_4(FLASH_ATTN_4, results) for results in (4, 5)}


def refused(name):
    return why_unavailable(name, "cuda", torch.bfloat16, 64, [(9, 0)], ring=True)


@pytest.mark.parametrize("which", FIT)
def test_torchs_bridge_calls_a_package_as_its_source_is(which, packages, operators):
    name, install = FIT[which]
    install(packages)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 64).bfloat16() for heads, tokens in ((4, 5), (2, 7), (2, 7)))
    with torch.inference_mode(), table.activated(name):
        out, lse = table.flash_of_torch(q, k, v, SCALE, True)
    wanted = SDPA(q, k, v, scale=SCALE, enable_gqa=True)
    assert out.shape == q.shape and (out - wanted).abs().max() < 0.05
    assert lse.dtype == torch.float32 and torch.allclose(lse, lse_of(q, k, SCALE), atol=1e-2)
    assert refused(name) is None
    assert kernel_trial.failure(name, torch.bfloat16, 64, True, CPU) == ""


def test_the_bridge_leaves_with_the_request(packages, operators):
    """Afterwards CUDA's kernel is torch's own, which a torch for CPUs does not have."""
    flash_4(FLASH_ATTN_4_OF_TWO, 2)(packages)
    with table.activated("flash-attn-4"):
        pass
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="_flash_attention"):
        table.flash_of_torch(q, q, q, SCALE, True)


@pytest.mark.parametrize("results", LATER)
def test_what_this_torch_does_not_take_is_refused_before_its_trial(results, packages):
    """Where the bridge fails, and nowhere else."""
    LATER[results](packages)
    refusal = refused("flash-attn-4") or ""
    trial = kernel_trial.failure("flash-attn-4", torch.bfloat16, 64, True, CPU)
    if has_torch(*table.TAKES_ALL_RESULTS):
        assert refusal == trial == ""
    else:
        assert "too many values to unpack" in trial
        remedy = install_command(["flash-attn-4==4.0.0b18"])
        why = (
            f"returns {results} results, of which torch {torch.__version__} takes 2; use a newer torch, run:"
        )
        assert f"{why} {remedy}, or set attention to auto." in refusal and refusal.count(". ") == 0


def test_results_that_its_types_do_not_name_fail_its_trial(packages):
    """4.0.0b19 returns four and says two."""
    flash_4(FLASH_ATTN_4_OF_TWO, results=4, annotated=2)(packages)
    fails = kernel_trial.failure("flash-attn-4", torch.bfloat16, 64, True, CPU)
    assert refused("flash-attn-4") is None
    assert bool(fails) != has_torch(*table.TAKES_ALL_RESULTS)


@pytest.mark.parametrize("results", [0, 2], ids=["torch 2.14", "torch 2.13"])
def test_another_version_is_named_where_the_trial_fails(monkeypatch, results):
    """Of its kernels none is built for a GPU, and versions before 4.0.0b11 have no heads of 256 on 10.x."""
    kernel = replace(KERNELS["flash-attn-4"], results=results)
    monkeypatch.setitem(KERNELS, "flash-attn-4", kernel)
    why = "AssertionError: (head_dim, head_dim_v)=(256, 256) is not supported on SM100/SM110."
    refusal = kernel_trial.refusal("flash-attn-4", [why])
    assert why in refusal and refusal.endswith(
        f"; run: {install_command([kernel.package])}, or set attention to auto."
    )


def test_the_early_version_among_the_files_of_flash_attention_2_is_named(packages):
    flash_4(FLASH_ATTN_4_OF_2, 2)(packages)
    refusal = refused("flash-attn-4") or ""
    assert "the early FlashAttention 4 of FlashAttention 2.8" in refusal
    assert f"run: {install_command([KERNELS['flash-attn-4'].package])}, or set" in refusal
    trial = kernel_trial.failure("flash-attn-4", torch.bfloat16, 64, True, CPU)
    assert trial.startswith("TypeError: got an unexpected keyword argument")
