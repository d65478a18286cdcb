"""The local attention kernels, and the form in which CUDA's takes a mask."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from moved_bytes import MovedBytes
from recorded_signatures import SAGE, SAGE_1

from backend.parallel.attention import attention_kernels as kernels
from backend.parallel.attention import kernel_table as table
from backend.parallel.attention import ring_library
from backend.parallel.attention.attention_kernels import ALIGNMENT, NOTHING, aligned, attend_lse
from backend.parallel.attention.kernel_choice import import_error, why_unavailable
from backend.probe import computed_in

#: Biases that torch.ops.aten._scaled_dot_product_efficient_attention refuses: rows of 13 keys, a ring rank's
#: slice of a longer mask (columns, then their beginning), another last dimension.
REFUSED = {
    "keys": torch.randn(2, 1, 3, 13),
    "slice": torch.randn(2, 1, 3, 20)[..., 4:12],
    "begins": torch.randn(2, 1, 3, 24)[..., 4:12],
    "transposed": torch.randn(2, 1, 8, 8).transpose(2, 3),
}


@pytest.mark.parametrize("is_masked", [False, True])
def test_grouped_keys_are_not_copied_on_a_cpu(is_masked):
    """With the bits of repeated ones, with and without the log-sum-exp."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 8, 33, 16), torch.randn(2, 2, 2, 33, 16)
    mask = torch.randn(2, 1, 33, 33) if is_masked else None
    whole = table.whole_heads(q, k, v)
    assert kernels.attend("auto", q, k, v, mask).equal(kernels.attend("auto", q, *whole, mask))
    want = attend_lse("auto", q, *whole, mask)
    with MovedBytes() as moved:
        found = attend_lse("auto", q, k, v, mask)
    assert all(map(torch.equal, found, want))
    with MovedBytes() as repeated:
        attend_lse("auto", q, *table.whole_heads(q, k, v), mask)
    assert moved.bytes < repeated.bytes


@pytest.mark.parametrize(
    "dtype, is_masked, capability, groups",
    [
        (torch.bfloat16, False, (8, 0), True),
        (torch.bfloat16, True, (8, 0), False),
        (torch.float32, False, (8, 0), False),
        (torch.float16, False, (7, 5), False),
    ],
)
def test_a_gpu_gets_groups_where_its_kernel_takes_them(monkeypatch, dtype, is_masked, capability, groups):
    """Elsewhere torch would make a matrix of all pairs of tokens; a stand-in for the GPU."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    kernels.has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    given = []
    monkeypatch.setattr(kernels, "SDPA", lambda q, k, *_, enable_gqa, **__: given.append((k, enable_gqa)))
    q, k = (torch.ones(1, heads, 4, 8, dtype=dtype).as_subclass(OnGpu) for heads in (6, 2))
    kernels.attend("auto", q, k, k, torch.zeros(1, 1, 4, 4) if is_masked else None)
    kernels.has_flash.cache_clear()
    ((key, enable_gqa),) = given
    assert enable_gqa == groups and key.shape[1] == (2 if groups else 6)


@pytest.mark.parametrize("name", REFUSED)
def test_rows_of_a_bias_begin_at_multiples(name):
    bias = REFUSED[name]
    found = aligned(bias)
    assert found.equal(bias) and found is not bias
    assert (
        found.stride(-1) == 1
        and found.storage_offset() == 0
        and all(step % ALIGNMENT == 0 for step in found.stride()[:-1])
    )


@pytest.mark.parametrize(
    "bias",
    [
        torch.zeros(2, 1, 3, 16),
        torch.zeros(1, 1, 1, 16).expand(2, 4, 3, 16),
        torch.zeros(2, 1, 3, 24)[..., 8:13],
    ],
    ids=["whole", "broadcast", "slice"],
)
def test_a_bias_that_fits_is_not_copied(bias):
    assert aligned(bias) is bias


@pytest.mark.parametrize("shape", [(1, 1, 1, 13), (2, 1, 1, 13), (2, 1, 5, 13)])
@pytest.mark.parametrize("boolean", [True, False])
def test_log_sum_exp_of_masked_attention(shape, boolean):
    """Against softmax by hand; a row whose keys are all masked gives 0 and -inf."""
    torch.manual_seed(0)
    q, k, v, seen = (
        torch.randn(2, 4, 5, 16),
        torch.randn(2, 4, 13, 16),
        torch.randn(2, 4, 13, 16),
        torch.rand(shape) > 0.4,
    )
    if shape[2] > 1:
        seen[0, :, 2] = False
    bias = torch.zeros(shape).masked_fill(~seen, float("-inf"))
    out, lse = attend_lse("auto", q, k, v, seen if boolean else bias)
    scores = q @ k.transpose(2, 3) * 16**-0.5 + bias
    assert torch.allclose(lse, scores.logsumexp(dim=-1).clamp(min=NOTHING), atol=1e-5)
    assert torch.allclose(out, scores.softmax(dim=-1).nan_to_num() @ v, atol=1e-5)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """Put a package of some source where Python looks for packages first."""

    def put(name, source):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)

    import_error.cache_clear()
    yield put
    import_error.cache_clear()
    for name in ("sageattention", "flash_attn", "flashinfer"):
        sys.modules.pop(name, None)


BROKEN = "raise OSError('libcudart.so.11.0: cannot open shared object file')"


@pytest.mark.parametrize(
    "name, head_size, gpus, says",
    [
        ("sage", 256, [(9, 0)], "heads of up to 128 features, and this model's have 256"),
        ("sage", 128, [(9, 0), (7, 5)], "8.0, 8.6, 8.9, 9.0, 12.0, 12.1, and there are GPUs of 7.5"),
        ("sage", 128, [(8, 9), (10, 0)], "and there are GPUs of 10.0"),
        ("flash-attn", 512, [(9, 0)], "up to 256"),
        ("flash-attn", 64, [(7, 5)], "8.0 or higher, and there are GPUs of 7.5"),
    ],
)
def test_heads_and_gpus_without_kernels_are_refused(name, head_size, gpus, says):
    reason = why_unavailable(name, "cuda", torch.bfloat16, head_size, gpus)
    assert reason and says in reason and reason.endswith("set attention to auto.")


@pytest.mark.parametrize("name, module", [("sage", "sageattention"), ("flash-attn", "flash_attn")])
def test_a_broken_package_names_itself(name, module, package):
    package(module, BROKEN)
    reason = why_unavailable(name, "cuda", torch.bfloat16, 128, [(9, 0)])
    assert reason and f"package {module} cannot be imported (OSError: libcudart" in reason


def test_a_package_that_fits_is_available(package):
    package("sageattention", f"def sageattn({SAGE.parameters}): ...")
    assert why_unavailable("sage", "cuda", torch.float16, 128, [(8, 6), (12, 0)]) is None


def test_version_1_of_sageattention_is_refused(package):
    """By its signature: it has no return_lse and accepts any name."""
    package("sageattention", f"def sageattn({SAGE_1.parameters}): ...")
    refusal = why_unavailable("sage", "cuda", torch.float16, 128, [(9, 0)]) or ""
    assert "is SageAttention 1, which changes the keys" in refusal and refusal.count(". ") == 0
    assert "build version 2 from github.com/thu-ml/SageAttention" in refusal


#: As yunchang's globals do, under ``except ImportError``, where flashinfer is installed and no GPU visible.
NEEDS_A_GPU = "import torch; torch.zeros(1, device='cuda')"


@pytest.mark.parametrize("source", [BROKEN, NEEDS_A_GPU], ids=["broken", "needs a GPU"])
def test_rings_need_no_kernel_package(package, source):
    """What reads a model's headers and rank 0 ask for them; the former sees no GPU."""
    for name in ("flash_attn", "flashinfer", "sageattention"):
        package(name, source)
    ring_library.ring_library.cache_clear()
    assert ring_library.ring_unavailable() is None


def test_the_rings_merge_is_no_torchscript():
    """Of which NVRTC makes kernels on a GPU, while the peer waits."""
    ring_library.ring_library.cache_clear()
    merge = ring_library.ring_library()._update_out_and_lse
    assert not isinstance(merge, torch.jit.ScriptFunction)
    assert isinstance(torch.jit.script(merge), torch.jit.ScriptFunction)


@pytest.mark.parametrize("files", [{}, {"ring/utils.py": "import gone"}], ids=["older", "broken"])
def test_rings_name_the_library_that_is_broken(files, tmp_path, monkeypatch):
    (tmp_path / "yunchang/ring").mkdir(parents=True)
    (tmp_path / "yunchang/__init__.py").touch()
    for name, source in files.items():
        (tmp_path / "yunchang" / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    ring_library.ring_library.cache_clear()
    reason = ring_library.ring_unavailable()
    assert reason and "the package yunchang cannot be used" in reason and reason.endswith("ulysses_degree.")
    ring_library.ring_library.cache_clear()


def test_one_rank_runs_the_chosen_kernel(monkeypatch):
    """Where nothing is divided there is no hook; masks, float32, wide heads and few keys stay torch's."""
    monkeypatch.setattr(table, "MIN_APPROXIMATE_KEYS", 5)
    calls = []
    module = ModuleType("sageattention")
    module.sageattn = lambda q, k, v, **named: calls.append(named) or torch.zeros_like(q)
    monkeypatch.setitem(sys.modules, "sageattention", module)
    x = torch.ones(1, 2, 5, 16)
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    half = x.bfloat16()
    with kernels.instead_of_torch("sage"):
        attention = torch.nn.functional.scaled_dot_product_attention
        assert not attention(half, half, half, scale=0.5).any() and calls[0]["sm_scale"] == 0.5
        wide = half.expand(-1, -1, -1, 16).repeat(1, 1, 1, 16)
        assert attention(x, x, x).all() and attention(wide, wide, wide).all()
        assert attention(half, half, half, attn_mask=mask).all()
        assert attention(half, half[:, :, :4], half[:, :, :4]).all()
    assert len(calls) == 1 and torch.nn.functional.scaled_dot_product_attention is kernels.SDPA
    with kernels.instead_of_torch("auto"):
        assert torch.nn.functional.scaled_dot_product_attention is kernels.SDPA


@pytest.mark.parametrize(
    "name, keys, is_own", [("sage", 1023, False), ("sage", 1024, True), ("flash-attn", 1023, True)]
)
def test_few_keys_are_torchs_in_rings_too(monkeypatch, name, keys, is_own):
    """Of 1024 x 1024 pixels a rank of a ring of 8 has 576; stand-ins for the GPU and the kernels."""
    calls = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    def kernel(who):
        return lambda q, *_, **__: calls.append(who) or (q, torch.zeros(q.shape[:3]))

    own = replace(table.KERNELS[name], call=kernel("own"))
    monkeypatch.setitem(table.KERNELS, name, own)
    monkeypatch.setattr(kernels, "has_flash", lambda device: True)
    monkeypatch.setattr(kernels, "SDPA", kernel("torch"))
    monkeypatch.setattr(kernels, "flash_of_torch", kernel("torch"))
    q, k = (torch.ones(1, 2, tokens, 64, dtype=torch.bfloat16).as_subclass(OnGpu) for tokens in (4, keys))
    kernels.attend(name, q, k, k)
    attend_lse(name, q, k, k)
    assert calls == ["own" if is_own else "torch"] * 2


def test_rings_on_the_cpu_leave_packaged_kernels_alone(monkeypatch):
    """Stand-ins for kernels take any tensor; a package's takes those of its GPU."""

    def of_the_package(*_):
        raise AssertionError("it has no kernel for the CPU")

    own = replace(table.KERNELS["flash-attn"], call=of_the_package)
    monkeypatch.setitem(table.KERNELS, "flash-attn", own)
    q, k = (torch.ones(1, 2, tokens, 64, dtype=torch.bfloat16) for tokens in (4, 1024))
    out, lse = attend_lse("flash-attn", q, k, k)
    assert out.eq(1).all() and lse.shape == (1, 2, 4)


@pytest.mark.parametrize(
    "capability, is_built, has_failed, called",
    [
        ((7, 5), True, False, "efficient"),
        ((8, 0), True, False, "flash"),
        ((8, 0), False, False, "efficient"),
        ((8, 0), True, True, "efficient"),
    ],
    ids=["before Ampere", "Ampere", "built without", "tried and failed"],
)
def test_rings_run_without_flash_where_there_is_none(monkeypatch, capability, is_built, has_failed, called):
    """Which raises there in the middle of a request; stand-ins for the GPU and for both kernels."""
    calls = []

    def kernel(name):
        return lambda q, k, v, *_, **__: calls.append(name) or (q, torch.zeros(1, 2, 4))

    kernels.has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_built)
    monkeypatch.setattr(kernels, "WITHOUT_FLASH", set())
    if has_failed:
        kernels.give_up_flash("cuda:0")
    efficient = kernel("efficient")
    monkeypatch.setattr(kernels, "aten", SimpleNamespace(_scaled_dot_product_efficient_attention=efficient))
    monkeypatch.setattr(kernels, "flash_of_torch", kernel("flash"))
    q = SimpleNamespace(is_cuda=True, dtype=torch.float16, device="cuda:0", shape=(1, 2, 4, 8), to=id)
    kernels._lse_kernel("auto", q, q, q, None, 1.0)
    sage = replace(table.KERNELS["sage"], call=kernel("sage"))
    monkeypatch.setitem(table.KERNELS, "sage", sage)
    monkeypatch.setattr(kernels, "fits", lambda *given, **named: True)
    kernels._lse_kernel("sage", q, q, q, None, 1.0)  # a kernel of its own does not ask for torch's
    kernels.has_flash.cache_clear()
    assert calls == [called, "sage"]


@pytest.mark.parametrize("capability, computed", [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_rings_without_flash_compute_in_bf16_where_the_gpu_does(monkeypatch, is_masked, capability, computed):
    """The memory-efficient kernel has none of it before Ampere, and float32 takes twice the memory; stand-ins
    for the GPU and for the kernel."""
    given = []

    def efficient(q, k, v, mask, *_, **__):
        given.extend(each.dtype for each in (q, k, v, mask) if each is not None)
        return q, torch.zeros(1, 2, 32)

    class OnGpu(torch.Tensor):
        is_cuda = True

    kernels.has_flash.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.setattr(kernels, "aten", SimpleNamespace(_scaled_dot_product_efficient_attention=efficient))
    q = torch.ones(1, 2, 4, 8, dtype=torch.bfloat16).as_subclass(OnGpu)
    mask = torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16) if is_masked else None
    out, lse = kernels._lse_kernel("auto", q, q, q, mask, 1.0)
    kernels.has_flash.cache_clear()
    assert set(given) == {computed} and len(given) == 3 + is_masked
    assert out.dtype == torch.bfloat16 and lse.shape == (1, 2, 4)


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float16), ((8, 6), torch.bfloat16)])
def test_the_probe_computes_in_the_type_of_models(monkeypatch, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert computed_in(torch.device("cuda")) == dtype
