"""Released models at usual sizes, without data: a checkpoint of meta tensors, and a request."""

import inspect
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from families import golden
from headers import HeaderFiles, fold, released
from released_forms import tensors_of
from tiny import golden_request
from torch import Tensor

from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import recognise
from backend.protocol import Sample

#: Tensors of a quantized file other than its weights.
SCALES = (".weight_scale", ".comfy_quant", ".input_scale", ".weight_scale_2")


@dataclass(frozen=True)
class Size:
    """header: as released_forms.File has it. latents: latent pixels (T, H, W) or (H, W) of each latent.
    text: tokens of the prompt. shapes: of arguments that do not follow from these."""

    header: str
    latents: tuple[tuple[int, ...], ...]
    text: int
    shapes: dict[str, tuple[int, ...]] | None = None


SQUARE = ((128, 128),)
WAN = ((21, 90, 160),)
LTX = ((16, 22, 40), (126, 16))
#: Golden family -> a released model of it: images of 1024 x 1024 where nothing else is said.
RELEASED = {
    "flux-dev": Size("saved__flux1-dev", SQUARE, 512),
    "sd3": Size("sd3.5-large", SQUARE, 333),
    "chroma": Size("saved__chroma1-hd", SQUARE, 512),
    "flux2-dev": Size("flux2-dev", ((64, 64),), 512),
    "flux3": Size("Flux3Transformer2DModel", ((64, 64),), 512),
    "qwen-image": Size("saved__qwen-image", ((1, 166, 166),), 128),  # 1328 x 1328
    "qwen-image21": Size("QwenImage21Transformer2DModel", ((64, 64),), 256),
    "z-image-turbo": Size("z-image-turbo", SQUARE, 256),
    "krea2": Size("saved__krea2", ((1, 128, 128),), 256),
    "hidream": Size("hidream-i1", SQUARE, 128),
    "lumina2": Size("saved__lumina2", SQUARE, 256),
    "ideogram4": Size("saved__ideogram4", ((64, 64),), 256),
    "hunyuan-image21": Size("hunyuan-image-2.1", ((64, 64),), 256),  # 2048 x 2048
    "hunyuan-dit": Size("saved__hunyuan-dit-1.2", SQUARE, 77),
    "pixart-sigma": Size("pixart-sigma", SQUARE, 300),
    "sana": Size("others2__diffusers_names__Sana_1600M_1024px", ((32, 32),), 300),
    "kandinsky5-image": Size("kandinsky5-lite-image", SQUARE, 256),
    "kandinsky5": Size("kandinsky5-pro-t2v", ((31, 64, 96),), 256),
    "wan21-t2v": Size("var__wan2.1_t2v_14B_prefixed__Comfy-Org_", WAN, 512),  # 1280 x 720, 81 frames
    "wan21-vace": Size("wan2.1-vace-1.3B", ((21, 60, 104),), 512),
    "hunyuan-video": Size("saved__hunyuan-video-t2v", ((33, 90, 160),), 256),  # 129 frames
    "hunyuan-video15": Size("var__HunyuanVideo-1.5_Tencent_names", ((31, 45, 80),), 256),
    "cogvideox": Size("cogvideox-5b", ((13, 60, 90),), 226),
    "ltxv": Size("saved__ltxv-2b", ((16, 22, 40),), 256),  # 1280 x 704, 121 frames
    "ltx2": Size("saved__ltx-2-19b", LTX, 1024, {"c_crossattn": (1, 1024, 2 * 3840)}),  # as padded
    "ltx23": Size("var__ltx-2.3-22b-dev_all_in_one", LTX, 256, {"c_crossattn": (1, 256, 4096 + 2048)}),
    "minimax-h3": Size("h3__minimax_h3_fl2va_int8_convrot__hash_known_", ((16, 44, 80), (2, 126)), 512),
    "minimax-h3-curves": Size(
        "h3__minimax_h3_fl2va_pruned_int8_convrot__hash_known_", ((16, 44, 80), (2, 126)), 512
    ),
}
#: Golden families whose released models take one prompt (guidance-distilled); the others take two.
DISTILLED = ("flux-dev", "flux2-dev", "z-image-turbo", "hunyuan-video")


class DryFiles(HeaderFiles):
    """A file whose tensors are meta tensors, in bf16 where they were quantized."""

    def __init__(self, name: str, tensors: dict, metadata: dict, data: dict):
        whole = {key: value for key, value in tensors.items() if not key.endswith(SCALES)}
        plain = {key: (_plain(dtype), shape) for key, (dtype, shape) in whole.items()}
        super().__init__(name, {"tensors": fold(plain), "metadata": metadata, "data": data})

    def read(self, key, rows=slice(None), columns=slice(None), dtype=None, device=None):
        """Return a meta tensor of those rows and columns."""
        if key in self._data:
            return super().read(key)
        whole = torch.empty(self.shapes[key], dtype=dtype or self.dtype(key), device="meta")
        part = whole[rows, columns].contiguous() if whole.ndim > 1 else whole[rows]
        self.bytes_read += part.nbytes
        return part

    def packed(self, key, rows=None, columns=None, device=None):
        """Nothing is quantized here."""

    def quantization(self, key):
        """Nothing is quantized here."""

    def stored_sizes(self, key, rows, columns):
        """Nothing is quantized here."""


def _plain(dtype: str) -> str:
    return dtype if dtype in ("F32", "F16", "BF16") else "BF16"


def checkpoint_of(family: str) -> Checkpoint:
    """Open the released model of a golden family, without its weights."""
    name = RELEASED[family].header
    header = released().get(name, {"metadata": {}, "data": {}})
    files = DryFiles(name, tensors=tensors_of(name), metadata=header["metadata"] or {}, data=header["data"])
    return recognise(name, cast(Any, files))


def request_of(
    family: str, checkpoint: Checkpoint, steps: int, latents: tuple[tuple[int, ...], ...] | None = None
) -> Sample:
    """Return the golden request of a family at the released model's widths and a usual size, with one
    prompt."""
    size = RELEASED[family]
    size = replace(size, latents=latents or size.latents)
    stored = golden_request("euler_simple") if family == "flux-dev" else golden(f"{family}__euler_simple")
    sample = stored[0]
    tensors = {
        key: _argument(key.partition(".")[2], value, sample, checkpoint, size)
        for key, value in sample.tensors.items()
        if key.startswith("positive.")
    }
    shapes, noise = _latent(sample, checkpoint, size)
    tensors |= {"noise": noise, "latent": noise, "percent_sigmas": torch.zeros(3, dtype=torch.float64)}
    tensors["sigmas"] = torch.linspace(sample.tensors["sigmas"][0].item(), 0, steps + 1)
    return replace(sample, sampler="euler", cfg=1.0, tensors=tensors, latent_shapes=shapes)


def guided(sample: Sample) -> Sample:
    """Return a request with a negative prompt like its positive one, and CFG."""
    negative = {
        key.replace("positive", "negative", 1): value
        for key, value in sample.tensors.items()
        if key.startswith("positive.")
    }
    return replace(sample, cfg=4.0, tensors=sample.tensors | negative)


#: Latent pixels at which a model is timed, where the usual size takes too long: 832 x 480, 81 frames.
TIMED = {"wan21-t2v": ((21, 60, 104),)}


def random_request(family: str) -> Sample:
    """Return the request of a family for ranks: at the size at which it is timed, with random numbers."""
    sample = request_of(family, checkpoint_of(family), 1, TIMED.get(family))
    generator = torch.Generator().manual_seed(0)

    def filled(value: Tensor) -> Tensor:
        drawn = value.is_floating_point() and value.ndim > 1
        return torch.randn(value.shape, generator=generator) if drawn else value.contiguous()

    tensors = {name: filled(value) for name, value in sample.tensors.items()}
    return replace(sample, tensors=tensors | {"latent": torch.zeros_like(tensors["noise"])})


def in_words(family: str) -> str:
    """Name the released model and the latent pixels at which it is timed."""
    latents = TIMED.get(family, RELEASED[family].latents)
    return f"{RELEASED[family].header}, latents {' and '.join('x'.join(map(str, each)) for each in latents)}"


def arguments_of(family: str, blocks: int) -> tuple[type, dict]:
    """Return the diffusers class of a released model, and its arguments for so many blocks."""
    checkpoint = checkpoint_of(family)
    cls = checkpoint.transformer_class
    known = inspect.signature(cls).parameters
    arguments = {name: value for name, value in checkpoint.config.items() if name in known}
    return cls, arguments | {"num_layers": blocks}


def save(family: str, folder: Path, blocks: int) -> Path:
    """Write a released model with random weights in bf16 and so many of its blocks as a diffusers folder."""
    cls, arguments = arguments_of(family, blocks)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = cls(**arguments)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    return folder


def _latent(sample: Sample, checkpoint: Checkpoint, size: Size) -> tuple[list[list[int]], Tensor]:
    """The shapes of nested latents, and noise."""
    latent = checkpoint.family.latent
    if latent.nested is None:
        channels = latent.channels(checkpoint.config)
        return [], torch.zeros(1).expand(1, channels, *size.latents[0])
    channels = [each[0] for each in sample.latent_shapes]
    shapes = [[count, *pixels] for count, pixels in zip(channels, size.latents)]
    return shapes, torch.zeros(1).expand(1, 1, sum(map(math.prod, shapes)))


def _argument(name: str, value: Tensor, sample: Sample, checkpoint: Checkpoint, size: Size) -> Tensor:
    """A model argument at the released size."""
    if size.shapes and name in size.shapes:
        return torch.zeros(1).expand(size.shapes[name])
    if name == "num_tokens":
        return torch.tensor(size.text)
    shape = list(value.shape)
    pixels = list(sample.tensors["noise"].shape[2:])
    if len(shape) > 3 and shape[-len(pixels) :] == pixels:
        shape[-len(pixels) :] = size.latents[0]
        return torch.zeros(1).expand(shape)
    prompt = sample.tensors["positive.c_crossattn"].shape[1]
    width = checkpoint.family.conditioning.widths(checkpoint.config).get(name)
    if width:
        shape[-1] = width
    if name in ("c_crossattn", "attention_mask"):
        shape[1] = size.text if shape[1] == prompt else shape[1]
    return value if shape == list(value.shape) else torch.ones(1, dtype=value.dtype).expand(shape)
