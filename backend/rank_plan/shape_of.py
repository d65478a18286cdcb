"""What the planner (backend/planner) has to know of a transformer, read from its headers."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..config import ParallelConfig
from ..errors import UnsupportedError
from ..loading.checkpoint import Checkpoint
from ..models.blocks import APART
from ..parallel.attention.ring_library import ring_unavailable
from ..parallel.block_cost import PROMPT, block_costs, latents_of
from ..parallel.block_streams import BlockStructure
from ..parallel.stage_split import IMAGE_TOKENS, TEXT_TOKENS
from ..planner.model_shape import NONE, BlockShape, ModelShape
from ..quantization.kernels import MatmulChoice
from ..quantization.matmul import NATIVE_FORMATS, RULES
from ..runtime.opaque_ops import compiles_on_gpus
from ..runtime.torch_version import unshardable
from .activations import FIRST, activations_of, block_share
from .modulation import shared_embeddings
from .request_size import RequestSize
from .weights import HeldParameter, held_parameters, planned_scratch_bytes
from .workload import Workload

#: Only the cuts of the first rank of two are looked at: a layer is cut by any degree or by none.
TWO = 2


def shape_of(
    checkpoint: Checkpoint, dtype: torch.dtype, choices: Mapping[str, MatmulChoice] | None = None
) -> ModelShape:
    """Measure a transformer that computes in ``dtype``. ``choices``: how quantized parameters multiply, by
    default by the dequantized weight. What ranks can do is what this process can, of whose Python they are.
    Raises UnsupportedError as loading does."""
    return _Measured(checkpoint, dtype, choices or {}).shape()


@dataclass(frozen=True)
class _Measured:
    checkpoint: Checkpoint
    dtype: torch.dtype
    choices: Mapping[str, MatmulChoice]

    def shape(self) -> ModelShape:
        """Return the whole transformer's."""
        family = self.checkpoint.family
        config = self.checkpoint.config
        held = self._parameters
        position = family.blocks.text_position
        return ModelShape(
            name=self.checkpoint.name,
            family=family.name,
            blocks=tuple(map(self._block, range(self.checkpoint.block_count))) or (self._whole_block(),),
            rest=sum(each.bytes for each in held if each.block is None) if self.checkpoint.block_count else 0,
            heads=family.blocks.heads(config),
            head_size=family.blocks.head_size(config),
            width=family.blocks.hidden_width(config),
            itemsize=self.dtype.itemsize,
            joint=position is not None,
            patch=family.latent.patch(config),
            pixels=family.latent.pixels(config),
            activations=activations_of(self._work(), self._work(TWO) if self._cuts else None),
            scratch=_scratch_bytes(held),
            scratch_of_cuts=self._scratch_of_cuts,
            whole_only=family.blocks.whole_only or "",
            tensor=bool(self._cuts),
            is_quantized=self.checkpoint.is_quantized,
            sharding_needs=self._sharding_needs,
            rings=ring_unavailable() is None,
            compiles=compiles_on_gpus(),
            head_groups=self._one_rank.head_groups if self._cuts else 0,
            static_text=family.cache.static_text,
            padded_prompt=family.cache.padded_prompt,
            image_features=family.conditioning.image_features(config, None),
            kv_heads=self._kv_heads,
            shared_embeddings=shared_embeddings(family),
        )

    def _work(self, tensor: int = 1) -> Workload:
        plan = ParallelConfig(tensor_parallel_degree=tensor)
        request = RequestSize(prompts=1, calls=1)
        return Workload(plan, self.checkpoint, request, self.dtype, self.choices)

    @property
    def _sharding_needs(self) -> str:
        """Say what can shard these weights; empty where this torch can."""
        found = unshardable(self.checkpoint.is_quantized, bool(self.checkpoint.family.build.float32))
        return f"torch {found[1]}, which can shard {found[0]}" if found else ""

    @property
    def _scratch_of_cuts(self) -> int:
        """Count what one of two tensor-parallel ranks needs more than a rank with whole matrices."""
        if not (self._cuts and self.checkpoint.is_quantized):
            return 0
        cut = held_parameters(self.checkpoint, self._cuts, self.dtype, self.choices)
        return max(0, _scratch_bytes(cut) - _scratch_bytes(self._parameters))

    @cached_property
    def _parameters(self) -> list[HeldParameter]:
        return held_parameters(self.checkpoint, {}, self.dtype, self.choices)

    @cached_property
    def _cuts(self) -> dict:
        """Return what tensor parallelism leaves of each layer on one of two ranks; empty where it cannot."""
        if self.checkpoint.family.blocks.whole_only:
            return {}
        try:
            return self._work(TWO).cuts(FIRST)
        except UnsupportedError:  # no plan for the class, or heads that two do not divide
            return {}

    @cached_property
    def _polynomials(self) -> list[dict[str, float]]:
        """Return the multiplications of every block, under BlockShape's names. They are polynomials of image
        and text tokens, so five counts tell them."""

        def counts(image: int, text: int) -> list[int]:
            checkpoint = self.checkpoint
            return block_costs(checkpoint.transformer, checkpoint.family, checkpoint.config, image, text)

        points = [counts(*tokens) for tokens in ((1, 0), (2, 0), (0, 1), (0, 2), (1, 1))]
        polynomials = []
        for one, two, prompt, prompts, both in zip(*points):
            pairs = {
                "image_pairs": (two - 2 * one) / 2,
                "cross_pairs": both - one - prompt,
                "text_pairs": (prompts - 2 * prompt) / 2,
            }
            image = one - pairs["image_pairs"]
            polynomials.append(pairs | {"image": image, "text": prompt - pairs["text_pairs"]})
        return polynomials

    @cached_property
    def _by_block(self) -> list[dict[str, HeldParameter]]:
        """Return the parameters of every block by their names, modulation included."""
        by_block: list[dict[str, HeldParameter]] = [{} for _ in self.checkpoint.block_names]
        for name, each in zip(self.checkpoint.parameters, self._parameters):
            if each.block is not None:
                by_block[each.block][name] = each
        return by_block

    def _native(self, weights: Mapping[str, HeldParameter]) -> dict[str, Any]:
        """Return the format of which most weights multiply natively, and its share of all matrices."""
        sizes: Counter[str] = Counter()
        for name, each in weights.items():
            shape = self.checkpoint.shapes[name]
            if len(shape) > 1:
                sizes["matrices"] += math.prod(shape)
            if each.kernel in NATIVE_FORMATS:
                sizes[NATIVE_FORMATS[each.kernel]] += math.prod(shape)
        kind = max(RULES, key=sizes.__getitem__)
        share = sizes[kind] / max(1, sizes["matrices"])
        return {"native_format": kind, "native_share": share} if share else {}

    @cached_property
    def _reduced(self) -> list[Counter[str]]:
        """Return the numbers of a token that tensor parallelism sums in every block."""
        checkpoint = self.checkpoint
        family = checkpoint.family
        counts = [Counter[str]() for _ in checkpoint.block_names]
        for module, cut in self._cuts.items():
            if not cut.reduce:
                continue
            block = checkpoint.layer_blocks[module]
            inner = module.removeprefix(f"{checkpoint.block_names[block]}.")
            numbers = cut.reduced_features * family.blocks.flop_share(inner, checkpoint.config)
            passing = checkpoint.layer_tokens[module]
            counts[block]["image"] += round(passing.count(1, 0, latents_of(family, 1)) * numbers)
            counts[block]["text"] += round(passing.count(0, 1, latents_of(family, 0)) * numbers)
        return counts

    def _whole_block(self) -> BlockShape:
        """Return a transformer that cannot be cut as one block: a token of the image meets every matrix.
        Attention and text, of which nothing is known, are left out; they speed up as the rest does."""
        matrices = (each for each in self.checkpoint.transformer.parameters() if each.ndim > 1)
        image = sum(each.numel() for each in matrices)
        none: dict[str, Any] = dict.fromkeys(("text", "image_pairs", "cross_pairs", "text_pairs", "cut"), 0)
        return BlockShape(image=image, **none, **_held(self._parameters))

    def _block(self, index: int) -> BlockShape:
        checkpoint = self.checkpoint
        own = self._by_block[index]
        weights = {name: each for name, each in own.items() if each.module not in self._one_rank.modulation}
        held = _held(weights.values())
        cut = sum(each.bytes for each in weights.values() if each.module in self._cuts)
        streams = checkpoint.family.blocks.lists[checkpoint.block_names[index].rpartition(".")[0]]
        multiplications = self._polynomials[index]
        return BlockShape(
            **multiplications,
            **held,
            modulation=sum(each.bytes for each in own.values()) - held["weights"],
            modulation_width=self._modulation_width(index),
            **self._native(weights),
            cut=cut / max(1, held["weights"]),
            reduced_image=self._reduced[index]["image"],
            reduced_text=self._reduced[index]["text"],
            streams=2 if streams == APART and multiplications["text"] else 1,
            queries=self._features(index, "queries"),
            keys=self._features(index, "keys"),
            skips=len(self._structure.crossing(index + 1)),
            prompt_keys=self._prompt_keys(index),
            activations=block_share(checkpoint, index),
        )

    @cached_property
    def _one_rank(self) -> Workload:
        return self._work()

    @cached_property
    def _structure(self) -> BlockStructure:
        return BlockStructure.of(self.checkpoint.transformer, self.checkpoint.family)

    def _features(self, index: int, side: str) -> int:
        """Return the features of the attention calls of a block whose ``side`` (queries or keys) is of image
        tokens; NONE without any."""
        latents = latents_of(self.checkpoint.family, 1)
        features = 0
        for call, count in self._one_rank.communicated_calls(range(index, index + 1)).items():
            if latents.get(getattr(call, side), 1):
                features += count * (call.width if side == "queries" else call.kv_width)
        return features or NONE

    def _prompt_keys(self, index: int) -> int:
        """Return the features of a prompt's keys that the cross-attention of a block caches."""
        if not self.checkpoint.family.cache.prompt_layers:
            return 0
        return sum(call.kv_width for call in self.checkpoint.attention_calls[index] if call.keys == PROMPT)

    def _modulation_width(self, index: int) -> int:
        layers = self.checkpoint.modulation[self.checkpoint.block_names[index]]
        return sum(self._one_rank.features(layer, FIRST) for layer in layers)

    @cached_property
    def _kv_heads(self) -> int:
        """Return the heads of keys and values; 0 where those of queries are as many."""
        grouped = [
            call.kv_width // self._one_rank.call_head_size(call)
            for calls in self.checkpoint.attention_calls
            for call in calls
            if call.kv_width < call.width and not call.is_local
        ]
        return min(grouped, default=0)


def _held(parameters: Collection[HeldParameter]) -> dict[str, Any]:
    """Return the bytes of parameters, and what it takes to dequantize them, under BlockShape's names."""
    return {
        "weights": sum(each.bytes for each in parameters),
        "unpacked": sum(each.unpacked for each in parameters),
        "dequantizing": sum(each.moved for each in parameters),
        "kernels": sum(each.kernels for each in parameters),
    }


def _scratch_bytes(held: list[HeldParameter]) -> int:
    return planned_scratch_bytes(held, IMAGE_TOKENS + TEXT_TOKENS)
