"""Quantized models of benchmarks/launches.py: Flux.1 dev at its released width, with two blocks of each kind.

Headers make a file of meta tensors, which the product's own loading reads. Golden models are too narrow: a
row has to hold whole blocks. Weight only, each product dequantizes its weight; "once" has room for all of
them to stay dequantized. comfy-kitchen's kernels are stand-ins, each one operation.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import cast
from unittest.mock import patch

import torch
from headers import HeaderFiles, fold
from released_forms import FORMS, HeaderGGUF, Tensors, gguf_tensors, is_matrix, tensors_of
from released_sizes import RELEASED, request_of
from torch import Tensor

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.checkpoint import Checkpoint
from backend.loading.files.mapped_file import DTYPES
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.quantized import QuantizedFiles
from backend.loading.recognition import recognise
from backend.parallel.mesh import Mesh
from backend.protocol import Sample
from backend.quantization import kernels
from backend.quantization.dequantize_once import dequantized_once
from backend.quantization.kernels import Kernel, MatmulChoice
from backend.quantization.packed_weight import PackedWeight, quantized
from backend.sampling.model_runner import LoadedModel

META = torch.device("meta")
FAMILY = "flux-dev"
#: Blocks of each kind that are left.
BLOCKS = 2
DEEPER = re.compile(r"_blocks\.(\d+)\.")
#: The scale of a weight, which a rank reads from its device while it loads.
FACTOR = 0.5


@dataclass(frozen=True)
class PackedModel:
    """form: of released_forms.FORMS, NVFP4 or a GGUF type. kernel: of native products. stays: weights stay
    dequantized."""

    form: str
    kernel: Kernel | None = None
    stays: bool = False


NVFP4 = "nvfp4"
MODELS = {
    "flux-dev fp8": PackedModel("fp8 scaled"),
    "flux-dev fp8, native": PackedModel("fp8 scaled", kernels.float8),
    "flux-dev int8": PackedModel("int8 ConvRot"),
    "flux-dev int8, native": PackedModel("int8 ConvRot", kernels.int8),
    "flux-dev nvfp4, native": PackedModel(NVFP4, kernels.nvfp4),
    "flux-dev Q8_0": PackedModel("Q8_0"),
    "flux-dev Q4_K": PackedModel("Q4_K"),
    "flux-dev Q4_K, once": PackedModel("Q4_K", stays=True),
}


def readable() -> list[str]:
    """Return the models whose files this Python can make: those of GGUF need its package."""
    has_gguf = find_spec("gguf") is not None
    return [name for name, model in MODELS.items() if has_gguf or model.form in (*FORMS, NVFP4)]


class MetaFiles(HeaderFiles):
    """A safetensors file whose tensors are meta tensors, as it stores them."""

    def read(self, key, rows=slice(None), columns=slice(None), dtype=None, device=None):
        """Return a meta tensor of those rows and columns."""
        if key in self._data:
            return super().read(key)
        stored = DTYPES[self.stored_dtype(key)]
        whole = torch.empty(self.shapes[key], dtype=dtype or stored, device=META)
        part = whole[rows, columns].contiguous() if whole.ndim > 1 else whole[rows] if whole.ndim else whole
        self.bytes_read += part.nbytes
        return part


class MetaGGUF(HeaderGGUF):
    """A GGUF file whose blocks are meta tensors."""

    def __init__(self, name: str, tensors: Tensors):
        super().__init__(name, tensors)
        for key, stored in self._stored.items():
            size = math.prod(stored.shape) // stored.block * stored.size
            data = torch.empty(size, dtype=torch.uint8, device=META)
            self._stored[key] = replace(stored, data=data)


def nvfp4(tensors: Tensors, settings: dict[str, str]) -> Tensors:
    """Store pairs of four bits, a scale of 16 columns in cuBLAS' tiles, and one of all."""
    made = dict(tensors)
    for key, (_, shape) in tensors.items():
        if is_matrix(key, shape):
            layer = key.removesuffix(".weight")
            tiles = [-(-shape[0] // 128) * 128, -(-shape[1] // 64) * 4]
            made |= {key: ("U8", [shape[0], shape[1] // 2]), f"{layer}.weight_scale": ("F8_E4M3", tiles)}
            made[f"{layer}.weight_scale_2"] = ("F32", [])
    return made


def checkpoint_of(name: str) -> Checkpoint:
    """Recognise a model by its headers."""
    return replace(_recognised(MODELS[name].form))  # each rank takes a transformer of its own apart


@cache
def _recognised(form: str) -> Checkpoint:
    tensors = {key: each for key, each in tensors_of(RELEASED[FAMILY].header).items() if _is_left(key)}
    makers: dict[str, Callable] = {**FORMS, NVFP4: nvfp4}
    if form not in makers:
        return recognise(form, MetaGGUF(form, gguf_tensors(tensors, form)))
    settings: dict[str, str] = {}
    made = makers[form](tensors, settings)
    header = {"tensors": fold(made), "metadata": {}, "data": settings}
    return recognise(form, QuantizedFiles(cast(TensorFiles, MetaFiles(form, header))))


def _is_left(key: str) -> bool:
    found = DEEPER.search(key)
    return found is None or int(found[1]) < BLOCKS


def request_for(name: str, steps: int) -> Sample:
    """Return a request of one prompt and so many steps, of 1024 x 1024."""
    return request_of(FAMILY, checkpoint_of(name), steps)


def load(name: str, config: ParallelConfig, mesh: Mesh) -> LoadedModel:
    """Load a model as one rank, by the product's own loading."""
    checkpoint = checkpoint_of(name)
    for module in checkpoint.transformer.modules():  # tables that no file stores
        for key, buffer in module._buffers.items():
            module._buffers[key] = None if buffer is None else buffer.to(META)
    engine = Engine(config, mesh)
    choice = MatmulChoice(MODELS[name].kernel, "as counted")
    with (
        patch("backend.engine.open_checkpoint", lambda *rest: checkpoint),
        patch("backend.engine.choose_all", lambda name, matrices, *rest: dict.fromkeys(matrices, choice)),
    ):
        engine.load("model", "released", "bf16")
    model = engine.models["model"]
    for weight in quantized(model.modules):
        if has_factor(weight):
            weight._scale = FACTOR  # there is none to read
    return model


def has_factor(weight: PackedWeight) -> bool:
    """Return whether a rank on a GPU reads the weight's one scale."""
    scale = weight.packed.tensors.get("scale")
    return weight.format_name in ("fp8", "int8") and scale is not None and scale.numel() == 1


@contextmanager
def running_on_meta(name: str, model: LoadedModel) -> Iterator[None]:
    """Have comfy-kitchen's kernels stood in for, and weights stay dequantized where the model's do."""
    with ExitStack() as stack:
        module = ModuleType("comfy_kitchen.scaled_mm_v2")
        vars(module)["scaled_mm_v2"] = _scaled_mm
        modules = {"comfy_kitchen": ModuleType("comfy_kitchen"), module.__name__: module}
        stack.enter_context(patch.dict(sys.modules, modules))
        stack.enter_context(patch.object(kernels, "_kitchen", lambda: KITCHEN))
        stack.enter_context(patch.object(kernels, "_fuses", lambda name: True))
        if MODELS[name].stays:
            stack.enter_context(dequantized_once(quantized(model.modules), sys.maxsize))
        yield


def _scaled_mm(x: Tensor, weight: Tensor, *rest, out_dtype: torch.dtype, **named) -> Tensor:
    return x.new_zeros(len(x), weight.shape[1], dtype=out_dtype)


def _int8_linear(x: Tensor, values: Tensor, *rest, **named) -> Tensor:
    return x.new_zeros(*x.shape[:-1], len(values))


def _quantize_nvfp4(x: Tensor, scale: Tensor, pad_16x: bool) -> tuple[Tensor, Tensor]:
    rows = -(-len(x) // 16) * 16
    return x.new_zeros(rows, x.shape[1] // 2, dtype=torch.uint8), x.new_empty(rows, x.shape[1] // 16)


def _scaled_mm_nvfp4(x: Tensor, values: Tensor, *rest, out_dtype: torch.dtype, **named) -> Tensor:
    return x.new_zeros(len(x), len(values), dtype=out_dtype)


#: comfy-kitchen's functions by shapes; block scales in tiles are a copy.
KITCHEN = SimpleNamespace(
    int8_linear=_int8_linear,
    quantize_per_tensor_fp8=lambda x, scale, output_type: x.to(output_type),
    quantize_nvfp4=_quantize_nvfp4,
    scaled_mm_nvfp4=_scaled_mm_nvfp4,
    to_blocked=lambda scales, flatten: scales.clone(),
)
