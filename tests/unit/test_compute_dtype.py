"""Which type a model computes in by default."""

import json

import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformerBlock
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from backend.loading.compute_dtype import MIN_CAPABILITY, compute_dtype, default_dtype, fast_dtypes
from backend.loading.recognition import open_checkpoint
from backend.models.common.joint_blocks import within_range
from backend.models.family import BF16_OR_FP16, FP16_OR_BF16

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = tuple(MIN_CAPABILITY)


@pytest.mark.parametrize(
    "stored, listed, able, want",
    [
        (BF16, BF16_OR_FP16, BOTH, BF16),
        (FP16, BF16_OR_FP16, BOTH, FP16),
        (FP32, BF16_OR_FP16, BOTH, BF16),
        (None, BF16_OR_FP16, BOTH, BF16),
        (BF16, FP16_OR_BF16, BOTH, FP16),
        (FP32, FP16_OR_BF16, BOTH, FP16),
        (FP16, (BF16,), BOTH, BF16),
        (BF16, BF16_OR_FP16, (FP16,), FP16),
        (FP32, BF16_OR_FP16, (FP16,), FP16),
        (FP16, (BF16,), (FP16,), FP32),
        (None, (BF16,), (FP16,), FP32),
        (BF16, FP16_OR_BF16, (), FP32),
        (FP16, FP16_OR_BF16, (), FP32),
    ],
)
def test_the_type_is_comfyuis(stored, listed, able, want):
    assert compute_dtype(stored, listed, able) == want


@pytest.mark.parametrize(
    "device, capability, want",
    [
        ("cpu", None, ()),
        ("cuda", (6, 1), ()),
        ("cuda", (7, 5), (FP16,)),
        ("cuda", (8, 6), BOTH),
        ("cuda", (12, 0), BOTH),
        ("cuda", None, BOTH),
    ],
)
def test_the_device_decides(device, capability, want):
    assert fast_dtypes(torch.device(device), capability) == want


def test_a_quantized_file_is_none_of_float16(tmp_path):
    """As in ComfyUI: what a file keeps in float16 besides its quantized layers says nothing."""
    weights = {
        key: value.half() for key, value in load_file(write_checkpoint(tmp_path / "m.safetensors")).items()
    }
    plain, quantized = tmp_path / "plain.safetensors", tmp_path / "int8.safetensors"
    save_file(weights, plain)
    name = "single_blocks.0.linear1"
    weights[f"{name}.weight"] = weights[f"{name}.weight"].char()
    weights[f"{name}.weight_scale"] = torch.ones(1)
    described = json.dumps({"layers": {name: {"format": "int8_tensorwise"}}})
    save_file(weights, quantized, {"_quantization_metadata": described})
    found = [
        default_dtype(open_checkpoint(str(path)), torch.device("cuda"), (8, 6)) for path in (plain, quantized)
    ]
    assert found == [FP16, BF16]


def test_float32_files_do_not_run_in_float32_on_a_gpu(tmp_path):
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "m.safetensors")))
    assert checkpoint.dtype == FP32
    assert default_dtype(checkpoint, torch.device("cuda"), (8, 0)) == BF16
    assert default_dtype(checkpoint, torch.device("cpu"), None) == FP32


def test_text_of_hunyuan_video_15_stays_within_float16(tmp_path):
    """As in ComfyUI, which runs the family in float16; diffusers' block alone overflows."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "m.safetensors", "hunyuan-video15")))
    checkpoint.load(range(checkpoint.block_count), FP16, torch.device("cpu"))
    block = checkpoint.transformer.get_submodule("transformer_blocks.0")
    width = checkpoint.config["num_attention_heads"] * checkpoint.config["attention_head_dim"]
    bias = block.norm1_context.linear.bias
    bias[2 * width : 3 * width] = bias[5 * width :] = 6e4  # the gates
    streams = {"hidden_states": torch.zeros(1, 2, width), "encoder_hidden_states": torch.randn(1, 3, width)}
    inputs = {name: value.half() for name, value in streams.items()} | {"temb": torch.zeros(1, width).half()}
    assert not block.forward(**inputs)[1].isfinite().all()
    assert block(**inputs)[1].isfinite().all()


def test_streams_of_flux_stay_within_float16(tmp_path):
    """Of image, too, whose infinities diffusers' block leaves: the norm of the next block makes no numbers of
    them. ComfyUI replaces both."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "m.safetensors", "flux-dev")))
    checkpoint.load(range(checkpoint.block_count), FP16, torch.device("cpu"))
    block = checkpoint.transformer.get_submodule("transformer_blocks.0")
    width = checkpoint.config["num_attention_heads"] * checkpoint.config["attention_head_dim"]
    for norm in (block.norm1, block.norm1_context):
        norm.linear.bias[2 * width : 3 * width] = norm.linear.bias[5 * width :] = 6e4  # the gates
    streams = {"hidden_states": torch.randn(1, 2, width), "encoder_hidden_states": torch.randn(1, 3, width)}
    inputs = {name: 100 * value.half() for name, value in streams.items()}
    inputs |= {"temb": torch.zeros(1, width).half()}
    theirs = FluxTransformerBlock.forward(block, **inputs)
    assert not any(stream.isfinite().all() for stream in theirs)
    assert all(stream.isfinite().all() for stream in block(**inputs))


def test_what_is_no_number_in_float16_is_zero_as_in_comfyui():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert within_range(x.half()).tolist() == [0.0, 65504.0, -65504.0, 1.0]
    assert within_range(x) is x  # other types reach far beyond


@pytest.mark.parametrize("family", ["minimax-h3", "minimax-h3-curves"])
def test_rotary_frequencies_of_minimax_stay_in_float32(tmp_path, family):
    """As in ComfyUI: positions are hundreds, by which bf16's error grows."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "m.safetensors", family)))
    checkpoint.load(range(checkpoint.block_count), BF16, torch.device("cpu"))
    assert checkpoint.transformer.get_buffer("rope.inv_freq").dtype == FP32
