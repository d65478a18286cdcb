"""What Inductor generates against torch's own kernels: the latents of families, in one process."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import LATENT_FORMATS, golden
from launch import EVERY_COMPILED
from tiny import relative, write_checkpoint, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import compiled_blocks, mesh
from backend.sampling.step_loop import Callbacks

#: Families of unlike blocks, which --all compiles; with the environment variable it compiles every one.
CHOSEN = ("qwen-image", "sana")
STEPS = 2


def difference(family: str, folder: Path) -> tuple[float, list[str]]:
    """Return how far the compiled latent is from the uncompiled one, and the notes of the run. Only graphs of
    this call are left to the compiler."""
    torch._dynamo.reset()
    path = folder / f"{family}.safetensors"
    engine = Engine(ParallelConfig(), mesh.single())
    whole = write_shallow_flux(path) if family == "flux-dev" else write_checkpoint(path, family)
    engine.load("tiny", str(whole), "default")
    sample, _ = golden(f"{family}__euler_simple", "tiny")
    sigmas = sample.tensors["sigmas"][: STEPS + 1]
    sample = replace(sample, tensors={**sample.tensors, "sigmas": sigmas})
    plain, _ = engine.sample(sample, Callbacks())
    compiled, stats = engine.sample(replace(sample, compile="blocks"), Callbacks())
    return relative(compiled, plain), stats["notes"]


@pytest.mark.parametrize("family", LATENT_FORMATS if EVERY_COMPILED in os.environ else CHOSEN)
def test_inductor_keeps_the_latent(family, tmp_path, monkeypatch):
    """Generated C++ against torch's own kernels, 1e-5 relative in float32."""
    compiler = compiled_blocks.Compiler()
    monkeypatch.setattr(compiled_blocks, "COMPILER", compiler)
    found, notes = difference(family, tmp_path)
    assert found <= 1e-5
    assert compiler.graphs > 0 and not compiler.failed
    assert [note for note in notes if note.startswith(f"compiled {compiler.graphs} graph")]
