"""A real ComfyUI over a folder of tiny models, for as long as tests need it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from comfy_server import PACK, CannotStart, ComfyServer


@contextmanager
def comfy_over(folder: Path) -> Iterator[ComfyServer]:
    """A ComfyServer with the pack as ``parallel-dit`` and the tests' own nodes; tests are skipped where there
    is none to start."""
    try:
        server = ComfyServer(
            folder, {"parallel-dit": PACK, "golden_pack": Path(__file__).parent / "golden_pack"}
        )
    except CannotStart as reason:
        pytest.skip(str(reason))
    try:
        yield server
    finally:
        server.stop()
