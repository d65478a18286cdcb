"""What the planner knows of a machine and of a request."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Any

from ..parallel.stage_split import IMAGE_TOKENS, TEXT_TOKENS
from ..quantization.lora_bytes import LoraBytes

#: (T, H, W) of a latent or of a patch.
Sides = tuple[int, int, int]
#: Bytes that CUDA, NCCL and the allocator need on each GPU besides what is counted.
RESERVE = 1_200_000_000
#: Bytes/s between a GPU and host memory of a machine that was not measured: PCIe 3.0 of 16 lanes.
HOST_LINK = 10e9
#: GPUs whose speeds are further apart get different shares of the work.
DIFFERENT = 1.1
#: The end of what is said of a measurement that does not outlast this process.
AGAIN = "it is measured again at the next start."
#: What is said of GPUs of one name whose speeds are further apart.
DISTURBED = (
    "GPUs of one name differ so where others use one during the measurement, or one is slowed down (power "
    f"limit, heat); {AGAIN}"
)
#: A GPU with a smaller part of the memory of that which has most is the last to be used.
TAKEN = 0.25
#: Further seconds of a block whose tokens are divided on GPUs, which the probe does not time: the least by
#: which published tables are met.
OVERHEAD = 1.5e-4
#: What is not of the GPUs themselves: their free memory, and which of them plans take first.
CHANGING = ("memory", "rank_order")
#: Samples of a call go through the model together up to this many tokens: beyond it a device is busy anyway,
#: and memory would grow with the batch.
TOKENS_AT_ONCE = 16384


@dataclass(frozen=True)
class Machine:
    """Rates of one rank while all ranks work, measured by backend/probe.py. FLOP/s, bytes/s, seconds.

    gemm, attention: sustained rates. bandwidth: of device memory. p2p: bytes that a rank sends to its
    neighbour while pairs of them do. all_to_all, rings: ranks of a group -> bytes that each of them sends to
    all others, to the next one while all groups do. latency: of one small message. launch: host seconds to
    start the kernels of one stream of a block. overhead: further seconds of a block whose tokens are divided.
    half_rate: tokens at which matrix products run at half their rate. alone: how many times as fast a rank
    computes while no other does (1 on GPUs; ranks on the CPU share its cores). ranks: how many ranks were
    measured. names, speeds: of each rank's GPU, in order; times as fast as the slowest, by one timed step
    (none on the CPU, whose cores ranks share). bandwidths: of each one's memory, in order. memory: free bytes
    of each GPU in order, or of the host. host_link: bytes that each rank reads from page-locked host memory
    while all do. float32: how many times as long products take in it, of models that a GPU has no other type
    for. native_rates: format of a quantized weight -> how many times as fast as by the dequantized weight its
    native products are, on the slowest rank; natives: those of each rank, in order. on_host: ranks run on the
    CPU, share its memory, and hide neither traffic nor kernel starts. links: a sentence on how GPUs reach
    each other where NCCL's own choice fails; empty elsewhere. rank_order: of each GPU in order, its place
    among the ranks of all GPUs, where plans take those alike in another order; empty elsewhere.
    """

    name: str
    gemm: float
    attention: float
    bandwidth: float
    p2p: float
    all_to_all: dict[int, float]
    latency: float = 3e-5
    launch: float = 2.5e-4
    overhead: float = 0.0
    half_rate: float = 96.0
    alone: float = 1.0
    ranks: int = 8
    names: tuple[str, ...] = ()
    speeds: tuple[float, ...] = ()
    bandwidths: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()
    on_host: bool = False
    rings: dict[int, float] = field(default_factory=dict)
    host_link: float = HOST_LINK
    float32: float = 1.0
    native_rates: dict[str, float] = field(default_factory=dict)
    natives: tuple[dict[str, float], ...] = ()
    links: str = ""
    rank_order: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """Return whether its GPUs differ, by name or by more than DIFFERENT in speed."""
        if len(self.speeds) < 2:
            return False
        return len(set(self.names)) > 1 or max(self.speeds) > DIFFERENT * min(self.speeds)

    @property
    def is_disturbed(self) -> bool:
        """Return whether GPUs of one name differ in speed, as where others used one meanwhile."""
        gpus = list(zip(self.names, self.speeds))
        return any(one == two and a > DIFFERENT * b for (one, a), (two, b) in product(gpus, gpus))

    @property
    def lasts(self) -> bool:
        """Return whether another process would measure the same: nothing of the moment was in the way."""
        return not self.is_disturbed and not self.links_pass

    @property
    def links_pass(self) -> bool:
        """Return whether GPUs may reach each other in a better way later."""
        return self.links.endswith(AGAIN)

    @property
    def line(self) -> str:
        """Say in one line how its GPUs differ; empty where they do not."""
        if not self.differs or not self.names:
            return ""
        each = [f"{name} {speed:.2f}x" for name, speed in zip(self.names, self.speeds)]
        line = f"GPUs differ: {', '.join(each)} the speed of the slowest (one timed step)."
        return f"{line} {DISTURBED}" if self.is_disturbed else line

    def speeds_of(self, ranks: int) -> tuple[float, ...]:
        """Return how many times as fast as the slowest GPU each of the first is: 1 where all are alike."""
        return self.speeds[:ranks] if self.differs else (1.0,) * ranks

    def bandwidths_of(self, ranks: int) -> tuple[float, ...]:
        """Return how many times as fast as the slowest GPU's the memory of each of the first GPUs is: 1 where
        all GPUs are alike."""
        if not self.differs or not self.bandwidths:
            return (1.0,) * ranks
        return tuple(each / min(self.bandwidths) for each in self.bandwidths[:ranks])

    def fastest_first(self, shared: int | None = None) -> list[int]:
        """Return the indices of the GPUs, the fastest first, of those alike the ``shared`` one last, on which
        ComfyUI computes; and after all others those whose memory others have taken."""
        speeds = self.speeds_of(len(self.speeds))
        taken = [free < TAKEN * max(self.memory) for free in self.memory] or [False] * len(speeds)

        def key(gpu: int) -> tuple:
            # two measurements of one kind of GPU are never quite equal
            like = max(speed for other, speed in enumerate(speeds) if self._are_alike(gpu, other))
            return taken[gpu], -like, gpu == shared, -speeds[gpu]

        return sorted(range(len(speeds)), key=key)

    def _are_alike(self, first: int, second: int) -> bool:
        slower, faster = sorted((self.speeds[first], self.speeds[second]))
        same_name = not self.names or self.names[first] == self.names[second]
        return same_name and faster <= DIFFERENT * slower

    def roomiest_first(self, shared: int | None = None) -> list[int]:
        """Return the indices of the GPUs by free memory, most first; of two alike as by ``fastest_first``."""
        gpus = [] if self.on_host else self.fastest_first(shared)
        return sorted(gpus, key=self.memory.__getitem__, reverse=True)

    def ordered(self, order: list[int], usual: list[int] | None = None) -> "Machine":
        """Return the machine with its GPUs in another order, of which plans take the first. Those that are
        taken are ranks in the ``usual`` order, by default the same: the ranks that they are where ComfyUI
        computes elsewhere."""
        rank_order = tuple(usual.index(gpu) for gpu in order) if usual and usual != order else ()
        return self._moved(order, rank_order)

    def _moved(self, order: Sequence[int], rank_order: tuple[int, ...]) -> "Machine":
        each = ("names", "speeds", "bandwidths", "memory", "natives")
        known = {name: getattr(self, name) for name in each}
        moved = {name: tuple(each[i] for i in order) for name, each in known.items() if len(each) > 1}
        return replace(self, **moved, rank_order=rank_order)

    def gpus_of_ranks(self, ranks: int) -> list[int]:
        """Return the index of each GPU of the first ``ranks``, in the order of the ranks."""
        order = self.rank_order or range(ranks)
        return sorted(range(ranks), key=order.__getitem__)

    def with_natives(self, natives: Sequence[dict[str, float]]) -> "Machine":
        """Return the machine with each rank's native rates; all ranks multiply natively, or none."""
        kinds = [kind for kind in natives[0] if all(kind in of for of in natives)]
        slowest = {kind: min(of[kind] for of in natives) for kind in kinds}
        return replace(self, native_rates=slowest, natives=tuple(natives))

    def in_rank_order(self, ranks: int) -> "Machine":
        """Return the machine with its first ``ranks`` in their order."""
        if not self.rank_order:
            return self
        return self._moved([*self.gpus_of_ranks(ranks), *range(ranks, len(self.rank_order))], ())

    def of_first(self, ranks: int) -> "Machine":
        """Return the machine with the native rates of its first ``ranks``."""
        if not self.natives:
            return self
        return replace(self.with_natives(self.natives[:ranks]), natives=self.natives)

    def speed(self, ranks: int) -> float:
        """Return how many times the measured rates a rank has while ``ranks`` work."""
        return min(self.alone, max(1.0, self.ranks / ranks))

    def all_to_all_rate(self, ranks: int) -> float:
        """Return the bytes/s of an all-to-all among ``ranks``: of the measured group that is nearest."""
        nearest = min(self.all_to_all, key=lambda size: abs(math.log(size / ranks)), default=0)
        return self.all_to_all.get(nearest, self.p2p)

    def neighbour(self, span: int) -> float:
        """Return the bytes/s that a rank sends to another one of a group of neighbours that spans so many
        ranks: of the smallest measured ring that reaches as far, whose slowest link counts."""
        sizes = [size for size in sorted(self.rings) if size >= span] or sorted(self.rings)[-1:]
        return min(self.p2p, self.rings[sizes[0]]) if sizes and span > 2 else self.p2p

    def rooms(self, ranks: int) -> tuple[int, ...]:
        """Return the bytes that each of the first ``ranks`` may hold."""
        if self.on_host:
            return (sum(self.memory) // ranks,) * ranks
        return tuple(size - RESERVE for size in self.memory[:ranks])

    def as_dict(self) -> dict:
        """Return a dict for JSON, without what changes: the memory, and which GPUs come first."""
        return {name: value for name, value in asdict(self).items() if name not in CHANGING}

    @classmethod
    def from_dict(cls, values: dict) -> "Machine":
        """Read what ``as_dict`` made. TypeError, KeyError or ValueError for anything else."""
        read = {each.name: values[each.name] for each in fields(cls) if each.name not in CHANGING}
        for name in ("all_to_all", "rings"):
            read[name] = {int(size): float(rate) for size, rate in values[name].items()}
        for name in ("names", "speeds", "bandwidths", "natives"):
            read[name] = tuple(values[name])
        machine = cls(**read)
        natives = [rate for each in (machine.native_rates, *machine.natives) for rate in each.values()]
        groups = [*machine.all_to_all.values(), *machine.rings.values()]
        alone = [getattr(machine, each.name) for each in fields(cls) if each.type is float]
        numbers = [*alone, *machine.speeds, *machine.bandwidths, *groups, *natives]
        are_finite = all(math.isfinite(number) and number >= 0 for number in numbers)
        if not are_finite or min(machine.gemm, machine.host_link, *natives) <= 0:
            raise ValueError("rates are positive numbers")
        return machine


@dataclass(frozen=True)
class RequestEstimate:
    """What is to be sampled: tokens of one latent, text tokens of one prompt, steps, prompts (2 with a
    negative one), latents of the batch. ``drained``: each step is a call of its own, as under Parallel
    Model, so that PipeFusion's stages wait for each other. ``loras``: bytes of LoRAs next to the quantized
    weights of the whole model; ``other_loras``: of those of models that stay on its ranks. ``then``: further
    requests of a graph that is about to run; None for one that runs itself. ``reference_tokens``: those of
    ``image_tokens`` that are of reference latents."""

    image_tokens: int = IMAGE_TOKENS
    text_tokens: int = TEXT_TOKENS
    steps: int = 20
    prompts: int = 2
    batch: int = 1
    drained: bool = False
    loras: LoraBytes = LoraBytes()
    other_loras: LoraBytes = LoraBytes()
    then: "tuple[RequestEstimate, ...] | None" = None
    reference_tokens: int = 0

    @property
    def latent_tokens(self) -> int:
        """Count the tokens that patches and sequence parallelism divide: each needs one of the latent. Those
        that a prompt leaves out (models/latent_tokens.PartialGrid) count: only its tensors tell them."""
        return max(1, self.image_tokens - self.reference_tokens)

    def prompts_per_rank(self, cfg_degree: int) -> int:
        """Count the prompts that a rank computes, one after the other."""
        return math.ceil(self.prompts / cfg_degree)


def samples_at_once(tokens: int) -> int:
    """Return how many samples of so many ``tokens``, references included, a call computes together."""
    return max(1, TOKENS_AT_ONCE // tokens)


def sides_of(shape: Sequence[int]) -> Sides:
    """Return (T, H, W) of a latent's ``shape``, (C, [T,] H, W); a side that is missing is 1."""
    time, height, width = (1, 1, *shape[1:])[-3:]
    return time, height, width


def is_latent_shape(shape: Any) -> bool:
    """Return whether ``shape`` lists (C, [T,] H, W) as whole numbers above 0."""
    has_sides = isinstance(shape, (list, tuple)) and len(shape) in (3, 4)
    return has_sides and all(type(side) is int and side > 0 for side in shape)


def tokens_of(sides: Sides, patch: Sides) -> int:
    """Count the tokens of a latent (T, H, W)."""
    return math.prod(max(1, -(-side // size)) for side, size in zip(sides, patch))
