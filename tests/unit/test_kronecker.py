"""Kronecker products of LoKr next to quantized weights, alone and with what else is added to a product."""

from collections.abc import Hashable
from pathlib import Path

import pytest
import torch
from live_memory import LiveMemory
from loras import randn
from safetensors.torch import save_file
from tiny import relative

from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.lora.adapters import cut
from backend.loading.lora.lokr import LoKr
from backend.loading.lora.lora_file_bytes import _held
from backend.loading.lora.lora_products import are_products
from backend.parallel.sequence import Span
from backend.quantization.added_products import MAX_TOKENS, AddedProduct, LowRank, Scales
from backend.quantization.formats import PLAIN_FLOAT8
from backend.quantization.lora_bytes import LoraBytes
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight, multiplier

CPU = torch.device("cpu")
ROWS, COLUMNS = 96, 64
NAMES = ("lokr_w1", "lokr_w2")
#: Form of a matrix of ROWS x COLUMNS -> its tensors, and what is held of w2.
LOKR = {
    "full": ({"lokr_w1": randn(4, 8), "lokr_w2": randn(24, 8)}, 1),
    "balanced": ({"lokr_w1": randn(8, 8), "lokr_w2": randn(12, 8)}, 1),
    "wide w1": ({"lokr_w1": randn(2, 16), "lokr_w2": randn(48, 4)}, 1),
    "tall w1": ({"lokr_w1": randn(16, 2), "lokr_w2": randn(6, 32)}, 1),
    "w1 of a row": ({"lokr_w1": randn(1, 4), "lokr_w2": randn(96, 16)}, 1),
    "factored": ({"lokr_w1": randn(2, 2), "lokr_w2_a": randn(48, 3), "lokr_w2_b": randn(3, 32)}, 2),
    "factored w1": (
        {
            "lokr_w1_a": randn(4, 2),
            "lokr_w1_b": randn(2, 4),
            "lokr_w2": randn(24, 16),
            "alpha": torch.tensor(6.0),
        },
        1,
    ),
    "large factors": ({"lokr_w1": randn(8, 8), "lokr_w2_a": randn(12, 9), "lokr_w2_b": randn(9, 8)}, 1),
}
#: Forms with more than half as many numbers as the matrix.
LARGE = {
    "w2 of all": {"lokr_w1": randn(1, 1), "lokr_w2": randn(ROWS, COLUMNS)},
    "w1 of one number": {
        "lokr_w1": randn(1, 1),
        "lokr_w2_a": randn(ROWS, 20),
        "lokr_w2_b": randn(20, COLUMNS),
    },
    "w2 of two numbers": {
        "lokr_w1_a": randn(48, 2),
        "lokr_w1_b": randn(2, COLUMNS),
        "lokr_w2": randn(2, 1),
    },
}
ALL = (Span(0, ROWS),), (Span(0, COLUMNS),)
SPANS: dict[str, tuple[tuple[Span, ...], tuple[Span, ...]]] = {
    "all": ALL,
    "blocks of rows": ((Span(48, 96),), ALL[1]),
    "rows of a block": ((Span(3, 5),), ALL[1]),
    "odd rows": ((Span(5, 31), Span(40, 41), Span(41, 90)), ALL[1]),
    "blocks of columns": (ALL[0], (Span(32, 64),)),
    "odd columns": (ALL[0], (Span(3, 29), Span(33, 64))),
    "both": ((Span(48, 96), Span(0, 48)), (Span(1, 2), Span(3, 4))),
    "no rows": ((Span(96, 96),), ALL[1]),
    "no columns": (ALL[0], (Span(8, 8),)),
}


def adapter(folder: Path, tensors: dict) -> LoKr:
    save_file(tensors, folder / "a.safetensors")
    return LoKr(TensorFiles([folder / "a.safetensors"]), {role: role for role in tensors}, (ROWS, COLUMNS))


def whole(tensors: dict) -> torch.Tensor:
    products = {name: tensors[f"{name}_a"] @ tensors[f"{name}_b"] for name in NAMES if name not in tensors}
    return torch.kron(*((tensors | products)[name] for name in NAMES))


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("form", LOKR)
@torch.inference_mode()
def test_a_kronecker_product_is_the_difference(form, spans, tmp_path):
    """Of any rows and columns, in as many numbers as were counted, whichever matrix comes first."""
    tensors, held = LOKR[form]
    lokr = adapter(tmp_path, tensors)
    rows, columns = SPANS[spans]
    wanted = lokr.scale * cut(whole(tensors), rows, columns)
    difference = lokr.scale * lokr.difference(rows, columns, CPU)
    assert difference.shape == wanted.shape and (difference - wanted).norm() <= 1e-6 * wanted.norm()
    found = lokr.kronecker(rows, columns, CPU, torch.float32)
    found.strength = 0.5 * lokr.scale
    assert lokr.is_small and len(found.right) == held
    assert sum(x.numel() for x in found.tensors) == lokr.held_numbers(rows, columns) < ROWS * COLUMNS / 2
    assert found.difference().shape == wanted.shape
    assert (found.difference() - 0.5 * wanted).norm() <= 1e-6 * wanted.norm()
    height, width = wanted.shape
    for x in (randn(2, 7, width), randn(5, 2 * width)[:, :width], randn(width), randn(2, 0, width)):
        before = randn(*x.shape[:-1], height, seed=1)
        out = before.clone()
        found.add_to(out, x)
        added = 0.5 * x.double() @ wanted.double().T
        assert (out - before - added).norm() <= 1e-6 * (added.norm() + before.norm())


@pytest.mark.parametrize(("spans", "rows"), [("all", 24), ("rows of a block", 2), ("odd rows", 76)])
def test_no_more_of_w2_is_read_than_rows_need(spans, rows, tmp_path):
    """Of blocks of 24 rows: the end of one, whole ones, the beginning of one; w1 once for all of them."""
    tensors, _ = LOKR["full"]
    lokr = adapter(tmp_path, tensors)
    lokr.difference(*SPANS[spans], CPU)
    assert lokr.files.bytes_read == tensors["lokr_w1"].nbytes + rows * tensors["lokr_w2"][0].nbytes


@torch.inference_mode()
def test_columns_are_cut_without_a_copy_of_all(tmp_path):
    """Inside of blocks, at a strength: nothing is made that is as large as the result."""
    tensors = {"lokr_w1": randn(16, 16), "lokr_w2": randn(64, 64)}
    save_file(tensors, tmp_path / "a.safetensors")
    files = TensorFiles([tmp_path / "a.safetensors"])
    lokr = LoKr(files, {role: role for role in tensors}, (1024, 1024))
    rows, columns = (Span(0, 1024),), (Span(0, 300), Span(500, 712))
    found = lokr.kronecker(rows, columns, CPU, torch.float32)
    found.strength = 0.5
    for difference in (found.difference, lambda: lokr.difference(rows, columns, CPU)):
        with LiveMemory() as memory:
            made = difference()
        assert made.nbytes <= memory.peak <= 1.2 * made.nbytes


@pytest.mark.parametrize("spans", ["all", "odd rows", "odd columns", "both", "no rows", "no columns"])
@pytest.mark.parametrize("scales", ["rows", "columns", "both"])
@torch.inference_mode()
def test_rows_and_columns_of_a_kronecker_product_are_scaled(scales, spans, tmp_path):
    """Those that the weight has, in what it adds and in the difference, and after it was moved."""
    found = adapter(tmp_path, LOKR["full"][0]).kronecker(*SPANS[spans], CPU, torch.float32)
    bare = found.difference()
    rows, columns = randn(len(bare), seed=1), randn(bare.shape[1], seed=2)
    found.scales = Scales(rows if scales != "columns" else None, columns if scales != "rows" else None)
    wanted = bare * (rows.unsqueeze(1) if scales != "columns" else 1) * (columns if scales != "rows" else 1)
    count = (scales != "columns") + (scales != "rows")
    for _ in range(2):
        assert len(found.tensors) == 2 + count
        assert (found.difference() - wanted).norm() <= 1e-6 * wanted.norm()
        x, before = randn(2, 7, bare.shape[1]), randn(2, 7, len(bare), seed=1)
        out = before.clone()
        found.add_to(out, x)
        added = x.double() @ wanted.double().T
        assert (out - before - added).norm() <= 1e-6 * (added.norm() + before.norm())
        found.move(torch.Tensor.clone)


@torch.inference_mode()
def test_a_kronecker_product_is_added_to_parts_of_memory(tmp_path):
    """Whose tokens are not next to each other."""
    found = adapter(tmp_path, LOKR["full"][0]).kronecker(*ALL, CPU, torch.float32)
    x, memory = randn(5, COLUMNS), torch.zeros(5, 2 * ROWS)
    found.add_to(memory[:, :ROWS], x)
    assert relative(memory[:, :ROWS], x @ found.difference().T) <= 1e-6
    assert not memory[:, ROWS:].any()


@pytest.mark.parametrize("spans", ["all", "odd rows", "odd columns", "rows of a block"])
@pytest.mark.parametrize("form", ["balanced", "wide w1", "tall w1", "factored"])
@torch.inference_mode()
def test_what_a_kronecker_product_makes_does_not_grow_with_tokens(form, spans, tmp_path):
    """Nothing is as large as the inputs or the outputs of a long sequence, whose last tokens are fewer."""
    rows, columns = SPANS[spans]
    found = adapter(tmp_path, LOKR[form][0]).kronecker(rows, columns, CPU, torch.float32)
    difference = found.difference()
    peaks = []
    for tokens in (MAX_TOKENS, 3 * MAX_TOKENS + 5):
        x, out = randn(tokens, difference.shape[1]), torch.zeros(tokens, len(difference))
        with LiveMemory() as memory:
            found.add_to(out, x)
        assert relative(out, x @ difference.T) <= 1e-6
        peaks.append(memory.peak)
    assert 0 < peaks[0] == peaks[1]


@torch.inference_mode()
def test_all_kinds_are_added_to_one_product(tmp_path):
    """Two that are joined, one that is not, and rows that are scaled before any is added; whichever way the
    product is made, and after what is held has moved."""
    values = {"values": randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)}
    weight = PackedWeight(Packed(PLAIN_FLOAT8, {}, values, COLUMNS, (range(COLUMNS),)), torch.float32)
    stored = weight.effective()
    lora = [LowRank(randn(ROWS, rank), randn(rank, COLUMNS), 0.3) for rank in (4, 8)]
    kronecker = adapter(tmp_path, LOKR["full"][0]).kronecker(*ALL, CPU, torch.float32)
    scale, x, bias = randn(ROWS, seed=2), randn(5, COLUMNS), randn(ROWS, seed=3)
    columns = randn(COLUMNS, seed=4)
    wanted = scale.unsqueeze(1) * stored * columns + sum(each.difference() for each in (*lora, kronecker))
    adapters: dict[Hashable, AddedProduct] = {"a": lora[0], "b": kronecker, "c": lora[1]}
    weight.set_adapters(adapters, scales=Scales(scale, columns))
    for _ in range(2):
        assert relative(weight.effective(), wanted) <= 1e-6
        assert relative(weight.linear(x, bias), x @ wanted.T + bias) <= 1e-6
        out = torch.empty(5, ROWS)
        multiplier(weight, x)(slice(None), out)
        assert relative(out, x @ wanted.T) <= 1e-6
        held = weight.added_tensors  # whose memory is not given to others before it is compared
        weight._apply(torch.clone)
        moved = {tensor.data_ptr() for tensor in weight.added_tensors}
        assert not moved & {tensor.data_ptr() for tensor in held}
    weight.set_adapters({})
    assert torch.equal(weight.effective(), stored) and not weight.added_tensors


@pytest.mark.parametrize("magnitudes", [(ROWS, 1), (1, COLUMNS)], ids=["rows", "columns"])
def test_with_magnitudes_a_kronecker_product_stays_one(magnitudes, tmp_path):
    """Where its matrices are small, whether it could be a low-rank product or not."""
    scale = {"dora_scale": randn(*magnitudes).abs()}
    for tensors, _ in LOKR.values():
        assert are_products([adapter(tmp_path, tensors | scale)])
    for tensors in LARGE.values():
        assert not are_products([adapter(tmp_path, tensors | scale)])


@pytest.mark.parametrize("form", LARGE)
def test_a_large_kronecker_product_is_a_copy(form, tmp_path):
    """On the ranks, and in what is planned from the file's header."""
    lokr = adapter(tmp_path, LARGE[form])
    assert lokr.size == (ROWS, COLUMNS) and not lokr.is_small and not are_products([lokr])
    planned = _held("blocks.0.proj", {role: tensor.shape for role, tensor in LARGE[form].items()})
    assert planned == LoraBytes(copies=2 * ROWS * COLUMNS)
