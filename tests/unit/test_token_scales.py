"""Which layers compare the largest values of their inputs over the ranks that divide their tokens."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from backend.models import FAMILIES
from backend.parallel import comm, mesh
from backend.parallel.block_cost import layer_tokens
from backend.parallel.modulation import token_scales
from backend.quantization import kernels
from backend.quantization.formats import FORMATS
from backend.quantization.kernels import MatmulChoice
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight
from backend.runtime.opaque_ops import RUNNING, text_count_tensor

ALONE = mesh.single().sp
PAIR = replace(ALONE, size=2, ranks=(0, 1))
NVFP4 = MatmulChoice(kernels.nvfp4, "")
COLUMNS = 64


def weight(choice: MatmulChoice = NVFP4, divided: str = "image", **more: torch.Tensor) -> PackedWeight:
    """A matrix of 32 x 64 ones."""
    tensors = {
        "values": torch.full((32, COLUMNS // 2), 0x22, dtype=torch.uint8),
        "block_scales": torch.ones(32, COLUMNS // 16).to(torch.float8_e4m3fn),
        "tensor_scale": torch.ones(1),
        **more,
    }
    packed = Packed(FORMATS["nvfp4"], {"format": "nvfp4"}, tensors, COLUMNS, (range(COLUMNS),))
    return PackedWeight(packed, torch.float32, choice, divided)


@pytest.fixture
def compared(monkeypatch):
    """What this rank gives to the others, whose largest value is 100."""
    found = []

    def all_reduce_max(x, axis, mechanism):
        found.append(x.item())
        return torch.clamp(x, min=100.0)

    monkeypatch.setattr(comm, "all_reduce_max", all_reduce_max)
    return found


@pytest.mark.parametrize(
    "family, blocks, layer, divided",
    [
        ("flux", "transformer_blocks", "attn.to_q", "image"),
        ("flux", "transformer_blocks", "attn.add_q_proj", "text"),
        ("flux", "transformer_blocks", "norm1.linear", ""),
        ("flux", "single_transformer_blocks", "proj_mlp", "image"),
        ("wan", "blocks", "attn2.to_q", "image"),
        ("wan", "blocks", "attn2.to_k", ""),
        ("kandinsky5", "visual_transformer_blocks", "cross_attention.to_key", ""),
        ("hidream", "double_stream_blocks", "block.ff_i.shared_experts.w1", "image"),
        ("hidream", "double_stream_blocks", "block.ff_i.experts.0.w1", ""),
        ("hidream", "double_stream_blocks", "block.ff_t.w1", "text"),
    ],
)
def test_layers_that_all_ranks_call_with_tokens_of_their_own(family, blocks, layer, divided):
    """Not the modulation, nor the prompt's keys and values, which are the same on each, nor experts, to which
    a rank may have no token to give."""
    block = nn.Module()
    at = block
    for name in layer.split("."):
        at.add_module(name, nn.Module())
        at = at.get_submodule(name)
    assert layer_tokens(block, blocks, FAMILIES[family])[layer].divided == divided


def test_only_what_needs_it_compares_and_only_over_several_ranks(compared):
    needs = weight()
    others = [
        weight(divided=""),
        weight(input_scale=torch.ones(1)),
        weight(MatmulChoice(None, "as chosen")),
        weight(MatmulChoice(kernels.int8, "")),
    ]
    for sp in (PAIR, ALONE, PAIR):
        token_scales.regroup([nn.ModuleList([needs]), nn.ModuleList(others)], sp)
        assert [each.max_over_token_ranks is not None for each in (needs, *others)] == [
            sp is PAIR,
            *[False] * 4,
        ]


@torch.inference_mode()
def test_over_columns_first_then_over_tokens(compared):
    pytest.importorskip("comfy_kitchen")
    one = weight()
    token_scales.regroup([one], PAIR)
    x = torch.ones(3, COLUMNS)
    found = one.linear(x, None, lambda most: most + 6)
    assert compared == [7.0]
    given = weight(input_scale=torch.full((1,), 100 / (448 * 6)))  # as of the others' 100
    assert found.equal(given.linear(x, None)) and not found.equal(weight().linear(x, None))


@torch.inference_mode()
def test_a_rank_that_has_nothing_to_multiply_takes_part(compared):
    """It has no tokens, or its product has failed before its degrees changed: the others wait for it."""
    one = weight()
    token_scales.regroup([one], PAIR)
    assert one.linear(torch.ones(2, 0, COLUMNS), None).shape == (2, 0, 32)
    one.choice = MatmulChoice(None, "its product failed")
    token_scales.regroup([one], PAIR)
    assert one.linear(torch.ones(1, COLUMNS), None).equal(torch.full((1, 32), float(COLUMNS)))
    assert compared == [0.0, 0.0]


@pytest.mark.parametrize("divided, text, given", [("text", 0, 0.0), ("text", 1, 5.0), ("image", 0, 5.0)])
def test_a_dummy_token_counts_for_nothing(compared, monkeypatch, divided, text, given):
    monkeypatch.setattr(RUNNING, "text", text_count_tensor(text))
    one = weight(divided=divided)
    token_scales.regroup([one], PAIR)
    assert (
        one.max_over_token_ranks is not None and one.max_over_token_ranks(torch.tensor(5.0)).item() == 100.0
    )
    assert compared == [given]


@torch.inference_mode()
def test_a_product_that_fails_while_others_wait_is_no_weight_only_product(compared, monkeypatch):
    kitchen = pytest.importorskip("comfy_kitchen")

    def fails(*args, **options):
        raise RuntimeError("not supported")

    monkeypatch.setattr(kitchen, "quantize_nvfp4", fails)
    one = weight()
    token_scales.regroup([one], PAIR)
    with pytest.raises(RuntimeError, match="not supported"):
        one.linear(torch.ones(1, COLUMNS), None)
