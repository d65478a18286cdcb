"""What each rank of a configuration would hold, compute and send, from a checkpoint's headers alone."""

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch

from ..config import ParallelConfig
from ..loading.checkpoint import Checkpoint
from ..quantization.kernels import MatmulChoice
from ..units import blocks_text, megabytes
from .activations import activation_bytes
from .modulation import gathers_ahead, modulation_bytes
from .request_size import RequestSize
from .traffic import sent
from .workload import MeshPlace, Workload


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and sends. Bytes are per rank.

    samples: of the batch on its replica. patches: (text tokens, tokens of the image stream) of this rank in
    each patch. weight_bytes: as the file stores them where layers keep them quantized. scratch_bytes: where
    one of those is dequantized at a time, or multiplied some tokens at a time. gathered_bytes: whole weights
    under shard_weights while a block runs. host_bytes: weights that wait in host memory (offload_modulation).
    modulation_bytes: the most modulation that is cached at once, for one prompt that all samples share.
    activation_bytes: an estimate (activations.py). bytes_per_step: in the steady state, by mechanism;
    "weights" are those that others gather in a forward of each prompt, without what is outside of blocks
    (once a request). Modulation is among them where it is not computed ahead, or for a part of the steps:
    all gathers, divided by the steps. One gather for all steps comes before the first, and is not.
    """

    rank: int
    place: dict[str, int]
    blocks: tuple[int, int]
    heads: int
    samples: int
    patches: list[tuple[int, int]]
    weight_bytes: int
    scratch_bytes: int
    gathered_bytes: int
    host_bytes: int
    kv_bytes: int
    modulation_bytes: int
    activation_bytes: int
    bytes_per_step: dict[str, int]

    def __str__(self) -> str:
        sent = ", ".join(f"{name} {megabytes(size)}" for name, size in self.bytes_per_step.items())
        host = f" (and {megabytes(self.host_bytes)} in host memory)" if self.host_bytes else ""
        rest = {
            "dequantized": self.scratch_bytes,
            "gathered": self.gathered_bytes,
            "keys and values": self.kv_bytes,
            "modulation": self.modulation_bytes,
            "activations about": self.activation_bytes,
        }
        held = ", ".join(f"{name} {megabytes(size)}" for name, size in rest.items() if size)
        return (
            f"rank {self.rank}: stage {self.place['pp']}, {blocks_text(self.blocks)}, {self.heads} heads, "
            f"{len(self.patches)} patches, {sum(map(sum, self.patches))} tokens, weights "
            f"{megabytes(self.weight_bytes)}{host}, {held}, in all about "
            f"{megabytes(self.device_bytes)}, sends per step: {sent or 'nothing'}"
        )

    @property
    def device_bytes(self) -> int:
        """All of it that is on the device at once, without what the allocator and CUDA need."""
        transient = self.scratch_bytes + self.gathered_bytes + self.activation_bytes
        return self.weight_bytes + self.kv_bytes + self.modulation_bytes + transient

    def as_dict(self) -> dict:
        """Return a dict for JSON; ``text`` is the plan as one line."""
        return {**asdict(self), "device_bytes": self.device_bytes, "text": str(self)}


def describe(
    config: ParallelConfig,
    checkpoint: Checkpoint,
    request: RequestSize,
    dtype: torch.dtype | None = None,
    choices: Mapping[str, MatmulChoice] | None = None,
    bits: int = 0,
) -> list[RankPlan]:
    """Describe every rank of ``config`` with the transformer of ``checkpoint``.

    dtype: of the weights, the file's by default. choices: quantized parameter -> how it multiplies, by
    default by the dequantized weight. bits: of a value of the linear layers in blocks, were the file
    quantized; 0 for the file as it is. Raises ConfigError and UnsupportedError as loading does.
    """
    config.validate()
    dtype = dtype or checkpoint.dtype
    replicas = [
        Workload(config, checkpoint, request, dtype, choices or {}, bits, replica)
        for replica in range(config.data_parallel_degree)
    ]
    works = {work.batch: work for work in replicas}  # one for all replicas of as many samples
    alike = ("cfg",) if config.shard_weights else ("cfg", "dp")  # where ranks hold and send the same
    plans: dict[tuple, RankPlan] = {}
    of_ranks = []
    for rank, place in enumerate(mesh_indices(config)):
        count = replicas[place["dp"]].batch
        held = {**place, "tp": replicas[0].tensor_ranks_alike[place["tp"]]}
        key = (count, *(index for axis, index in held.items() if axis not in alike))
        if key not in plans:
            plans[key] = _plan(works[count], rank, place)
        of_ranks.append(replace(plans[key], rank=rank, place=place))
    return of_ranks


def mesh_indices(config: ParallelConfig) -> list[MeshPlace]:
    """Return where each rank stands: its index on every mesh axis."""
    indices = itertools.product(*map(range, config.degrees.values()))
    return [dict(zip(config.degrees, place)) for place in indices]


def _plan(work: Workload, rank: int, place: MeshPlace) -> RankPlan:
    blocks = work.blocks(place)
    patches = work.patches(place)
    weights = work.weights(place)
    traffic = sent(work, place, patches)
    forwards = 1 if work.request.drained else work.prompts_per_rank  # a call has its prompts in one
    traffic["weights"] = weights.sent * forwards  # which torch sends: comm.SENT lacks them
    if weights.sent_ahead and (gathers := gathers_ahead(work)) > 1:
        traffic["weights"] += weights.sent_ahead * gathers // work.request.calls
    return RankPlan(
        rank=rank,
        place=place,
        blocks=(blocks.start, blocks.stop),
        heads=work.heads(place),
        samples=work.batch,
        patches=[(len(patch.local.text), patch.local.stream) for patch in patches],
        weight_bytes=weights.device,
        scratch_bytes=weights.scratch,
        gathered_bytes=weights.gathered,
        host_bytes=weights.host,
        kv_bytes=work.kv_bytes(place, blocks, patches),
        modulation_bytes=modulation_bytes(work, place),
        activation_bytes=activation_bytes(work, place),
        bytes_per_step={name: size for name, size in traffic.items() if size},
    )
