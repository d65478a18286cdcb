"""GGUF files: every type of block against the gguf package, and what cannot be read is refused by name."""

import re
from itertools import product

import numpy as np
import pytest
import torch
from quantized import write_gguf, write_plain_gguf
from safetensors.torch import load_file
from tiny import write_checkpoint
from torch.overrides import TorchFunctionMode

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.quantization import gguf_blocks
from backend.quantization.gguf_blocks import GGUF_SCALES
from backend.runtime.install_command import install_command

GGUF_KINDS = (
    "Q8_0",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "BF16",
    "F16",
    "F32",
)


#: The README's "IQ1 to IQ3".
RARER = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


@pytest.mark.parametrize("kind", RARER)
def test_rarer_types_are_refused_by_name(folder, kind):
    gguf = pytest.importorskip("gguf")
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    path = folder / f"{kind}.gguf"
    writer = gguf.GGUFWriter(str(path), "flux")
    blocks = np.zeros((4, size), dtype=np.uint8)
    writer.add_tensor("img_in.weight", blocks, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = (
        rf"'img_in.weight' is stored as {kind}, which is not supported; supported are .*IQ4_XS.*another file"
    )
    with pytest.raises(UnsupportedError, match=words):
        open_checkpoint(str(path))


@pytest.mark.parametrize("kinds", [GGUF_KINDS[i::3] for i in range(3)], ids=" ".join)
def test_gguf(folder, state, kinds):
    """Every type against the gguf package's own dequantization, whole and by rows and columns."""
    pytest.importorskip("gguf")
    values = write_gguf(folder / "file.gguf", state, kinds, with_values=True)
    checkpoint = open_checkpoint(str(folder / "file.gguf"))
    assert checkpoint.dtype == torch.bfloat16 and checkpoint.files.shapes == {
        key: tuple(value.shape) for key, value in state.items()
    }
    for key, want in values.items():
        found = checkpoint.files.read(key, dtype=torch.float32)
        assert torch.allclose(found, want, rtol=1e-6, atol=1e-6 * want.abs().max()), key
        if want.ndim == 2 and want.shape[0] > 8:
            rows, columns = slice(3, want.shape[0] - 2), slice(5, want.shape[1] - 7)
            assert checkpoint.files.read(key, rows, dtype=torch.float32).equal(found[rows])
            cut = checkpoint.files.read(key, rows, columns, torch.float32)
            assert cut.equal(found[rows, columns])
            assert cut.untyped_storage().nbytes() == cut.nbytes  # it does not hold the other columns


def test_gguf_in_another_shape(folder, state):
    """Matrices whose rows are no whole blocks are stored as rows of one block, their own shape in the
    metadata.
    """
    pytest.importorskip("gguf")
    pattern = re.compile(r"img_in\.weight$")
    values = write_gguf(folder / "reshaped.gguf", state, ("Q6_K",), pattern, with_values=True)
    want = values["img_in.weight"]
    files = open_checkpoint(str(folder / "reshaped.gguf")).files
    assert want.shape[1] < 256 and files.shapes["img_in.weight"] == tuple(want.shape)
    found = files.read("img_in.weight", slice(3, 50), slice(9, 33), torch.float32)
    assert torch.allclose(found, want[3:50, 9:33], rtol=1e-6, atol=1e-6 * want.abs().max())


def test_a_convolution_of_five_dimensions(folder):
    """ComfyUI-GGUF's converter keeps the shape of a video model's first convolution."""
    pytest.importorskip("gguf")
    state = load_file(write_checkpoint(folder / "wan.safetensors", "wan21-t2v"))
    checkpoint = open_checkpoint(str(write_plain_gguf(folder / "wan.gguf", state)))
    want = state["patch_embedding.weight"]
    assert want.ndim == 5 and checkpoint.files.shapes["patch_embedding.weight"] == tuple(want.shape)
    assert checkpoint.files.read("patch_embedding.weight", dtype=torch.float32).equal(want)


def test_refused_gguf_files(folder, state):
    pytest.importorskip("gguf")
    write_gguf(folder / "whole.gguf", state, ("Q8_0",))
    data = (folder / "whole.gguf").read_bytes()
    (folder / "half.gguf").write_bytes(data[: len(data) // 2])
    (folder / "header.gguf").write_bytes(data[:1000])
    (folder / "empty.gguf").write_bytes(b"")
    (folder / "text.gguf").write_bytes(b"not a model " * 100)
    for name in ("half", "header", "empty", "text"):
        with pytest.raises(UnsupportedError, match="truncated or no GGUF file") as error:
            open_checkpoint(str(folder / f"{name}.gguf"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", GGUF_SCALES)
def test_gguf_blocks_with_scales_of_nan_are_refused_as_they_are_read(folder, state, kind):
    """Each scale and minimum of a block, in the last block of a matrix; by the rank that reads it."""
    gguf = pytest.importorskip("gguf")
    path = folder / f"nan-{kind}.gguf"
    write_gguf(path, state, (kind,))
    reader = gguf.GGUFReader(path)
    tensor = next(
        each for each in reader.tensors if each.tensor_type.name == kind and each.shape[0] % 256 == 0
    )
    _, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    data = path.read_bytes()
    assert open_checkpoint(str(path)).files.packed(tensor.name) is not None
    for at, bits in product(GGUF_SCALES[kind], (b"\x00\x7e", b"\x00\xfc")):  # NaN, and minus infinity
        place = tensor.data_offset + tensor.n_bytes - size + at
        path.write_bytes(data[:place] + bits + data[place + 2 :])
        engine = Engine(ParallelConfig(), mesh.single())
        engine.check_load(str(path), "default")
        with pytest.raises(
            UnsupportedError, match=f"the {kind} blocks of '{tensor.name}' have a scale of NaN"
        ):
            engine.load("m", str(path), "fp32")
        rows = tensor.shape[1]
        files = open_checkpoint(str(path)).files
        assert files.packed(tensor.name, slice(0, rows - 1)) is not None  # a rank that does not read it


def test_every_gguf_type_has_its_scales():
    pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import dequantize_functions

    assert GGUF_SCALES.keys() == {kind.name for kind in dequantize_functions} - {"BF16"}


class Copies(TorchFunctionMode):
    """Counts tensors that are made of numbers, each of which a GPU waits for."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.tensor
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", GGUF_SCALES)
def test_constants_of_a_type_are_made_once(kind):
    pytest.importorskip("gguf")
    _, _, size = gguf_blocks.gguf_type(kind)
    stored = {"values": torch.randint(0, 100, (3, 2 * size), dtype=torch.uint8)}
    gguf_blocks._on_device.cache_clear()
    first = gguf_blocks.weight(stored, {"format": kind}, torch.float32, None)
    with Copies() as copies:
        assert gguf_blocks.weight(stored, {"format": kind}, torch.float32, None).equal(first)
    assert copies.count == 0 and (not kind.endswith("_K") or gguf_blocks._on_device.cache_info().currsize > 0)


@pytest.mark.parametrize(
    "architecture, keys, says",
    [
        ("llama", ["token_embd.weight", "blk.0.attn_q.weight"], "begin with 'token_embd.weight'"),
        (
            "t5encoder",
            ["enc.blk.0.attn_q.weight", "token_embd.weight"],
            "text encoder or VAE does not belong",
        ),
        ("sdxl", ["input_blocks.0.0.weight", "input_blocks.1.0.in_layers.0.weight"], "is .* a UNet"),
        ("flux", ["t5_yproj.weight"], "is Mochi"),  # the tensors tell, not what the metadata says
        ("wan", ["double_blocks.0.img_attn.qkv.weight"], "no transformer of a supported family"),
    ],
)
def test_gguf_of_another_family(folder, architecture, keys, says):
    gguf = pytest.importorskip("gguf")
    path = folder / "other.gguf"
    writer = gguf.GGUFWriter(str(path), architecture)
    for key in keys:
        writer.add_tensor(key, torch.ones(4, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=says) as error:
        open_checkpoint(str(path))
    assert "other.gguf" in str(error.value) and "\n" not in str(error.value)


def test_gguf_without_its_package(folder, state, monkeypatch):
    (folder / "any.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=re.escape(install_command(["gguf"]))):
        open_checkpoint(str(folder / "any.gguf"))
