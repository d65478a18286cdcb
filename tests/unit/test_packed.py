"""Quantized weights stay as their files store them: the latents of what they stand for, to the bit, in the
memory of what is stored."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cropping import cropped
from families import CASES, golden
from loras import lora
from quantized import KINDS, matrices, weights_of, write_gguf, write_scaled
from safetensors.torch import load_file, save_file
from tiny import relative, write_checkpoint
from tolerance import assert_same_bits

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora.lora_keys import lora_stack
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.quantization import packed, packed_weight
from backend.quantization.packed_weight import PackedWeight
from backend.sampling.step_loop import Callbacks

#: One golden case of each family.
FIRST = {name.split("__")[0]: name for name in reversed(CASES)}
#: Most rows and columns of latent pixels where no ComfyUI is compared.
SIDE = 8
GGUF_KINDS = ("Q8_0", "Q5_1", "Q4_K", "Q2_K")


def loaded(path: Path) -> Engine:
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    return engine


def packed_weights(engine: Engine) -> dict[str, PackedWeight]:
    found = engine.models["tiny"].transformer.named_modules()
    return {name: module for name, module in found if isinstance(module, PackedWeight)}


def inflated(path: Path, out: Path) -> Path:
    """A plain file of the values that a quantized one stands for."""
    files = open_checkpoint(str(path)).files
    save_file({key: files.read(key, dtype=torch.float32).contiguous() for key in files.shapes}, out)
    return out


def steps(engine: Engine, sample) -> torch.Tensor:
    sample.tensors["sigmas"] = sample.tensors["sigmas"][:2]
    engine.check_sample(sample)
    return engine.sample(sample, Callbacks())[0]


@pytest.fixture
def no_cat_of_float8(monkeypatch):
    """As early versions of torch on GPUs."""
    cat = torch.cat

    def without(tensors, *args, **named):
        assert not any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors)
        return cat(tensors, *args, **named)

    monkeypatch.setattr(torch, "cat", without)


@pytest.mark.parametrize("family", FIRST)
def test_every_family_multiplies_by_float8(family, tmp_path, no_cat_of_float8):
    """Every matrix of the file is float8, those around the blocks too."""
    state = load_file(write_checkpoint(tmp_path / "plain.safetensors", family))
    tensors = {
        key: value.to(torch.float8_e4m3fn) if value.ndim == 2 else value for key, value in state.items()
    }
    save_file(tensors, tmp_path / "float8.safetensors")
    engine = loaded(tmp_path / "float8.safetensors")
    assert len(packed_weights(engine)) > 10
    save_file({key: value.float() for key, value in tensors.items()}, tmp_path / "inflated.safetensors")
    wanted = loaded(tmp_path / "inflated.safetensors")
    sample, _ = golden(FIRST[family])
    sample = replace(sample, tensors=cropped(sample.tensors, SIDE))
    assert_same_bits(steps(engine, sample), steps(wanted, sample))


def write(folder: Path, state: dict, kind: str) -> Path:
    if kind not in GGUF_KINDS:
        return write_scaled(folder / f"{kind}.safetensors", state, kind)
    pytest.importorskip("gguf")
    write_gguf(folder / f"{kind}.gguf", state, (kind,))
    return folder / f"{kind}.gguf"


@pytest.mark.parametrize("kind", [*KINDS, "legacy", *GGUF_KINDS])
def test_every_format(folder, state, kind, monkeypatch):
    """The latent of the inflated file to the bit, of large layers a few rows at a time, but for float8 whose
    one scale multiplies products; what is held is what is stored, and one layer's weight in addition."""
    path = write(folder, state, kind)
    monkeypatch.setattr(packed, "CHUNK", 40_000)
    packed_weight.free_scratch()
    engine = loaded(path)
    weights = packed_weights(engine)
    # q, k and v are one matrix in the file
    assert len(weights) > len(matrices(state))
    files = open_checkpoint(str(path)).files
    sizes = {
        key: files.stored_sizes(key, len(state[key]), [range(state[key].shape[1])]) for key in matrices(state)
    }
    stored = sum(each.bytes for found in sizes.values() for each in found)
    held = sum(p.numel() * p.element_size() for weight in weights.values() for p in weight.parameters())
    # each piece of a stacked matrix has its own copy of the one scale, or codebook, of all
    shared = 64 if kind == "asym_w4a8_int8" else 8
    assert stored <= held <= stored + shared * len(weights)
    found = steps(engine, golden("flux-dev__euler_simple")[0])
    plain = loaded(inflated(path, folder / "plain.safetensors"))
    wanted = steps(plain, golden("flux-dev__euler_simple")[0])
    if any(weight.factor is not None for weight in weights.values()):
        assert relative(found, wanted) <= 1e-5
    else:
        assert_same_bits(found, wanted)
    largest = max(weight.shape.numel() for weight in weights.values())
    assert packed_weight.scratch_bytes(torch.device("cpu")) == 4 * largest
    engine.unload("tiny")
    assert packed_weight.scratch_bytes(torch.device("cpu")) == 0


def lora_on(state: dict, path: Path) -> Path:
    shapes = {key.removesuffix(".weight"): tuple(state[key].shape) for key in matrices(state)}
    save_file(lora(shapes, "kohya")[0], path)
    return path


def counted_is_held(engine: Engine, loras: list):
    """What is counted of LoRAs next to quantized weights is what they take, on one rank all of it."""
    model, stack = engine.models["tiny"], lora_stack(loras)
    weights = packed_weights(engine).values()
    held = [x for w in weights for a in w.adapters.values() for x in a.tensors]
    held += [x for w in weights for x in (w.whole, *w.scales) if x is not None]
    assert model.weights.stack == stack
    assert model.lora_bytes(stack) == model.whole_lora_bytes(stack).total == sum(x.nbytes for x in held) > 0
    assert model.held_lora_bytes == model.lora_bytes(stack)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8_tensorwise", "Q4_K"])
def test_loras_are_held_apart_from_the_weights(folder, state, kind):
    """Two at once equal what is merged into the inflated weights; a changed strength reads nothing, and what
    is taken out is gone to the last bit."""
    path = write(folder, state, kind)
    one, two = lora_on(state, folder / "one.safetensors"), lora_on(state, folder / "two.safetensors")
    engine = loaded(path)
    plain = loaded(inflated(path, folder / "plain.safetensors"))
    bare = steps(engine, golden("flux-dev__euler_simple")[0])

    def with_loras(engine, *strengths):
        stack = lora_stack([[str(one), strengths[0]], [str(two), strengths[1]]])
        sample = golden("flux-dev__euler_simple", engine.add_lora_stack("tiny", stack))[0]
        return steps(engine, sample)

    for strengths in ((0.3, -0.2), (0.1, 0.4)):
        assert relative(with_loras(engine, *strengths), with_loras(plain, *strengths)) <= 1e-5
    weights = packed_weights(engine)
    assert all(len(weight.adapters) == 2 and weight.whole is None for weight in weights.values())
    counted_is_held(engine, [[str(one), 0.1], [str(two), 0.4]])
    files = engine.models["tiny"].weights.checkpoint.files
    before, factors = (
        files.bytes_read,
        {name: [a.tensors[0] for a in w.adapters.values()] for name, w in weights.items()},
    )
    with_loras(engine, 0.7, 0.1)
    assert files.bytes_read == before
    assert all(
        again.tensors[0] is up
        for name, w in weights.items()
        for again, up in zip(w.adapters.values(), factors[name])
    )
    assert_same_bits(steps(engine, golden("flux-dev__euler_simple")[0]), bare)
    assert not any(weight.adapters for weight in weights.values())


def test_a_lora_of_one_piece_of_a_tensor_is_held_for_that_alone(folder, state):
    """As ComfyUI's loaders put together those of queries, keys and values: each has its own rank, not three
    times as much, and a piece without any has next to nothing."""
    path, name = write(folder, state, "float8_e4m3fn"), "double_blocks.0.img_attn.qkv"
    rows, columns = state[f"{name}.weight"].shape
    up = torch.block_diag(*[torch.randn(rows // 3, 4) for _ in range(2)])
    up = torch.nn.functional.pad(up, (0, 0, 0, rows // 3))  # nothing of values
    tensors = {f"{name}.lora_up.weight": up, f"{name}.lora_down.weight": torch.randn(8, columns)}
    save_file(tensors, folder / "pieces.safetensors")
    found = []
    for engine in (loaded(path), loaded(inflated(path, folder / "plain.safetensors"))):
        stack = lora_stack([[str(folder / "pieces.safetensors"), 0.1]])
        found.append(steps(engine, golden("flux-dev__euler_simple", engine.add_lora_stack("tiny", stack))[0]))
        ranks = [a.tensors[0].shape[1] for w in packed_weights(engine).values() for a in w.adapters.values()]
        assert sorted(ranks) == ([1, 4, 4] if len(found) == 1 else [])
    assert relative(*found) <= 1e-5


def test_what_is_unknown_after_a_failed_change_takes_nothing(folder, state, monkeypatch):
    """It names no file; on a rank that ran out of memory the next request asks for its size."""
    engine = loaded(write(folder, state, "float8_e4m3fn"))
    weights = engine.models["tiny"].weights
    with monkeypatch.context() as patched:
        patched.setattr(weights, "_put", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            weights.fuse(lora_stack([[str(lora_on(state, folder / "lora.safetensors")), 1.0]]))
    assert engine.models["tiny"].lora_bytes(weights.stack) == 0


def test_other_adapters_make_a_layer_whole(folder, state):
    """A full difference is added once to the values that are stored, which come back without it."""
    path = write(folder, state, "float8_e4m3fn")
    key = min(matrices(state))
    difference = 0.1 * torch.randn(state[key].shape, generator=torch.Generator().manual_seed(1))
    name = f"diffusion_model.{key.removesuffix('.weight')}.diff"
    save_file({name: difference}, folder / "difference.safetensors")
    engine = loaded(path)
    before = weights_of(engine.models["tiny"].transformer)
    stack = lora_stack([[str(folder / "difference.safetensors"), 0.5]])
    (warning,) = engine.check_loras("tiny", stack)
    assert "in 1 quantized layers, which are held a second time for it" in warning
    engine.fused(engine.add_lora_stack("tiny", stack))
    whole = {name: w for name, w in packed_weights(engine).items() if w.whole is not None}
    assert len(whole) == 1
    counted_is_held(engine, [[str(folder / "difference.safetensors"), 0.5]])
    (changed, weight), *_ = whole.items()
    assert torch.allclose(weight.effective(), before[changed] + 0.5 * difference, rtol=1e-6, atol=1e-6)
    engine.fused("tiny")
    after = weights_of(engine.models["tiny"].transformer)
    assert all(value.equal(before[name]) for name, value in after.items())
