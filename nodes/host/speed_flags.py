"""Flags of ComfyUI that make its own models faster and do not reach the ranks, or work against these."""

from collections.abc import Mapping
from typing import Any

#: Argument, or feature of --fast -> input and value that do the same on the ranks; None: none does.
FLAGS: dict[str, tuple[str, str] | None] = {
    "use_sage_attention": ("attention", "sage"),
    "use_flash_attention": ("attention", "flash-attn"),
    "fp16_unet": ("weight_dtype", "fp16"),
    "bf16_unet": ("weight_dtype", "bf16"),
    "fp32_unet": ("weight_dtype", "fp32"),
    "fp8_matrix_mult": ("matmul", "native"),
    "fp16_accumulation": None,
}
NODES = {"attention": "Parallel Config", "weight_dtype": "Load Parallel DiT", "matmul": "Load Parallel DiT"}
#: Argument -> what it does to ranks that share a GPU with ComfyUI.
AGAINST = {
    "reserve_vram": "has their weights leave the sooner for each of ComfyUI's own models; leave it out",
    "gpu_only": "keeps text encoders and VAE on the GPU that they need; leave it out",
}
#: Value of an input -> what it needs that the flag does not: ComfyUI's attention takes SageAttention 1 too.
NEEDS = {"sage": ", which needs SageAttention 2"}
#: What an input is where it leaves the choice to the ranks.
OPEN = ("auto", "default")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
#: Said of fp8 layers that are weight only under auto and native where ``matmul`` is (quantization/matmul.py).
WITHOUT_SCALES = "without scales"


def flag_lines(arguments: Mapping[str, Any], chosen: Mapping[str, str], info: dict) -> list[str]:
    """Return a line for each flag that ComfyUI runs with and the ranks do not, or that works against them;
    none of ranks on the CPU, and of what a model or its GPUs cannot do. ``arguments``: of ComfyUI's command
    line; ``chosen``: the values of the inputs in NODES; ``info``: of the loaded model."""
    if info["device"] != "cuda":
        return []
    fast = {feature.value for feature in arguments["fast"]}
    lines = [
        f"ComfyUI runs with --{name.replace('_', '-')}, which {what}."
        for name, what in AGAINST.items()
        if arguments.get(name)
    ]
    for name, same in FLAGS.items():
        if not (name in fast or arguments.get(name)):
            continue
        words = f"--fast {name}" if name in fast else f"--{name.replace('_', '-')}"
        if same is None:
            lines.append(f"ComfyUI runs with {words}, which the ranks do not have.")
        elif chosen[same[0]] in OPEN and _changes(*same, info):
            remedy = f"set {same[0]} of {NODES[same[0]]} to {same[1]}{NEEDS.get(same[1], '')}"
            lines.append(f"ComfyUI runs with {words}, the ranks do not; {remedy}.")
    return lines


def _changes(name: str, value: str, info: dict) -> bool:
    """Return whether the ranks can take this value, and would then compute otherwise."""
    if name == "attention":
        return info["attention"][value].startswith(f"attention {value}:")
    if name == "weight_dtype":
        return info["dtype"] != DTYPES[value]
    return any(WITHOUT_SCALES in kind["multiplication"] for kind in info["quantized"])
