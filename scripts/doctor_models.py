"""The models that scripts/doctor.py --full runs, made when they are asked for, and requests for them."""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from doctor_files import random_weights, write_flux, write_lora_of, write_quantized, write_quantized_copy
from doctor_requests import in_batch, in_steps
from doctor_room import (
    HELD_OF_COPY,
    MAX_COPY,
    delete,
    model_bytes,
    need_disk,
    need_host,
    quantized_bytes,
    stored_bytes,
    weights_bytes,
)
from doctor_sizes import Size, timed_blocks
from doctor_time import Clock
from torch import Tensor

from backend.config import ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.protocol import Sample
from backend.sampling.validation import check_blocks_and_heads

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS, SUPPORT = ROOT / "benchmarks", ROOT / "tests" / "support"
sys.path[:0] = [str(BENCHMARKS), str(SUPPORT)]
FLUX_WORDS = "10 of Flux.1's 57 blocks, 1024 x 1024"

Made = TypeVar("Made")


def blocks_and_heads(path: Path) -> tuple[int, int]:
    """Count the blocks and the attention heads of the model at ``path``, which is not kept open."""
    checkpoint = open_checkpoint(str(path))
    return checkpoint.block_count, checkpoint.family.blocks.heads(checkpoint.config)


def refusal(name: str, counts: tuple[int, int], config: ParallelConfig) -> str:
    """Return why ranks would refuse a model for its blocks or heads, which are counted, "" where they fit."""
    try:
        check_blocks_and_heads(name, *counts, config)
    except UnsupportedError as error:
        return str(error)
    return ""


class Models(Clock, ABC):
    """Models in a folder, for a kind of device ("cuda" or "cpu")."""

    device: str
    folder: Path
    size: Size
    _cache: dict[tuple, Any]

    @abstractmethod
    def fresh(self):
        """End the ranks: they may have mapped deleted files."""

    def cached(self, key: tuple, make: Callable[[], Made]) -> Made:
        """Return what ``make`` gave for this key, made once."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def tiny(self, family: str) -> tuple[Path, Sample, Tensor]:
        """Return a tiny model of a golden family, ComfyUI's request, and its latent (VAE units)."""
        if not (SUPPORT / "tiny.py").exists():
            raise FileNotFoundError(
                "the folder tests is missing, which has the tiny models; clone the repository"
            )
        import families
        import tiny

        def write():
            return tiny.write_checkpoint(self.folder / f"{family}.safetensors", family)

        return self.cached(("tiny", family), write), *families.golden(f"{family}__euler_simple")

    def distances_from_comfyui(
        self, family: str, sample: Sample, samples: Tensor, golden: Tensor
    ) -> tuple[float, float]:
        """Return how far a request's latent is from ComfyUI's: at most, in its standard deviations, and
        relative."""
        import families
        import tiny

        latent = families.to_vae_units(family, samples, sample.latent_shapes)
        return tiny.error_in_std(latent, golden), tiny.relative(latent, golden)

    def flux(self) -> Path:
        """Write the mid-size Flux: random weights, bf16 on GPUs, float32 on the CPU."""
        import common
        from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

        def write():
            arguments = common.FLUX | self.size.flux
            dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
            size = model_bytes(FluxTransformer2DModel, arguments, dtype.itemsize)
            self.need_room(size, "the mid-size Flux")
            return write_flux(self.folder / "flux", arguments, dtype)

        return self.cached(("flux",), write)

    def released(self, family: str) -> tuple[Path, Callable[[int], Sample], str]:
        """Return a released model of a golden family with random weights and few of its blocks, what makes a
        request of so many steps, and both in words; of Flux.1 the mid-size one; on the CPU the tiny model."""
        if self.device == "cpu":
            path, sample, _ = self.tiny(family)
            return path, partial(in_steps, sample), "a tiny model"
        if family == "flux-dev":
            path = self.flux()
            return path, partial(self.request, path), FLUX_WORDS
        import released_sizes

        blocks = timed_blocks(self.ranks)

        def write():
            size = model_bytes(*released_sizes.arguments_of(family, blocks), 2)
            self.need_room(size, f"{blocks} blocks of {family}")
            return released_sizes.save(family, self.folder / f"released-{family}", blocks)

        path = self.cached(("released", family), write)
        sample = released_sizes.random_request(family)
        return path, partial(in_steps, sample), f"{blocks} blocks, {released_sizes.in_words(family)}"

    def refusal(self, path: Path, config: ParallelConfig) -> str:
        """Return why ranks would refuse the model at ``path`` for its heads or blocks, "" where they fit."""
        counts = self.cached(("blocks and heads", path), partial(blocks_and_heads, path))
        return refusal(path.stem, counts, config)

    def released_quantized(self, family: str, kind: str) -> Path:
        """Write what ``released`` has, with blocks quantized as ``kind``."""
        path, _, _ = self.released(family)

        def write():
            stored = stored_bytes(path)
            self.need_room(int(MAX_COPY * stored), f"{family} in {kind}", int(HELD_OF_COPY * stored))
            return write_quantized_copy(path, self.folder / f"released-{family}-{kind}", kind)

        return self.cached(("released", family, kind), write)

    def released_lora(self, family: str) -> tuple[Path, float]:
        """Write a LoRA for what ``released`` has; return its file and a strength that shows."""
        path, _, _ = self.released(family)
        target = self.folder / f"lora-{family}.safetensors"
        return self.cached(("lora of", family), partial(write_lora_of, path, target))

    def request(self, path: Path, steps: int, guided: bool = False, batch: int = 1) -> Sample:
        """Return a request for a Flux whose configuration is in the folder ``path``."""
        import common

        sample = common.request(str(path), steps, guided, self.size.side, self.size.text)
        return in_batch(sample, batch)

    def plain_request(self, steps: int) -> Sample:
        """Return a request for what ``quantized`` writes, a Flux without guidance."""
        import memory

        config = {"in_channels": memory.LATENT, "guidance_embeds": False}
        config |= dict.fromkeys(("joint_attention_dim", "pooled_projection_dim"), memory.CONTEXT)
        folder = self.folder / "request"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        return self.request(folder, steps)

    def quantized(self, kind: str) -> Path:
        """Write a file of a Flux whose blocks are quantized as ``kind``, or bf16."""

        def write():
            held = 0 if ("weights",) in self._cache else weights_bytes(self.size.width)
            self.need_room(quantized_bytes(kind, self.size.width), f"the file of {kind}", held)
            state = self.cached(("weights",), partial(random_weights, self.size.width))
            return write_quantized(self.folder, kind, state)

        return self.cached(("quantized", kind), write)

    def forget_weights(self):
        """Free the weights that quantized files are made of; another file makes them anew, the same ones."""
        self._cache.pop(("weights",), None)

    def drop(self, *key):
        """Delete the file of this key after its last use; who needs it again makes it anew."""
        if key in self._cache:
            delete(self._cache.pop(key))

    def need_room(self, size: int, what: str, held: int = 0):
        """Raise NoRoomError where the temporary folder has no room for a file of so many bytes, or the host's
        memory none for making it, with so many ``held`` besides: the system would end the doctor."""
        self.need_time(size, what)
        need_host(size, held, what, self.folder)
        need_disk(size, what, self.folder, self.fresh)
