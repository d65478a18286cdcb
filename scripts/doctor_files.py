"""The quantized files of scripts/doctor.py --full: a Flux with random weights, in every format."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

#: Strength of a LoRA times the root of the width of its matrices, by which their weights fall, too: it adds
#: about a tenth of them.
LORA_STRENGTH = 4.0

Shapes = Mapping[str, Sequence[int]]


class Numbers:
    """Random numbers, the same ones each time, of which every tensor has those from another place: to draw
    each one takes most of the time of a file. ``shapes``: of all tensors; numbers are even within -1 and 1,
    or normal."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, is_normal: bool):
        self.random = torch.Generator().manual_seed(0)
        self.pool = torch.empty(2 * max(map(math.prod, shapes.values())), dtype=dtype)
        if is_normal:
            self.pool.normal_(generator=self.random)
        else:
            self.pool.uniform_(-1, 1, generator=self.random)

    def of_shape(self, shape: Sequence[int], scale: float) -> Tensor:
        """Return numbers times ``scale``."""
        count = math.prod(shape)
        begin = int(torch.randint(len(self.pool) - count + 1, (), generator=self.random))
        return self.pool[begin : begin + count].view(*shape) * scale


def random_weights(width: int) -> dict[str, Tensor]:
    """Return the weights of a Flux of that width in bf16, the same ones each time."""
    import memory

    shapes = memory.shapes(width)
    numbers = Numbers(shapes, torch.bfloat16, is_normal=True)
    return {key: numbers.of_shape(shape, math.prod(shape[1:]) ** -0.5) for key, shape in shapes.items()}


def write_flux(folder: Path, arguments: dict, dtype: torch.dtype) -> Path:
    """Write a FluxTransformer2DModel with random weights, as large as torch initializes layers, as a
    diffusers folder; return it."""
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from safetensors.torch import save_file

    with torch.device("meta"):
        model = FluxTransformer2DModel(**arguments)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    numbers = Numbers(shapes, dtype, is_normal=False)
    state = {name: _initialized(name, shapes, numbers) for name in shapes}
    model.save_config(folder)
    save_file(state, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    return folder


def _initialized(name: str, shapes: Shapes, numbers: Numbers) -> Tensor:
    """Return a weight or bias of a linear layer, or the weight of a norm, which is 1."""
    weight = shapes[f"{name.rpartition('.')[0]}.weight"]
    if len(weight) == 1:
        return torch.ones(*weight, dtype=numbers.pool.dtype)
    return numbers.of_shape(shapes[name], weight[1] ** -0.5)


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


def write_lora_of(model: Path, target: Path) -> tuple[Path, float]:
    """Write a LoRA on every matrix of a model's blocks, a single file or a diffusers folder; return its file
    and a strength."""
    from loras import write_lora
    from quantized import ANY_MATRIX
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in [model] if model.is_file() else sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in filter(ANY_MATRIX.search, tensors.keys()):
                size = tuple(tensors.get_slice(name).get_shape())
                if len(size) == 2:  # of norms it is 1
                    shapes[name.removesuffix(".weight")] = size
    width = min(columns for _, columns in shapes.values())
    return write_lora(target, shapes, "comfyui" if model.is_file() else "peft"), LORA_STRENGTH / width**0.5
