"""Native products are tried before a model is loaded: what a rank's kernels refuse, all ranks leave."""

import re

import pytest
import torch
import torch.nn.functional as F

from backend.errors import UnsupportedError
from backend.quantization import kernels, native_trial
from backend.quantization.formats import FORMATS
from backend.quantization.matmul import RULES, Matrix, choose, choose_all, wanted
from backend.quantization.packed_weight import scratch_bytes

CPU = torch.device("cpu")
INT8 = ("int8_tensorwise", "float32")
MATRIX = Matrix(FORMATS[INT8[0]], {"format": INT8[0]}, (96,), (0, 256), torch.float32)


@pytest.fixture
def kitchen():
    return pytest.importorskip("comfy_kitchen")


@pytest.fixture(autouse=True)
def nothing_is_known():
    native_trial._refusal.cache_clear()
    yield
    native_trial._refusal.cache_clear()


def failing(error: Exception):
    def product(*arguments):
        raise error

    return product


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_that_work_refuse_nothing(kitchen, dtype):
    """Of all formats. No memory to dequantize in is left behind, which would count as a model's."""
    held = scratch_bytes(CPU)
    assert native_trial.refusals([(kind, dtype) for kind in RULES], CPU) == {}
    assert scratch_bytes(CPU) <= held


@pytest.mark.parametrize(
    "product, says",
    [
        (
            failing(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nwhen calling")),
            "failed .CUBLAS_STATUS_NOT_SUPPORTED",
        ),
        (failing(RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")), "failed .CUBLAS_STATUS_NOT_INITIALIZED"),
        (failing(TypeError("unexpected keyword")), "failed .unexpected keyword"),
        (lambda x, w: torch.zeros(len(x), w.shape[1], dtype=torch.int32), "is off by 1 of its values"),
        (lambda x, w: torch.full((len(x), w.shape[1]), float("nan")), "is off by inf of its values"),
    ],
    ids=["an error", "a broken library", "another call", "zeros", "NaN"],
)
def test_kernels_that_do_not_are_refused(kitchen, monkeypatch, product, says):
    """Once for a process: the next load asks no device again."""
    monkeypatch.setattr(kitchen, "mm_int8", product)
    found = native_trial.refusals([INT8, ("float8_e4m3fn", "float32")], CPU)
    assert found.keys() == {INT8}
    assert re.search(says, found[INT8]) and "\n" not in found[INT8]
    monkeypatch.undo()
    assert native_trial.refusals([INT8], CPU) == found


def test_both_ways_of_turing_are_tried(kitchen, monkeypatch):
    """Of few rows, and of as many as images have."""
    from comfy_kitchen.backends import cuda

    is_fused = cuda._prefer_turing_fused_int8
    product = kitchen.mm_int8
    fused = set()

    def few_rows(x, weight):
        fused.add(is_fused(len(x), weight.shape[1], len(weight)))
        if False in fused:
            raise RuntimeError("no product of many rows")
        return product(x, weight)

    monkeypatch.setattr(kitchen, "mm_int8", few_rows)
    assert native_trial.refusals([INT8], CPU) == {INT8: "its product failed (no product of many rows)"}
    assert fused == {True, False}


def test_without_comfy_kitchen_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(kernels, "kitchen", lambda: (None, "comfy-kitchen is not installed"))
    assert native_trial.refusals([INT8], CPU) == {INT8: "comfy-kitchen is not installed"}


def test_memory_that_runs_out_is_no_refusal(kitchen, monkeypatch):
    """It ends the load on all ranks, and is not cached."""
    monkeypatch.setattr(kitchen, "mm_int8", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        native_trial.refusals([INT8], CPU)
    assert native_trial.agree([INT8], CPU, lambda own: [[[], "", "CPU"], own]) == (
        {},
        ["", "CUDA out of memory"],
    )
    monkeypatch.undo()
    assert native_trial.refusals([INT8], CPU) == {}


def test_a_rank_that_loses_its_gpu_in_a_trial_ends_once_all_have_gathered(kitchen, monkeypatch):
    """And not in the next request of somebody else, which would be blamed for it."""
    gathered = []

    def lost(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as gpu:
        gpu.setattr(kitchen, "mm_int8", lost)
        gpu.setattr(torch, "ones", lambda *size, **named: lost() if named else torch.full(size, 1.0))
        with pytest.raises(RuntimeError, match="native int8_tensorwise products lost the GPU.*weight only"):
            native_trial.agree([INT8], CPU, lambda own: gathered.append(own) or [own])
    assert len(gathered) == 1 and native_trial.refusals([INT8], CPU) == {}


def test_all_ranks_leave_what_one_refuses(monkeypatch):
    """The first rank and its GPU are named; one rank alone is not."""
    monkeypatch.setattr(kernels, "kitchen", lambda: (None, "comfy-kitchen is not installed"))
    other = [[[*INT8, "its product failed"], ["nvfp4", "float32", "it is old"]], "", "NVIDIA L4"]
    found = native_trial.agree([INT8], CPU, lambda own: [[[], "", "CPU"], other, own])
    assert found == (
        {
            INT8: "on rank 1 (NVIDIA L4) its product failed",
            ("nvfp4", "float32"): "on rank 1 (NVIDIA L4) it is old",
        },
        [""] * 3,
    )
    assert native_trial.agree([INT8], CPU, lambda own: [own]) == (
        {INT8: "comfy-kitchen is not installed"},
        [""],
    )


def test_a_refused_format_is_weight_only(kitchen):
    """Under auto, of that format in that type alone; native is refused with the reason."""
    refused = {INT8: "on rank 2 (NVIDIA L4) its product failed"}
    choice = choose(MATRIX, "auto", CPU, None, refused)
    assert choice.kernel is None and choice.why == refused[INT8]
    half = Matrix(MATRIX.format, MATRIX.settings, MATRIX.rows, MATRIX.edges, torch.bfloat16)
    assert choose(half, "auto", CPU, None, refused).kernel and choose(MATRIX, "auto", CPU).kernel
    says = "1 of 1 quantized layers of m .* first 'a': on rank 2 .NVIDIA L4. its product failed; choose auto"
    with pytest.raises(UnsupportedError, match=says):
        choose_all("m", {"a": MATRIX}, "native", CPU, None, refused)


def test_what_is_tried_depends_on_nothing_that_is_installed(monkeypatch):
    """Else a machine without the package would have its ranks try nothing, and multiply otherwise."""
    monkeypatch.setattr(kernels, "kitchen", lambda: (None, "comfy-kitchen is not installed"))
    inside = Matrix(FORMATS["nvfp4"], {"format": "nvfp4"}, (96,), (0, 16, 256))  # no kernel takes it
    plain = Matrix(FORMATS["float8_e5m2"], {"format": "float8_e5m2"}, (96,), (0, 256))
    assert wanted([MATRIX, MATRIX, inside, plain], "native", CPU, None) == [INT8]
    assert wanted([MATRIX], "weight only", CPU, None) == wanted([plain], "auto", CPU, None) == []
    monkeypatch.setattr("backend.quantization.matmul.has_torch", lambda *version: False)
    gpu = torch.device("cuda", 0)
    four = Matrix(FORMATS["nvfp4"], {"format": "nvfp4"}, (96,), (0, 256))
    assert wanted([four], "auto", gpu, (10, 0)) == [("nvfp4", "bfloat16")]


@pytest.mark.parametrize("kind", [RuntimeError, AssertionError])
@torch.inference_mode()
def test_a_shape_that_no_trial_saw(kitchen, monkeypatch, kind):
    """Its layer is weight only from then on, but where other ranks wait in it, and where memory ran out."""
    weight, *_ = native_trial.examples(*INT8[:1], torch.float32, CPU)
    x, bias, calls = torch.randn(3, 256), torch.randn(256), []
    native = weight.linear(x, bias)
    error = kind("CUBLAS_STATUS_NOT_SUPPORTED")
    monkeypatch.setattr(kitchen, "mm_int8", lambda *a: calls.append(1) or failing(error)())
    with pytest.raises(kind, match="NOT_SUPPORTED"):
        weight.linear(x, bias, lambda most: most)
    assert weight.choice.kernel
    with pytest.warns(UserWarning, match="int8 multiplies weight only: its product failed .CUBLAS"):
        found = weight.linear(x, bias)
    assert found.equal(F.linear(x, weight.dequantized(), bias)) and not found.equal(native)
    assert weight.choice.kernel is None and "NOT_SUPPORTED" in weight.choice.why
    assert weight.linear(x, bias).equal(found) and len(calls) == 2
    short, *_ = native_trial.examples(*INT8[:1], torch.float32, CPU)
    monkeypatch.setattr(kitchen, "mm_int8", failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        short.linear(x, bias)
    assert short.choice.kernel
