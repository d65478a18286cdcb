"""Fixtures of several files of unit tests."""

import pytest
from safetensors.torch import load_file
from tiny import write_checkpoint


@pytest.fixture(scope="module")
def state(folder):
    """Weights of the tiny Flux, by ComfyUI's keys."""
    return load_file(write_checkpoint(folder / "flux-tiny.safetensors"))
