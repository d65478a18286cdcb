"""Tensor-parallel plans: what a rank keeps of every family, and what cannot be cut.
(tests/ranks/test_families_ranks.py has the results.)
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import LATENT_FORMATS
from tiny import write_checkpoint
from torch import nn

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.models.blocks import APART, Blocks
from backend.parallel import mesh, tensor_parallel
from backend.parallel.mesh import Axis


def place(ranks: int, rank: int = 0):
    return replace(mesh.single(), tp=Axis(None, rank, ranks, tuple(range(ranks))))


@pytest.mark.parametrize("family", LATENT_FORMATS)
def test_megatron_halves_attention_and_mlp_of_every_family(family, tmp_path):
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / f"{family}.safetensors", family)))
    shards = [
        tensor_parallel.shards(checkpoint.empty, checkpoint.family, "megatron", place(2, rank))
        for rank in range(2)
    ]
    layers = {
        name: layer
        for name, layer in checkpoint.empty.named_modules()
        if isinstance(layer, nn.Linear) and name.split(".")[0] in checkpoint.family.blocks.lists
    }
    modulation = {name for block in checkpoint.block_names for name in checkpoint.modulation(block)}
    for name, layer in layers.items():
        if (
            any(
                word in name
                for word in (".to_q", ".to_k", ".to_v", ".to_out", "add_", "ff", "mlp", "net", "feed_forward")
            )
            or name in modulation
        ):
            kept = [
                sum(map(len, shard[name].outputs)) * sum(map(len, shard[name].inputs)) for shard in shards
            ]
            assert kept == [layer.weight.numel() // 2] * 2, name


def test_heads_of_keys_and_values_must_divide(tmp_path):
    checkpoint = open_checkpoint(
        str(write_checkpoint(tmp_path / "krea2.safetensors", "krea2"))
    )  # 4 heads, 2 of keys and values
    with pytest.raises(UnsupportedError, match="does not divide the 2 heads of keys and values"):
        Engine(ParallelConfig(tensor_parallel_degree=4), place(4)).check_load(
            str(tmp_path / "krea2.safetensors"), "default"
        )
    rows = tensor_parallel.shards(checkpoint.empty, checkpoint.family, "row", place(4))
    assert {
        sum(map(len, rows[f"transformer_blocks.0.attn.{name}"].inputs)) for name in ("to_q", "to_k", "to_v")
    } == {128}


def test_a_class_without_plan_is_refused():
    family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}), tensor_plan=None)
    transformer = nn.Module()
    transformer.blocks, transformer._tp_plan = nn.ModuleList([nn.Linear(4, 4)]), None
    with pytest.raises(UnsupportedError, match="has no plan for split_scheme megatron"):
        tensor_parallel.shards(transformer, family, "megatron", place(2))


def test_gated_layers_keep_both_halves():
    family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}), tensor_plan={"*.0": "gated colwise"})
    transformer = nn.Module()
    transformer.blocks = nn.ModuleList([nn.Linear(4, 8)])
    spans = tensor_parallel.shards(transformer, family, "megatron", place(2, 1))["blocks.0"].outputs
    assert [(span.lo, span.hi) for span in spans] == [(2, 4), (6, 8)]


def test_norm_over_all_heads(monkeypatch):
    """Two ranks' norms, with the sum between them made here, are the whole one."""
    whole, x = nn.RMSNorm(8, eps=1e-6), torch.randn(2, 3, 8)
    whole.weight = nn.Parameter(torch.rand(8), requires_grad=False)
    squares = x.square().sum(dim=-1, keepdim=True)
    monkeypatch.setattr(tensor_parallel.comm, "all_reduce", lambda mine, axis, mechanism: squares)
    for rank in range(2):
        attention = SimpleNamespace(to_q=nn.Linear(8, 8))
        shard = tensor_parallel._norm(whole, attention, "norm_q", place(2, rank).tp)
        norm = tensor_parallel.ShardedNorm(whole, shard)
        mine = slice(4 * rank, 4 * rank + 4)
        norm.weight.data = whole.weight[mine]
        torch.testing.assert_close(norm(x[..., mine]), whole(x)[..., mine])
