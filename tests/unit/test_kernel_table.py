"""The table of attention kernels: what may be chosen, and how the packages' own functions are called.

Stand-ins (attention_packages.py) have the signatures of the packages' sources and compute attention as those
define it, so a wrong layout, scale or order of results shows in the numbers.
"""

import re
import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from attention_packages import FUNCTIONS, lse_of, package
from attention_stubs import by_cudnn
from recorded_signatures import SAGE_ON_8_0
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import _registry as torch_registry

from backend.config import CHOICES, ParallelConfig
from backend.parallel.attention import attention_kernels
from backend.parallel.attention import kernel_table as table
from backend.parallel.attention.attention_kernels import attend, torchs_choice
from backend.parallel.attention.kernel_choice import explained, import_error, why_unavailable
from backend.parallel.attention.kernel_table import KERNELS, SDPA, TORCH, fits
from backend.runtime.install_command import install_command

CPU = torch.device("cpu")
SCALE = 0.3
HELP = Path(__file__).parents[2] / "web/docs/ParallelConfig.md"


class Operator:
    """Stands for an operator of torch's for CUDA: takes what its schema does."""

    def __init__(self, name):
        self.schema = getattr(torch.ops.aten, name).default._schema
        self.calls = []

    def __call__(self, *given, **named):
        arguments = self.schema.arguments
        positional = [each.name for each in arguments if not each.kwarg_only]
        call = dict(zip(positional, given, strict=False)) | named
        assert len(given) <= len(positional) and call.keys() <= {each.name for each in arguments}
        missing = [each for each in arguments if each.name not in call and not each.has_default_value()]
        assert not missing, missing
        self.calls.append(call)
        q, k, v, scale = (call[name] for name in ("query", "key", "value", "scale"))
        assert q.shape[1] == k.shape[1], "these operators know no grouped queries"
        others = [None] * (len(self.schema.returns) - 2)
        return SDPA(q, k, v, scale=scale), lse_of(q, k, scale), *others


@pytest.fixture
def stand_ins(monkeypatch):
    """Every package and operator of the table, for few keys too."""
    monkeypatch.setattr(table, "MIN_APPROXIMATE_KEYS", 0)
    for name, functions in FUNCTIONS.items():
        monkeypatch.setitem(sys.modules, KERNELS[name].module, package(functions))
    monkeypatch.setattr(table, "SDPA", by_cudnn)
    operators = {
        name: Operator(name)
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention")
    }
    monkeypatch.setattr(table, "aten", SimpleNamespace(**operators))
    return operators


def sample(heads=4, dtype=torch.bfloat16, size=64, tokens=5):
    torch.manual_seed(0)
    q = torch.randn(2, 4, tokens, size, dtype=dtype)
    k, v = (torch.randn(2, heads, 7, size, dtype=dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("name", [name for name in KERNELS if name != TORCH])
def test_a_kernel_computes_what_torch_does(name, heads, stand_ins):
    q, k, v = sample(heads)
    before = k.clone()
    wanted = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)
    # attention does not change where a constant is taken off all keys
    assert (attend(name, q, k, v, None, SCALE) - wanted).abs().max() < 0.05
    assert (
        attend(name, q, k, v) - F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    ).abs().max() < 0.05
    assert k.equal(before), "keys may be a K/V buffer's"


@pytest.mark.parametrize("tokens", [5, 14, 30])
@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if kernel.lse and kernel.call])
def test_a_ring_gets_the_log_sum_exp(name, tokens, stand_ins):
    """Also where a rank has twice the tokens of the one whose keys come around, which SageAttention 2.2.0 is
    wrong for with heads first."""
    q, k, v = sample(tokens=tokens)
    out, lse = KERNELS[name].call(q, k, v, SCALE, True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert torch.allclose(lse, lse_of(q, k, SCALE), atol=1e-2)
    assert (out - SDPA(q, k, v, scale=SCALE)).abs().max() < 0.05


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("gpu, is_cuda_kernel", [((8, 0), False), ((8, 6), True), ((8, 9), False)])
def test_sageattention_adds_in_float32_on_gpus_of_8_6(stand_ins, monkeypatch, gpu, is_cuda_kernel, lse):
    """Where its own choice adds in float16; a stand-in for the GPU."""
    accumulators = []

    class OnGpu(torch.Tensor):
        is_cuda = True

    sage = sys.modules["sageattention"]
    of_8_0 = getattr(sage, SAGE_ON_8_0.function)

    def recorded(*given, pv_accum_dtype, **named):
        accumulators.append(pv_accum_dtype)
        return of_8_0(*given, pv_accum_dtype=pv_accum_dtype, **named)

    monkeypatch.setattr(sage, SAGE_ON_8_0.function, recorded)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: gpu)
    q, k, v = sample()
    out, sums = table._sage(q.as_subclass(OnGpu), k, v, SCALE, lse)
    assert accumulators == ["fp32"] * is_cuda_kernel
    assert out.equal(SDPA(q, k, v, scale=SCALE))
    wanted = lse_of(q, k, SCALE)
    assert sums is None if not lse else sums is not None and sums.equal(wanted)


@pytest.mark.parametrize("name", ["flash-attn-3", "flash-attn-4"])
def test_torch_activates_a_kernel_for_a_request_alone(name, monkeypatch):
    seen = []
    handle = SimpleNamespace(remove=lambda: seen.append("restored"))

    def register():
        seen.append("activated")
        return handle

    monkeypatch.setitem(torch_registry._FLASH_ATTENTION_IMPLS, KERNELS[name].torch_impl, register)
    with pytest.raises(ZeroDivisionError):
        with table.activated(name):
            assert torch.nn.attention.current_flash_attention_impl() == KERNELS[name].torch_impl
            raise ZeroDivisionError
    assert seen == ["activated", "restored"] and torch.nn.attention.current_flash_attention_impl() is None


def test_other_heads_of_a_model_stay_off_an_activated_kernel(stand_ins, monkeypatch):
    """LTX-2's audio, for example: SDPA would hand them to what torch has activated."""
    q, k, v = sample(size=20)
    limited = []
    monkeypatch.setattr(
        "backend.parallel.attention.attention_kernels.sdpa_kernel",
        lambda backends: limited.append(backends) or torch.no_grad(),
    )
    assert attend("flash-attn-3", q, k, v).equal(SDPA(q, k, v))
    assert limited and not stand_ins["_scaled_dot_product_flash_attention"].calls


def test_what_a_kernel_cannot_compute_is_torchs(stand_ins):
    q, k, v = sample()
    for name, kernel in KERNELS.items():
        assert not fits(name, q, k, masked=True, lse=False)
        assert not fits(name, q.float(), k, masked=False, lse=False)
        assert fits(name, q, k, masked=False, lse=True) == (kernel.lse and kernel.call is not None)
    mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
    assert all(attend(name, q, k, v, mask).equal(SDPA(q, k, v, mask)) for name in KERNELS)


def test_the_node_offers_the_table():
    assert CHOICES["attention"][:2] == ("auto", TORCH) and set(CHOICES["attention"]) == {"auto", *KERNELS}


@pytest.mark.parametrize("name", [name for name in KERNELS if name != TORCH])
def test_the_help_page_has_the_table(name):
    kernel = KERNELS[name]
    cells = (f"`{name}`", kernel.what, kernel.gpus_in_words, kernel.heads_in_words)
    ending = ("yes" if kernel.lse else "no", "exact" if kernel.exact else "approximate")
    what = "; ".join((*cells[1:], *ending))
    assert f"- {cells[0]}: {what}\n" in HELP.read_text()


#: Kernel, head size, GPU, ring -> words of the refusal; "" where nothing stands against it but the package.
COMBINATIONS = [
    ("sage", 256, (9, 0), False, "heads of up to 128 features"),
    ("sage", 128, (10, 0), False, "8.0, 8.6, 8.9, 9.0, 12.0, 12.1, and there are GPUs of 10.0"),
    ("sage", 128, (12, 0), True, ""),
    ("sage", 128, (12, 1), True, ""),
    ("sage-3", 128, (12, 0), False, ""),
    ("sage-3", 128, (12, 1), False, ""),
    ("sage-3", 128, (10, 0), False, "12.0 to 12.1, and there are GPUs of 10.0"),
    ("sage-3", 96, (12, 0), False, "heads of 64 or 128 features, and this model's have 96"),
    ("sage-3", 128, (9, 0), False, "12.0 to 12.1, and there are GPUs of 9.0"),
    ("sage-3", 128, (12, 0), True, "does not return the log-sum-exp by which rings merge"),
    ("sage-3", 128, (12, 0), True, "set attention to one of sdpa, cudnn, flash-attn"),
    ("cudnn", 128, (7, 5), False, "8.0 or higher, and there are GPUs of 7.5"),
    ("flash-attn", 256, (12, 0), True, ""),
    ("flash-attn-3", 128, (9, 0), True, ""),
    ("flash-attn-3", 128, (8, 9), False, "9.0 to 9.9, and there are GPUs of 8.9"),
    ("flash-attn-3", 100, (9, 0), False, "up to 256 features, in multiples of 8"),
    ("flash-attn-4", 128, (10, 0), True, ""),
    ("flash-attn-4", 256, (10, 0), False, ""),
    ("flash-attn-4", 256, (9, 0), True, ""),
    ("flash-attn-4", 192, (10, 0), False, "up to 128 features, in multiples of 8, or of 256"),
    ("flash-attn-4", 128, (12, 0), False, "9.0 to 10.9"),
]


@pytest.mark.parametrize("name, head_size, gpu, ring, says", COMBINATIONS)
def test_a_wrong_combination_cannot_be_chosen(name, head_size, gpu, ring, says):
    refusal = why_unavailable(name, "cuda", torch.bfloat16, head_size, [gpu], ring) or ""
    text = explained(name, "cuda", torch.bfloat16, head_size, [gpu], ring)
    if says:
        assert says in refusal and text == refusal
        assert refusal.count(". ") == 0 and refusal.endswith(".")
    else:  # no such package is installed here
        assert "is not installed" in refusal and text.startswith(f"attention {name}: {KERNELS[name].what}")


@pytest.mark.parametrize("name", ["flash-attn", "flash-attn-4"])
def test_a_package_is_installed_for_the_python_of_the_ranks(name):
    refusal = why_unavailable(name, "cuda", torch.bfloat16, 128, [(9, 0)])
    package = KERNELS[name].package
    assert re.split("[=>]=", package)[0] == name
    assert refusal and f"is not installed; run: {install_command([package])}, or set" in refusal


def test_every_choice_is_explained_in_one_line():
    for name, device, ring in product(CHOICES["attention"], ("cpu", "cuda"), (False, True)):
        text = explained(name, device, torch.bfloat16, 128, [(9, 0)], ring)
        assert name in text and "\n" not in text
    assert "approximate, whose log-sum-exp the ring merges by" in explained(
        "sage", "cuda", torch.bfloat16, 128, [(9, 0)], True
    )


#: GPU, type, head size, ring -> the kernels that auto leaves there.
LEFT = {
    "RTX 4090": ((8, 9), torch.bfloat16, 128, False, "cudnn, flash-attn, sage (approximate)"),
    "its wide heads": ((8, 9), torch.float16, 256, False, "flash-attn"),
    "H100": (
        *((9, 0), torch.bfloat16, 128, False),
        "cudnn, flash-attn, flash-attn-3, flash-attn-4, sage (approximate)",
    ),
    "B200": ((10, 0), torch.bfloat16, 128, True, "cudnn, flash-attn, flash-attn-4"),
    "RTX 5090": (
        *((12, 0), torch.bfloat16, 128, False),
        "cudnn, flash-attn, sage (approximate), sage-3 (approximate)",
    ),
    "its ring": ((12, 0), torch.bfloat16, 128, True, "cudnn, flash-attn, sage (approximate)"),
    "RTX 2080": ((7, 5), torch.float16, 128, False, ""),
    "float32": ((9, 0), torch.float32, 128, False, ""),
}


@pytest.mark.parametrize("gpu, dtype, head_size, ring, left", LEFT.values(), ids=LEFT)
def test_auto_says_which_kernel_runs_and_which_it_leaves(gpu, dtype, head_size, ring, left):
    of_torch = ("cuDNN's", "memory-efficient")
    texts = [explained(name, "cuda", dtype, head_size, [gpu], ring, of_torch) for name in ("auto", "sdpa")]
    rule = f"{KERNELS[TORCH].what}, exact, on these GPUs cuDNN's, with a mask memory-efficient"
    assert texts[1] == f"attention sdpa: {rule}"
    others = f"; others for it: {left}; auto takes torch's, since none was timed here" if left else ""
    assert texts[0].partition(" (scripts")[0] == f"attention auto: {rule}{others}"
    assert "timed here (scripts/doctor.py --full does)" in texts[0] or not left


@pytest.mark.parametrize("head_size", [128, 20])
def test_torch_is_asked_which_of_its_kernels_it_chooses(head_size):
    """The CPU's stand for a GPU's: flash, or all scores where that is switched off."""
    for kernel, words in ((SDPBackend.FLASH_ATTENTION, "flash"), (SDPBackend.MATH, "the plain one")):
        with sdpa_kernel(kernel):
            assert torchs_choice(CPU, torch.bfloat16, head_size, ring=False) == (words, words)


@pytest.mark.parametrize("is_flash", [True, False])
def test_a_ring_says_which_of_torchs_operators_it_calls(monkeypatch, is_flash):
    monkeypatch.setattr(attention_kernels, "has_flash", {CPU: is_flash}.__getitem__)
    first = "flash" if is_flash else "memory-efficient"
    assert torchs_choice(CPU, torch.bfloat16, 128, ring=True) == (first, "memory-efficient")
    assert torchs_choice(CPU, torch.float32, 128, ring=True) == ("memory-efficient", "memory-efficient")


def test_gpus_that_differ_are_not_said_to_choose_alike():
    text = explained("auto", "cuda", torch.bfloat16, 128, [(8, 9), (12, 0)], False)
    assert "for each call as torch's own rules say; others for it: cudnn, flash-attn, sage" in text


@pytest.mark.parametrize(
    "name, ring, ends",
    [
        ("sage", False, "where there is a mask or fewer than 1,024 keys"),
        ("sage", True, "where there is a mask or fewer than 1,024 keys in a hop of the ring"),
        ("flash-attn", True, "where there is a mask"),
    ],
)
def test_the_node_says_which_calls_stay_torchs(name, ring, ends):
    assert explained(name, "cuda", torch.bfloat16, 128, [(9, 0)], ring).endswith(f"torch's own {ends}")


def test_a_torch_that_cannot_activate_is_named(monkeypatch):
    monkeypatch.delitem(torch_registry._FLASH_ATTENTION_IMPLS, "FA3")
    refusal = why_unavailable("flash-attn-3", "cuda", torch.bfloat16, 128, [(9, 0)])
    assert refusal and "cannot activate (it knows FA4)" in refusal


def test_a_package_of_that_name_without_the_function_is_named(monkeypatch):
    """FlashAttention 4 alone leaves a package flash_attn without FlashAttention 2's function."""
    module = ModuleType("flash_attn")
    module.__spec__ = SimpleNamespace(name="flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    import_error.cache_clear()
    refusal = why_unavailable("flash-attn", "cuda", torch.bfloat16, 128, [(9, 0)])
    import_error.cache_clear()
    assert refusal and "cannot be imported (it has no flash_attn_func)" in refusal


def test_cudnn_cannot_be_chosen_on_amd(monkeypatch):
    """Its operator is there, and raises. AMD's GPUs have no compute capability to refuse by."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    refusal = why_unavailable("cudnn", "cuda", torch.bfloat16, 128)
    assert refusal and "NVIDIA GPUs only" in refusal and "set attention to auto" in refusal
    assert why_unavailable("sdpa", "cuda", torch.bfloat16, 128) is None
    assert "is not installed" in (why_unavailable("flash-attn", "cuda", torch.bfloat16, 128) or "")


@pytest.mark.parametrize(
    "fields, merges",
    [
        ({"ring_degree": 2}, True),
        ({"ulysses_degree": 2}, False),
        ({"ring_degree": 2, "pipefusion_degree": 2}, False),
        ({"ring_degree": 2, "pipefusion_degree": 2, "num_pipeline_patch": 1}, True),
    ],
)
def test_where_rings_merge(fields, merges):
    assert table.merges(ParallelConfig(**fields)) == merges
