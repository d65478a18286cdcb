"""What a rank reads where it holds a shard of a matrix that a LoRA changes."""

import torch
from fused_loras import write
from loras import lora
from tiny import write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora_keys import lora_stack
from backend.parallel import mesh
from backend.parallel.sequence import Span

ATTENTION = "double_blocks.0.img_attn.qkv"


def test_a_shard_of_fsdp_reads_its_rows_alone(tmp_path):
    flux = Engine(ParallelConfig(), mesh.single())
    flux.load("m", str(write_checkpoint(tmp_path / "flux-dev.safetensors")), "default")
    path = write(tmp_path / "one.safetensors", lora({ATTENTION: (768, 256)}, "comfyui")[0])
    weights = flux.models["m"].weights
    name = "transformer_blocks.0.attn.to_k.weight"
    changes = weights._changes(lora_stack([[path, 1.0]]))[name]
    for some in ([], changes):
        whole = weights._value(name, some, {}, torch.float32)
        before = weights.checkpoint.files.bytes_read
        rows = weights._value(name, some, {}, torch.float32, Span(64, 128))
        assert weights.checkpoint.files.bytes_read - before == 64 * 256 * 4
        assert torch.allclose(rows, whole[64:128], rtol=1e-6, atol=1e-6)
    assert weights._value(name, changes, {}, torch.float32, Span(256, 256)).shape == (0, 256)
