"""Writes numbers for people: bytes in decimal units, blocks and ranks. Standard library only."""

from collections.abc import Sequence


def megabytes(size: float) -> str:
    """Write bytes as "12.3 MB"."""
    return f"{size / 1e6:.1f} MB"


def fine_gigabytes(size: float) -> str:
    """Write bytes as "1.23 GB", where little memory decides."""
    return f"{size / 1e9:.2f} GB"


def coarse_gigabytes(size: float) -> str:
    """Write bytes as "1.2 GB", and less than 0.1 of them as "12 MB"."""
    return f"{size / 1e9:.1f} GB" if abs(size) >= 1e8 else f"{size / 1e6:.0f} MB"


def gigabytes_or_megabytes(size: float) -> str:
    """Write bytes as "1.2 GB", and less than one of them as "12.3 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else megabytes(size)


def progress_text(done: float, total: float) -> str:
    """Write "3.1 of 11.9 GB", or MB of what is small."""
    unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
    return f"{done / size:.1f} of {total / size:.1f} {unit}"


def blocks_text(blocks: Sequence[int]) -> str:
    """Write a stage's blocks (first, last + 1); a transformer that runs whole counts none."""
    first, end = blocks
    return f"blocks {first}-{end - 1}" if end > first else "all blocks"


def ranks_text(ranks: Sequence[int]) -> str:
    """Write "rank 3" or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
