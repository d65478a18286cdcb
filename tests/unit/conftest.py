"""Fixtures of several files of unit tests."""

import pytest
import torch
from tiny import shallow_flux, weights_module


@pytest.fixture(scope="module")
def state():
    """Weights of the shallow Flux, by ComfyUI's keys."""
    return weights_module().state_dict(shallow_flux())


@pytest.fixture
def kitchen(monkeypatch):
    """comfy-kitchen next to a torch for CPUs: one for CUDA plans for ranks that have GPUs."""
    monkeypatch.setattr(torch.version, "cuda", None)
    return pytest.importorskip("comfy_kitchen")
