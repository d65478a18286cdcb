"""Makes golden files with a real ComfyUI's own model, KSampler and latent format: FAMILY.json and
FAMILY__CASE.safetensors, by default euler_simple.

COMFYUI_PATH=~/ComfyUI python tests/golden/make.py FAMILY[__CASE] [...]         # with ComfyUI's Python; on
the CPU in float32
"""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [
    os.environ.get("COMFYUI_PATH", str(Path.home() / "ComfyUI")),
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "support"),
]
sys.argv, NAMES = sys.argv[:1], sys.argv[1:]  # ComfyUI reads the arguments as its own
import torch
import weights
from comfy.cli_args import args as options
from safetensors.torch import save_file

options.cpu = True
import comfy.model_patcher
import comfy.nested_tensor
import comfy.supported_models
import comfyui_version
import pack  # noqa: F401  # makes parallel_dit importable
from cases import CASES, Case
from discrete_cases import DISCRETE_CASES
from parallel_dit.nodes.comfy_models.registry import OURS

import nodes

HERE = Path(__file__).parent
SETTINGS = {
    "sampler": "euler",
    "scheduler": "simple",
    "steps": 6,
    "cfg": 3.0,
    "denoise": 1.0,
    "seed": 42,
    "start_step": None,
    "last_step": None,
}


def build(case: Case):
    """ComfyUI's ModelPatcher around a model with the golden weights, and the {key: shape} of its
    checkpoint."""
    ours = {"disable_unet_model_creation": True, "accepted": ("c_crossattn", "attention_mask")}
    config = (OURS.get(case.comfy_class) or getattr(comfy.supported_models, case.comfy_class))(
        case.unet_config | (ours if case.elsewhere else {})
    )
    config.unet_config |= case.unet_config  # Ideogram 4's class puts the released widths over it
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({})
    if case.elsewhere:
        model.diffusion_model = case.elsewhere()
    target = model.diffusion_model.model if case.elsewhere else model.diffusion_model
    shapes = {case.renamed(key): list(value.shape) for key, value in target.state_dict().items()}
    for key in [key for key in shapes if case.stacked and case.stacked[0] in key]:
        first, second, name = case.stacked
        rows = [shapes.pop(key), shapes.pop(key.replace(f"{first}.", second))]
        shapes[key.replace(first, name)] = [rows[0][0] + rows[1][0], *rows[0][1:]]
    state = weights.state_dict(shapes)
    target.load_state_dict(
        case.converted(dict(state))
        if case.converted
        else {key: state[case.renamed(key)] for key in target.state_dict()}
    )
    return comfy.model_patcher.ModelPatcher(model.eval(), torch.device("cpu"), torch.device("cpu")), shapes


def prompt(case: Case, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) for name, shape in case.conditioning.items()
    } | case.constant()


def conditioning(values: dict) -> list:
    values = {key: value.item() if value.ndim == 0 else value for key, value in values.items()}
    return [[values.pop("cross_attn"), {"pooled_output": None, **values}]]


def make(name: str):
    """Write both files of a family."""
    case, (family, _, run) = (CASES | DISCRETE_CASES)[name], name.partition("__")
    patcher, shapes = build(case)
    (HERE / f"{family}.json").write_text(
        json.dumps(
            {
                "family": family,
                "comfy_class": case.comfy_class,
                "unet_config": case.unet_config,
                "shapes": shapes,
            },
            indent=0,
        )
        + "\n"
    )
    latent = (
        comfy.nested_tensor.NestedTensor([torch.zeros(shape) for shape in case.latent])
        if isinstance(case.latent, list)
        else torch.zeros(case.latent)
    )
    prompts, stored, settings = (
        {"positive": prompt(case, 100), "negative": prompt(case, 101)},
        {},
        SETTINGS | case.settings,
    )

    def keep(name, value):
        return stored.update(
            {f"{name}.{i}": part for i, part in enumerate(value.unbind())}
            if value.is_nested
            else {name: value}
        )

    sampling = patcher.get_model_object("model_sampling")
    stored |= {
        f"{branch}.{key}": value for branch, values in prompts.items() for key, value in values.items()
    }
    noise = nodes.comfy.sample.prepare_noise(latent, settings["seed"])
    steps = (settings["steps"], settings["cfg"], settings["sampler"], settings["scheduler"])
    sampler = nodes.comfy.samplers.KSampler(
        patcher, steps[0], patcher.load_device, *steps[2:], settings["denoise"], patcher.model_options
    )
    with torch.inference_mode():
        samples = nodes.comfy.sample.sample(
            patcher,
            noise,
            *steps,
            conditioning(prompts["positive"]),
            conditioning(prompts["negative"]),
            latent,
            denoise=settings["denoise"],
            seed=settings["seed"],
            callback=lambda step, x0, x, total: keep(f"x0_step{step}", x0) if step + 1 == total else None,
        )
    for key, value in {
        "samples": samples,
        "latent": latent,
        "noise": noise,
        "sigmas": sampler.sigmas,
    }.items():
        keep(key, value)
    facts = {
        "comfy": comfyui_version.__version__,
        "family": family,
        "args": json.dumps(settings),
        "model_sampling": type(sampling).__mro__[1].__name__,
        "shift": str(getattr(sampling, "shift", None)),
    }
    save_file(
        {key: value.clone().contiguous() for key, value in stored.items()},
        HERE / f"{family}__{run or 'euler_simple'}.safetensors",
        metadata=facts,
    )
    print(
        name,
        {
            key: (tuple(value.shape), round(value.std().item(), 3))
            for key, value in stored.items()
            if key.startswith(("samples", "x0"))
        },
    )


for name in NAMES:
    make(name)
