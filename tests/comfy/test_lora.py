"""LoRAs in a real ComfyUI: ParallelLoRA on two ranks against LoraLoaderModelOnly and KSampler, on the same
checkpoint and the same files."""

import json
import os
import signal
import time

import pytest
import torch
from loras import lora, uso, write_mixed
from safetensors.torch import save_file
from servers import comfy_over
from tiny import GOLDEN, facts, write_checkpoint
from versions import skip_without, skip_without_nodes

#: Diffusers' own names that ComfyUI knows: family -> module -> shape of its weight.
OURS = {
    "flux-dev": {
        "transformer_blocks.0.attn.to_k": (256, 256),
        "single_transformer_blocks.1.proj_mlp": (1024, 256),
        "transformer_blocks.1.ff.net.0.proj": (1024, 256),
        "norm_out.linear": (512, 256),
    },
    "sd3": {
        "transformer_blocks.1.attn.add_v_proj": (256, 256),
        "transformer_blocks.0.ff.net.2": (256, 1024),
        "norm_out.linear": (512, 256),
        "transformer_blocks.3.norm1_context.linear": (512, 256),
    },
    "qwen-image": {
        "transformer_blocks.1.attn.to_v": (256, 256),
        "transformer_blocks.2.attn.to_out.0": (256, 256),
    },
    "qwen-image21": {
        "transformer_blocks.0.img_mlp.gate_layer": (384, 128),
        "transformer_blocks.1.img_mlp.proj": (384, 128),
        "transformer_blocks.2.attn.to_out.0": (128, 128),
    },
}
FAMILIES = ["flux-dev", "sd3", "qwen-image", "qwen-image21", "wan21-t2v"]
CASES = [
    (family, spelling)
    for family in FAMILIES
    for spelling in ("comfyui", "kohya", "peft")
    if spelling != "peft" or family in OURS
] + [("flux-dev", "uso")]


@pytest.fixture(scope="module")
def comfy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comfy")
    for name in ("diffusion_models", "loras"):
        (folder / "models" / name).mkdir(parents=True)
    loras = folder / "models/loras"
    for family in FAMILIES:
        write_checkpoint(folder / f"models/diffusion_models/{family}.safetensors", family)
        shapes = {
            name.removesuffix(".weight"): tuple(shape)
            for name, shape in facts(family)["shapes"].items()
            if name.endswith(".weight") and len(shape) > 1
        }
        for spelling in ("comfyui", "kohya", "peft"):
            save_file(
                lora(OURS.get(family, {}) if spelling == "peft" else shapes, spelling)[0],
                loras / f"{family}-{spelling}.safetensors",
            )
    save_file(uso()[0], loras / "flux-dev-uso.safetensors")
    write_mixed(loras / "mixed.safetensors", facts("flux-dev")["shapes"])
    save_file(
        lora(OURS["flux-dev"], "peft", seed=9)[0] | {"lora_te1_text.alpha": torch.tensor(1.0)},
        loras / "in-part.safetensors",
    )
    save_file(lora({"double_blocks.0.img_attn.qkv": (9216, 3072)}, "kohya")[0], loras / "large.safetensors")
    with comfy_over(folder) as server:
        yield server


def graph(comfy, family: str, loras: list[tuple[str, float]], seed: int = 5) -> dict:
    """ParallelSampler (node "o") and KSampler (node "t") with ``loras``, and their distance; KSampler without
    them ("p"), and its distance from the other."""
    golden, file = (
        str(GOLDEN / f"{family}__euler_simple.safetensors"),
        str(comfy.folder / f"models/diffusion_models/{family}.safetensors"),
    )
    nodes = {
        "in": ("TestGoldenInputs", {"file": golden, "change": "nothing"}),
        "config": ("ParallelConfig", {"pipefusion_degree": 2, "num_pipeline_patch": 1, "device": "cpu"}),
        "dit": ("LoadParallelDiT", {"config": ["config", 0], "model_name": f"{family}.safetensors"}),
        "model": ("TestNativeModel", {"family": str(GOLDEN / f"{family}.json"), "file": file}),
    }
    ours = theirs = None
    for i, (name, strength) in enumerate(loras):
        nodes[f"dit{i}"] = (
            "ParallelLoRA",
            {"dit": [ours or "dit", 0], "lora_name": name, "strength": strength},
        )
        nodes[f"model{i}"] = (
            "LoraLoaderModelOnly",
            {"model": [theirs or "model", 0], "lora_name": name, "strength_model": strength},
        )
        ours, theirs = f"dit{i}", f"model{i}"
    settings = {
        "positive": ["in", 0],
        "negative": ["in", 1],
        "latent_image": ["in", 2],
        "seed": seed,
        "steps": 2,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
    }
    nodes |= {
        "o": ("ParallelSampler", {"dit": [ours or "dit", 0], **settings}),
        "t": ("KSampler", {"model": [theirs or "model", 0], **settings}),
        "p": ("KSampler", {"model": ["model", 0], **settings}),
        "error": ("TestLatentError", {"ours": ["o", 0], "theirs": ["t", 0]}),
        "change": ("TestLatentError", {"ours": ["t", 0], "theirs": ["p", 0]}),
    }
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def run(comfy, family, loras, seed=5) -> tuple[float, float]:
    """Distance from KSampler, and how much the LoRAs changed."""
    found = comfy.run(graph(comfy, family, loras, seed))
    assert found.status == "success", found.message or found.node_errors
    return tuple(json.loads(found.outputs[name]["text"][0]) for name in ("error", "change"))


def ranks(comfy) -> set[int]:
    return {
        pid
        for pid, line in comfy.descendants("backend.worker").items()
        if "torch.distributed.run" not in line
    }


@pytest.mark.parametrize("family, spelling", CASES)
def test_same_latent_as_lora_loader(comfy, family, spelling):
    skip_without(
        {"QwenImage21"}
        if family == "qwen-image21" and "TextEncodeQwenImage21" not in comfy.get("/object_info")
        else ()
    )
    error, change = run(comfy, family, [(f"{family}-{spelling}.safetensors", 0.8)])
    assert error < 1e-4 < 1e-2 < change


def test_stacked_changed_and_removed_on_the_same_ranks(comfy):
    before = None
    for loras in (
        [("mixed.safetensors", 0.6)],
        [("mixed.safetensors", 0.6), ("flux-dev-peft.safetensors", -0.5)],
        [("flux-dev-peft.safetensors", 1.0), ("mixed.safetensors", 1.0)],
        [("mixed.safetensors", 0.0)],
        [],
    ):
        error, change = run(comfy, "flux-dev", loras)
        assert error < 1e-4 and (change > 1e-2) == any(strength for _, strength in loras)
        assert len(ranks(comfy)) == 2 and ranks(comfy) == (before or ranks(comfy))
        before = ranks(comfy)


def test_two_models_of_one_checkpoint_in_one_graph(comfy):
    """With a LoRA and without, sampled in one queue: each is right."""
    nodes = graph(comfy, "flux-dev", [("flux-dev-kohya.safetensors", 1.0)])
    nodes["plain"] = {"class_type": "ParallelSampler", "inputs": {**nodes["o"]["inputs"], "dit": ["dit", 0]}}
    nodes["plain error"] = {
        "class_type": "TestLatentError",
        "inputs": {"ours": ["plain", 0], "theirs": ["p", 0]},
    }
    found = comfy.run(nodes)
    assert found.status == "success", found.message
    assert all(json.loads(found.outputs[name]["text"][0]) < 1e-4 for name in ("error", "plain error"))


def test_new_ranks_get_the_loras_of_a_cached_handle(comfy):
    loras = [("mixed.safetensors", 0.7), ("flux-dev-peft.safetensors", 0.4)]
    run(comfy, "flux-dev", loras)
    before = ranks(comfy)
    os.kill(min(before), signal.SIGKILL)
    while ranks(comfy) & before:
        time.sleep(0.1)
    assert run(comfy, "flux-dev", loras, seed=6)[0] < 1e-4 and not ranks(comfy) & before


def test_what_is_left_out_is_named_in_the_log(comfy):
    error, _ = run(comfy, "flux-dev", [("in-part.safetensors", 1.0)])
    assert error < 1e-4
    assert (
        "1 keys of the LoRA in-part.safetensors were not loaded" in comfy.log.read_text()
        and "lora_te1_text.alpha" in comfy.log.read_text()
    )


def test_a_lora_of_another_model_is_refused_and_the_next_queue_works(comfy):
    for name, words in (
        ("wan21-t2v-kohya.safetensors", "has nothing for flux-dev.safetensors"),
        ("large.safetensors", "9216 x 3072, but in flux-dev.safetensors that tensor is 768 x 256"),
    ):
        found = comfy.run(graph(comfy, "flux-dev", [(name, 1.0)]))
        assert found.status == "error" and words in found.message and "\n" not in found.message.strip(), (
            found.message
        )
    assert run(comfy, "flux-dev", [])[0] < 1e-4


@pytest.mark.parametrize("loader", ["LoraLoaderModelOnly", "LoraLoaderBypassModelOnly"])
def test_stock_loaders_behind_parallel_model(comfy, loader):
    """The second one hangs a LoRA on modules, of which Parallel Model has none."""
    prompt = graph(comfy, "flux-dev", [("flux-dev-kohya.safetensors", 0.7)])
    settings = {key: value for key, value in prompt["o"]["inputs"].items() if key != "dit"}
    inputs = {"lora_name": "flux-dev-kohya.safetensors", "strength_model": 0.7}
    prompt["remote"] = {"class_type": "ParallelModel", "inputs": {"dit": ["dit", 0]}}
    prompt["lora"] = {"class_type": loader, "inputs": {"model": ["remote", 0], **inputs}}
    prompt["o"] = {"class_type": "KSampler", "inputs": {"model": ["lora", 0], **settings}}
    skip_without_nodes(prompt, comfy.get("/object_info"))
    found = comfy.run(prompt)
    assert found.status == "success", found.message or found.node_errors
    error, change = (json.loads(found.outputs[name]["text"][0]) for name in ("error", "change"))
    assert error <= 1e-4 and change > 1e-2
