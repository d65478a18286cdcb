"""Fixtures of several files of unit tests."""

import pytest
from tiny import shallow_flux, weights_module


@pytest.fixture(scope="module")
def state():
    """Weights of the shallow Flux, by ComfyUI's keys."""
    return weights_module().state_dict(shallow_flux())
