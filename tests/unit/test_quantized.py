"""Quantized files: scales and blocks give the right weights, whole, by rows and by columns."""

import json
from dataclasses import replace

import pytest
import torch
from quantized import FLOAT8, KINDS, described, legacy_fp8, matrices, weights_of, write_gguf, write_scaled
from safetensors.torch import load_file, save_file
from tolerance import assert_same_bits, assert_ulps

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh

FOUR_BITS = ("convrot_w4a4", "asym_w4a8_int8")


def expected(tensors: dict, name: str, kind: str) -> torch.Tensor:
    """A layer's weight by its format's definition, value by value."""
    if kind in FOUR_BITS:
        return expected_of_four_bits(tensors, name, kind)
    values, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    if kind in FLOAT8 or kind == "int8_tensorwise":
        weight = values.double() * scale.double()
        if kind == "int8_tensorwise" and "convrot_groupsize" in json.loads(
            bytes(tensors[f"{name}.comfy_quant"].tolist())
        ):
            return torch.cat([group @ rotation(64) for group in weight.split(64, dim=1)], dim=1)
        return weight
    block = 32 if kind == "mxfp8" else 16
    if kind == "nvfp4":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        table = torch.cat([table, -table])
        values = torch.stack([table[(values >> 4).long()], table[(values & 15).long()]], dim=-1).flatten(1)
    row, column = torch.meshgrid(
        torch.arange(values.shape[0]), torch.arange(values.shape[1] // block), indexing="ij"
    )
    # cuBLAS: tiles of 128 x 4 scales, one after the other; in a tile, rows 32 apart are neighbours
    tile = row // 128 * (scale.shape[1] // 4) + column // 4
    scales = scale.flatten()[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4].double()
    return (
        values.double()
        * scales.repeat_interleave(block, dim=1)
        * tensors.get(f"{name}.weight_scale_2", torch.ones(())).double()
    )


def expected_of_four_bits(tensors: dict, name: str, kind: str) -> torch.Tensor:
    """A rotated layer's weight by its format's definition."""
    settings = json.loads(bytes(tensors[f"{name}.comfy_quant"].tolist()))
    pairs = tensors[f"{name}.weight"].int() & 255
    codes = torch.stack([pairs % 16, pairs // 16], dim=-1).flatten(1)
    if kind == "convrot_w4a4":
        weight = torch.where(codes < 8, codes, codes - 16) * tensors[f"{name}.weight_scale"][:, None].double()
    else:
        book = tensors.get(f"{name}.weight_codebook", torch.arange(-8.0, 8.0))
        scales = tensors[f"{name}.weight_s_rel"].view(torch.float8_e4m3fn).float()
        grid = book[codes] * scales.repeat_interleave(settings["group_size"], dim=1)
        weight = (
            grid.round().clamp(-127, 127).double() * tensors[f"{name}.weight_s_channel"][:, None].double()
        )
    size = settings["convrot_groupsize"]
    return torch.cat([group @ rotation(size) for group in weight.split(size, dim=1)], dim=1)


def rotation(size: int) -> torch.Tensor:
    """The orthogonal matrix with which weights of 8 bits are rotated: the Kronecker power of
    [[1,1,1,-1],[1,1,-1,1],[1,-1,1,1],[-1,1,1,1]] / 2.
    """
    index = torch.arange(size)
    same = sum((index[:, None] >> 2 * digit & 3) + (index[None] >> 2 * digit & 3) == 3 for digit in range(3))
    return (-1.0) ** same.double() / size**0.5


def assert_same_part(found: torch.Tensor, wanted: torch.Tensor, kind: str):
    """Weights of 8 bits may be rotated, which is a product of as many rows as are read; the other formats
    multiply number by number."""
    if kind in ("int8_tensorwise", *FOUR_BITS):
        assert_ulps(found, wanted, 1)
    else:
        assert_same_bits(found, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_values_times_scales(folder, state, kind):
    tensors = load_file(write_scaled(folder / f"{kind}.safetensors", state, kind))
    files = open_checkpoint(str(folder / f"{kind}.safetensors")).files
    assert files.shapes == {key: tuple(value.shape) for key, value in state.items()}
    for key in matrices(state):
        want, found = (
            expected(tensors, key.removesuffix(".weight"), kind),
            files.read(key, dtype=torch.float32),
        )
        assert torch.allclose(found.double(), want, rtol=1e-6, atol=1e-6 * want.abs().max()), key
        rows, columns = slice(5, want.shape[0] - 3), slice(7, want.shape[1] - 9)
        assert_same_part(files.read(key, rows, columns, torch.float32), found[rows, columns], kind)


@pytest.mark.parametrize("kind", ["legacy", "header"])
def test_older_descriptions(folder, state, kind):
    """Scaled fp8 in its first layout, and described in the header: 448 times off without the scales, at most
    half a step of fp8 with them.
    """
    files = open_checkpoint(str(write_scaled(folder / f"{kind}.safetensors", state, kind))).files
    for key, value in state.items():
        assert torch.allclose(
            files.read(key, dtype=torch.float32), value, rtol=0.07, atol=1e-4 * value.abs().max().item()
        )


def test_prefixed_file_described_in_the_header(folder, state):
    found, metadata = described(state, "float8_e4m3fn", in_header=True)
    save_file(
        {f"model.diffusion_model.{key}": value for key, value in found.items()},
        folder / "prefixed.safetensors",
        metadata,
    )
    key = matrices(state)[0]
    found = open_checkpoint(str(folder / "prefixed.safetensors")).files.read(
        f"model.diffusion_model.{key}", dtype=torch.float32
    )
    assert torch.allclose(found, state[key], rtol=0.07, atol=1e-3)


def test_smoothed_inputs_scale_the_columns(folder, state):
    found, _ = described(state, "float8_e4m3fn")
    key = matrices(state)[0]
    smoothing = torch.linspace(0.5, 2, state[key].shape[1])
    save_file(
        {**found, key.replace(".weight", ".pre_quant_scale"): smoothing}, folder / "smoothed.safetensors"
    )
    plain = open_checkpoint(
        str(write_scaled(folder / "plain.safetensors", state, "float8_e4m3fn"))
    ).files.read(key, columns=slice(3, 9), dtype=torch.float32)
    assert (
        open_checkpoint(str(folder / "smoothed.safetensors"))
        .files.read(key, columns=slice(3, 9), dtype=torch.float32)
        .equal(plain * smoothing[3:9])
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", FOUR_BITS)
def test_four_bits_are_comfy_kitchens(folder, state, kind, dtype):
    """Its own dequantization of the same tensors, to the bit."""
    tensor = pytest.importorskip("comfy_kitchen.tensor")
    found = load_file(write_scaled(folder / f"kitchen-{kind}.safetensors", state, kind))
    files = open_checkpoint(str(folder / f"kitchen-{kind}.safetensors")).files
    for key in matrices(state):
        leaves = {leaf: found.get(key.replace("weight", leaf)) for leaf in LEAVES}
        settings = json.loads(bytes(found[key.replace("weight", "comfy_quant")].tolist()))
        common = dict(orig_dtype=dtype, orig_shape=tuple(state[key].shape))
        common["convrot_groupsize"] = settings["convrot_groupsize"]
        if kind == "convrot_w4a4":
            layout = tensor.TensorCoreConvRotW4A4Layout
            params = layout.Params(scale=leaves["weight_scale"], **common)
        else:
            layout = tensor.AsymW4A8Int8Layout
            common |= dict(s_channel=leaves["weight_s_channel"], codebook=leaves["weight_codebook"])
            scale = leaves["weight_s_rel"].view(torch.float8_e4m3fn)
            params = layout.Params(scale=scale, group_size=settings["group_size"], **common)
        assert_same_bits(files.read(key, dtype=dtype), layout.dequantize(found[key], params))


LEAVES = ("weight_scale", "weight_s_rel", "weight_s_channel", "weight_codebook")


def loaded(path, config: ParallelConfig | None = None, **places) -> dict[str, torch.Tensor]:
    engine = Engine(config or ParallelConfig(), replace(mesh.single(), **places))
    engine.load("m", str(path), "default")
    return weights_of(engine.models["m"].transformer)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8_tensorwise", "nvfp4", *FOUR_BITS, "gguf"])
def test_shards_of_quantized_layers(folder, state, kind):
    """A tensor-parallel rank reads rows or columns of stacked layers (q, k, v), with the scales that belong
    to them.
    """
    if kind == "gguf":
        pytest.importorskip("gguf")
        path = folder / "shards.gguf"
        write_gguf(path, state, ("Q8_0", "Q5_1"))
    else:
        path = write_scaled(folder / f"shards-{kind}.safetensors", state, kind)
    whole = loaded(path)
    pieces = [
        loaded(path, ParallelConfig(tensor_parallel_degree=2), tp=mesh.Axis(None, rank, 2, (0, 1)))
        for rank in range(2)
    ]
    for name, dim in (
        ("transformer_blocks.0.attn.to_k.weight", 0),
        ("single_transformer_blocks.1.attn.to_v.weight", 0),
        ("transformer_blocks.0.ff.net.2.weight", 1),
    ):
        assert_same_part(torch.cat([piece[name] for piece in pieces], dim), whole[name], kind)


def test_quantized_files_are_read_in_part(folder, state):
    """Half of the rows are half of the bytes."""
    pytest.importorskip("gguf")
    write_gguf(folder / "part.gguf", state, ("Q8_0",))
    paths = [folder / "part.gguf", write_scaled(folder / "part.safetensors", state, "nvfp4")]
    for path in paths:
        files, key = open_checkpoint(str(path)).files, matrices(state)[0]
        counts = []
        for rows in (slice(None), slice(0, state[key].shape[0] // 2)):
            before = files.bytes_read
            files.read(key, rows)
            counts.append(files.bytes_read - before)
        assert (
            counts[1] == pytest.approx(counts[0] / 2, rel=0.01) and counts[0] < 0.6 * state[key].numel() * 2
        )


def test_layers_of_one_file_may_be_of_several_formats(folder, state):
    """Published files are: some layers fp8, others int8 or plain."""
    kinds = [described(state, kind)[0] for kind in ("float8_e4m3fn", "int8_tensorwise", "asym_w4a8_int8")]
    keys = matrices(state)
    mixed = dict(state)
    for i, key in enumerate(keys[:-1]):
        name = key.removesuffix("weight")
        mixed |= {leaf: value for leaf, value in kinds[i % 3].items() if leaf.startswith(name)}
    save_file(mixed, folder / "mixed.safetensors")
    files = open_checkpoint(str(folder / "mixed.safetensors")).files
    for i, key in enumerate(keys[:-1]):
        kind = ("float8_e4m3fn", "int8_tensorwise", "asym_w4a8_int8")[i % 3]
        want = expected(mixed, key.removesuffix(".weight"), kind)
        found = files.read(key, dtype=torch.float32).double()
        assert torch.allclose(found, want, rtol=1e-6, atol=1e-6 * want.abs().max())
    assert files.packed(keys[-1]) is None


def test_legacy_marker_is_no_weight(folder, state):
    save_file(legacy_fp8(state), folder / "marker.safetensors")
    assert set(open_checkpoint(str(folder / "marker.safetensors")).files.shapes) == set(state)


def test_a_scale_of_a_plain_layer_is_multiplied(folder, state):
    found = {**legacy_fp8(state), "img_in.scale_weight": torch.tensor(0.5)}
    save_file(found, folder / "plain_scaled.safetensors")
    files = open_checkpoint(str(folder / "plain_scaled.safetensors")).files
    assert files.read("img_in.weight").equal(state["img_in.weight"].bfloat16() * 0.5)


@pytest.mark.parametrize("kind", ["nvfp4", "int8_tensorwise"])
def test_files_without_a_description(folder, state, kind):
    """Of nvfp4; of int8 as lightx2v's converter writes it."""
    found, _ = described(state, kind)
    save_file(found, folder / f"{kind}_described.safetensors")
    plain = {
        key for key, value in found.items() if key.endswith(".comfy_quant") and b"convrot" not in bytes(value)
    }
    bare = {key: value for key, value in found.items() if key not in plain}
    assert len(bare) < len(found)
    save_file(bare, folder / f"{kind}_bare.safetensors")
    described_files, files = (
        open_checkpoint(str(folder / f"{kind}_{name}.safetensors")).files for name in ("described", "bare")
    )
    assert all(files.read(key).equal(described_files.read(key)) for key in matrices(state))


def test_values_are_read_before_their_scales(folder, state, monkeypatch):
    """What is largest has its memory on a device first."""
    file = write_scaled(folder / "order.safetensors", state, "nvfp4")
    files = open_checkpoint(str(file)).files
    read, plain = [], TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda *a, **named: read.append(a[1]) or plain(*a, **named))
    key = matrices(state)[0]
    files.read(key)
    assert read[0] == key and len(read) > 2
