"""Seconds of a request under a plan: FLOPs over rates, bytes over links, and the pipeline's fill.

Bytes that a rank sends are those of the methods' papers (DeepSpeed-Ulysses arXiv 2309.14509, ring attention
arXiv 2310.01889, USP arXiv 2405.07719, PipeFusion arXiv 2405.14430, Megatron arXiv 1909.08053) and of
rank_plan/traffic.py, which tests compare.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from ..config import ParallelConfig
from ..parallel.modulation.modulation_chunks import counted_embeddings, evaluations_ahead
from ..parallel.wire_bytes import head_bytes
from ..quantization.dequantized_cache import pays
from ..shares import relative_shares, shard_sizes
from .machine import Machine, RequestEstimate, samples_at_once
from .model_shape import BlockShape, ModelShape, stages_of
from .rank_shares import RankShare, rank_shares

#: Attention over blocks of keys and values that come around a ring, against one kernel over all of them.
RING_EFFICIENCY = 0.87
#: Merging two such results by their log-sum-exp: passes over outputs in float32, and small kernels, of which
#: a stream of a block has LAUNCHES.
MERGE_PASSES, MERGE_KERNELS, LAUNCHES = 6, 8, 24
FLOAT32 = 4


@dataclass(frozen=True)
class Cost:
    """The seconds of one plan. ``spare``: bytes in which each rank may keep weights dequantized."""

    shape: ModelShape
    plan: ParallelConfig
    machine: Machine
    request: RequestEstimate
    spare: int = 0

    @property
    def total(self) -> float:
        """Seconds of all steps."""
        offloaded = self._offloaded() * (self.request.steps if self.request.drained else 1)
        synchronous, stale = self._steps
        in_patches = stale * self.step(self.plan.patches) if stale else 0.0
        return synchronous * self.step(1) + in_patches + offloaded + self._gather_ahead()

    @property
    def _steps(self) -> tuple[int, int]:
        """Count the steps of the whole sequence, and those of patches with stale keys and values."""
        steps = self.request.steps
        synchronous = min(self.plan.warmup_steps, steps) if self.plan.has_stale_kv else steps
        return synchronous, steps - synchronous

    def _offloaded(self) -> float:
        """Return the seconds in which offloaded modulation comes: once for many steps, or for a call."""
        if not self.plan.offload_modulation:
            return 0.0
        ranks = self.plan.pipefusion_degree * self.plan.tensor_parallel_degree
        return sum(block.modulation for block in self.shape.blocks) / ranks / self.machine.host_link

    def step(self, patches: int) -> float:
        """Return the seconds of one step of a sequence cut into ``patches``: 1 in PipeFusion's warm-up."""
        plan = self.plan
        of_stages = zip(self._stages, self._loads, self._reading)
        micro = max(self._micro(*stage, patches) for stage in of_stages)
        hop = self._hop(patches)
        stages = plan.pipefusion_degree
        work = patches * self._batches(patches)
        if patches == 1:  # every stage waits for the one before; batches follow each other
            return (stages + work - 1) * (micro + hop) + self._combine()
        return max(work * micro, stages * (micro + hop), work * hop) + self._combine()

    @cached_property
    def _stages(self) -> list[tuple[BlockShape, ...]]:
        split = stages_of(self.shape, self.plan.pipefusion_degree, self.plan.shares_of("pp"))
        return [self.shape.blocks[each.start : each.stop] for each in split]

    @cached_property
    def _loads(self) -> list[float]:
        """Return for each stage its last rank's seconds, in those of the slowest GPU for an even share."""
        speeds = self.machine.speeds_of(self.plan.world_size)
        work = [each.tokens * each.matrices * each.samples / self._most_samples for each in self._ranks]
        return self._last([share / speed for share, speed in zip(work, speeds)])

    @cached_property
    def _reading(self) -> list[float]:
        """Return for each stage the seconds in which its last rank reads its weights, in those that the
        slowest memory takes for an even share."""
        memories = self.machine.bandwidths_of(self.plan.world_size)
        return self._last([each.matrices / memory for each, memory in zip(self._ranks, memories)])

    @cached_property
    def _ranks(self) -> tuple[RankShare, ...]:
        return rank_shares(self.plan, self.request.batch)

    def _last(self, multiples: list[float]) -> list[float]:
        """Return for each stage the most of its ranks' ``multiples``."""
        most = [0.0] * self.plan.pipefusion_degree
        for rank, multiple in zip(self._ranks, multiples):
            most[rank.stage] = max(most[rank.stage], multiple)
        return most

    @cached_property
    def _most_samples(self) -> int:
        """Latents of the rank that has most of the batch."""
        return max(each.samples for each in self._ranks)

    def _at_once(self, patches: int) -> float:
        """Count the samples that go through the model together, of several batches their mean: in a
        synchronous step of a pipeline one, and in a call those of all prompts, up to so many tokens."""
        return self._most_samples * self._prompts / self._batches(patches)

    def _batches(self, patches: int) -> int:
        """Return how many batches a step has on the rank with most samples."""
        every = self._most_samples * self._prompts
        if self.plan.pipefusion_degree > 1 and patches == 1:
            return every
        if self.plan.pipefusion_degree > 1 or not self.request.drained:
            return self._prompts
        return math.ceil(every / samples_at_once(self.request.image_tokens))

    @property
    def _prompts(self) -> int:
        return self.request.prompts_per_rank(self.plan.cfg_degree)

    @cached_property
    def _sequence(self) -> int:
        return self.shape.sequence(self.request.image_tokens, self.request.text_tokens)

    def _speed(self, patches: int) -> float:
        """Return how much faster than measured a rank computes; stages that wait leave others their cores."""
        stages = self.plan.pipefusion_degree
        at_once = stages if patches > 1 else min(stages, self._batches(patches))
        return self.machine.speed(self.plan.world_size // stages * at_once)

    def _micro(self, blocks: tuple[BlockShape, ...], load: float, reading: float, patches: int) -> float:
        """Return the seconds of one patch of one prompt on the last rank of a stage."""
        plan = self.plan
        # narrow matrices are as slow as short ones
        divided = plan.sp_degree * plan.tensor_parallel_degree
        at_once = self._at_once(patches)
        tokens = at_once * self._sequence / divided / patches
        speed = self._speed(patches)
        efficiency = speed * tokens / (tokens + self.machine.half_rate)
        share = at_once / (divided * patches) * load
        lengths = (self.request.image_tokens, self.request.text_tokens)
        native = self.machine.native_rates
        linear = 2 * share * sum(block.linear(*lengths) * block.slowness(native) for block in blocks)
        efficiency /= self.machine.float32 if self.shape.itemsize == FLOAT32 else 1.0
        products = max(linear / (self.machine.gemm * efficiency), reading * self._read(blocks) / speed)
        attention = 2 * share * self._uneven_heads * sum(block.attention(*lengths) for block in blocks)
        device = products + reading * self._dequantize(blocks) / speed
        device += self._ring(attention / (self.machine.attention * efficiency), blocks, patches)
        device += self._all_to_all(blocks, patches) + self._all_reduce(blocks, patches)
        gathered = self._gather_weights(blocks, patches)
        device = device + gathered if self.machine.on_host else max(device, gathered)
        if divided > 1:
            device += self.machine.overhead * len(blocks)
        started = self._made_share * sum(block.kernels for block in blocks)
        started /= plan.tensor_parallel_degree * LAUNCHES
        launches = self.machine.launch * (sum(block.streams for block in blocks) + started) / speed
        return device + launches if self.machine.on_host else max(device, launches)

    @property
    def _uneven_heads(self) -> float:
        """Return the heads of the rank that has most, as a multiple of an even share."""
        heads = self.shape.heads // self.plan.tensor_parallel_degree
        u = self.plan.ulysses_degree
        shares = self.plan.shares_of("ulysses")
        each = zip(shard_sizes(heads, count=u, shares=shares), relative_shares(u, shares))
        return max(count * u / heads / portion for count, portion in each)

    def _read(self, blocks: tuple[BlockShape, ...]) -> float:
        """Return the seconds to read the weights from device memory."""
        size = sum(block.unpacked or block.weights for block in blocks)
        return size / self.plan.tensor_parallel_degree / self.machine.bandwidth

    def _dequantize(self, blocks: tuple[BlockShape, ...]) -> float:
        """Return the seconds to make what quantized weights stand for, before it is read."""
        size = self._made_share * sum(block.dequantizing for block in blocks)
        return size / self.plan.tensor_parallel_degree / self.machine.bandwidth

    @cached_property
    def _made_share(self) -> float:
        """Return the share of a request's mean pass that is dequantized: what stays so
        (quantization/dequantize_once.py) is in the first one alone."""
        made = max(sum(block.unpacked for block in blocks) for blocks in self._stages)
        if not made or self.request.drained:
            return 1.0
        moved = sum(block.dequantizing for block in self.shape.blocks)
        cached = sum(block.unpacked for block in self.shape.blocks)
        if not self.machine.on_host and not pays(self._passes, moved=moved, cached=cached):
            return 1.0
        stay = min(1.0, self.spare * self.plan.tensor_parallel_degree / made)
        return 1 - stay + stay / self._passes

    @property
    def _passes(self) -> int:
        """Return how often each block runs in a request."""
        patches = self.plan.patches
        synchronous, stale = self._steps
        return synchronous * self._batches(1) + stale * patches * self._batches(patches)

    def _activation(self, patches: int, features: int) -> float:
        """Return the bytes of so many features of all tokens of a patch."""
        return self._at_once(patches) * self._sequence * features * self.shape.itemsize / patches

    @property
    def _on_wire(self) -> float:
        """Return the bytes of a number that Ulysses or a ring sends, as a part of those that it has."""
        full = self.shape.head_size * self.shape.itemsize
        return head_bytes(self.shape.head_size, self.shape.itemsize, self.plan.wire) / full

    def _keys(self, blocks: tuple[BlockShape, ...]) -> int:
        keys = sum(block.sent(self.shape.width)[1] for block in blocks)
        return keys * self.shape.kv_repeats(self.plan)

    def _queries(self, blocks: tuple[BlockShape, ...]) -> int:
        return sum(block.sent(self.shape.width)[0] for block in blocks)

    def _ring(self, attention: float, blocks: tuple[BlockShape, ...], patches: int) -> float:
        """Return the seconds of attention, and of keys and values that travel unhidden by it."""
        plan = self.plan
        r = plan.ring_degree
        if r == 1:
            return attention
        travelling = self._travelling(blocks, patches)
        if plan.has_stale_kv:  # gathered into the stage's buffer before attention
            return attention + travelling
        merges = (r - 1) * self._merge(blocks, patches)
        if self.machine.on_host:
            return attention + travelling + merges
        return max(attention / RING_EFFICIENCY, attention / r + travelling) + merges

    def _travelling(self, blocks: tuple[BlockShape, ...], patches: int) -> float:
        """Return the seconds in which keys and values go around a ring."""
        plan = self.plan
        r = plan.ring_degree
        width = plan.ulysses_degree * plan.tensor_parallel_degree
        sent = 2 * self._on_wire * self._activation(patches, self._keys(blocks)) * (r - 1) / (r * width)
        return sent / self.machine.neighbour(r * width) + (r - 1) * self.machine.latency * len(blocks)

    def _merge(self, blocks: tuple[BlockShape, ...], patches: int) -> float:
        """Return the seconds to merge the attention over one part of the keys into that over others."""
        plan = self.plan
        width = plan.sp_degree * plan.tensor_parallel_degree
        queries = self._activation(patches, self._queries(blocks))
        outputs = queries / self.shape.itemsize * FLOAT32 / width
        passes = MERGE_PASSES * outputs / self.machine.bandwidth
        return (passes + self.machine.launch * len(blocks) * MERGE_KERNELS / LAUNCHES) / self._speed(patches)

    def _all_to_all(self, blocks: tuple[BlockShape, ...], patches: int) -> float:
        """Return the seconds of Ulysses' all-to-all before and after attention."""
        plan = self.plan
        u = plan.ulysses_degree
        tp = plan.tensor_parallel_degree
        if u == 1:
            return 0.0
        features = 2 * (self._queries(blocks) + self._keys(blocks))  # and values; outputs
        own = self._activation(patches, features) / plan.ring_degree / tp
        sent = self._on_wire * own * (u - 1) / u**2
        # ranks of tensor parallelism lie between those of Ulysses, whose links those of as many more are
        rate = min(self.machine.all_to_all_rate(u), self.machine.all_to_all_rate(u * tp))
        return sent / rate + 2 * self.machine.latency * len(blocks)

    def _all_reduce(self, blocks: tuple[BlockShape, ...], patches: int) -> float:
        """Return the seconds of tensor parallelism's sums."""
        plan = self.plan
        tp = plan.tensor_parallel_degree
        if tp == 1:
            return 0.0
        image = self.request.image_tokens
        text = self.request.text_tokens
        numbers = sum(block.reduced_image * image + block.reduced_text * text for block in blocks)
        held = self._at_once(patches) * self.shape.itemsize / plan.sp_degree / patches
        sent = 2 * (tp - 1) / tp * numbers * held
        return sent / self.machine.neighbour(tp) + 2 * self.machine.latency * len(blocks)

    def _gather_weights(self, blocks: tuple[BlockShape, ...], patches: int) -> float:
        """Return the seconds in which sharded weights come from the others, as they are stored, while blocks
        before them compute, and tokens take the same links; with modulation where a call is a request of its
        own."""
        if not self.plan.shard_weights:
            return 0.0
        size = sum(block.weights for block in blocks)
        if self.request.drained:
            size += sum(block.modulation for block in blocks)
        gathered = self._gathered(size, len(blocks))
        if self.machine.on_host:  # where nothing is hidden, and tokens are counted already
            return gathered
        return gathered + self._travelling(blocks, patches) + self._all_to_all(blocks, patches)

    def _gathered(self, size: int, messages: int) -> float:
        """Return the seconds in which so many bytes of sharded weights come."""
        ranks = self.plan.sharding_degree
        rate = self.machine.neighbour(self.plan.world_size if self.plan.data_parallel_degree > 1 else ranks)
        return size * (ranks - 1) / ranks / rate + self.machine.latency * messages

    def _gather_ahead(self) -> float:
        """Return the seconds in which sharded modulation comes ahead, as often as rank_plan's
        gathers_ahead counts. A message counts for each block, of which some families have several layers
        that are gathered apart."""
        blocks = self.shape.blocks
        size = sum(block.modulation for block in blocks)
        if not self.plan.shard_weights or self.request.drained or not size:
            return 0.0
        embeddings = counted_embeddings(
            self._prompts,
            self._most_samples,
            shared=self.shape.shared_embeddings,
            replicas=self.plan.data_parallel_degree,
        )
        width = sum(block.modulation_width for block in blocks)
        at_once = evaluations_ahead(width, self.shape.itemsize, embeddings)
        return math.ceil(self.request.steps / at_once) * self._gathered(size, len(blocks))

    def _hop(self, patches: int) -> float:
        """Return the seconds in which a patch goes to the next stage."""
        if self.plan.pipefusion_degree == 1:
            return 0.0
        carried = max(1 + stage[-1].skips for stage in self._stages[:-1])
        sent = carried * self._activation(patches, self.shape.width) / self.plan.sp_degree
        return self.machine.latency + sent / self.machine.neighbour(self.plan.prompt_degree)

    def _combine(self) -> float:
        """Return the seconds in which CFG ranks gather their predictions."""
        if self.plan.cfg_degree == 1:
            return 0.0
        rate = self.machine.neighbour(self.plan.prompt_degree * self.plan.cfg_degree)
        # float32 of a token's latent pixels: at most about 64 numbers
        return self.machine.latency + self._most_samples * self.request.image_tokens * 64 * 4 / rate
