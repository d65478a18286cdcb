"""Seconds in which weights leave the GPUs and come back: of models that take turns, and for ComfyUI's own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import ParallelConfig
from .machine import RequestEstimate
from .memory import held, held_by_rank
from .model_shape import ModelShape

#: Bytes/s from a file for all ranks together where no load of it was measured: of a slow NVMe.
FILE_RATE = 1.5e9


def read_bytes(shape: ModelShape, plan: ParallelConfig, request: RequestEstimate) -> int:
    """Return the bytes that all ranks together read of a model's file, as their rate counts them. Each reads
    all of what is sharded, and drops what is of others."""
    if plan.shard_weights:
        return shape.weights * plan.world_size
    return sum(rank.weights for rank in held_by_rank(shape, plan, request))


@dataclass(frozen=True)
class WeightSwaps:
    """Where the weights of models wait while they are not on the GPUs.

    host: bytes of host memory for them; 0 for enough. file: bytes/s of all ranks together in the model's last
    load; 0: unknown. left_by_comfyui: (index, bytes) of each of the machine's GPUs, or of each
    rank of a plan, where ComfyUI took room between requests: the fewest bytes of weights that it left there
    after requests no larger than this. unified: the machine's GPUs, or the ranks of a plan, whose memory is
    the host's.
    """

    host: int = 0
    file: float = 0.0
    left_by_comfyui: tuple[tuple[int, int], ...] = ()
    unified: tuple[int, ...] = ()

    def ordered(self, gpus: Sequence[int]) -> "WeightSwaps":
        """Return the same where the ranks are those of ``gpus``: of each rank, which one it is here."""
        sizes = dict(self.left_by_comfyui)
        left = tuple((rank, sizes[gpu]) for rank, gpu in enumerate(gpus) if gpu in sizes)
        unified = tuple(rank for rank, gpu in enumerate(gpus) if gpu in self.unified)
        return replace(self, left_by_comfyui=left, unified=unified)

    def parks(self, plan: ParallelConfig) -> bool:
        """Return whether weights may wait in host memory: on no rank where that is the GPU's own on one."""
        return all(rank >= plan.world_size for rank in self.unified)

    def must_reread(self, plan: ParallelConfig, leaving: int) -> bool:
        """Return whether ``leaving`` bytes of weights, on all ranks, have to be read from their file again.
        Weights that are not sharded are parked instead where host memory has room (rank/worker.py)."""
        return plan.shard_weights or not self.parks(plan) or 0 < self.host < leaving

    @property
    def source(self) -> str:
        """Say where weights come from that are read again, and how fast."""
        if self.file:
            return f"from its file, at the {self.file / 1e9:.1f} GB/s of its last load"
        return f"from its file, at {FILE_RATE / 1e9:.1f} GB/s, which is assumed"

    def swap(
        self, shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, others: tuple, link: float
    ) -> tuple[float, bool]:
        """Return the seconds in which the ranks swap the weights of one of ``others`` for those of ``shape``,
        and whether these are read from their file. ``link``: bytes/s between a GPU and host memory."""
        own = held(shape, plan, request).weights
        theirs = replace(request, loras=request.other_loras)
        sizes = [(held(other, plan, theirs).weights, other.is_quantized) for other in others]
        waiting = max(size for size, _ in sizes)
        # what a file stores is copied to the host the first time alone (loading/parking.py)
        copied = max(0 if is_quantized else size for size, is_quantized in sizes)
        # they are parked while those of ``shape`` still are, and half of what memory these leave counts
        if self.must_reread(plan, (waiting + own // 2) * plan.world_size):
            return read_bytes(shape, plan, request) / self._file_rate, True
        return (own + copied) / link, False

    def yield_time(
        self, shape: ModelShape, plan: ParallelConfig, request: RequestEstimate, others: tuple, link: float
    ) -> tuple[float, bool]:
        """Return the seconds of each request in which weights of ``shape`` make room for ComfyUI's own models
        and come back, and whether they are read from their file. Arguments as in ``swap``; ``others`` are on
        the ranks, too, and smaller models leave first."""
        if not self.left_by_comfyui:
            return 0.0, False
        theirs = replace(request, loras=request.other_loras)
        models = [held_by_rank(shape, plan, request), *(held_by_rank(each, plan, theirs) for each in others)]
        # a request pays for its own model, which leaves without a copy where it is quantized
        ways = 1 if shape.is_quantized else 2
        seconds = 0.0
        for rank, left in self.left_by_comfyui:
            if rank >= plan.world_size:
                continue
            sizes = [ranks[rank].weights for ranks in models]
            gone = _gone(sizes, left)
            if gone and self.must_reread(plan, gone):  # they are freed on every rank
                return read_bytes(shape, plan, request) / self._file_rate, True
            seconds += ways * gone * sizes[0] / max(1, sum(sizes)) / link
        return seconds, False

    @property
    def _file_rate(self) -> float:
        return self.file or FILE_RATE


def _gone(sizes: list[int], left: int) -> int:
    """Return the bytes of the models that leave, the smallest first, until at most ``left`` stay."""
    stay = sum(sizes)
    for size in sorted(sizes):
        stay -= size if stay > left else 0
    return sum(sizes) - stay
