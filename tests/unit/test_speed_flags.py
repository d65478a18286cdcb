"""Flags of ComfyUI that do not reach the ranks, said under the loader."""

from collections.abc import Mapping
from types import SimpleNamespace

import pack  # noqa: F401  # makes parallel_dit importable
import pytest
import torch
from parallel_dit.nodes.host.speed_flags import flag_lines

from backend.config import CHOICES
from backend.parallel.attention.kernel_choice import explained
from backend.quantization.formats import PLAIN_FLOAT8
from backend.quantization.matmul import Matrix, choose

OPEN = {"attention": "auto", "weight_dtype": "default", "matmul": "auto"}
NATIVE = "matmul of Load Parallel DiT to native"


def info_of(device: str = "cuda", head_size: int = 128, quantized: bool = True) -> dict:
    """What ranks on an RTX 4090 tell of a model in bf16, with fp8 layers without scales."""
    where = (device, torch.bfloat16, head_size, {(8, 9)}, False)
    weight = Matrix(PLAIN_FLOAT8, {"format": "float8_e4m3fn"}, (64,), (0, 64))
    choice = choose(weight, "auto", torch.device("cpu"))
    kinds = [{"format": "fp8", "layers": 9, "multiplication": str(choice)}] if quantized else []
    attention = {name: explained(name, *where) for name in CHOICES["attention"]}
    return {"device": device, "dtype": "bfloat16", "attention": attention, "quantized": kinds}


def lines(flag: str, chosen: Mapping[str, str] = OPEN, **info) -> list[str]:
    name = flag.removeprefix("--fast ").removeprefix("--").replace("-", "_")
    fast = [SimpleNamespace(value=name)] if flag.startswith("--fast") else []
    return flag_lines({name: True, "fast": fast}, {**OPEN, **chosen}, info_of(**info))


@pytest.mark.parametrize(
    "flag, remedy",
    [
        ("--use-sage-attention", "attention of Parallel Config to sage, which needs SageAttention 2"),
        ("--use-flash-attention", "attention of Parallel Config to flash-attn"),
        ("--fp16-unet", "weight_dtype of Load Parallel DiT to fp16"),
        ("--fast fp8_matrix_mult", NATIVE),
    ],
)
def test_a_flag_is_said_with_the_input_that_does_the_same(flag, remedy):
    assert lines(flag) == [f"ComfyUI runs with {flag}, the ranks do not; set {remedy}."]


def test_a_flag_without_such_an_input_is_said():
    said = ["ComfyUI runs with --fast fp16_accumulation, which the ranks do not have."]
    assert lines("--fast fp16_accumulation") == said


@pytest.mark.parametrize("flag", ["--reserve-vram", "--gpu-only"])
def test_a_flag_that_works_against_the_ranks_is_said(flag):
    (said,) = lines(flag)
    assert said.startswith(f"ComfyUI runs with {flag}, which ") and "leave it out" in said
    assert not lines(flag, device="cpu")


@pytest.mark.parametrize(
    "flag, change",
    [
        ("--use-sage-attention", {"chosen": {"attention": "sdpa"}}),
        ("--use-sage-attention", {"head_size": 256}),
        ("--use-sage-attention", {"device": "cpu"}),
        ("--fp16-unet", {"chosen": {"weight_dtype": "fp32"}}),
        ("--bf16-unet", {}),
        ("--fast fp8_matrix_mult", {"chosen": {"matmul": "native"}}),
        ("--fast fp8_matrix_mult", {"quantized": False}),
        ("--fast autotune", {}),
        ("--use-quad-cross-attention", {}),
    ],
    ids=str,
)
def test_nothing_is_said_where_it_would_change_nothing(flag, change):
    assert lines(flag, **change) == []
