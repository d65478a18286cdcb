"""A transformer that no family file describes, in a graph of a real ComfyUI: AuraFlow's diffusers folder on
two ranks, ComfyUI's own single file and KSampler for comparison."""

import json

import pytest
from comfy_modules import comfy_modules
from diffusers.loaders.single_file_utils import convert_auraflow_transformer_checkpoint_to_diffusers
from graphs import SAMPLER, Graph
from safetensors.torch import save_file
from tiny import GOLDEN, weights_module

with comfy_modules():
    import comfy.ops
    from comfy.ldm.aura.mmdit import MMDiT

UNET = {
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 2,
    "dim": 64,
    "n_layers": 6,
    "n_double_layers": 2,
    "n_heads": 4,
    "global_conddim": 64,
    "cond_seq_dim": 64,
    "max_seq": 256,
}
TRANSFORMER = {
    "_class_name": "AuraFlowTransformer2DModel",
    "sample_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 64,
    "pos_embed_max_size": 256,
}
PIPELINE = {
    "model_index.json": {"_class_name": "AuraFlowPipeline"},
    "transformer/config.json": TRANSFORMER,
    "vae/config.json": {"scaling_factor": 0.13025},
    "scheduler/scheduler_config.json": {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 1.73},
}


@pytest.fixture
def auraflow(family_comfy):
    """(ComfyUI's single file, name of the folder) with the same random weights."""
    module = MMDiT(**UNET, operations=comfy.ops.disable_weight_init, device="meta")
    state = weights_module().state_dict(
        {name: list(value.shape) for name, value in module.state_dict().items()}
    )
    file, folder = (
        family_comfy.folder / "aura.safetensors",
        family_comfy.folder / "models/diffusers/AuraFlow-tiny",
    )
    save_file(state, file)
    for name, content in PIPELINE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    converted = convert_auraflow_transformer_checkpoint_to_diffusers(dict(state))
    save_file(
        {name: value.contiguous() for name, value in converted.items()},
        folder / "transformer/diffusion_pytorch_model.safetensors",
    )
    return file, folder.name


def test_same_latent_as_ksampler(family_comfy, auraflow):
    """Where the latent's sides are even numbers of tokens: for odd ones diffusers takes other positions than
    ComfyUI."""
    file, name = auraflow
    g = Graph()
    prompts = g.add(
        "TestGoldenInputs", file=str(GOLDEN / "flux2-dev__euler_simple.safetensors"), change="nothing"
    )
    inputs = {
        "positive": [prompts, 0],
        "negative": [prompts, 1],
        "latent_image": g.latent(1, 4, 16, 20, empty=True),
        **SAMPLER,
    }
    theirs = g.one(
        "KSampler",
        model=g.one(
            "TestReferenceModel",
            file=str(file),
            facts=json.dumps({"comfy_class": "AuraFlow", "unet_config": UNET}),
        ),
        **inputs,
    )
    ours = g.one(
        "ParallelSampler",
        dit=g.one(
            "LoadParallelDiT", config=g.one("ParallelConfig", device="cpu", ulysses_degree=2), model_name=name
        ),
        **inputs,
    )
    result = g.add("TestLatentDistance", samples=ours, reference=theirs)
    run = family_comfy.run(g.nodes)
    assert run.status == "success", run.message or run.node_errors
    assert json.loads(run.outputs[result]["text"][0])["error"] < 1e-4
