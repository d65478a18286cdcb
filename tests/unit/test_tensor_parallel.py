"""Tensor-parallel plans: what a rank keeps of every family, and what cannot be cut.
(tests/ranks/test_families_ranks.py has the results.)
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from families import LATENT_FORMATS
from released_forms import File, checkpoint_of
from tiny import write_checkpoint
from torch import nn

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.models.blocks import APART, Blocks
from backend.models.family import Cache
from backend.parallel import mesh, tensor_parallel
from backend.parallel.matrix_cuts import cut_plan
from backend.parallel.mesh import Axis
from backend.parallel.sequence import Span


def place(ranks: int, rank: int = 0):
    return replace(mesh.single(), tp=Axis(None, rank, ranks, tuple(range(ranks))))


#: Family -> layers of its blocks that every rank holds whole: modulation that is none of Blocks.modulation,
#: and layers between whole streams (control video, skips).
UNCUT = {
    "wan21-vace": (".control.proj_in", ".control.proj_out"),
    "z-image-turbo": (".adaLN_modulation.0",),
    "ideogram4": (".adaln_modulation",),
    "minimax-h3-curves": (".adaln_proj.linear",),
    "hunyuan-dit": (".skip_linear",),
}


@pytest.mark.parametrize("family", LATENT_FORMATS)
def test_megatron_halves_the_blocks_of_every_family(family, tmp_path):
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / f"{family}.safetensors", family)))
    plan = checkpoint.cut_plan(ParallelConfig(tensor_parallel_degree=2))
    shards = [plan.shards(place(2, rank)) for rank in range(2)]
    compared = dict.fromkeys(checkpoint.family.blocks.lists, 0)
    for name, layer in checkpoint.transformer.named_modules():
        own = [blocks for blocks in compared if name.startswith(f"{blocks}.")]
        if not own or not isinstance(layer, nn.Linear):
            continue
        if name.endswith(UNCUT.get(family, ())):
            assert not any(name in shard for shard in shards), name
            continue
        held = [sum(map(len, shard[name].outputs)) * sum(map(len, shard[name].inputs)) for shard in shards]
        assert held == [layer.weight.numel() // 2] * 2, name
        compared[own[0]] += 1
    assert all(compared.values()), compared


def test_heads_of_keys_and_values_must_divide(tmp_path):
    checkpoint = open_checkpoint(
        str(write_checkpoint(tmp_path / "krea2.safetensors", "krea2"))
    )  # 4 heads, 2 of keys and values
    with pytest.raises(UnsupportedError, match="does not divide the 2 heads \\(num_kv_heads\\)"):
        Engine(ParallelConfig(tensor_parallel_degree=4), place(4)).check_load(
            str(tmp_path / "krea2.safetensors"), "default"
        )
    rows = cut_plan(checkpoint.transformer, checkpoint.family, "row", 4).shards(place(4))
    assert {
        sum(map(len, rows[f"transformer_blocks.0.attn.{name}"].inputs)) for name in ("to_q", "to_k", "to_v")
    } == {128}


def test_a_class_without_plan_is_refused():
    family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}), tensor_plan=None)
    transformer = nn.Module()
    transformer.blocks, transformer._tp_plan = nn.ModuleList([nn.Linear(4, 4)]), None
    with pytest.raises(UnsupportedError, match="has no plan for split_scheme megatron"):
        cut_plan(transformer, family, "megatron", 2)


def test_gated_layers_keep_both_halves():
    family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}), tensor_plan={"*.0": "gated colwise"})
    transformer = nn.Module()
    transformer.blocks = nn.ModuleList([nn.Linear(4, 8)])
    spans = cut_plan(transformer, family, "megatron", 2).shards(place(2, 1))["blocks.0"].outputs
    assert [(span.lo, span.hi) for span in spans] == [(2, 4), (6, 8)]


def test_norm_over_all_heads(monkeypatch):
    """Two ranks' norms, with the sum between them made here, are the whole one."""
    whole, x = nn.RMSNorm(8, eps=1e-6), torch.randn(2, 3, 8)
    whole.weight = nn.Parameter(torch.rand(8), requires_grad=False)
    squares = x.square().sum(dim=-1, keepdim=True)
    monkeypatch.setattr(tensor_parallel.comm, "all_reduce", lambda mine, axis, mechanism: squares)
    for rank in range(2):
        transformer = nn.Module()
        transformer.blocks = nn.ModuleList([nn.Module()])
        attention = transformer.blocks[0].attn = nn.Module()
        attention.to_q, attention.norm_q = nn.Linear(8, 8), whole
        styles = {"*.norm_q": "norm", "*.to_q": "colwise"}
        family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}), tensor_plan=styles)
        shard = cut_plan(transformer, family, "megatron", 2).shards(place(2, rank))["blocks.0.attn.norm_q"]
        norm = tensor_parallel.ShardedNorm(whole, shard)
        mine = slice(4 * rank, 4 * rank + 4)
        norm.weight.data = whole.weight[mine]
        torch.testing.assert_close(norm(x[..., mine]), whole(x)[..., mine])


def mlp(gate: str, inputs: int, hidden: int) -> nn.Module:
    """A block: attention of 4 heads of 24 features, and an MLP."""
    block = nn.Module()
    block.attn, block.up, block.down = nn.Module(), nn.Linear(inputs, hidden), nn.Linear(hidden, inputs)
    block.attn.to_q, block.attn.heads = nn.Linear(inputs, 96), 4
    block.attn.to_out = nn.Linear(96, inputs)
    if gate:
        block.up = nn.Linear(inputs, 2 * hidden)
    transformer = nn.Module()
    transformer.blocks = nn.ModuleList([block])
    return transformer


@pytest.mark.parametrize("gate", ["", "gated "])
@pytest.mark.parametrize(
    "unit, ranks, widths",
    [
        (32, 2, [64, 96]),  # 5 blocks
        (32, 4, [32, 32, 32, 64]),
        (80, 2, [80, 80]),
        (80, 4, [40] * 4),  # more ranks than blocks
        (64, 2, [80, 80]),  # rows end within a block
        (1, 4, [40] * 4),
    ],
)
def test_an_mlp_is_cut_between_blocks(gate, unit, ranks, widths):
    """Its first layer as its last; attention between heads."""
    transformer = mlp(gate, 64, 160)
    styles = {"*.to_q": "colwise", "*.to_out": "rowwise", "*.up": f"{gate}colwise", "*.down": "rowwise"}
    family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}), tensor_plan=styles, cache=Cache())
    units = {f"blocks.0.{name}": unit for name in ("up", "down", "attn.to_q", "attn.to_out")}
    plan = cut_plan(transformer, family, "megatron", ranks, units)
    end = 0
    for rank in range(ranks):
        found = plan.shards(place(ranks, rank))
        columns = found["blocks.0.down"].inputs
        assert [(span.lo, span.hi) for span in columns] == [(end, end + widths[rank])]
        halves = [Span(span.lo + shift, span.hi + shift) for shift in (0, 160) for span in columns]
        assert found["blocks.0.up"].outputs == (tuple(halves) if gate else columns)
        assert found["blocks.0.up"].heights == tuple(k * (2 if gate else 1) for k in widths)
        assert [len(span) for span in found["blocks.0.attn.to_out"].inputs] == [96 // ranks]
        end += widths[rank]


def test_columns_taken_of_whole_activations_are_cut_between_blocks():
    transformer = mlp("", 64, 160)
    family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}))
    plan = cut_plan(transformer, family, "row", 2, {"blocks.0.down": 32, "blocks.0.attn.to_out": 32})
    found = plan.shards(place(2, 1))
    assert found["blocks.0.down"].inputs == (Span(64, 160),)
    assert found["blocks.0.attn.to_out"].inputs == (Span(32, 96),)  # in the midst of a head: it is no matter
    assert found["blocks.0.up"].inputs == (Span(32, 64),)


def test_released_files_are_cut_between_blocks():
    """Wan's 13824 hidden features are 54 groups of ConvRot, of which an eighth is no whole number."""
    checkpoint = checkpoint_of(File("Wan", "int8 ConvRot", "wan2.2-i2v-A14B"))
    plan = checkpoint.cut_plan(ParallelConfig(tensor_parallel_degree=8))
    shards = [plan.shards(place(8, rank)) for rank in range(8)]
    widths = [sum(map(len, shard["blocks.3.ffn.net.2"].inputs)) for shard in shards]
    assert sorted(widths) == [6 * 256] * 2 + [7 * 256] * 6
    assert widths == [sum(map(len, shard["blocks.3.ffn.net.0.proj"].outputs)) for shard in shards]
    assert {len(shard["blocks.3.attn1.to_out.0"].inputs[0]) for shard in shards} == {5120 // 8}  # 5 heads
