"""What a load cost a rank."""

import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from ..units import blocks_text, megabytes, ranks_text


@dataclass(frozen=True)
class LoadReport:
    """One rank's part of a load. blocks: first and last + 1 of its stage; file_bytes: size of the whole
    checkpoint; weight_bytes: on its device; peak_bytes: most device memory meanwhile (on the CPU, of the
    process in all; 0 where unknown); quantized: its quantized layers (quantization/matmul.summary)."""

    rank: int
    stage: int
    blocks: tuple[int, int]
    bytes_read: int
    file_bytes: int
    weight_bytes: int
    peak_bytes: int
    seconds: float
    quantized: list[dict] = field(default_factory=list)

    def as_dict(self) -> dict:
        """Return a dict for JSON; ``text`` is the report as one line."""
        return {**asdict(self), "text": str(self)}

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: stage {self.stage}, {blocks_text(self.blocks)}, read "
            f"{self.bytes_read / 1e6:.1f} of {megabytes(self.file_bytes)} in {self.seconds:.1f} s, "
            f"weights {megabytes(self.weight_bytes)}, peak memory {self.peak_bytes / 1e6:.0f} MB"
            + "".join(map(_layers_text, self.quantized))
        )


def _layers_text(kind: dict) -> str:
    layers = f"{kind['layers']} {kind['format']} layers of {megabytes(kind['bytes'])}"
    return f"; {layers}, {kind['multiplication']}"


def forget_peak(device: torch.device):
    """Begin to measure ``peak_bytes``."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return LoadReport.peak_bytes as it is now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform != "linux":
        return 0
    # not getrusage, whose maximum a process inherits from the one that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    highest = next(line for line in lines if line.startswith("VmHWM"))
    return 1024 * int(highest.split()[1])


def by_rank(reasons: list[str]) -> list[str]:
    """Return each reason with the ranks that give it; an empty one is none."""
    ranks: dict[str, list[int]] = {}
    for rank, reason in enumerate(reasons):
        if reason:
            ranks.setdefault(reason, []).append(rank)
    return [f"{ranks_text(which)}: {reason}" for reason, which in ranks.items()]
