"""A live backend whose kernels fail: native is refused and the ranks stay, auto goes on weight only."""

import os

import pytest
from quantized import write_scaled
from tiny import shallow_flux, weights_module

from backend import protocol
from backend.client import pool
from backend.config import ParallelConfig

#: A comfy-kitchen that has all that is called, and multiplies nothing.
BROKEN = """
def disable_backend(name): pass
def list_backends(): return {}
def __getattr__(name):
    if name.startswith("__"): raise AttributeError(name)
    def product(*arguments, **more): raise RuntimeError("not supported here")
    return product
"""
CONFIG = ParallelConfig(ulysses_degree=2, device="cpu")


@pytest.fixture
def backend(tmp_path, monkeypatch):
    (tmp_path / "comfy_kitchen.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # ranks import it at its first use
    pool.close_all()  # ranks of a module before, which have not that path
    yield pool.backend_for(CONFIG)
    pool.close_all()


def test_kernels_that_fail(backend, folder):
    path = folder / "int8.safetensors"
    write_scaled(path, weights_module().state_dict(shallow_flux()), "int8_tensorwise")
    says = (
        r"matmul is native, but \d+ of \d+ quantized layers of int8.safetensors cannot multiply so, first "
        r"'.*': on rank 0 \(CPU\) its product failed \(not supported here\); choose auto or weight only\."
    )
    for _ in range(2):  # all ranks agree at the first, rank 0 knows it at the second
        with pytest.raises(protocol.RefusedError, match=f"^{says}$"):
            backend.load(str(path), matmul="native")
    loaded = backend.load(str(path))
    (kind,) = loaded.info["quantized"]
    assert kind["multiplication"] == "weight only: on rank 0 (CPU) its product failed (not supported here)"
    report = backend.client.request(protocol.Status())
    assert [rank["pid"] for rank in report.ranks] == backend.welcome.pids
    assert list(report.models) == [loaded.model]
