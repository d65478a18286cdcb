"""What is next to quantized weights as products of small matrices: Kronecker products of LoKr, and low-rank
ones under DoRA's magnitudes of rows."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import golden
from live_memory import LiveMemory
from loras import randn
from quantized import plain_float8
from safetensors.torch import load_file, save_file
from tiny import relative, shallow_flux, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading import lora_fusion, lora_products
from backend.loading.lokr import LoKr
from backend.loading.lora_file_bytes import file_bytes
from backend.loading.lora_keys import lora_stack
from backend.loading.lora_products import are_products
from backend.loading.lora_spellings import stem_of_rows
from backend.loading.safetensors_files import TensorFiles
from backend.parallel import compiled_blocks, mesh
from backend.parallel.sequence import Span
from backend.quantization.added_products import MAX_TOKENS, Kronecker, LowRank
from backend.quantization.formats import PLAIN_FLOAT8
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight, multiplier
from backend.sampling.step_loop import Callbacks
from backend.units import fine_gigabytes

CPU = torch.device("cpu")
ROWS, COLUMNS = 96, 64
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
ALL = (Span(0, ROWS),), (Span(0, COLUMNS),)
SPANS = {
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


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("form", LOKR)
@torch.inference_mode()
def test_a_kronecker_product_is_the_difference(form, spans, tmp_path):
    """Of any rows and columns, in as many numbers as were counted, whichever matrix comes first."""
    tensors, held = LOKR[form]
    lokr = adapter(tmp_path, tensors)
    rows, columns = SPANS[spans]
    wanted = lokr.scale * lokr.difference(rows, columns, CPU)
    found = lokr.kronecker(rows, columns, CPU, torch.float32)
    found.strength = 0.5
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
    wanted = scale.unsqueeze(1) * stored + sum(each.difference() for each in (*lora, kronecker))
    weight.set_adapters({"a": lora[0], "b": kronecker, "c": lora[1]}, row_scale=scale)
    for _ in range(2):
        assert relative(weight.effective(), wanted) <= 1e-6
        assert relative(weight.linear(x, bias), x @ wanted.T + bias) <= 1e-6
        out = torch.empty(5, ROWS)
        multiplier(weight)(x, out)
        assert relative(out, x @ wanted.T) <= 1e-6
        held = weight.added_tensors  # whose memory is not given to others before it is compared
        weight._apply(torch.clone)
        moved = {tensor.data_ptr() for tensor in weight.added_tensors}
        assert not moved & {tensor.data_ptr() for tensor in held}
    weight.set_adapters({})
    assert torch.equal(weight.effective(), stored) and not weight.added_tensors


def write(folder: Path) -> tuple[Path, dict[str, Path]]:
    """A float8 file of the shallow Flux, and LoRAs of the same matrices: plain ones, with magnitudes of rows,
    and Kronecker products of full matrices."""
    state = load_file(write_shallow_flux(folder / "plain.safetensors"))
    save_file(plain_float8(state), folder / "float8.safetensors")
    shapes = shallow_flux()
    found: dict[str, dict] = {"lora": {}, "dora": {}, "lokr": {}}
    for name in ("double_blocks.0.img_attn.qkv", "double_blocks.0.img_mlp.0", "single_blocks.0.linear2"):
        rows, columns = shapes[f"{name}.weight"]
        module = "lora_unet_" + name.replace(".", "_")
        for kind in ("lora", "dora"):
            up, down = randn(rows, 3, seed=len(kind)) * 0.2, randn(3, columns, seed=ord(kind[0])) * 0.1
            found[kind] |= {f"{module}.lora_up.weight": up, f"{module}.lora_down.weight": down}
        norm = state[f"{name}.weight"].norm(dim=1, keepdim=True)
        found["dora"][f"{module}.dora_scale"] = norm * (1 + 0.3 * randn(rows, 1))
        found["dora"][f"{module}.alpha"] = torch.tensor(2.0)
        found["lokr"] |= {f"{module}.lokr_w1": randn(4, 8) * 0.1}
        found["lokr"] |= {f"{module}.lokr_w2": randn(rows // 4, columns // 8) * 0.1}
    for kind, tensors in found.items():
        save_file(tensors, folder / f"{kind}.safetensors")
    return folder / "float8.safetensors", {kind: folder / f"{kind}.safetensors" for kind in found}


#: LoRAs in order -> whether they are products of one weight.
STACKS = {
    ("lokr",): True,
    ("dora",): True,
    ("lora", "dora", "lora", "lokr"): True,
    ("dora", "lora", "dora"): True,
    ("dora", "dora", "lokr", "lokr"): True,
    ("lokr", "dora"): False,
}


def effective(engine: Engine) -> dict[str, torch.Tensor]:
    """Return name -> each quantized weight as its products see it."""
    packed = engine.models["tiny"].weights.packed
    return {name: weight.effective().clone() for name, weight in packed.items()}


def test_stacks_are_the_whole_differences(tmp_path, monkeypatch):
    """In any order, at other strengths on top of what was there; no layer is held a second time where all are
    products, what is counted is what is held, and nothing of them is left."""
    path, files = write(tmp_path)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    model, bare = engine.models["tiny"], effective(engine)
    found, stacks = {}, {}
    for names, products in STACKS.items():
        for strengths in ((0.5, 1.0, -0.3, 0.7), (1.2, 0.4, 0.6, -0.2)):
            stack = lora_stack([[str(files[name]), s] for name, s in zip(names, strengths)])
            planned = model.lora_bytes(stack, whole=True)
            model.weights.fuse(stack)
            stacks[names, strengths], found[names, strengths] = stack, effective(engine)
            wholes = [weight.whole is not None for weight in model.weights.packed.values()]
            assert any(wholes) != products
            assert model.held_lora_bytes == model.lora_bytes(stack) == model.lora_bytes(stack, whole=True)
            assert model.held_lora_bytes <= planned
    kinds = {type(a) for w in model.weights.packed.values() for a in w.adapters.values()}
    assert not kinds  # of the last stack, which is whole
    model.weights.fuse(())
    assert not model.held_lora_bytes and all(effective(engine)[name].equal(w) for name, w in bare.items())
    for module in (lora_fusion, lora_products):
        monkeypatch.setattr(module, "are_products", lambda adapters: False)
    for key, stack in stacks.items():
        model.weights.fuse(stack)
        for name, weight in effective(engine).items():
            assert relative(found[key][name], weight) <= 1e-6, (key, name)
        assert any(not weight.equal(bare[name]) for name, weight in effective(engine).items())


def test_a_layer_that_is_held_twice_is_the_cost_of_the_lora_that_needs_it(tmp_path):
    """The first one with which the changes of a layer are no products, in the order of the stack; it is what
    is then held a second time, and nothing where the strength is 0."""
    path, files = write(tmp_path)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    weights = engine.models["tiny"].weights

    def warnings(*names: str, strength: float = 1.0) -> list[str]:
        return engine.check_loras("tiny", lora_stack([[str(files[name]), strength] for name in names]))

    for names in STACKS:
        stack = lora_stack([[str(files[name]), 1.0] for name in names])
        weights.fuse(stack)
        size = sum(w.whole.nbytes for w in weights.packed.values() if w.whole is not None)
        assert any(warnings(*names)) == bool(size)
        assert not size or fine_gigabytes(size) in warnings(*names)[-1]
    assert warnings("lokr", "dora", strength=0.0) == ["", ""]
    words = "With the LoRA dora.safetensors changes are no products of small matrices in 5 quantized layers, "
    for names in (("lokr", "dora"), ("dora", "lokr", "dora"), ("lokr", "dora", "lora")):
        found = [warning.startswith(words) for warning in warnings(*names)]
        at = names.index("lokr") + 1
        assert found == [i == at for i in range(len(names))]
        assert all(not warning for i, warning in enumerate(warnings(*names)) if i != at)


def test_magnitudes_of_columns_need_the_whole(tmp_path):
    """They are norms of columns with what is added, and scale the inputs of the stored weight."""
    tensors = {"lokr_w1": randn(4, 8), "lokr_w2": randn(24, 8)}
    rows = adapter(tmp_path, tensors | {"dora_scale": randn(ROWS, 1).abs()})
    assert not are_products([rows])  # a Kronecker product whose factors are large
    small = {"lokr_w1": randn(2, 2), "lokr_w2_a": randn(48, 2), "lokr_w2_b": randn(2, 32)}
    rows = adapter(tmp_path, small | {"dora_scale": randn(ROWS, 1).abs()})
    columns = adapter(tmp_path, small | {"dora_scale": randn(1, COLUMNS).abs()})
    assert are_products([rows]) and not are_products([columns])


def test_rows_of_a_tensor_are_planned_as_they_are_held(tmp_path):
    """Each parameter's own rank is known before any is next to its weight; of one product for all three, of
    which each has a part, it is not."""
    path, _ = write(tmp_path)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "bf16", "weight only")
    model, module = engine.models["tiny"], "diffusion_model.double_blocks.0.img_attn.qkv"
    stems = [stem_of_rows(module, 256 * i, 256 * (i + 1)) for i in range(3)]
    tensors = {f"{stem}.lora_up.weight": randn(256, 4, seed=i) for i, stem in enumerate(stems)}
    tensors |= {f"{stem}.lora_down.weight": randn(4, 256, seed=i) for i, stem in enumerate(stems)}
    save_file(tensors, tmp_path / "apart.safetensors")
    stack = lora_stack([[str(tmp_path / "apart.safetensors"), 1.0]])
    planned = model.lora_bytes_by_kind(stack, whole=True)
    model.weights.fuse(stack)
    assert planned == model.lora_bytes_by_kind(stack, whole=True)
    assert model.held_lora_bytes == planned.total == 3 * 4 * (256 + 256) * 2


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "large lokr", "loha", "large loha", "diff"])
def test_a_file_is_planned_as_it_is_held(kind, tmp_path):
    """From its header alone, before ranks open it: of a matrix that no other shares, to the byte."""
    path, files = write(tmp_path)
    name = "double_blocks.0.img_mlp.0"
    rows, columns = shallow_flux()[f"{name}.weight"]
    module = "lora_unet_" + name.replace(".", "_")
    if kind in files:
        found = load_file(files[kind])
        tensors = {key: value for key, value in found.items() if key.startswith(f"{module}.")}
    elif kind == "large lokr":
        tensors = {f"{module}.lokr_w1": randn(1, 1), f"{module}.lokr_w2": randn(rows, columns)}
    elif "loha" in kind:
        rank = 4 if kind == "loha" else 13
        tensors = {f"{module}.hada_w{i}_a": randn(rows, rank, seed=i) for i in (1, 2)}
        tensors |= {f"{module}.hada_w{i}_b": randn(rank, columns, seed=i) for i in (1, 2)}
    else:
        tensors = {f"{module}.diff": randn(rows, columns)}
    save_file(tensors, tmp_path / "one.safetensors")
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "bf16", "weight only")
    model, stack = engine.models["tiny"], lora_stack([[str(tmp_path / "one.safetensors"), 1.0]])
    planned = file_bytes({key: value.shape for key, value in tensors.items()})
    assert planned == model.lora_bytes_by_kind(stack, whole=True) and planned.total
    model.weights.fuse(stack)
    assert model.held_lora_bytes == planned.total
    wanted = {"lora": "factors", "dora": "factors", "lokr": "uncut", "loha": "factors"}
    assert getattr(planned, wanted.get(kind, "copies")) == planned.total


def test_compiled_blocks_have_no_graphs_of_their_own_for_them(tmp_path, monkeypatch):
    """A quantized layer is one node, whatever is next to it: the graphs of the model without LoRAs serve."""
    torch._dynamo.reset()
    compiler = compiled_blocks.Compiler()
    monkeypatch.setattr(compiled_blocks, "COMPILER", compiler)
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    path, files = write(tmp_path)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    stack = lora_stack([[str(files[name]), 0.5] for name in ("dora", "lora", "lokr")])

    def sampled(name: str, compile: str) -> torch.Tensor:
        sample, _ = golden("flux-dev__euler_simple", name)
        sample = replace(sample, compile=compile, tensors=sample.tensors | {})
        sample.tensors["sigmas"] = sample.tensors["sigmas"][:2]
        return engine.sample(sample, Callbacks())[0]

    bare = sampled("tiny", "blocks")
    graphs = compiler.graphs
    name = engine.add_lora_stack("tiny", stack)
    found = sampled(name, "blocks")
    assert graphs == compiler.graphs > 0 and not compiler.failed
    assert relative(found, sampled(name, "off")) <= 1e-5 < relative(found, bare)


def test_kinds_that_are_held(tmp_path):
    path, files = write(tmp_path)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    weights = engine.models["tiny"].weights
    weights.fuse(lora_stack([[str(files[name]), 0.5] for name in ("lora", "dora", "lokr", "lokr")]))
    held = [w for w in weights.packed.values() if w.adapters]
    assert len(held) == 5  # queries, keys and values apart
    for weight in held:
        assert [type(each) for each in weight.adapters.values()] == [LowRank, LowRank, Kronecker]
        assert weight.row_scale is not None and [*weight.adapters.values()][2].strength == 1.0
