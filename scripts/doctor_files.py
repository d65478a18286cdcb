"""The quantized files of scripts/doctor.py --full: a Flux with random weights, in every format."""

import math
import shutil
from pathlib import Path

import torch
from torch import Tensor


def random_weights(width: int) -> dict[str, Tensor]:
    """Return the weights of a Flux of that width in bf16, the same ones each time."""
    import memory

    random = torch.Generator().manual_seed(0)
    return {
        key: torch.randn(shape, generator=random).mul_(math.prod(shape[1:]) ** -0.5).bfloat16()
        for key, shape in memory.shapes(width).items()
    }


def write_quantized_copy(source: Path, target: Path, kind: str) -> Path:
    """Write a model, a single file or a diffusers folder, with the matrices of its blocks quantized as
    ``kind``; return the file or the folder ``target``."""
    from quantized import ANY_MATRIX, write_scaled
    from safetensors.torch import load_file

    if source.is_file():
        return write_scaled(
            target.with_suffix(".safetensors"), load_file(source), kind, ANY_MATRIX, rowwise=False
        )
    target.mkdir()
    shutil.copy(source / "config.json", target)
    state: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        state |= load_file(file)
    write_scaled(target / "diffusion_pytorch_model.safetensors", state, kind, ANY_MATRIX, rowwise=False)
    return target


def write_quantized(folder: Path, kind: str, state: dict[str, Tensor]) -> Path:
    """Write weights whose blocks are quantized as ``kind``, or bf16; return the file."""
    from quantized import write_gguf, write_scaled
    from safetensors.torch import save_file

    path = folder / f"{kind}.safetensors"
    if kind == "bf16":
        save_file(state, path)
        return path
    if kind.startswith("Q"):
        path = path.with_suffix(".gguf")
        write_gguf(path, state, (kind,))
        return path
    # layers with scales of rows have no native product
    return write_scaled(path, state, kind, rowwise=False)
