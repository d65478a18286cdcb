"""What the planner knows of a machine and of a request."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

#: Bytes that CUDA, NCCL and the allocator need on each GPU beside what is counted.
RESERVE = 1_200_000_000


@dataclass(frozen=True)
class Machine:
    """Rates of one rank while all ranks work, measured by backend/probe.py. FLOP/s, bytes/s, seconds.

    gemm, attention: sustained rates. bandwidth: of device memory. p2p: bytes that a rank sends to its
    neighbour while all do. all_to_all: ranks of a group -> bytes that each of them sends. latency: of one
    small message. launch: host seconds to start the kernels of one stream of a block. overhead: further
    seconds of a block whose tokens are divided. half_rate: tokens at which matrix products run at half their
    rate. alone: how many times as fast a rank computes while no other does (1 on GPUs; ranks on the CPU
    share its cores). ranks: how many ranks were measured. memory: free bytes of each GPU in order, or of the
    host. on_host: ranks run on the CPU, share its memory, and hide neither traffic nor kernel starts.
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
    memory: tuple[int, ...] = field(default=())
    on_host: bool = False

    def speed(self, ranks: int) -> float:
        """Return how many times the measured rates a rank has while ``ranks`` work."""
        return min(self.alone, max(1.0, self.ranks / ranks))

    def exchange(self, ranks: int) -> float:
        """Return the bytes/s of an all-to-all among ``ranks``: of the measured group that is nearest."""
        nearest = min(self.all_to_all, key=lambda size: abs(math.log(size / ranks)), default=0)
        return self.all_to_all.get(nearest, self.p2p)

    def room(self, ranks: int) -> int:
        """Return the bytes that each of ``ranks`` may hold: of the smallest of their GPUs."""
        if self.on_host:
            return sum(self.memory) // ranks
        return min(self.memory[:ranks]) - RESERVE

    def as_dict(self) -> dict:
        """For JSON, without the memory, which changes."""
        return {name: value for name, value in asdict(self).items() if name != "memory"}

    @classmethod
    def from_dict(cls, values: dict) -> "Machine":
        """Read what ``as_dict`` made. TypeError, KeyError or ValueError for anything else."""
        known: dict[str, Any] = {
            each.name: values[each.name] for each in fields(cls) if each.name != "memory"
        }
        rates = {int(size): float(rate) for size, rate in values["all_to_all"].items()}
        found = cls(**{**known, "all_to_all": rates})
        numbers = [getattr(found, each.name) for each in fields(cls) if each.type is float]
        if not all(math.isfinite(number) and number >= 0 for number in numbers) or found.gemm <= 0:
            raise ValueError("rates are positive numbers")
        return found


@dataclass(frozen=True)
class Request:
    """What is to be sampled: tokens of one latent, text tokens of one prompt, steps, prompts (2 with a
    negative one), latents of the batch. ``drained``: each step is a call of its own, as under Parallel
    Model, so that PipeFusion's stages wait for each other."""

    image_tokens: int = 4096
    text_tokens: int = 512
    steps: int = 20
    prompts: int = 2
    batch: int = 1
    drained: bool = False
