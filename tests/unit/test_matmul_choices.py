"""Which quantized layers multiply natively, what is refused, and what the load reports."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from quantized import described, legacy_fp8, matrices, write_gguf, write_scaled
from safetensors.torch import save_file

from backend.client.pool import Backend
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.model_key import model_key
from backend.loading.recognition import open_checkpoint
from backend.models.blocks import APART, Blocks
from backend.models.family import Cache
from backend.parallel import mesh
from backend.parallel.matrix_cuts import cut_plan
from backend.protocol import Load, Loaded, Result, Unload
from backend.quantization import matmul
from backend.quantization.formats import FORMATS, PLAIN_FLOAT8
from backend.quantization.matmul import Matrix, choose
from backend.quantization.packed_weight import PackedWeight

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
ROWS, COLUMNS = (96,), 256
ROTATED = {"convrot": True, "convrot_groupsize": 64}


@pytest.fixture
def kitchen():
    return pytest.importorskip("comfy_kitchen")


#: Format, what the file says, device, its capability -> the reason not to multiply natively under auto.
AUTO = [
    ("int8_tensorwise", {}, CPU, None, ""),
    ("int8_tensorwise", {}, GPU, (8, 6), ""),
    ("int8_tensorwise", {}, GPU, (7, 0), "needs compute capability 7.5, and the ranks' GPUs have 7.0"),
    ("float8_e4m3fn", {}, CPU, None, "this CPU has no kernel"),
    ("float8_e4m3fn", {}, GPU, (8, 6), "needs compute capability 8.9"),
    ("float8_e4m3fn", {}, GPU, (8, 9), ""),
    ("float8_e4m3fn", {}, GPU, (12, 0), ""),
    ("float8_e4m3fn", {"scales": 96}, GPU, (9, 0), "its rows have scales of their own"),
    ("float8_e4m3fn", {"full_precision_matrix_mult": True}, GPU, (9, 0), "the file asks for it"),
    ("float8_e5m2", {}, GPU, (9, 0), "float8_e5m2 has no native kernel"),
    ("mxfp8", {}, GPU, (9, 0), "needs compute capability 10.0"),
    ("mxfp8", {}, GPU, (10, 0), ""),
    ("nvfp4", {}, GPU, (9, 0), "needs compute capability 10.0"),
    ("nvfp4", {}, GPU, (12, 0), ""),
    ("int8_tensorwise", {}, torch.device("mps"), None, "only NVIDIA GPUs"),
]


@pytest.mark.parametrize("name, says, device, capability, why", AUTO)
def test_auto_is_native_where_comfyui_is(monkeypatch, name, says, device, capability, why):
    monkeypatch.setattr(matmul.kernels, "kitchen", lambda: (None, ""))
    matrix = Matrix(FORMATS[name], {"format": name, **says}, ROWS, (0, COLUMNS))
    choice = choose(matrix, "auto", device, capability)
    assert (choice.kernel is None) == bool(why) and why in choice.why
    assert choose(matrix, "weight only", device).kernel is None


#: The kernels that multiply two kinds of layers.
CAPABILITIES = {"int8_tensorwise": "int8_linear", "nvfp4": "quantize_nvfp4"}


@pytest.mark.parametrize(
    "found, says",
    [
        ({"disabled": True}, "slowly, by torch's kernels: torch is for CUDA "),
        ({"unavailable_reason": "no extension"}, "slowly, by torch's kernels: no extension"),
        ({"capabilities": ["other"]}, "slowly, by torch's kernels: comfy-kitchen has no "),
        ({"capabilities": [*CAPABILITIES.values()]}, ""),
    ],
    ids=["CUDA 12", "no extension", "too old", "fast"],
)
@pytest.mark.parametrize("name", CAPABILITIES)
def test_kernels_that_are_missing_are_said(monkeypatch, name, found, says):
    """ComfyUI warns of them, too; the layer is native all the same."""
    module = SimpleNamespace(list_backends=lambda: {"cuda": found})
    monkeypatch.setattr(matmul.kernels, "kitchen", lambda: (module, ""))
    matrix = Matrix(FORMATS[name], {"format": name}, ROWS, (0, COLUMNS))
    text = str(choose(matrix, "auto", GPU, (12, 0)))
    assert text.startswith("native: ") and says in text and ("slowly" in text) == bool(says)
    assert "slowly" not in str(choose(matrix, "auto", CPU))


def test_amds_gpus_have_kernels_of_their_own(monkeypatch):
    """comfy-kitchen calls them hip; CUDA's are never there."""
    found = {"cuda": {"disabled": True}, "hip": {"capabilities": ["int8_linear"]}}
    monkeypatch.setattr(matmul.kernels, "kitchen", lambda: (SimpleNamespace(list_backends=lambda: found), ""))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    matrix = Matrix(FORMATS["int8_tensorwise"], {"format": "int8_tensorwise"}, ROWS, (0, COLUMNS))
    assert "slowly" not in str(choose(matrix, "auto", GPU, None))
    found["hip"] = {"unavailable_reason": "an older GPU"}
    assert str(choose(matrix, "auto", GPU, None)).endswith("slowly, by torch's kernels: an older GPU")


def test_other_gpus_multiply_int8_alone(monkeypatch):
    """AMD's, which have no compute capability."""
    monkeypatch.setattr(matmul.kernels, "kitchen", lambda: (None, ""))
    for name in matmul.RULES:
        matrix = Matrix(FORMATS[name], {"format": name}, ROWS, (0, COLUMNS))
        assert (choose(matrix, "native", GPU, None).kernel is None) == (name != "int8_tensorwise")


def test_plain_fp8_is_native_where_it_is_asked_for(monkeypatch):
    """ComfyUI multiplies it so with --fast alone."""
    monkeypatch.setattr(matmul.kernels, "kitchen", lambda: (None, ""))
    matrix = Matrix(PLAIN_FLOAT8, {"format": "float8_e4m3fn"}, ROWS, (0, COLUMNS))
    assert choose(matrix, "auto", CPU).kernel is None and choose(matrix, "native", CPU).kernel


@pytest.mark.parametrize(
    "name, says, rows, edges, why",
    [
        ("int8_tensorwise", ROTATED, (96,), (0, 100, 256), "begin or end at 100, inside 64"),
        ("int8_tensorwise", ROTATED, (96,), (0, 128, 256), ""),
        ("int8_tensorwise", {}, (31,), (0, 100, 256), ""),
        ("float8_e4m3fn", {}, (96,), (0, 100, 256), "at 100, inside 16"),
        ("float8_e4m3fn", {}, (31,), (0, 256), "31 rows are no multiple of 16"),
        ("float8_e4m3fn", {}, (32, 31), (0, 256), "31 rows are no multiple of 16"),  # of another rank
        ("nvfp4", {}, (96,), (0, 16, 256), "at 16, inside 32"),
    ],
)
def test_pieces_that_no_kernel_takes(monkeypatch, name, says, rows, edges, why):
    monkeypatch.setattr(matmul.kernels, "kitchen", lambda: (None, ""))
    choice = choose(Matrix(FORMATS[name], {"format": name, **says}, rows, edges), "native", CPU)
    assert (choice.kernel is None) == bool(why) and why in choice.why


@pytest.mark.parametrize(
    "style, rows, edges",
    [("rowwise", 8, (0, 33, 66, 100)), ("rowwise after attention", 60, (0, 20, 40, 60, 73, 86, 100))],
)
def test_all_ranks_choose_alike(style, rows, edges):
    """Where any rank's columns begin and end is known to all that add up their products, and how many rows
    any rank has."""
    transformer = torch.nn.Module()
    transformer.blocks = torch.nn.ModuleList([torch.nn.Linear(100, rows), torch.nn.Linear(rows, 100)])
    styles = {"blocks.0": style, "blocks.1": "colwise"}
    family = SimpleNamespace(blocks=Blocks(lists={"blocks": APART}), tensor_plan=styles, cache=Cache())
    plan = cut_plan(transformer, family, "megatron", 3)
    for rank in range(3):
        found = plan.shards(replace(mesh.single(), tp=mesh.Axis(None, rank, 3, (0, 1, 2))))
        assert found["blocks.0"].edges == edges and found["blocks.1"].heights == (33, 33, 34)


def engine_of(path, mode="auto") -> Engine:
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(path), "default", mode)
    return engine


def test_without_comfy_kitchen(folder, state, monkeypatch):
    """auto is weight only and says why; native is refused with the command that installs it."""
    monkeypatch.setattr(matmul.kernels, "kitchen", lambda: (None, "comfy-kitchen is not installed"))
    path = write_scaled(folder / "absent.safetensors", state, "int8_tensorwise")
    (found,) = engine_of(path).facts("m")["quantized"]
    assert found["multiplication"] == "weight only: comfy-kitchen is not installed"
    with pytest.raises(UnsupportedError, match="comfy-kitchen is not installed.*pip install.*choose auto"):
        Engine(ParallelConfig(), mesh.single()).check_load(str(path), "default", "native")


@pytest.mark.parametrize(
    "kind, mode, says",
    [
        ("float8_e5m2", "native", "float8_e5m2 has no native kernel"),
        ("float8_e4m3fn", "native", "its rows have scales of their own"),
        ("gguf", "native", "Q8_0 has no native kernel"),
        ("plain", "native", "no quantized layers; choose auto"),
        ("plain", "fast", "matmul is 'fast'; choose auto, weight only, native"),
    ],
)
def test_refusals(kitchen, folder, state, kind, mode, says):
    path = folder / f"refused-{kind}.safetensors"
    if kind == "gguf":
        pytest.importorskip("gguf")
        path = folder / "refused.gguf"
        write_gguf(path, state, ("Q8_0",))
    elif kind == "plain":
        save_file(state, path)
    else:
        write_scaled(path, state, kind)
    with pytest.raises(UnsupportedError, match=says) as refusal:
        Engine(ParallelConfig(), mesh.single()).check_load(str(path), "default", mode)
    assert "\n" not in str(refusal.value)


def test_the_report_counts_layers(kitchen, folder, state):
    path = write_scaled(folder / "counted.safetensors", state, "int8_tensorwise")
    engine = engine_of(path)
    (found,) = engine.facts("m")["quantized"]
    weights = [m for m in engine.models["m"].transformer.modules() if isinstance(m, PackedWeight)]
    stored = sum(p.numel() * p.element_size() for weight in weights for p in weight.parameters())
    want = {"format": "int8", "layers": len(weights), "bytes": stored}
    assert weights and found == {**want, "multiplication": "native: int8 on this CPU"}
    assert f"{len(weights)} int8 layers of {stored / 1e6:.1f} MB, native" in str(engine.models["m"].report)
    (again,) = engine_of(path, "weight only").facts("m")["quantized"]
    assert again["multiplication"] == "weight only: as chosen"


def test_native_leaves_layers_that_ask_for_full_precision(kitchen, folder, state):
    """Some of a file, which says so of each, and layers of a scaled file that are stored in full."""
    found, _ = described(state, "float8_e4m3fn")
    quantized = matrices(state)
    for i, key in enumerate(quantized):
        name = key.removesuffix(".weight")
        scale = state[key].abs().amax() / 448  # one, for all rows
        found |= {key: (state[key] / scale).to(torch.float8_e4m3fn), f"{name}.weight_scale": scale}
        precise = {"full_precision_matrix_mult": True} if i == 0 else {}
        text = json.dumps({"format": "float8_e4m3fn", **precise}).encode()
        found[f"{name}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    path = folder / "mixed.safetensors"
    save_file(found, path)
    kinds = {kind["multiplication"] for kind in engine_of(path, "native").facts("m")["quantized"]}
    assert kinds == {"native: fp8 on this CPU", "weight only: the file asks for it"}
    plain = Matrix(FORMATS["scaled plain"], {"format": "scaled plain"}, ROWS, (0, COLUMNS))
    assert matmul.choose_all("m", {"a": plain}, "native", CPU, None)["a"].kernel is None


def test_scales_of_inputs_are_read(folder, state):
    """Under either name; a marker of two numbers asks for full precision, as in ComfyUI."""
    name = matrices(state)[0].removesuffix(".weight")
    found = legacy_fp8(state)
    found[f"{name}.scale_input"] = torch.tensor(0.25)
    for count, is_precise in ((2, True), (1, False)):
        found["scaled_fp8"] = torch.zeros(count, dtype=torch.float8_e4m3fn)
        path = folder / f"inputs{count}.safetensors"
        save_file(found, path)
        files = open_checkpoint(str(path)).files
        packed = files.packed(f"{name}.weight", slice(3, 9))
        assert packed.tensors["input_scale"].tolist() == [0.25]
        assert bool(packed.settings.get("full_precision_matrix_mult")) == is_precise
        settings = files.quantization(f"{name}.weight").settings
        assert settings == packed.settings and settings["scales"] == 1


def test_a_scale_of_inputs_is_one_number(folder, state):
    found, _ = described(state, "float8_e4m3fn")
    name = matrices(state)[0].removesuffix(".weight")
    save_file({**found, f"{name}.input_scale": torch.ones(3)}, folder / "three.safetensors")
    with pytest.raises(UnsupportedError, match="input_scale. has shape .3,., which does not fit"):
        open_checkpoint(str(folder / "three.safetensors"))


def test_models_that_multiply_in_another_way_are_others(tmp_path):
    """To the backend and to its client, which frees what no graph wants any more."""
    path = str(tmp_path / "model.safetensors")
    names = [model_key(Load(path, matmul=mode)) for mode in ("auto", "weight only", "native")]
    assert len(set(names)) == 3 and model_key(Load(path)) == names[0]

    class Client:
        closed = False
        requests = []

        def request(self, message, *callbacks):
            self.requests.append(message)
            left = Result({"left": [0], "freed": True})
            return Loaded(model_key(message), "flux") if isinstance(message, Load) else left

    backend = Backend(ParallelConfig(), Client())
    for mode in ("auto", "native"):
        backend.load(path, matmul=mode)
    assert list(backend.models.values()) == [names[0], names[2]]
    assert backend.unload((path, "default", "native")) == [0]
    assert Client.requests[-1] == Unload(names[2], park=True)
