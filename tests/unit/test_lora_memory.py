"""LoRAs and memory: room for those on quantized weights is planned, and where it runs out nothing of them
is left behind."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fused_loras import equal, fuse, parameters, write
from live_memory import LiveMemory
from loras import lora
from published import FLUX, L40
from safetensors.torch import load_file
from tiny import write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora.adapters import LoRA
from backend.parallel import mesh
from backend.planner.choose import Question, choose
from backend.planner.machine import RESERVE, RequestEstimate
from backend.planner.memory import held
from backend.quantization.added_products import LowRank
from backend.quantization.formats import PLAIN_FLOAT8
from backend.quantization.lora_bytes import LoraBytes
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight

GB = 10**9


@pytest.mark.parametrize("kind", ["plain", "float8"])
def test_a_change_that_fails_leaves_nothing_behind(folder, tmp_path, monkeypatch, kind):
    """Memory runs out in the middle of it: the model without LoRAs has its own bits again, and the next try
    is like the first."""
    file = write_checkpoint(folder / "flux-dev.safetensors")
    if kind == "float8":
        state = {k: v.to(torch.float8_e4m3fn) if v.ndim == 2 else v for k, v in load_file(file).items()}
        file = Path(write(tmp_path / "float8.safetensors", state))
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(file), "fp32", "weight only")
    tensors, _ = lora({f"double_blocks.{i}.img_mlp.0": (1024, 256) for i in range(3)}, "kohya")
    path, before = write(tmp_path / "a.safetensors", tensors), parameters(engine)
    fuse(engine, (path, 0.5))
    wanted, read, calls = parameters(engine), LoRA.factors, []
    fuse(engine)

    def factors(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read(*arguments)

    monkeypatch.setattr(LoRA, "factors", factors)
    with pytest.raises(torch.OutOfMemoryError):
        fuse(engine, (path, 0.5))
    fuse(engine)
    assert equal(parameters(engine), before)
    fuse(engine, (path, 0.5))
    assert equal(parameters(engine), wanted) and not equal(wanted, before)


def test_loras_on_quantized_weights_take_room():
    """All of them on each rank but for stages, for the factors that are cut with a matrix, and for copies."""
    plain = RequestEstimate(4096, 512, 20, 1)
    with_loras = replace(plain, loras=LoraBytes(GB))

    def more(**plan) -> float:
        config = ParallelConfig(**plan)
        return (held(FLUX, config, with_loras).bytes - held(FLUX, config, plain).bytes) / GB

    assert more() == more(ulysses_degree=2, shard_weights=True) == 1
    assert more(tensor_parallel_degree=4) == pytest.approx(0.625)
    assert more(pipefusion_degree=2, num_pipeline_patch=1) == pytest.approx(0.5, abs=0.15)
    for loras, share in (
        (LoraBytes(copies=GB), 0.25),
        (LoraBytes(uncut=GB), 1),
        (LoraBytes(GB, GB, GB), 1.875),
    ):
        with_loras = replace(plain, loras=loras)
        assert more(tensor_parallel_degree=4) == pytest.approx(share)
        assert more() == pytest.approx(loras.total / GB)
    with_loras = replace(plain, loras=LoraBytes(GB))
    room = held(FLUX, ParallelConfig(), plain).bytes / GB + 0.5
    machine = replace(L40, memory=(int(room * GB) + RESERVE,) * 2)
    assert choose(Question(FLUX, plain, machine, 2)).one.fits
    assert not choose(Question(FLUX, with_loras, machine, 2)).one.fits


@torch.inference_mode()
def test_loras_are_added_by_one_product():
    """What is taken out of several leaves no memory behind, and a changed strength makes nothing anew."""
    packed = Packed(PLAIN_FLOAT8, {}, {"values": torch.zeros(32, 64)}, 64, (range(64),))
    weight, whole, x = PackedWeight(packed, torch.float32), torch.zeros(32, 64), torch.randn(5, 64)
    one, two = (LowRank(torch.randn(32, rank), torch.randn(rank, 64), 0.5) for rank in (4, 8))

    def product(of: LowRank) -> torch.Tensor:
        return of.strength * x @ of.down.T @ of.up.T

    weight.set_adapters({"one": one, "two": two}, whole)
    together = weight._joined
    assert together is not None and together.up.shape == (32, 12)
    assert one.up.data_ptr() == together.up.data_ptr()
    one = replace(one, strength=2.0)
    weight.set_adapters({"one": one, "two": two}, whole)
    assert weight._joined is not None and weight._joined.up is together.up
    assert torch.allclose(weight.linear(x, None), product(one) + product(two), atol=1e-4)
    weight.set_adapters({"two": two}, whole)
    assert two.up.untyped_storage().nbytes() == two.up.nbytes
    assert torch.allclose(weight.linear(x, None), product(two), atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 300, 64), (300, 64), (64,), (2, 0, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_loras_are_added_in_place(shape, dtype):
    """On a quantized weight they make nothing of the size of its output."""
    random = torch.Generator().manual_seed(0)

    def numbers(*size):
        return torch.randn(*size, generator=random).to(dtype)

    values = {"values": numbers(512, 64).to(torch.float8_e4m3fn)}
    weight = PackedWeight(Packed(PLAIN_FLOAT8, {}, values, 64, (range(64),)), dtype)
    whole = weight.effective()  # no memory to dequantize in
    weight.set_adapters({}, whole)
    x, bias = numbers(*shape[::-1]).permute(*reversed(range(len(shape)))), numbers(512)
    bare = weight.linear(x, bias)
    loras = {i: LowRank(numbers(512, 4), numbers(4, 64), s) for i, s in enumerate((0.5, -0.3))}
    weight.set_adapters(loras, whole)
    with LiveMemory() as memory:
        found = weight.linear(x, bias)
    assert found.shape == bare.shape == (*shape[:-1], 512) and found.dtype == dtype
    assert memory.peak <= 1.2 * found.nbytes
    change = sum(a.strength * a.up.double() @ a.down.double() for a in weight.adapters.values())
    error = found.double() - bare.double() - x.double() @ change.T
    assert error.norm() <= 1.5 * torch.finfo(dtype).eps * found.double().norm()
