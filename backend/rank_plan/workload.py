"""The work of a request on a configuration's ranks and its memory: weights, keys and values, modulation."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..config import ParallelConfig
from ..loading.checkpoint import Checkpoint
from ..parallel.block_cost import PROMPT, AttentionCall, LayerTokens, latents_of
from ..parallel.matrix_cuts import Shard, head_groups
from ..parallel.modulation.modulation_cache import layer_features
from ..parallel.sequence import SequenceLengths, TokenShards, patches, whole_sequence
from ..parallel.stage_split import Stages
from ..parallel.wire_bytes import kv_heads_sent
from ..planner.model_shape import samples_of_activations
from ..quantization.kernels import MatmulChoice
from ..shares import shard_sizes
from .request_size import RequestSize
from .weights import (
    HeldParameter,
    HeldWeights,
    gathered_bytes,
    held_parameters,
    planned_scratch_bytes,
    sent_shards,
    tensor_mesh,
)

#: A rank's index on every mesh axis.
MeshPlace = dict[str, int]
#: Checkpoint -> its cuts and parameters by what they follow from: the same for all requests.
FOUND: WeakKeyDictionary[Checkpoint, dict[tuple, Any]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Workload:
    """A request on the ranks of one ``replica`` of a configuration. choices, bits: as in describe."""

    config: ParallelConfig
    checkpoint: Checkpoint
    request: RequestSize
    dtype: torch.dtype
    choices: Mapping[str, MatmulChoice]
    bits: int = 0
    replica: int = 0

    @cached_property
    def batch(self) -> int:
        """Count the samples on the replica, at least one."""
        shares = self.config.shares_of("dp")
        shards = shard_sizes(self.request.batch, count=self.config.data_parallel_degree, shares=shares)
        return max(1, shards[self.replica])

    @property
    def prompts_per_rank(self) -> int:
        """Count the prompts that a rank computes, one after the other."""
        return -(-self.request.prompts // self.config.cfg_degree)

    @property
    def family(self):
        return self.checkpoint.family

    @cached_property
    def stages(self) -> Stages:
        return self.checkpoint.stages(self.config)

    def blocks(self, place: MeshPlace) -> range:
        """Return the blocks of the rank at ``place``."""
        return self.stages.blocks[place["pp"]]

    def patches(self, place: MeshPlace) -> list[TokenShards]:
        """Return the tokens of every patch on the rank at ``place``; one patch where nothing is stale."""
        sequence = self.sequence
        ranks = (self.sp_rank(place), self.config.sp_degree, self.config.shares_of("ring", "ulysses"))
        if not self.config.has_stale_kv:
            return [whole_sequence(sequence, *ranks)]
        return patches(sequence, self.config.patches, *ranks)

    @property
    def sequence(self) -> SequenceLengths:
        """The tokens of a forward; of nested latents all are the first's where nothing else is known."""
        position = self.family.blocks.text_position
        image = self.request.image_tokens
        text = self.request.text_tokens if position else 0
        latents = self.request.latents or tuple(latents_of(self.family, image).items())
        return SequenceLengths(text=text, image=image, text_position=position, latents=latents)

    @property
    def is_linear(self) -> bool:
        """Return whether blocks mix tokens by linear attention."""
        return "linear" in self.family.blocks.attention

    def all_heads(self, place: MeshPlace) -> int:
        """Count the attention heads of the rank at ``place`` before Ulysses divides them."""
        return self._of_tensor_rank(self.family.blocks.heads(self.checkpoint.config), place)

    def _of_tensor_rank(self, heads: int, place: MeshPlace) -> int:
        """Count the ``heads`` that tensor parallelism leaves on the rank at ``place``."""
        tp = self.config.tensor_parallel_degree
        if tp == 1 or self.config.split_scheme != "megatron":
            return heads
        shards = shard_sizes(self.head_groups, count=tp, shares=self.config.shares_of("tp"))
        return heads * shards[place["tp"]] // self.head_groups

    def _of_ulysses_rank(self, heads: int, place: MeshPlace) -> int:
        """Count the ``heads`` that Ulysses leaves on the rank at ``place``."""
        uneven = self.config.shares_of("ulysses")
        return shard_sizes(heads, count=self.config.ulysses_degree, shares=uneven)[place["ulysses"]]

    @cached_property
    def head_groups(self) -> int:
        """How many ranks can have attention heads of their own, queries with their keys and values."""
        transformer = self.checkpoint.transformer
        blocks = map(transformer.get_submodule, self.checkpoint.block_names)
        return head_groups(module for block in blocks for module in block.modules())

    def heads(self, place: MeshPlace) -> int:
        """Count the attention heads of the rank at ``place``."""
        return self._of_ulysses_rank(self.all_heads(place), place)

    def all_kv_heads(self, place: MeshPlace, call: AttentionCall) -> int:
        """Count the heads of keys and values that go through Ulysses from the rank at ``place``."""
        own = self._of_tensor_rank(call.kv_width // self.call_head_size(call), place)
        uneven = self.config.shares_of("ulysses")
        return kv_heads_sent(self.all_heads(place), own, self.config.ulysses_degree, shares=uneven)

    def kv_heads(self, place: MeshPlace, call: AttentionCall) -> int:
        """Count the heads of keys and values of the rank at ``place`` in an attention call."""
        return self._of_ulysses_rank(self.all_kv_heads(place, call), place)

    @property
    def width(self) -> int:
        """Features of a token between blocks."""
        return self.family.blocks.hidden_width(self.checkpoint.config, self.request.controls)

    @property
    def head_size(self) -> int:
        return self.family.blocks.head_size(self.checkpoint.config)

    def state_bytes(self, place: MeshPlace) -> int:
        """Count the bytes of linear attention's state in float32, for one sample and block."""
        return 4 * self.all_heads(place) * self.head_size * (self.head_size + 1)

    def cuts(self, place: MeshPlace) -> dict[str, Shard]:
        """Return what tensor parallelism leaves of each layer on the rank at ``place``."""
        return self._cuts[place["tp"]]

    @cached_property
    def _cuts(self) -> list[dict[str, Shard]]:
        """Return what each rank of a tensor-parallel group holds of each layer: alike for all requests."""
        found = FOUND.setdefault(self.checkpoint, {})
        key = ("cuts", *self._split)
        if key not in found:
            plan = self.checkpoint.cut_plan(self.config)
            ranks = range(self.config.tensor_parallel_degree)
            found[key] = [plan.shards(tensor_mesh(self.config, rank)) for rank in ranks]
        return found[key]

    @property
    def _split(self) -> tuple:
        """Return what the cuts of a checkpoint's matrices depend on."""
        config = self.config
        return config.tensor_parallel_degree, config.split_scheme, config.shares_of("tp")

    def communicated_calls(self, blocks: range) -> Counter[AttentionCall]:
        """Count the calls of ``blocks`` by kind, without those whose keys every rank has."""
        counts: Counter[AttentionCall] = Counter()
        for call in chain.from_iterable(self.checkpoint.attention_calls[index] for index in blocks):
            if not call.is_local:
                counts[call] += self.runs(call)
        return counts

    def runs(self, part: AttentionCall | LayerTokens) -> int:
        """Count how often an attention call or a layer runs in a forward."""
        return self.request.controls if part.is_control else 1

    def call_head_size(self, call: AttentionCall) -> int:
        """Count the features of a head of an attention call."""
        return call.width // self.family.blocks.heads(self.checkpoint.config)

    @cached_property
    def modulation(self) -> frozenset[str]:
        return frozenset(chain.from_iterable(self.checkpoint.modulation.values()))

    def weights(self, place: MeshPlace) -> HeldWeights:
        """Count the bytes of the weights of the rank at ``place``."""
        here, whole = self._on_stage(place["tp"], place["pp"])
        if not self.config.shard_weights:
            return whole
        ranks = self.config.sharding_degree
        rank = place["dp"] * self.config.sp_degree + self.sp_rank(place)
        is_ahead = not self.request.drained  # of many steps at once (Runner.modulate_ahead)
        ahead = self.modulation if is_ahead else frozenset()
        in_blocks = [each for each in here if each.block is not None]
        return replace(
            whole,
            device=sum(each.shard(rank, ranks) for each in here),
            gathered=gathered_bytes(here, self.modulation, is_ahead),
            sent=sent_shards([each for each in in_blocks if each.module not in ahead], ranks),
            sent_ahead=sent_shards([each for each in in_blocks if each.module in ahead], ranks),
        )

    def _on_stage(self, tp: int, stage: int) -> tuple[list[HeldParameter], HeldWeights]:
        """Return the parameters of a ``stage`` on a rank of tensor parallelism, and their unsharded bytes."""
        if (tp, stage) not in self._known:
            here = [each for each in self._held(tp) if self.is_on(each.module, each.block, stage)]
            waiting = self.modulation if self.config.offload_modulation else frozenset()
            host = sum(each.bytes for each in here if each.module in waiting)
            device = sum(each.bytes for each in here) - host
            tokens = self.batch * -(-self.request.tokens // self.config.sp_degree)
            scratch = planned_scratch_bytes(here, tokens)
            self._known[tp, stage] = here, HeldWeights(device, host, scratch)
        return self._known[tp, stage]

    def is_on(self, module: str, block: int | None, stage: int) -> bool:
        """Return whether a ``stage`` holds a layer of ``block`` (None: outside of them): modulation may be on
        another stage than its block."""
        if module in self.stages.holders:
            return self.stages.holders[module] == stage
        return block is None or block in self.stages.blocks[stage]

    @cached_property
    def _known(self) -> dict[tuple[int, int], tuple[list[HeldParameter], HeldWeights]]:
        """(tp rank, stage) -> what is there."""
        return {}

    def _held(self, tp: int) -> list[HeldParameter]:
        """Return every parameter on the ``tp``-th rank of tensor parallelism: alike for all requests."""
        found = FOUND.setdefault(self.checkpoint, {})
        key = ("held", tp, *self._split, self.dtype, self.bits, frozenset(self.choices.items()))
        if key not in found:
            found[key] = held_parameters(self.checkpoint, self._cuts[tp], self.dtype, self.choices, self.bits)
        return found[key]

    @cached_property
    def tensor_ranks_alike(self) -> list[int]:
        """Return, for each rank of a tensor-parallel group, the first one that holds and sends as much. Only
        itself where shares differ, and of quantized matrices, whose blocks may divide otherwise."""
        ranks = range(self.config.tensor_parallel_degree)
        if len(ranks) == 1 or self.config.shares or self.checkpoint.is_quantized:
            return [*ranks]
        first: dict[tuple, int] = {}
        return [first.setdefault(self._piece_sizes(rank), rank) for rank in ranks]

    def _piece_sizes(self, tp: int) -> tuple:
        """Return the groups of heads of a rank of tensor parallelism, and the sizes of its different
        pieces."""
        pieces = {id(cut): cut for cut in self._cuts[tp].values()}  # layers that are cut alike share one
        sizes = ((sum(map(len, cut.outputs)), sum(map(len, cut.inputs))) for cut in pieces.values())
        return self._of_tensor_rank(self.head_groups, {"tp": tp}), *sizes

    def sp_rank(self, place: MeshPlace) -> int:
        """Return the index of the rank at ``place`` among the sequence-parallel ones."""
        return place["ring"] * self.config.ulysses_degree + place["ulysses"]

    def kv_bytes(self, place: MeshPlace, blocks: range, patches: list[TokenShards]) -> int:
        """Count the bytes of the K/V buffers, of static text's keys and values in a Ulysses group, and of
        prompts'."""
        number = 2 * self.batch * self.prompts_per_rank * self.dtype.itemsize
        of_prompts = self._prompt_bytes(place, blocks)
        if not self.config.has_stale_kv:
            u = self.config.ulysses_degree
            lengths = patches[0].lengths("text")
            cached = sum(lengths[place["ring"] * u : (place["ring"] + 1) * u])
            token = len(blocks) * self.heads(place) * self.head_size
            return of_prompts + (number * token * cached if self.family.cache.static_text else 0)
        sequence = patches[0].sequence
        buffers = 2 if self.config.stale_kv == "extrapolate" else 1
        if self.is_linear:
            states = self.config.patches * self.state_bytes(place)
            tokens = sequence.image * self.width * self.dtype.itemsize
            states_and_tokens = self.batch * self.prompts_per_rank * len(blocks) * (states + tokens)
            return of_prompts + buffers * states_and_tokens
        calls = self.communicated_calls(blocks).items()
        features = sum(
            n * self.kv_heads(place, call) * self.call_head_size(call) * sequence.length_of(call.keys)
            for call, n in calls
        )
        if self.family.cache.static_text:  # text attends among itself in the first steps
            features += len(blocks) * self.heads(place) * self.head_size * sequence.text
        return of_prompts + buffers * number * features

    def _prompt_bytes(self, place: MeshPlace, blocks: range) -> int:
        """Count the bytes of keys and values that cross-attention caches of all prompts and samples for a
        request; of a call, those of the samples that run at once. An image's features count in all layers:
        Wan Animate's of faces, which read none, are counted too large."""
        if not self.family.cache.prompt_layers:
            return 0
        width = 0
        for call in chain.from_iterable(self.checkpoint.attention_calls[index] for index in blocks):
            if call.keys == PROMPT:
                size = self.call_head_size(call)
                width += self.runs(call) * size * self._of_tensor_rank(call.kv_width // size, place)
        cached = self.batch * self.prompts_per_rank
        if self.request.drained:  # which forgets them with each micro-batch
            cached = samples_of_activations(self.config, self.batch)
        image = self.request.image_features
        if image is None:
            image = self.family.conditioning.image_features(self.checkpoint.config, None)
        tokens = max(self.request.text_tokens, self.family.cache.padded_prompt) + image
        return 2 * cached * width * tokens * self.dtype.itemsize

    @cached_property
    def modulation_widths(self) -> list[list[int]]:
        """Return the features of every stage's modulation, for each rank of a tensor-parallel group."""
        names = self.checkpoint.block_names
        layers = self.checkpoint.modulation
        of_stages = [[layer for i in blocks for layer in layers[names[i]]] for blocks in self.stages.blocks]
        places = [{"tp": tp} for tp in range(self.config.tensor_parallel_degree)]
        return [[sum(self.features(layer, place) for layer in own) for own in of_stages] for place in places]

    def features(self, layer: str, place: MeshPlace) -> int:
        """Return the width of a modulation layer's output on this rank."""
        cut = self.cuts(place).get(layer)
        if cut is None:
            return layer_features(self.checkpoint.transformer.get_submodule(layer))
        return cut.features
