"""Configurations of a folder's text encoder and VAE: their libraries build what these say without a limit, in
ComfyUI's own process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...backend.errors import UnsupportedError, quoted
from ...backend.loading.regular_files import read_json

#: The largest text encoders have about a hundred layers.
MAX_LAYERS = 1_024
#: Entries whose names end so count modules of Python, each of which takes time and memory.
COUNTS = ("layers", "_depth", "depths", "num_experts", "layers_per_block")
#: Entries that name the code of attention or experts; a name with a slash is that of a repository, from which
#: transformers would load it.
IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def check_config(part: Path):
    """Refuse a part with more layers than any published one, or code to load. Raises UnsupportedError."""
    config = part / "config.json"
    for name, value in _entries(read_json(config) if config.is_file() else {}):
        counted = value if isinstance(value, list) else [value]
        if name.endswith(COUNTS) and any(isinstance(each, int) and each > MAX_LAYERS for each in counted):
            raise UnsupportedError(f"{part.name} has {quoted(value)} as {name}, {MAX_LAYERS:,} at most")
        if name.endswith(IMPLEMENTATIONS) and "/" in str(value):
            raise UnsupportedError(
                f"{part.name} names code to load, {quoted(value)} as {name}: take that out"
            )


def _entries(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a configuration and of those within it."""
    for name, value in config.items() if isinstance(config, dict) else ():
        yield str(name), value
        yield from _entries(value)
