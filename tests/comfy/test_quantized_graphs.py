"""Quantized files with a LoRA in a graph of a real ComfyUI, on two ranks: the latent of its KSampler, whose
model has the values that the file stands for and the LoRA merged into them."""

import json

import pytest
import torch
from families import TOLERANCES
from graphs import SAMPLER, Graph
from loras import write_lora
from quantized import ANY_MATRIX, matrices, write_scaled
from safetensors.torch import load_file, save_file
from tiny import GOLDEN, write_checkpoint

from backend.loading.recognition import open_checkpoint

#: Golden family, format of its file, and how two ranks share the work.
CASES = {
    "Flux.1 ConvRot int8, ulysses": ("flux-dev", "int8_tensorwise", {"ulysses_degree": 2}),
    "Flux.1 ConvRot int8, tensor parallel": ("flux-dev", "int8_tensorwise", {"tensor_parallel_degree": 2}),
    "Wan 2.1 scaled fp8, ulysses": ("wan21-t2v", "float8_e4m3fn", {"ulysses_degree": 2}),
    "Wan 2.1 scaled fp8, sharded": (
        "wan21-t2v",
        "float8_e4m3fn",
        {"ulysses_degree": 2, "shard_weights": True},
    ),
    "Qwen-Image nvfp4, ulysses": ("qwen-image", "nvfp4", {"ulysses_degree": 2}),
}
#: What native products may change, in standard deviations of the latent (docs/models.md).
NATIVE = 0.3


@pytest.mark.parametrize("family, kind, degrees", CASES.values(), ids=CASES)
def test_same_latent_as_ksampler(comfy, tmp_path, family, kind, degrees):
    models = comfy.folder / "models"
    state = load_file(write_checkpoint(tmp_path / "plain.safetensors", family))
    stored = write_scaled(
        models / "diffusion_models" / f"{family}-{kind}.safetensors", state, kind, ANY_MATRIX
    )
    files = open_checkpoint(str(stored)).files
    plain = {key: files.read(key, dtype=torch.float32).contiguous() for key in files.shapes}
    save_file(plain, tmp_path / "inflated.safetensors")
    (models / "loras").mkdir(exist_ok=True)
    name = f"{family}-lora.safetensors"
    shapes = {key.removesuffix(".weight"): tuple(state[key].shape) for key in matrices(state, ANY_MATRIX)}
    write_lora(models / "loras" / name, shapes, "comfyui")
    g = Graph()
    golden = g.add(
        "TestGoldenInputs", file=str(GOLDEN / f"{family}__euler_simple.safetensors"), change="nothing"
    )
    prompts = {"positive": [golden, 0], "negative": [golden, 1], "latent_image": [golden, 2], **SAMPLER}
    config = g.one("ParallelConfig", device="cpu", **degrees)
    sampled = {}
    for matmul in ("weight only", "auto"):
        dit = g.one("LoadParallelDiT", config=config, model_name=stored.name, matmul=matmul)
        dit = g.one("ParallelLoRA", dit=dit, lora_name=name, strength=0.3)
        sampled[matmul] = g.one("ParallelSampler", dit=dit, **prompts)
    native = g.one(
        "TestNativeModel", family=str(GOLDEN / f"{family}.json"), file=str(tmp_path / "inflated.safetensors")
    )
    native = g.one("LoraLoaderModelOnly", model=native, lora_name=name, strength_model=0.3)
    theirs = g.one("KSampler", model=native, **prompts)
    errors = {matmul: g.add("TestLatentError", ours=ours, theirs=theirs) for matmul, ours in sampled.items()}
    run = comfy.run(g.nodes)
    assert run.status == "success", run.message or run.node_errors
    found = {matmul: json.loads(run.outputs[node]["text"][0]) for matmul, node in errors.items()}
    assert found["weight only"] < max(2 * TOLERANCES.get(family, 1e-4), 2e-4)
    assert found["auto"] < NATIVE
