"""float8 on the wire of Ulysses and rings: what arrives, and who may ask for it."""

from dataclasses import replace

import pytest
import torch
from live_memory import LiveMemory

from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.models import FAMILIES
from backend.parallel.wire import pack, unpack
from backend.parallel.wire_bytes import FP8, FULL, SCALE_BYTES, head_bytes
from backend.planner.auto_config import AutoConfig, config_of
from backend.sampling.validation import check_wire

#: Half a step of three bits of mantissa, relative to the value: the most that rounding takes or adds.
HALF_A_STEP = 2**-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [7, 64, 128])
def test_each_number_keeps_its_first_digits(dtype, size):
    """To half a step of float8, and of what is smallest in its row to half of the least float8."""
    x = torch.randn(2, 5, 3, size, dtype=dtype).transpose(1, 2) * 30
    sent = pack(x, FP8)
    assert sent.dtype == torch.uint8 and sent.shape == (2, 3, 5, head_bytes(size, x.element_size(), FP8))
    found = unpack(sent, dtype)
    assert found.dtype == dtype and found.shape == x.shape
    least = x.double().abs().amax(-1, keepdim=True) / 448 * 2**-10
    allowed = torch.maximum(x.double().abs() * (HALF_A_STEP + 2**-8), 1.01 * least)
    assert ((found.double() - x.double()).abs() <= allowed).all()
    assert not found.equal(x)


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_the_bytes_are_those_of_all_tokens_at_once(tokens):
    """However few of them are divided at a time; and in memory tokens stay before heads."""
    x = torch.randn(2, tokens, 3, 16, dtype=torch.bfloat16).transpose(1, 2) * 30
    scale = (x.abs().amax(-1, keepdim=True).float() / 448).clamp_min(1e-30)
    packed = pack(x, FP8)
    assert packed[..., :16].equal((x / scale).to(torch.float8_e4m3fn).view(torch.uint8))
    assert packed[..., 16:].equal(scale.view(torch.uint8))
    assert packed.transpose(1, 2).is_contiguous()


def test_half_of_a_tensor_is_in_float32_at_once():
    x = torch.randn(2, 3, 64, 128, dtype=torch.bfloat16)
    with torch.inference_mode(), LiveMemory() as memory:
        pack(x, FP8)
    # of the numbers in bytes: what travels, and half of them in float32
    assert memory.peak < 3.2 * x.numel()


def test_an_outlier_costs_its_own_token_and_head_alone():
    x = torch.randn(1, 2, 2, 64)
    spiked = x.clone()
    spiked[0, 0, 0, 0] = 1e4
    plain, found = (unpack(pack(each, FP8), x.dtype) for each in (x, spiked))
    others = [found[0, 1], found[0, 0, 1]]
    assert all(a.equal(b) for a, b in zip(others, [plain[0, 1], plain[0, 0, 1]]))
    assert not found[0, 0, 0, 1:].equal(plain[0, 0, 0, 1:])


@pytest.mark.parametrize("value", [0.0, 1e-35, 3e38])
def test_rows_of_any_size_come_back(value):
    found = unpack(pack(torch.full((2, 8), value), FP8), torch.float32)
    assert torch.allclose(found, torch.full((2, 8), value), rtol=HALF_A_STEP, atol=1e-32)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_no_number_is_not_hidden(value):
    x = torch.ones(2, 8)
    x[0, 3] = value
    found = unpack(pack(x, FP8), x.dtype)
    assert found[0].isnan().all() and found[1].equal(x[1])


def test_full_is_the_tensor_itself():
    x = torch.randn(1, 2, 3, 8, dtype=torch.bfloat16)
    assert unpack(pack(x, FULL), x.dtype) is x
    assert head_bytes(128, 2, FULL) == 256 and head_bytes(128, 2, FP8) == 128 + SCALE_BYTES


@pytest.mark.parametrize("tokens, heads", [(0, 3), (3, 0), (0, 0)])
def test_ranks_without_tokens_or_heads_send_nothing(tokens, heads):
    x = torch.zeros(1, heads, tokens, 16)
    assert unpack(pack(x, FP8), x.dtype).shape == x.shape


def test_wire_fp8_is_refused_where_nothing_would_travel():
    with pytest.raises(ConfigError, match="wire is fp8 but ulysses_degree and ring_degree are 1"):
        ParallelConfig(cfg_degree=2, wire="fp8").validate()
    for name in ("ulysses_degree", "ring_degree"):
        assert ParallelConfig(**{name: 2}, wire="fp8").validate()


def test_linear_attention_is_refused():
    config = ParallelConfig(ulysses_degree=2, wire="fp8")
    with pytest.raises(UnsupportedError, match="sana mixes tokens by linear attention.*set wire to full"):
        check_wire(config, FAMILIES["sana"])
    check_wire(replace(config, wire="full"), FAMILIES["sana"])
    check_wire(config, FAMILIES["flux"])


def test_auto_never_takes_wire_fp8():
    """A graph that asks for it has chosen by hand; what auto plans with is in full."""
    found = config_of(2, ulysses_degree=2, wire="fp8", device="cpu")
    assert isinstance(found, ParallelConfig) and found.wire == "fp8"
    with pytest.raises(ConfigError, match="wire is fp8"):
        config_of(2, wire="fp8", device="cpu")
    auto = config_of(2, device="cpu")
    assert isinstance(auto, AutoConfig) and auto.base.wire == "full"
