"""Variants of the golden families: the same tiny checkpoints with other shapes, and requests with what
ComfyUI's model would make of their CONDITIONING.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from families import golden
from image_variants import IMAGE_VARIANTS, OLDER_IMAGE_VARIANTS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import GOLDEN, facts, random_weights, shared
from variant_parts import GUIDANCE, randn
from video_variants import VIDEO_VARIANTS
from wan_variants import WAN_VARIANTS

from backend.protocol import Sample

VARIANTS = IMAGE_VARIANTS | WAN_VARIANTS | VIDEO_VARIANTS | OLDER_IMAGE_VARIANTS
#: What tests/comfy/variant_goldens.py writes.
GOLDENS = GOLDEN / "variants"
#: Entries of unet_config for which later versions of ComfyUI ask.
NEWER = {
    "flux-dev": {"txt_ids_dims": []},
    "hunyuan-video": {"use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False},
}


def described(name: str) -> dict:
    """The facts of a variant, as tiny.facts gives a golden family's."""
    variant = VARIANTS[name]
    base = facts(variant.family)
    shapes = {
        key: list(shape) for key, shape in (base["shapes"] | variant.shapes).items() if shape is not None
    }
    return {
        "comfy_class": variant.comfy_class or base["comfy_class"],
        "unet_config": NEWER.get(variant.family, {}) | base["unet_config"] | variant.unet,
        "shapes": shapes,
    }


def write(path: Path, name: str) -> Path:
    """The checkpoint of a variant as a single file in ComfyUI's key layout."""
    return shared(path, name, lambda: state(name))


def state(name: str) -> dict[str, torch.Tensor]:
    """The weights of a variant."""
    weights = random_weights(described(name)["shapes"], VARIANTS[name].family)
    if "head.head.weight" in weights:
        weights["head.head.weight"] *= VARIANTS[name].louder
    # a blur, which ComfyUI reads and diffusers computes
    line = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    return weights | {key: torch.outer(line, line) for key in weights if key.endswith(".kernel")}


def write_golden(name: str, sample: Sample, samples: torch.Tensor):
    """Write what a real ComfyUI returned for a variant, in the model's units, and the request of the
    same inputs. What both prompts hold is stored once."""
    tensors = {"samples": samples}
    same = []
    for key, value in sample.tensors.items():
        branch, _, argument = key.partition(".")
        positive = sample.tensors.get(f"positive.{argument}")
        if branch == "negative" and positive is not None and torch.equal(positive, value):
            same.append(argument)
        else:
            tensors[key] = value.clone().contiguous()
    header = {key: value for key, value in vars(sample).items() if key != "tensors"}
    GOLDENS.mkdir(exist_ok=True)
    save_file(
        tensors, GOLDENS / f"{name}.safetensors", {"sample": json.dumps(header), "same": json.dumps(same)}
    )


def golden_variant(name: str) -> tuple[Sample, torch.Tensor]:
    """The request of a variant's golden file, and what ComfyUI returned for it, in the model's units."""
    tensors = load_file(GOLDENS / f"{name}.safetensors")
    with safe_open(GOLDENS / f"{name}.safetensors", "pt") as file:
        told = {key: json.loads(value) for key, value in file.metadata().items()}
    samples = tensors.pop("samples")
    tensors |= {f"negative.{argument}": tensors[f"positive.{argument}"] for argument in told["same"]}
    return Sample(**told["sample"], tensors=tensors), samples


def request(name: str, model: str = "tiny") -> Sample:
    """A request for a variant, with a negative prompt."""
    variant = VARIANTS[name]
    sample, _ = golden(f"{variant.family}__euler_simple", model)
    tensors = dict(sample.tensors)
    if variant.latent:
        tensors["noise"], tensors["latent"] = randn(*variant.latent), torch.zeros(variant.latent)
    if variant.mask is not None:
        tensors["latent"], tensors["denoise_mask"] = randn(*tensors["noise"].shape), variant.mask
    if not variant.shapes.keys().isdisjoint(GUIDANCE):
        tensors = {key: value for key, value in tensors.items() if not key.endswith(".guidance")}
    for branch in ("positive", "negative"):
        tensors |= {
            f"{branch}.{key}": value
            for key, value in (variant.arguments | (variant.negative if branch == "negative" else {})).items()
            if value is not None
        }
    return replace(sample, tensors=tensors)
