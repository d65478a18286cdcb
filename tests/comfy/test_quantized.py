"""Quantized files as ComfyUI's own loader dequantizes them: every weight the same, and to rounding where
weights of 8 bits are rotated, which is a matrix product."""

import pytest
import torch
from comfy_modules import comfy_modules
from quantized import KINDS, matrices, write_scaled
from safetensors.torch import load_file
from tiny import facts, write_checkpoint
from tolerance import assert_same_bits, assert_ulps

from backend.loading.recognition import open_checkpoint

with comfy_modules():
    import comfy.model_detection
    import comfy.sd

quant_ops = pytest.importorskip("comfy.quant_ops", reason="this ComfyUI has no quantized layouts")


@pytest.fixture(scope="module")
def state(folder):
    return load_file(write_checkpoint(folder / "flux-tiny.safetensors"))


@pytest.mark.parametrize("kind", ["legacy", "header", *KINDS])
def test_weights_are_comfyuis(folder, state, kind, monkeypatch):
    if kind in KINDS and kind not in quant_ops.QUANT_ALGOS:
        pytest.skip(f"this ComfyUI does not have {kind}")
    path = write_scaled(folder / f"{kind}.safetensors", state, kind)
    # its detection takes heads to be 128 wide, which those of a tiny model are not
    detect = comfy.model_detection.detect_unet_config
    monkeypatch.setattr(
        comfy.model_detection,
        "detect_unet_config",
        lambda *args, **kwargs: detect(*args, **kwargs) | facts("flux-dev")["unet_config"],
    )
    theirs = dict(comfy.sd.load_diffusion_model(str(path)).model.diffusion_model.named_parameters())
    files, compared = open_checkpoint(str(path)).files, 0

    def compare(found, want):
        if kind == "int8_tensorwise":
            assert_ulps(found, want, 1)
        else:
            assert_same_bits(found, want)

    for key in matrices(state):
        weight = theirs[key]
        assert isinstance(weight.data, quant_ops.QuantizedTensor)
        want = weight.dequantize()
        compare(files.read(key, dtype=want.dtype), want)
        for dtype in (torch.bfloat16, torch.float16):
            compared += 1
            compare(files.read(key, dtype=dtype), weight.data.to(dtype).dequantize())
    assert compared
