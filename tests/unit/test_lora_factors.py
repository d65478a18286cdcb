"""LoHa and LoKr of small matrices: next to quantized weights they are held as those."""

from pathlib import Path

import pytest
import torch
from families import golden
from loras import factored, randn
from quantized import plain_float8
from safetensors.torch import load_file, save_file
from tiny import relative, shallow_flux, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.lora import lora_products
from backend.loading.lora.adapters import LoHa, is_low_rank
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import mesh
from backend.parallel.sequence import Span
from backend.sampling.step_loop import Callbacks

CPU = torch.device("cpu")


def loha(rows: int, columns: int, *ranks: int) -> dict:
    left = {f"hada_w{i}_a": randn(rows, rank, seed=i) for i, rank in enumerate(ranks, 1)}
    return left | {f"hada_w{i}_b": randn(rank, columns, seed=i) for i, rank in enumerate(ranks, 1)}


#: Form -> (tensors for a matrix of 96 x 64, rank of its factors, whether they are small enough).
FORMS = {
    "loha": (loha(96, 64, 4, 4), 16, True),
    "loha of two ranks": (loha(96, 64, 2, 3), 6, True),
    "loha of a large rank": (loha(96, 64, 5, 5), 25, False),
}


@pytest.mark.parametrize("form", FORMS)
def test_factors_are_the_difference(form, tmp_path):
    """Of any rows and columns; and only those are used that are smaller than the matrix."""
    tensors, rank, is_small = FORMS[form]
    save_file(tensors, tmp_path / "a.safetensors")
    adapter = LoHa(TensorFiles([tmp_path / "a.safetensors"]), {role: role for role in tensors}, (96, 64))
    assert adapter.size == (96, 64) and adapter.factor_rank == rank
    assert is_low_rank(adapter) == is_small
    for rows, columns in (
        ((Span(0, 96),), (Span(0, 64),)),
        ((Span(5, 31), Span(40, 41)), (Span(0, 64),)),
        ((Span(0, 96),), (Span(3, 29), Span(33, 64))),
        ((Span(96, 96),), (Span(0, 64),)),  # of a rank without any
        ((Span(0, 96),), (Span(8, 8),)),
    ):
        up, down = adapter.factors(rows, columns, CPU)
        wanted = adapter.difference(rows, columns, CPU)
        assert up.shape == (len(wanted), rank) and down.shape == (rank, wanted.shape[1])
        assert (up @ down - wanted).norm() <= 1e-6 * wanted.norm()


def write(folder: Path) -> tuple[Path, Path]:
    """A float8 file of the shallow Flux, and the LoRA of ``factored``."""
    state = load_file(write_shallow_flux(folder / "plain.safetensors"))
    save_file(plain_float8(state), folder / "float8.safetensors")
    found = factored(shallow_flux())
    tensors = {f"{name}.{role}": value for name, added in found.items() for role, value in added.items()}
    save_file(tensors, folder / "lora.safetensors")
    return folder / "float8.safetensors", folder / "lora.safetensors"


def sampled(engine: Engine, model: str) -> torch.Tensor:
    sample, _ = golden("flux-dev__euler_simple", model)
    sample.tensors["sigmas"] = sample.tensors["sigmas"][:2]
    engine.check_sample(sample)
    return engine.sample(sample, Callbacks())[0]


def test_they_are_held_apart_from_quantized_weights(tmp_path, monkeypatch):
    """No layer is held a second time for them, the latent is that of layers which are, what is counted before
    is enough for what is held, and they leave nothing."""
    path, lora = write(tmp_path)
    stack = lora_stack([[str(lora), 0.5]])

    def run() -> tuple[Engine, torch.Tensor, int, torch.Tensor]:
        engine = Engine(ParallelConfig(), mesh.single())
        engine.load("tiny", str(path), "fp32", "weight only")
        bare = sampled(engine, "tiny")
        model = engine.models["tiny"]
        planned = model.whole_lora_bytes(stack).total
        found = sampled(engine, engine.add_lora_stack("tiny", stack))
        assert model.held_lora_bytes == model.lora_bytes(stack) == model.whole_lora_bytes(stack).total
        assert model.held_lora_bytes <= planned
        return engine, found, model.held_lora_bytes, bare

    engine, found, held, bare = run()
    assert engine.check_loras("tiny", stack) == [""]
    packed = engine.models["tiny"].weights.packed.values()
    assert sum(bool(weight.adapters) for weight in packed) == 9  # queries, keys and values apart
    assert all(weight.whole is None for weight in packed)
    assert sampled(engine, "tiny").equal(bare)
    monkeypatch.setattr(lora_products, "is_product", lambda adapter: False)
    whole_engine, wanted, whole_bytes, _ = run()
    assert any(weight.whole is not None for weight in whole_engine.models["tiny"].weights.packed.values())
    assert whole_engine.check_loras("tiny", stack) != [""]
    assert relative(found, wanted) <= 1e-5 < relative(bare, wanted)
    assert held < whole_bytes / 10
