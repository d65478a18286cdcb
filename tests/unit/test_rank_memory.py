"""describe() against the weights that loaded ranks hold, and against what a request allocates."""

import json
import runpy
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from families import golden
from live_memory import LiveMemory
from quantized import KINDS, write_gguf, write_scaled
from tiny import golden_request, save_whole, shallow_flux, weights_module, write_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.parallel.mesh import Axis
from backend.planner.machine import RequestEstimate
from backend.planner.memory import held
from backend.quantization import kernels
from backend.quantization.formats import effort_of
from backend.quantization.packed_weight import PackedWeight, free_scratch, scratch_bytes
from backend.rank_plan import RequestSize, activations, describe
from backend.rank_plan.need import request_need
from backend.rank_plan.request_size import size_of
from backend.rank_plan.shape_of import shape_of
from backend.sampling.step_loop import Callbacks

GGUF = ("Q8_0", "Q4_K", "Q5_1", "IQ4_XS")
FILES = ("plain", *KINDS, "legacy", "header", "gguf")
SIZE = RequestSize(60, 12)
TP = [
    {"tensor_parallel_degree": ranks, "split_scheme": scheme}
    for ranks, scheme in ((4, "megatron"), (3, "row"), (3, "column"), (4, "2d"))
]
PP = [
    {"pipefusion_degree": 3},
    {"pipefusion_degree": 2, "offload_modulation": True},
    {"pipefusion_degree": 2, "tensor_parallel_degree": 2},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A shallow Flux in every format: name -> path."""
    folder = tmp_path_factory.mktemp("formats")
    state = weights_module().state_dict(shallow_flux())
    plain = save_whole(state, folder / "plain.safetensors")
    found = {"plain": plain, "gguf": folder / "all.gguf"}
    for kind in FILES[1:-1]:
        found[kind] = write_scaled(folder / f"{kind}.safetensors", state, kind)
    write_gguf(found["gguf"], state, GGUF)
    return found


def stand_in(config: ParallelConfig, place: dict[str, int]) -> mesh.Mesh:
    """The mesh of one rank without its groups: loading needs none of them."""
    axes = {axis: Axis(None, place[axis], size, ()) for axis, size in config.degrees.items()}
    tp, rank = config.tensor_parallel_degree, place["tp"]
    rows = max(r for r in range(1, tp + 1) if tp % r == 0 and r * r <= tp)
    grid = {
        "tp_inputs": Axis(None, rank // (tp // rows), rows, ()),
        "tp_outputs": Axis(None, rank % (tp // rows), tp // rows, ()),
    }
    return replace(mesh.single(), **axes, **grid)


def loaded(config: ParallelConfig, groups: mesh.Mesh, path, dtype: str = "bf16"):
    engine = Engine(config, groups)
    engine.load("tiny", str(path), dtype)
    return engine.models["tiny"]


@pytest.mark.parametrize("degrees", [{}, *TP, *PP], ids=str)
@pytest.mark.parametrize("kind", FILES)
def test_weights_are_those_of_the_loaded_rank(files, kind, degrees):
    config = ParallelConfig(**degrees)
    for plan in describe(config, open_checkpoint(str(files[kind])), SIZE, torch.bfloat16):
        model = loaded(config, stand_in(config, plan.place), files[kind])
        assert plan.weight_bytes + plan.host_bytes == model.report.weight_bytes
        held = [model.transformer, *chain.from_iterable(model.cache.hosted)]
        packed = [
            module
            for module in chain.from_iterable(root.modules() for root in held)
            if isinstance(module, PackedWeight) and not module.device.type == "meta"
        ]
        largest = max([2 * weight.shape.numel() for weight in packed], default=0)
        assert plan.scratch_bytes == largest + max(map(made, packed), default=0)


def made(weight: PackedWeight) -> int:
    """Bytes that dequantizing holds besides the weight, which is small enough to be dequantized at once."""
    stored = weight.packed
    return round(weight.shape.numel() * effort_of(stored.format, stored.settings).made)


@pytest.mark.parametrize(
    "kind, matmul, fuses, held",
    [
        ("int8_tensorwise", "auto", True, "inputs"),
        ("int8_tensorwise", "auto", False, "turns"),  # multiplied some tokens at a time
        ("int8_tensorwise", "weight only", True, "weight"),
        ("nvfp4", "native", True, "weight"),  # of which a CPU has no product
    ],
)
def test_layers_that_multiply_natively_need_no_weight(files, monkeypatch, kind, matmul, fuses, held):
    pytest.importorskip("comfy_kitchen")
    monkeypatch.setattr(kernels, "_fuses", lambda name: fuses)
    monkeypatch.setattr(torch.version, "cuda", None)  # one for CUDA plans for ranks that have GPUs
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(files[kind]), "bf16", matmul)
    model = engine.models["tiny"]
    assert {choice.kernel is not None for choice in model.choices.values()} == {matmul != "weight only"}
    (plan,) = describe(ParallelConfig(), open_checkpoint(str(files[kind])), SIZE, model.dtype, model.choices)
    assert plan.weight_bytes == model.report.weight_bytes
    matrices = (model.checkpoint.shapes[name] for name in model.choices)
    inputs = SIZE.tokens * max(columns for rows, columns in matrices if columns > rows)
    assert plan.scratch_bytes == inputs if held == "inputs" else plan.scratch_bytes > 0


def test_what_dequantizing_makes_is_needed_at_every_request(files):
    """The memory for a weight stays from the first one on."""
    free_scratch()
    (plan,) = describe(ParallelConfig(), open_checkpoint(str(files["gguf"])), SIZE, torch.bfloat16)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(files["gguf"]), "bf16")
    engine.sample(golden_request("euler_simple", "tiny")[0], Callbacks())
    held = scratch_bytes(engine.mesh.device)
    assert 0 < held < plan.scratch_bytes
    assert request_need(plan).likely - request_need(plan, held).likely == held


@pytest.mark.parametrize("kind, ranks", [*((kind, 5) for kind in FILES), ("header", 2)])
def test_sharded_weights_are_those_of_the_loaded_rank(files, kind, ranks):
    """Equal to the values that FSDP holds; its padding, at most a row of each tensor, is not counted."""
    config = ParallelConfig(ulysses_degree=ranks, shard_weights=True)
    whole = describe(ParallelConfig(), open_checkpoint(str(files[kind])), SIZE, torch.bfloat16)[0]
    plans = describe(config, open_checkpoint(str(files[kind])), SIZE, torch.bfloat16)
    assert sum(plan.weight_bytes for plan in plans) == whole.weight_bytes
    for plan in plans:
        dist.init_process_group("fake", store=FakeStore(), rank=plan.rank, world_size=ranks)
        try:
            weights = init_device_mesh("cpu", (ranks,))
            model = loaded(config, replace(mesh.single(), weights=weights), files[kind])
        finally:
            dist.destroy_process_group()
        assert plan.weight_bytes == model.report.weight_bytes


def test_the_block_that_runs_is_gathered_twice_and_the_next_one_once(files):
    """test_fsdp.py shows that it is so, and dry runs of released models (test_scaling_page.py), in which the
    layers of modulation are gathered apart."""
    path = str(files["float8_e4m3fn"])
    config = ParallelConfig(ulysses_degree=2, shard_weights=True)
    sizes = {"transformer_blocks": 0, "single_transformer_blocks": 0, "": 0}
    transformer = loaded(ParallelConfig(), mesh.single(), path).transformer
    checkpoint = open_checkpoint(path)
    apart = tuple(f"{layer}." for block in checkpoint.block_names for layer in checkpoint.modulation[block])
    for name, parameter in transformer.named_parameters():
        block = next((each for each in sizes if each and name.startswith(f"{each}.")), "")
        if not block or (name.startswith(f"{block}.0.") and not name.startswith(apart)):
            sizes[block] += parameter.numel() * parameter.element_size()
    whole = 3 * max(sizes["transformer_blocks"], sizes["single_transformer_blocks"]) + sizes[""]

    def gathered(config: ParallelConfig, size: RequestSize) -> int:
        return describe(config, checkpoint, size, torch.bfloat16)[0].gathered_bytes

    assert gathered(config, RequestSize()) == whole
    # a call of its own computes modulation while its block runs
    bytes_of = {name: each.numel() * each.element_size() for name, each in transformer.named_parameters()}
    layer = max(sum(bytes_of[name] for name in bytes_of if name.startswith(each)) for each in apart)
    assert gathered(config, RequestSize(drained=True)) == whole + 2 * layer
    replicas = ParallelConfig(data_parallel_degree=2, shard_weights=True)
    assert gathered(replicas, RequestSize(batch=2)) == whole


def test_weights_that_stay_in_float32_are_counted_so(tmp_path):
    path = write_checkpoint(tmp_path / "h3.safetensors", "minimax-h3")
    model = loaded(ParallelConfig(), mesh.single(), path)
    in_float32 = [p for p in model.transformer.parameters() if p.dtype == torch.float32]
    plan = describe(ParallelConfig(), open_checkpoint(str(path)), RequestSize(), torch.bfloat16)[0]
    assert in_float32 and plan.weight_bytes == model.report.weight_bytes


def larger(family: str):
    """A golden request of one step with twice the latent's height and width."""
    case = {"wan21-t2v": "wan21-t2v__euler_simple"}.get(family, f"{family}__euler_simple")
    sample = golden_request("euler_simple")[0] if family == "flux-dev" else golden(case)[0]
    tensors = {**sample.tensors, "sigmas": sample.tensors["sigmas"][:2]}
    for name in ("noise", "latent"):
        *shape, height, width = tensors[name].shape
        tensors[name] = torch.randn(*shape, 2 * height, 2 * width)
    return replace(sample, tensors=tensors)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["flux-dev", "wan21-t2v", "qwen-image", "lumina2", "krea2"])
def test_activations_are_about_what_a_request_allocates(tmp_path, family, dtype):
    """As activations.py says; latents of LiveMemory are whole tensors, as on any device."""
    path = write_checkpoint(tmp_path / f"{family}.safetensors", family)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), dtype)
    model, sample = engine.models["tiny"], larger(family)
    memory = LiveMemory()
    with memory:
        engine.sample(sample, Callbacks())
    *_, frames, height, width = (1, *sample.tensors["noise"].shape[2:])
    pt, ph, pw = model.family.latent.patch(model.checkpoint.config)
    image = frames * height * width // (pt * ph * pw)
    text = sample.tensors["positive.c_crossattn"].shape[1]
    plan = describe(ParallelConfig(), open_checkpoint(str(path)), RequestSize(image, text), model.dtype)[0]
    measured = memory.peak - model.cache.most_bytes - plan.kv_bytes
    assert 0.75 <= plan.activation_bytes / measured <= 1.45


@pytest.mark.parametrize("case, other", [("flux2-edit-zero", "flux2-edit"), ("krea2-style", "krea2-edit")])
def test_references_at_timestep_0_hold_little_more(tmp_path, case, other):
    """A modulation for each token is made where it is used: all parts at once were a fifth and two fifths."""
    peaks = []
    for name in (case, other):
        path = write(tmp_path / f"{name}.safetensors", name)
        engine = Engine(ParallelConfig(), mesh.single())
        engine.load("tiny", str(path), "fp32")
        sample = request(name, "tiny")
        tensors = {
            key: torch.randn(*value.shape[:-2], 2 * value.shape[-2], 2 * value.shape[-1])
            if key in ("noise", "latent") or "ref_latents." in key
            else value
            for key, value in sample.tensors.items()
        }
        tensors["sigmas"] = tensors["sigmas"][:2]
        memory = LiveMemory()
        with memory:
            engine.sample(replace(sample, tensors=tensors), Callbacks())
        peaks.append(memory.peak)
    assert peaks[0] < 1.1 * peaks[1]


@pytest.mark.parametrize("videos", [1, 2, 3])
def test_activations_of_control_videos_are_about_what_they_allocate(tmp_path, videos):
    """Up to 1.65 times as much in float32: the estimate is fitted to bfloat16, whose float32 tensors count
    double."""
    engine = Engine(ParallelConfig(), mesh.single())
    path = str(write(tmp_path / "vace.safetensors", "wan21-vace-two"))
    pristine = engine.check_load(path, "default").checkpoint
    engine.load("tiny", path, "default")
    model = engine.models["tiny"]
    noise = torch.randn(1, 16, 3, 32, 32)
    tensors = {**request("wan21-vace-two").tensors, "noise": noise, "latent": noise, "sigmas": torch.ones(2)}
    for side in ("positive", "negative"):
        tensors[f"{side}.vace_context"] = torch.randn(1, videos, 96, 3, 32, 32)
        tensors[f"{side}.vace_strength"] = torch.ones(1, videos)
    sample = replace(request("wan21-vace-two"), tensors=tensors)
    memory = LiveMemory()
    with memory:
        engine.sample(sample, Callbacks())
    size = size_of(sample, engine.config, model.checkpoint)
    plan = describe(engine.config, pristine, size, model.dtype)[0]
    assert 0.75 <= plan.activation_bytes / (memory.peak - model.cache.most_bytes - plan.kv_bytes) <= 1.65


@pytest.mark.parametrize("is_fitted", [True, False], ids=["fitted", "by layers"])
def test_a_batch_through_a_one_patch_pipeline_is_planned_as_ranks_count_it(tmp_path, monkeypatch, is_fitted):
    """Sample by sample; ranks would refuse what the planner takes for small."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "tiny.safetensors", "krea2")))
    if not is_fitted:
        monkeypatch.delitem(activations.FITTED, checkpoint.family.name)
    shape = shape_of(checkpoint, checkpoint.dtype)
    plan = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=1)
    planned, counted = [], []
    for batch in (1, 4):
        planned.append(held(shape, plan, RequestEstimate(4096, 512, 20, 1, batch)).activations)
        ranks = describe(plan, checkpoint, RequestSize(batch=batch, prompts=1))
        counted.append(max(rank.activation_bytes for rank in ranks))
    assert planned == pytest.approx(counted, rel=0.25)
    assert planned[1] - planned[0] == pytest.approx(counted[1] - counted[0], rel=0.01, abs=8)
    assert counted[1] < 2 * counted[0]


def test_activations_divide_over_tokens_and_heads(files):
    def told(**fields):
        plans = describe(ParallelConfig(**fields), open_checkpoint(str(files["plain"])), RequestSize())
        return plans[0].activation_bytes

    assert told(ulysses_degree=4) < 0.6 * told()
    assert told(tensor_parallel_degree=4) < 0.7 * told()
    assert told(pipefusion_degree=2) <= told()


def test_the_script_prints_json(files, monkeypatch, capsys):
    script = Path(__file__).parents[2] / "scripts" / "describe.py"
    path = str(files["nvfp4"])
    monkeypatch.setattr(sys, "argv", ["describe.py", path, "--tensor-parallel-degree", "2", "--json"])
    runpy.run_path(str(script), run_name="__main__")
    found = json.loads(capsys.readouterr().out)
    plans = describe(ParallelConfig(tensor_parallel_degree=2), open_checkpoint(path), RequestSize())
    assert found == {"ranks": [json.loads(json.dumps(plan.as_dict())) for plan in plans]}
    wanted = {"weight_bytes", "scratch_bytes", "kv_bytes", "modulation_bytes", "activation_bytes"}
    assert wanted <= found["ranks"][0].keys()
