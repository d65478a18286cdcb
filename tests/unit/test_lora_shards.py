"""What a rank reads where it holds a shard of a matrix that a LoRA changes."""

from dataclasses import replace

import pytest
import torch
from fused_loras import write
from header_forms import write_sparse_gguf
from loras import lora
from tiny import write_checkpoint
from torch import nn

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.files.gguf_files import GGUFFile
from backend.loading.lora.lora_fusion import FusedWeights
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import fsdp, mesh
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


def test_what_all_rows_of_a_shard_need_is_read_once(tmp_path, monkeypatch):
    """For each parameter, of which some rows change at a time; it is held no longer."""
    flux = Engine(ParallelConfig(), mesh.single())
    flux.load("m", str(write_checkpoint(tmp_path / "flux-dev.safetensors")), "default")
    tensors = lora({ATTENTION: (768, 256)}, "comfyui")[0]
    path = write(tmp_path / "one.safetensors", tensors)
    weights = flux.models["m"].weights
    stack = lora_stack([[path, 1.0]])
    names = [f"transformer_blocks.0.attn.to_{one}.weight" for one in "qkv"]
    wanted = [weights._value(name, weights._changes(stack)[name], {}, torch.float32) for name in names]
    read, found = [], []
    monkeypatch.setattr(fsdp, "own_runs", lambda *_: [Span(lo, lo + 64) for lo in range(0, 256, 64)])
    monkeypatch.setattr(fsdp, "assign", lambda parameter, value, rows: found.append(value))
    files = weights.open(stack)[0].adapters[0][1].files
    uncounted = files.read
    files.read = lambda key, *others, **named: read.append(key) or uncounted(key, *others, **named)
    weights.fuse(stack)
    up, down = (next(key for key in tensors if role in key) for role in ("lora_up", "lora_down"))
    assert read.count(down) == len(names) and read.count(up) == 4 * len(names)
    assert torch.allclose(torch.cat(found), torch.cat(wanted), rtol=1e-6, atol=1e-6)
    assert all(adapter.shared is None for _, adapter in weights.open(stack)[0].adapters)


def test_a_shard_is_computed_on_the_rank_s_device(tmp_path):
    """Whatever it was read to; but what is dequantized is where it was, for the same bits, and so are whole
    matrices. The meta device stands for a GPU."""
    flux = Engine(ParallelConfig(), mesh.single())
    flux.load("m", str(write_checkpoint(tmp_path / "flux-dev.safetensors")), "default")
    path = write(tmp_path / "one.safetensors", lora({ATTENTION: (768, 256)}, "comfyui")[0])
    checkpoint = flux.models["m"].weights.checkpoint
    weights = FusedWeights(checkpoint, {}, torch.device("meta"), torch.device("cpu"))
    name = "transformer_blocks.0.attn.to_k.weight"
    changes = weights._changes(lora_stack([[path, 1.0]]))[name]

    def place(some, rows) -> str:
        return weights._value(name, some, {}, torch.float32, rows).device.type

    for some in ([], changes):
        assert [place(some, rows) for rows in (Span(64, 128), None)] == ["meta", "cpu"]
    source = checkpoint.sources[name]
    checkpoint.sources[name] = replace(source, shape=(256, 256))
    assert place([], Span(64, 128)) == "cpu"
    checkpoint.sources[name] = source
    checkpoint.files.is_plain = lambda key: False
    assert place([], Span(64, 128)) == "cpu"


def test_what_is_dequantized_is_not_plain(tmp_path):
    """Of GGUF also what is no matrix of whole blocks, which stays quantized on no rank."""
    pytest.importorskip("gguf")
    tensors = {
        "rows.weight": ("Q8_0", [4, 32]),
        "other.weight": ("Q8_0", [64]),
        "plain.weight": ("BF16", [4, 32]),
    }
    path = tmp_path / "odd.gguf"
    write_sparse_gguf(path, tensors)
    files = GGUFFile(path)
    assert [files.quantization(key) is None for key in tensors] == [False, True, True]
    assert [files.is_plain(key) for key in tensors] == [False, False, True]


@pytest.mark.parametrize(
    "own, wanted",
    [
        (Span(10, 35), [Span(10, 21), Span(21, 32), Span(32, 35)]),
        (Span(50, 50), []),
        (None, [None]),
    ],
)
def test_a_shard_changes_some_rows_at_a_time(monkeypatch, own, wanted):
    """Sums in float32 are several times what is stored."""
    monkeypatch.setattr(fsdp, "own_rows", lambda parameter: own)
    assert fsdp.own_runs(nn.Parameter(torch.empty(50, 9)), 100) == wanted


@pytest.mark.parametrize("rows", [Span(64, 128), None])
def test_a_shard_is_computed_on_the_host_where_its_device_is_full(tmp_path, monkeypatch, rows):
    """No plan counts the memory of a run. Any other error, and one of the host's memory, ends the change."""
    flux = Engine(ParallelConfig(), mesh.single())
    flux.load("m", str(write_checkpoint(tmp_path / "flux-dev.safetensors")), "default")
    path = write(tmp_path / "one.safetensors", lora({ATTENTION: (768, 256)}, "comfyui")[0])
    checkpoint = flux.models["m"].weights.checkpoint
    host, meta = torch.device("cpu"), torch.device("meta")
    weights = FusedWeights(checkpoint, {}, meta, host)
    name = "transformer_blocks.0.attn.to_k.weight"
    changes = weights._changes(lora_stack([[path, 1.0]]))[name]
    summed, tried, full = weights._sum, [], [meta]

    def sum_on(name, value, *others):
        tried.append(value.device.type)
        if value.device in full:
            raise error
        return summed(name, value, *others)

    monkeypatch.setattr(weights, "_sum", sum_on)
    error = torch.OutOfMemoryError("CUDA out of memory")
    found = weights._rounded(name, changes, {}, torch.bfloat16, rows)
    assert tried == (["meta", "cpu"] if rows else ["cpu"])
    assert found.equal(FusedWeights(checkpoint, {}, host)._rounded(name, changes, {}, torch.bfloat16, rows))
    tried.clear()
    weights._rounded(name, changes, {}, torch.bfloat16, rows)
    assert tried == ["cpu"]  # it is not asked again
    full.append(host)
    with pytest.raises(torch.OutOfMemoryError):
        weights._rounded(name, changes, {}, torch.bfloat16, rows)
    tried.clear()
    weights.fuse(lora_stack([[path, 0.0]]))  # which changes nothing
    error = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(RuntimeError, match="illegal"):
        weights._rounded(name, changes, {}, torch.bfloat16, rows)
    assert tried == (["meta"] if rows else ["cpu"])  # by the next fuse it may have room
