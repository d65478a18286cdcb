"""Quantized versions of a tiny checkpoint's state, in the layouts of published files."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from backend.quantization.packed_weight import PackedWeight

#: Layers that are quantized: the matrices of the blocks, as in published files. ROWWISE get a scale for each
#: row.
MATRICES = re.compile(r"(double|single)_blocks\.\d+\..*\.weight$")
#: Matrices of the blocks of any family.
ANY_MATRIX = re.compile(r"(blocks|layers)\.\d+\..*\.weight$")
KINDS = (
    *("float8_e4m3fn", "float8_e5m2", "int8_tensorwise", "mxfp8", "nvfp4"),
    *("convrot_w4a4", "asym_w4a8_int8"),
)
FLOAT8 = {"float8_e4m3fn": (torch.float8_e4m3fn, 448.0), "float8_e5m2": (torch.float8_e5m2, 57344.0)}


def matrices(state: dict, pattern: re.Pattern = MATRICES) -> list[str]:
    return [key for key, value in state.items() if pattern.search(key) and value.ndim == 2]


def float8(
    weight: torch.Tensor, kind: str = "float8_e4m3fn", rowwise: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scale): the largest value of the matrix, or of each row, becomes the largest of the format."""
    dtype, largest = FLOAT8[kind]
    scale = (weight.abs().amax(dim=1, keepdim=True) if rowwise else weight.abs().amax()) / largest
    return (weight / scale).to(dtype), scale.float()


def plain_float8(state: dict, pattern: re.Pattern = MATRICES) -> dict:
    """Without scales: every matrix cast."""
    return {**state, **{key: state[key].to(torch.float8_e4m3fn) for key in matrices(state, pattern)}}


def legacy_fp8(state: dict) -> dict:
    """ "Scaled fp8": X.scale_weight, X.scale_input and the marker scaled_fp8."""
    tensors = {**state, "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for key in matrices(state):
        tensors[key], scale = float8(state[key])
        name = key.removesuffix(".weight")
        tensors[f"{name}.scale_weight"], tensors[f"{name}.scale_input"] = scale, torch.ones(())
    return tensors


def layer(weight: torch.Tensor, kind: str, seed: int, rowwise: bool = False) -> tuple[dict, dict]:
    """({leaf: tensor}, what comfy_quant says besides the format) of one layer. Of the formats in blocks,
    values and scales are random."""
    random = torch.Generator().manual_seed(seed)
    rows, columns = weight.shape
    if kind in FLOAT8:
        values, scale = float8(weight, kind, rowwise)
        return {"weight": values, "weight_scale": scale}, {}
    if kind == "int8_tensorwise":
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        settings = {"convrot": True, "convrot_groupsize": 64} if columns % 64 == 0 and seed % 2 else {}
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.float()}, settings
    if kind in ("convrot_w4a4", "asym_w4a8_int8"):
        return four_bits(weight, kind, seed)
    block, packed = {"mxfp8": (32, 1), "nvfp4": (16, 2)}[kind]
    tiles = -(-rows // 128) * 128, -(-columns // block // 4) * 4

    def numbers(*shape, high=256):
        return torch.randint(high, shape, generator=random, dtype=torch.int32).to(torch.uint8)

    if kind == "mxfp8":
        values = numbers(rows, columns, high=120).view(torch.float8_e4m3fn)  # below the NaN
        scale = (numbers(*tiles, high=6) + 116).view(getattr(torch, "float8_e8m0fnu", torch.uint8))
        return {"weight": values, "weight_scale": scale}, {}
    return {
        "weight": numbers(rows, columns // packed),
        "weight_scale": numbers(*tiles, high=120).view(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(2e-4),
    }, {}


def four_bits(weight: torch.Tensor, kind: str, seed: int) -> tuple[dict, dict]:
    """As ``layer``: any bytes are values. Every other asym_w4a8_int8 layer has a codebook."""
    rows, columns = weight.shape
    random = torch.Generator().manual_seed(seed)
    rotated = {"convrot_groupsize": 64 if columns % 64 == 0 else 16}
    leaves = {"weight": torch.randint(-128, 128, (rows, columns // 2), generator=random).to(torch.int8)}
    scale = weight.abs().amax(dim=1).float() / 127
    if kind == "convrot_w4a4":
        return {**leaves, "weight_scale": scale * 16}, rotated
    group = 8 if seed % 2 else 16
    rel = (torch.rand(rows, columns // group, generator=random) * 16).to(torch.float8_e4m3fn)
    leaves |= {"weight_s_rel": rel, "weight_s_channel": scale}
    if seed % 2:
        leaves |= {"weight_s_rel": rel.view(torch.uint8), "weight_codebook": torch.linspace(-7, 8, 16)}
    return leaves, {**rotated, "group_size": group}


def described(
    state: dict, kind: str, in_header: bool = False, pattern: re.Pattern = MATRICES, rowwise: bool = True
) -> tuple[dict, dict]:
    """(state, metadata) with every matrix of the blocks in ``kind``, described in X.comfy_quant tensors or in
    the header. ``rowwise``: every other one in float8 has a scale for each row."""
    tensors, layers = dict(state), {}
    for seed, key in enumerate(matrices(state, pattern)):
        name = key.removesuffix(".weight")
        leaves, settings = layer(state[key], kind, seed, rowwise=rowwise and kind in FLOAT8 and seed % 2 == 1)
        tensors |= {f"{name}.{leaf}": value for leaf, value in leaves.items()}
        layers[name] = {"format": kind, **settings}
    if in_header:
        return tensors, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    texts = {
        f"{name}.comfy_quant": torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)
        for name, text in layers.items()
    }
    return tensors | texts, {}


def weights_of(transformer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> parameter, on this rank; of a quantized weight what it stands for, with what belongs to it."""
    weights = {name: p.detach() for name, p in transformer.named_parameters() if not p.is_meta}
    for name, weight in list(transformer.named_modules()):
        if not isinstance(weight, PackedWeight):
            continue
        weights = {key: value for key, value in weights.items() if not key.startswith(f"{name}.")}
        weights[name] = weight.effective()
    return {name.replace(".layer.", ".").replace(".block.", "."): value for name, value in weights.items()}


def write_scaled(
    path: Path, state: dict, kind: str, pattern: re.Pattern = MATRICES, rowwise: bool = True
) -> Path:
    """A safetensors file of ``kind``: legacy, header (fp8 described in the header), plain float8 or one of
    KINDS; ``rowwise`` as in described."""
    if kind in ("legacy", "plain float8"):
        tensors, metadata = (legacy_fp8(state) if kind == "legacy" else plain_float8(state, pattern)), {}
    else:
        tensors, metadata = described(
            state, FIRST if kind == "header" else kind, kind == "header", pattern, rowwise
        )
    save_file(tensors, path, metadata)
    return path


FIRST = KINDS[0]


def write_gguf(
    path: Path,
    state: dict,
    kinds: tuple[str, ...],
    pattern: re.Pattern = MATRICES,
    with_values: bool = False,
) -> dict:
    """A GGUF file with the matrices of ``pattern`` in ``kinds`` in turn (K-quants from random blocks: the
    package cannot quantize to them), the rest in BF16, F16 and F32; a matrix whose rows hold no whole blocks
    is stored in another shape, as ComfyUI-GGUF's converter does. ``with_values``: return what the package's
    own dequantization gives, of the whole file in float32; else nothing."""
    import gguf
    import numpy as np

    writer, values, random = gguf.GGUFWriter(str(path), "flux"), {}, np.random.default_rng(0)
    quantized = matrices(state, pattern)
    for key, tensor in state.items():
        kind = (
            kinds[quantized.index(key) % len(kinds)]
            if key in quantized
            else "F32"
            if tensor.ndim == 1
            else "BF16"
            if len(key) % 2
            else "F16"
        )
        kind = gguf.GGMLQuantizationType[kind]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        array = tensor.float().numpy()
        if array.shape[-1] % block:
            writer.add_array(f"comfy.gguf.orig_shape.{key}", list(array.shape))
            array = array.reshape(-1, block)
        try:
            data = gguf.quants.quantize(array, kind)
        except NotImplementedError:  # gguf reads K-quants and cannot write them: any bits are valid blocks
            data = _random_blocks(random, array.shape, kind.name, block, size)
        writer.add_tensor(key, data, raw_dtype=kind)
        if with_values:
            dequantized = np.array(gguf.quants.dequantize(data, kind))
            values[key] = torch.from_numpy(dequantized).reshape(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def write_plain_gguf(path: Path, state: dict, **strings: str) -> Path:
    """A GGUF file of float32 tensors, with ``strings`` in its metadata."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "any")
    for name, text in strings.items():
        writer.add_string(name, text)
    for key, tensor in state.items():  # of five dimensions too, as ComfyUI-GGUF's fix_5d_tensors.py
        writer.add_tensor(key, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


#: Where in a block its float16 scales are.
SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def _random_blocks(random, shape, kind: str, block: int, size: int):
    """Any bytes are a block, but for its scales, which must be finite."""
    import numpy as np

    data = random.integers(0, 256, (shape[0], shape[-1] // block, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        data[..., at : at + 2] = (
            random.uniform(1e-4, 1e-2, (*data.shape[:2], 1)).astype(np.float16).view(np.uint8)
        )
    return data.reshape(shape[0], -1)
