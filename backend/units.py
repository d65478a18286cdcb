"""Writes numbers of bytes for people, in the decimal units that file managers use. Standard library only."""


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
