"""LoRAs next to quantized weights as products of small matrices: low-rank ones and LoKr's Kronecker products,
under DoRA's magnitudes of rows and of columns too."""

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
from backend.loading.device_or_host import DeviceOrHost
from backend.loading.lora import lora_fusion, lora_products, magnitudes
from backend.loading.lora.lora_file_bytes import file_bytes
from backend.loading.lora.lora_keys import lora_stack
from backend.loading.lora.lora_spellings import stem_of_rows
from backend.parallel import compiled_blocks, mesh
from backend.quantization.added_products import Kronecker, LowRank
from backend.sampling.step_loop import Callbacks
from backend.units import fine_gigabytes

#: Kind with magnitudes -> the kind without, and the dimension over which norms are.
SCALED = {
    "dora": ("lora", 1),
    "dora of columns": ("lora", 0),
    "lokr of rows": ("lokr", 1),
    "lokr of columns": ("lokr", 0),
}


def write(folder: Path) -> tuple[Path, dict[str, Path]]:
    """A float8 file of the shallow Flux, and LoRAs of the same matrices: plain ones, Kronecker products of
    full matrices, both with magnitudes, and whole differences."""
    state = load_file(write_shallow_flux(folder / "plain.safetensors"))
    save_file(plain_float8(state), folder / "float8.safetensors")
    shapes = shallow_flux()
    found: dict[str, dict] = {kind: {} for kind in ("lora", "lokr", "diff", *SCALED)}
    for name in ("double_blocks.0.img_attn.qkv", "double_blocks.0.img_mlp.0", "single_blocks.0.linear2"):
        rows, columns = shapes[f"{name}.weight"]
        module = "lora_unet_" + name.replace(".", "_")
        roles = {
            "lora": {"lora_up.weight": randn(rows, 3) * 0.2, "lora_down.weight": randn(3, columns) * 0.1},
            "lokr": {"lokr_w1": randn(4, 8) * 0.1, "lokr_w2": randn(rows // 4, columns // 8) * 0.1},
            "diff": {"diff": randn(rows, columns) * 0.01},
        }
        for kind, (bare, dim) in SCALED.items():
            norm = state[f"{name}.weight"].norm(dim=dim, keepdim=True)
            magnitudes = norm * (1 + 0.3 * randn(*norm.shape))
            roles[kind] = roles[bare] | {"dora_scale": magnitudes, "alpha": torch.tensor(2.0)}
        for kind, tensors in roles.items():
            found[kind] |= {f"{module}.{role}": value.clone() for role, value in tensors.items()}
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
    ("lokr", "dora"): True,
    ("dora of columns",): True,
    ("lokr of rows",): True,
    ("lokr of columns",): True,
    ("lora", "lokr", "dora of columns", "lora"): True,
    ("lokr of columns", "dora", "lokr of rows", "dora of columns"): True,
    ("lora", "lokr of rows", "lokr of columns", "lokr"): True,
    ("lokr", "diff"): False,
    ("diff", "dora of columns", "lokr of rows"): False,
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
            planned = model.whole_lora_bytes(stack).total
            model.weights.fuse(stack)
            stacks[names, strengths], found[names, strengths] = stack, effective(engine)
            wholes = [weight.whole is not None for weight in model.weights.packed.values()]
            assert any(wholes) != products
            assert model.held_lora_bytes == model.lora_bytes(stack) == model.whole_lora_bytes(stack).total
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


def test_norms_are_computed_by_few_rows(tmp_path, monkeypatch):
    """What is made for the factors of magnitudes does not grow with the weights, and they are the same."""
    path, files = write(tmp_path)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    weights = engine.models["tiny"].weights
    whole, values = magnitudes.MAX_VALUES, 1 << 11
    for names in (names for names, products in STACKS.items() if products and {*names} & {*SCALED}):
        changes = weights._changes(lora_stack([[str(files[name]), 0.7] for name in names]))
        monkeypatch.setattr(magnitudes, "MAX_VALUES", whole)
        wanted = {name: weights._scales(name, changes)[name] for name in changes}
        monkeypatch.setattr(magnitudes, "MAX_VALUES", values)
        for name, factors in wanted.items():
            with LiveMemory() as memory:
                found = weights._scales(name, changes)[name]
            assert 0 < memory.peak <= 6 * values * 4 < weights.packed[name].shape.numel()
            assert found.keys() == factors.keys()
            for order, each in factors.items():
                for one, two in zip(found[order], each):
                    assert (one is None) == (two is None)
                    assert one is None or two is None or relative(one, two) <= 1e-6


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
        assert not size or fine_gigabytes(size) in " ".join(warnings(*names))
    assert warnings("lokr", "diff", strength=0.0) == ["", ""]
    words = "With the LoRA diff.safetensors changes are no products of small matrices in 5 quantized layers, "
    for names in (("lokr", "diff"), ("dora", "lokr", "diff", "diff"), ("diff", "dora of columns")):
        found = [warning.startswith(words) for warning in warnings(*names)]
        at = names.index("diff")
        assert found == [i == at for i in range(len(names))]
        assert all(not warning for i, warning in enumerate(warnings(*names)) if i != at)


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
    planned = model.whole_lora_bytes(stack)
    model.weights.fuse(stack)
    assert planned == model.whole_lora_bytes(stack)
    assert model.held_lora_bytes == planned.total == 3 * 4 * (256 + 256) * 2


@pytest.mark.parametrize("kind", ["lora", "lokr", *SCALED, "large lokr", "loha", "large loha", "diff"])
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
    else:
        rank = 4 if kind == "loha" else 13
        tensors = {f"{module}.hada_w{i}_a": randn(rows, rank, seed=i) for i in (1, 2)}
        tensors |= {f"{module}.hada_w{i}_b": randn(rank, columns, seed=i) for i in (1, 2)}
    save_file(tensors, tmp_path / "one.safetensors")
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "bf16", "weight only")
    model, stack = engine.models["tiny"], lora_stack([[str(tmp_path / "one.safetensors"), 1.0]])
    planned = file_bytes({key: value.shape for key, value in tensors.items()})
    assert planned == model.whole_lora_bytes(stack) and planned.total
    model.weights.fuse(stack)
    assert model.held_lora_bytes == planned.total
    is_copy = kind in ("large lokr", "large loha", "diff")
    assert bool(planned.copies) == is_copy and bool(planned.uncut) == kind.startswith("lokr")
    assert bool(planned.factors) == (not is_copy and kind != "lokr")


@pytest.mark.parametrize("kind", ["dora of columns", "lokr of columns"])
def test_magnitudes_of_columns_are_planned_for_each_parameter(kind, tmp_path):
    """Of a matrix that has the rows of three, each of which has factors of its columns."""
    path, files = write(tmp_path)
    module = "lora_unet_double_blocks_0_img_attn_qkv"
    tensors = {key: each for key, each in load_file(files[kind]).items() if key.startswith(f"{module}.")}
    save_file(tensors, tmp_path / "one.safetensors")
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "bf16", "weight only")
    model, stack = engine.models["tiny"], lora_stack([[str(tmp_path / "one.safetensors"), 1.0]])
    planned = file_bytes({key: value.shape for key, value in tensors.items()})
    assert planned.factors == model.whole_lora_bytes(stack).factors
    model.weights.fuse(stack)
    held = [weight for weight in model.weights.packed.values() if weight.adapters]
    found = [weight.scales.columns for weight in held]
    assert len(found) == 3 and all(each is not None and each.shape == (256,) for each in found)


@pytest.mark.parametrize("kind", ["dora", "lokr of columns"])
def test_norms_are_computed_on_the_host_where_the_device_is_full(tmp_path, monkeypatch, kind):
    """Next to sharded quantized weights, whose checkpoint was read there: no plan counts the memory of a few
    rows. The meta device stands for a GPU."""
    path, files = write(tmp_path)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    weights = engine.models["tiny"].weights
    changes = weights._changes(lora_stack([[str(files[kind]), 0.7]]))
    wanted = {name: weights._scales(name, changes)[name] for name in changes}
    read, tried = weights.checkpoint.read, []
    error = RuntimeError("CUDA error: an illegal memory access")

    def read_to(name, dtype, device, shard):
        tried.append(device.type)
        if device.type == "meta":
            raise error
        return read(name, dtype, device, shard)

    monkeypatch.setattr(weights.checkpoint, "read", read_to)
    weights.room = DeviceOrHost(torch.device("meta"), torch.device("cpu"))
    first, *others = wanted
    with pytest.raises(RuntimeError, match="illegal"):
        weights._scales(first, changes)
    error = torch.OutOfMemoryError("CUDA out of memory")
    for name, factors in wanted.items():
        found = weights._scales(name, changes)[name]
        for order, scales in factors.items():
            assert all(one.equal(other) for one, other in zip(found[order].tensors, scales.tensors))
    assert others and tried[:2] == ["meta"] * 2 and {*tried[2:]} == {"cpu"}  # it is not asked again


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
        assert weight.scales.rows is not None and [*weight.adapters.values()][2].strength == 1.0
    weights.fuse(lora_stack([[str(files[name]), 0.5] for name in ("lokr", "lokr of columns", "lokr")]))
    for weight in held:
        assert weight.scales.rows is None and weight.scales.columns is not None
        kronecker = [each for each in weight.adapters.values() if isinstance(each, Kronecker)]
        assert [each.scales.columns is not None for each in kronecker] == [True, True, False]
