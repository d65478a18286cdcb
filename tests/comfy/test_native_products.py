"""What native products change of latents, against ComfyUI's own. One flipped rounding spreads, so latents are
not compared one by one, but how far native ones are from weight only, over many seeds."""

import json
from dataclasses import replace

import pytest
import torch
from comfy_modules import comfy_modules
from safetensors.torch import load_file, save_file
from tiny import GOLDEN, SCALE, SHIFT, facts, golden_request, weights_module

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

with comfy_modules():
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher
    import comfy.sample
    import comfy.samplers
    import comfy.supported_models

kitchen = pytest.importorskip("comfy_kitchen.tensor", reason="comfy-kitchen is not installed")
pytest.importorskip("comfy.quant_ops", reason="this ComfyUI has no quantized layouts")

CPU = torch.device("cpu")
SEEDS = 20
STEPS = 4
CASE = "size20x12"
#: Kind -> comfy-kitchen's layout and its options, and what files say.
KINDS = {
    "int8": ("TensorWiseINT8Layout", {"per_channel": True}, {"format": "int8_tensorwise"}),
    "ConvRot": (
        "TensorWiseINT8Layout",
        {"per_channel": True, "convrot": True, "convrot_groupsize": 64},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
    ),
    "fp8": ("TensorCoreFP8Layout", {"scale": "recalculate"}, {"format": "float8_e4m3fn"}),
    "nvfp4": ("TensorCoreNVFP4Layout", {}, {"format": "nvfp4"}),
}


def quantized(kind: str) -> tuple[dict, dict]:
    """(a file's tensors, the plain weights that they stand for) of the tiny Flux."""
    name, options, settings = KINDS[kind]
    layout = getattr(kitchen, name)
    stored = weights_module().state_dict(facts("flux-dev")["shapes"])
    plain = dict(stored)
    for key in [key for key, value in stored.items() if "_blocks." in key and value.ndim == 2]:
        values, params = layout.quantize(stored[key].float(), **options)
        plain[key] = layout.dequantize(values, params).to(stored[key].dtype)
        layer = key.removesuffix(".weight")
        stored[key] = values
        scales = {"weight_scale": params.scale}
        if kind == "nvfp4":
            scales = {"weight_scale": params.block_scale, "weight_scale_2": params.scale}
        stored |= {f"{layer}.{leaf}": value for leaf, value in scales.items()}
        stored[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    return {key: value.contiguous() for key, value in stored.items()}, plain


def noises() -> list[torch.Tensor]:
    shape = golden_request(CASE)[0].tensors["noise"].shape
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(SEEDS)]


def sigmas() -> torch.Tensor:
    known = golden_request(CASE)[0].tensors["sigmas"]
    return known[torch.linspace(0, len(known) - 1, STEPS + 1).round().long()]


@torch.inference_mode()
def theirs(state: dict) -> list[torch.Tensor]:
    """ComfyUI's own latents of a state, one a seed."""
    told = facts("flux-dev")
    detected = comfy.model_detection.detect_unet_config({**state}, "")
    config = getattr(comfy.supported_models, told["comfy_class"])({**detected, **told["unet_config"]})
    if any(key.endswith("comfy_quant") for key in state):
        config.quant_config = {"mixed_ops": True}
    config.set_inference_dtype(torch.float32, torch.float32)
    model = config.get_model({**state}, "")
    model.load_model_weights({**state}, "")
    patcher = comfy.model_patcher.ModelPatcher(model.eval(), CPU, CPU)
    stored = load_file(GOLDEN / f"flux-dev__{CASE}.safetensors")
    told = {"pooled_output": stored["positive.pooled_output"], "guidance": stored["positive.guidance"].item()}
    prompt = [[stored["positive.cross_attn"], told]]
    euler = comfy.samplers.sampler_object("euler")
    return [
        comfy.sample.sample_custom(
            patcher, noise, 1.0, euler, sigmas(), prompt, prompt, noise * 0.0, disable_pbar=True
        )
        for noise in noises()
    ]


def ours(path, matmul: str) -> list[torch.Tensor]:
    """Our latents of a file, one a seed."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", matmul)
    (found,) = engine.facts("tiny")["quantized"]
    assert found["multiplication"].startswith(matmul)
    sample = golden_request(CASE)[0]
    wanted = {
        key: value for key, value in sample.tensors.items() if not key.startswith(("negative", "latent"))
    }
    results = []
    for noise in noises():
        tensors = {**wanted, "noise": noise, "latent": torch.zeros_like(noise), "sigmas": sigmas()}
        request = replace(sample, sampler="euler", cfg=1.0, tensors=tensors)
        results.append(engine.sample(request, Callbacks())[0])
    return results


def distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The root mean square of differences, in standard deviations."""
    apart = torch.stack([a - b for a, b in zip(some, others, strict=True)])
    return (apart.square().mean().sqrt() / torch.stack(others).std()).item()


def no_kernel(*arguments, **options):
    raise RuntimeError("torch has no kernel of this format for a CPU")


@pytest.mark.parametrize("kind", KINDS)
def test_native_is_as_far_from_weight_only_as_comfyuis(kind, folder, monkeypatch):
    """Over 20 seeds: their native latents from those of the dequantized weights, and ours."""
    # as on a GPU that can; of fp4, comfy-kitchen then multiplies what the blocks stand for
    for name in ("supports_fp8_compute", "supports_nvfp4_compute"):
        monkeypatch.setattr(comfy.model_management, name, lambda device=None: True)
    monkeypatch.setattr("comfy_kitchen.scaled_mm_nvfp4", no_kernel)
    stored, plain = quantized(kind)
    path = folder / f"{kind}.safetensors"
    save_file(stored, path)
    native, weight_only = ours(path, "native"), ours(path, "weight only")
    their_native, their_plain = theirs(stored), theirs(plain)
    found, want = distance(native, weight_only), distance(their_native, their_plain)
    print(f"{kind}: {found:.5f} of the standard deviation, ComfyUI {want:.5f}")
    assert distance(weight_only, [latent_of(each) for each in their_plain]) < 1e-4
    assert want > 1e-4 and found == pytest.approx(want, rel=0.1)


def latent_of(samples: torch.Tensor) -> torch.Tensor:
    """ComfyUI's latent in the model's units."""
    return (samples - SHIFT) * SCALE
