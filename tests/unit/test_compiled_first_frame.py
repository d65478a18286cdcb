"""HunyuanVideo's compiled blocks where the tokens of a given first frame have a timestep of their own."""

from dataclasses import replace

import torch
from ranks.flux_requests import shortened
from tiny import relative
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import compiled_blocks, mesh
from backend.sampling.step_loop import Callbacks


def test_blocks_of_a_given_first_frame_are_compiled(tmp_path, monkeypatch):
    """The latent of uncompiled blocks, and no block that a compiler could not trace."""
    torch._dynamo.reset()
    compiler = compiled_blocks.Compiler()
    monkeypatch.setattr(compiled_blocks, "COMPILER", compiler)
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / "m.safetensors", "hunyuan-video-i2v-v2")), "default")
    sample = shortened(request("hunyuan-video-i2v-v2"), 2)
    plain, _ = engine.sample(sample, Callbacks())
    compiled, stats = engine.sample(replace(sample, compile="blocks"), Callbacks())
    assert relative(compiled, plain) <= 1e-5
    assert compiler.graphs > 0 and not compiler.failed
    assert not [note for note in stats["notes"] if "uncompiled" in note]
