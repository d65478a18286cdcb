"""Quantized safetensors files that cannot be read: each is refused by name when it is opened."""

import json

import pytest
import torch
from live_memory import LiveMemory
from quantized import KINDS, described, matrices
from safetensors.torch import save_file
from tiny import write_checkpoint

from backend.config import ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.files.scale_values import check_scales
from backend.loading.recognition import open_checkpoint
from backend.planner import candidates
from backend.planner.machine import RequestEstimate
from backend.rank_plan.shape_of import shape_of
from backend.runtime import torch_version
from backend.sampling import validation


def with_settings(state: dict, text: dict | bytes) -> dict:
    found, _ = described(state, "float8_e4m3fn")
    data = text if isinstance(text, bytes) else json.dumps(text).encode()
    return {
        **found,
        matrices(state)[0].replace(".weight", ".comfy_quant"): torch.tensor(list(data), dtype=torch.uint8),
    }


FIRST = "double_blocks.0.img_mod.lin"
REFUSED = {
    "unknown format": (
        lambda s: with_settings(s, {"format": "awq_w4a16"}),
        "quantized as 'awq_w4a16', which is not supported; supported are float8_e4m3fn",
    ),
    "no format": (lambda s: with_settings(s, b"nonsense"), "is no JSON"),
    "other storage": (
        lambda s: with_settings(s, {"format": "int8_tensorwise"}),
        "is said to be int8_tensorwise but is stored as F8_E4M3",
    ),
    "no scale": (
        lambda s: {k: v for k, v in described(s, "nvfp4")[0].items() if k != f"{FIRST}.weight_scale_2"},
        "lacks weight_scale_2",
    ),
    "scale of nothing": (
        lambda s: {**s, f"{FIRST}.scale_weight": torch.ones(1)},
        "the weight that they belong to is not",
    ),
    "misshapen scale": (
        lambda s: {**described(s, "mxfp8")[0], f"{FIRST}.weight_scale": torch.ones(3, 4, dtype=torch.uint8)},
        "does not fit its mxfp8 weight",
    ),
    "packed integers": (
        lambda s: {**s, "img_in.weight": s["img_in.weight"].to(torch.uint8)},
        "a quantization that is not supported",
    ),
}


def changed(kind: str, **leaves):
    """The first layer of ``kind`` with other leaves."""
    return lambda s: {**described(s, kind)[0], **{f"{FIRST}.{leaf}": value for leaf, value in leaves.items()}}


def with_format(kind: str, **settings):
    """The first layer of ``kind`` described with other settings."""
    text = json.dumps({"format": kind, **settings}).encode()
    return changed(kind, comfy_quant=torch.tensor(list(text), dtype=torch.uint8))


REFUSED |= {
    "SVDQuant": (lambda s: with_settings(s, {"format": "svdquant_w4a4"}), "which is not supported"),
    "scales of other rows": (
        changed("int8_tensorwise", weight_scale=torch.ones(5)),
        "shape .5,., which does",
    ),
    "scales of another type": (
        changed("float8_e4m3fn", weight_scale=torch.ones(1, dtype=torch.int64)),
        "is stored as I64, and float8_e4m3fn has F32",
    ),
    "block scales of another type": (
        changed("mxfp8", weight_scale=torch.ones(1536, 8)),
        "is stored as F32, and mxfp8 has F8_E8M0, U8",
    ),
    "two scales": (
        changed("float8_e4m3fn", scale_weight=torch.ones(1)),
        "both weight_scale and scale_weight",
    ),
    "smoothing of other columns": (
        changed("float8_e4m3fn", pre_quant_scale=torch.ones(3)),
        "pre_quant_scale. has shape .3,., which does not fit",
    ),
    "codebook of 8": (changed("asym_w4a8_int8", weight_codebook=torch.ones(8)), "shape .8,., which does not"),
    "group of no power": (
        with_format("convrot_w4a4", convrot_groupsize=48),
        "groups of 48 values, and a power",
    ),
    "group that does not divide": (
        with_format("convrot_w4a4", convrot_groupsize=1024),
        "rows are no whole groups of 1024 values",
    ),
    "scale group of 12": (with_format("asym_w4a8_int8", group_size=12), "groups of 12 values, and 4, 8"),
    "truncated matrix": (
        lambda s: changed("nvfp4", weight=described(s, "nvfp4")[0][f"{FIRST}.weight"][:9].clone())(s),
        "which does not fit its nvfp4 weight",
    ),
    "no matrix": (changed("nvfp4", weight=torch.ones(64, dtype=torch.uint8)), "and a matrix is needed"),
    "no dimension": (
        changed("int8_tensorwise", weight=torch.tensor(1, dtype=torch.int8)),
        "a matrix is needed",
    ),
    "a leaf of another format": (
        changed("int8_tensorwise", weight_s_rel=torch.ones(2, 2)),
        "the weight that they belong to is not",
    ),
}


def test_a_layer_that_is_described_in_two_ways(folder, state):
    found, _ = described(state, "float8_e4m3fn")
    header = json.dumps({"layers": {FIRST: {"format": "int8_tensorwise"}}})
    save_file(found, folder / "twice.safetensors", {"_quantization_metadata": header})
    says = "describes the layer .* twice, as 'int8_tensorwise' and 'float8_e4m3fn'"
    with pytest.raises(UnsupportedError, match=says):
        open_checkpoint(str(folder / "twice.safetensors"))


@pytest.mark.parametrize(
    "kind, leaf",
    [
        *[(kind, "weight_scale") for kind in KINDS if kind != "asym_w4a8_int8"],
        *[("asym_w4a8_int8", leaf) for leaf in ("weight_s_rel", "weight_s_channel")],
        *[("nvfp4", "weight_scale_2"), ("float8_e4m3fn", "input_scale")],
    ],
)
def test_scales_of_nan_are_refused_by_name(folder, state, kind, leaf):
    found, _ = described(state, kind)
    save_file(found, folder / "scales.safetensors")
    check_scales(open_checkpoint(str(folder / "scales.safetensors")))
    scale = found.setdefault(f"{FIRST}.{leaf}", torch.ones(1)).clone()
    scale.view(-1).view(torch.uint8)[-4:] = 255  # NaN in every type of scales
    found[f"{FIRST}.{leaf}"] = scale
    save_file(found, folder / "nan.safetensors")
    checkpoint = open_checkpoint(str(folder / "nan.safetensors"))
    with pytest.raises(UnsupportedError, match=f"'{FIRST}.{leaf}' holds NaN or infinity"):
        check_scales(checkpoint)


@pytest.mark.parametrize(
    "byte, is_number", [(0x7F, False), (0xFF, False), (0x7E, True), (0xFE, True)], ids=hex
)
@pytest.mark.parametrize("stored", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_block_scales_are_looked_at_as_bits(folder, state, stored, byte, is_number):
    """NaN of both signs, next to negative scales and the largest number. Nothing is made of them in float32,
    which took 10 seconds of a file of 32 billion parameters."""
    found, _ = described(state, "nvfp4")
    scale = found[f"{FIRST}.weight_scale"].view(torch.uint8).clone()
    scale[-1, -1] = byte
    found[f"{FIRST}.weight_scale"] = scale.view(stored)
    save_file(found, folder / "bits.safetensors")
    checkpoint = open_checkpoint(str(folder / "bits.safetensors"))
    with LiveMemory() as memory:
        if is_number:
            check_scales(checkpoint)
        else:
            with pytest.raises(UnsupportedError, match="weight_scale' holds NaN or infinity"):
                check_scales(checkpoint)
    assert memory.peak < 3 * scale.numel()


@pytest.mark.parametrize("change, says", REFUSED.values(), ids=REFUSED)
def test_refused_files(folder, state, change, says):
    save_file(change(state), folder / "changed.safetensors")
    with pytest.raises(UnsupportedError, match=says) as error:
        open_checkpoint(str(folder / "changed.safetensors"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("can", [False, True], ids=["integers fail", "integers are sharded"])
def test_sharding_where_torch_shards_no_integers(folder, state, monkeypatch, is_quantized, can):
    """It fails on every rank in the middle of a load; auto takes another way, a graph is told why."""
    monkeypatch.setattr(torch_version, "torch_version", lambda: "2.12.0" if can else "2.11.0")
    path = folder / "m.safetensors"
    save_file(described(state, "float8_e4m3fn")[0] if is_quantized else state, path)
    refused = "cannot shard the quantized weights .* install torch 2.12" if is_quantized and not can else ""
    check_sharding(path, refused)


@pytest.mark.parametrize("family", ["flux3", "minimax-h3", "flux-dev"])
@pytest.mark.parametrize("version", ["2.7.1", "2.8.0"])
def test_sharding_where_torch_shards_no_weights_of_several_types(folder, monkeypatch, family, version):
    """FSDP2 says so at the first forward, on every rank."""
    monkeypatch.setattr(torch_version, "torch_version", lambda: version)
    path = write_checkpoint(folder / f"{family}.safetensors", family)
    fails = family != "flux-dev" and version == "2.7.1"
    check_sharding(path, "several types .*float32.* install torch 2.8" if fails else "")


def check_sharding(path, refused: str):
    checkpoint = open_checkpoint(str(path))
    shape = shape_of(checkpoint, torch.bfloat16)
    plans = candidates.candidates(shape, RequestEstimate(), 2, ParallelConfig())
    assert any(plan.shard_weights for plan in plans) == (not refused)
    config = ParallelConfig(ulysses_degree=2, shard_weights=True)
    validation.check_degrees(checkpoint, ParallelConfig(ulysses_degree=2))
    if not refused:
        return validation.check_degrees(checkpoint, config)
    with pytest.raises(UnsupportedError, match=refused):
        validation.check_degrees(checkpoint, config)
