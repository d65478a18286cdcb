"""describe() against what the ranks counted and against the published formulas."""

import gc
import math
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from families import golden
from tiny import golden_request, write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.parallel.modulation.modulation_chunks import AHEAD
from backend.rank_plan import RequestSize, describe, weights, workload
from backend.rank_plan.request_size import size_of
from backend.sampling.step_loop import Callbacks

#: The tiny Flux and the golden request of 20 x 12 latent pixels: rows, width, blocks, bytes of one
#: activation.
TEXT, IMAGE, WIDTH, DOUBLE, SINGLE = 12, 60, 256, 4, 8
LAYERS = DOUBLE + SINGLE
A = (TEXT + IMAGE) * WIDTH * 4
#: Bytes sent per rank and forward (perf formulas of the methods' papers), N ranks.
FORMULAS = {
    "ulysses": lambda n: 4 * A * LAYERS * (n - 1) / n**2,
    "ring": lambda n: 2 * A * LAYERS * (n - 1) / n,
    # attention and MLP, and the modulation of one embedding (two layers of 6 widths, one of 3)
    "tensor": lambda n: (
        (n - 1) / n * (2 * A * (2 * DOUBLE + SINGLE) + 4 * WIDTH * (12 * DOUBLE + 3 * SINGLE))
    ),
    "pipeline": lambda n: A,
}
DEGREES = {
    "ulysses": "ulysses_degree",
    "ring": "ring_degree",
    "tensor": "tensor_parallel_degree",
    "pipeline": "pipefusion_degree",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("models") / "flux-tiny.safetensors")
    return Engine(ParallelConfig(), mesh.single()).check_load(str(path), "default").checkpoint


def plans(checkpoint, **fields):
    return describe(ParallelConfig(**fields), checkpoint, RequestSize(IMAGE, TEXT, prompts=1))


@pytest.mark.parametrize("mechanism", FORMULAS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_formulas(checkpoint, mechanism, ranks):
    sent = [
        plan.bytes_per_step.get(mechanism, 0) for plan in plans(checkpoint, **{DEGREES[mechanism]: ranks})
    ]
    formula = FORMULAS[mechanism](ranks)
    assert max(sent) <= 1.02 * formula
    assert sum(sent) / len(sent) >= 0.7 * formula or mechanism == "pipeline"


def test_traffic_of_a_hybrid_does_not_grow_with_patches(checkpoint):
    """PP x SP sends only fresh rows: the same bytes at 2 and at 8 patches."""
    hybrid = (ParallelConfig(pipefusion_degree=2, ring_degree=2, num_pipeline_patch=m) for m in (2, 8))
    few, many = (describe(config, checkpoint, RequestSize(2048, 128))[0].bytes_per_step for config in hybrid)
    assert few["ring"] == pytest.approx(many["ring"], rel=0.02)


def test_weights_divide_over_stages(checkpoint):
    """Each stage holds its blocks and the shared layers; together they hold every block once."""
    whole = plans(checkpoint)[0].weight_bytes
    parts = plans(checkpoint, pipefusion_degree=3)
    shared = (sum(plan.weight_bytes for plan in parts) - whole) / 2
    assert 0 < shared < 0.2 * whole
    assert all(plan.weight_bytes - shared <= 1.15 * (whole - shared) / 3 for plan in parts)
    blocks = [plan.blocks for plan in parts]
    assert blocks[0][0] == 0 and blocks[-1][1] == LAYERS and all(a[1] == b[0] for a, b in pairwise(blocks))


def test_offloaded_modulation_is_counted_apart(checkpoint):
    whole, offloaded = plans(checkpoint)[0], plans(checkpoint, offload_modulation=True)[0]
    modulation = 4 * (DOUBLE * 2 * 6 + SINGLE * 3) * WIDTH * (WIDTH + 1)
    assert (
        whole.host_bytes == 0
        and offloaded.host_bytes == modulation == whole.weight_bytes - offloaded.weight_bytes
    )
    assert "MB in host memory" in str(offloaded)


def test_modulation_ahead_has_a_row_a_call_and_prompt(checkpoint):
    """Up to modulation_chunks.AHEAD; samples share theirs, and a stage has those of its own blocks, whoever
    computes them. FSDP shards modulation apart, and computes it ahead too."""
    row = 4 * WIDTH * (DOUBLE * 2 * 6 + SINGLE * 3)

    def told(calls=28, config=None, **size):
        request = RequestSize(IMAGE, TEXT, calls=calls, **size)
        plans = describe(ParallelConfig(**(config or {})), checkpoint, request)
        return [plan.modulation_bytes for plan in plans]

    assert told() == told(batch=3) == [2 * 28 * row] and told(6, prompts=1) == [6 * row]
    assert told(100000) == [AHEAD // row * row]
    assert sum(told(config={"pipefusion_degree": 3})) == 2 * 28 * row and "modulation 2.1 MB" in str(
        plans(checkpoint)[0]
    )
    assert told(config={"ulysses_degree": 2, "shard_weights": True}, batch=3) == [2 * 28 * row] * 2


def test_explicit_stages_and_stale_buffers(checkpoint):
    reuse = plans(checkpoint, pipefusion_degree=2, attn_layer_num_for_pp="3,9")
    extrapolate = plans(checkpoint, pipefusion_degree=2, attn_layer_num_for_pp="3,9", stale_kv="extrapolate")
    assert [plan.blocks for plan in reuse] == [(0, 3), (3, 12)]
    assert [plan.kv_bytes for plan in reuse] == [2 * A * 3, 2 * A * 9]
    assert [plan.kv_bytes for plan in extrapolate] == [2 * plan.kv_bytes for plan in reuse]


@pytest.mark.parametrize("degree", [1, 2])
def test_one_prompt_is_planned_on_every_rank_of_cfg(checkpoint, degree):
    """Each of them computes it: keys and values of none were planned under cfg_degree 2."""
    found = plans(checkpoint, cfg_degree=degree, pipefusion_degree=2)
    assert [plan.kv_bytes for plan in found] == [A * LAYERS] * len(found)


def test_keys_and_values_that_are_cached_are_counted(tmp_path):
    """Those of Qwen-Image 2.1's text, as many bytes as a request keeps in one process; ranks share them, and
    in a step in steady state no row of text is sent."""
    path = str(write_checkpoint(tmp_path / "qwen.safetensors", "qwen-image21"))
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", path, "default")
    attention, found = engine.models["tiny"].stage.attention, []
    engine.sample(
        golden("qwen-image21__euler_simple")[0],
        Callbacks(
            lambda step, x0: found.append(
                sum(pair.numel() * pair.element_size() for pair in attention.static_text.values())
            )
        ),
    )
    cached = found[-1]

    def told(text=12, **fields):
        opened = engine.check_load(path, "default").checkpoint
        return describe(ParallelConfig(**fields), opened, RequestSize(80, text))[0]

    assert told().kv_bytes == cached == 4 * 2 * 2 * 12 * 128 * 4 and told(text=0).kv_bytes == 0
    for degree in ("ulysses_degree", "ring_degree", "cfg_degree", "tensor_parallel_degree"):
        assert told(**{degree: 2}).kv_bytes == cached / 2
    assert told(pipefusion_degree=2, num_pipeline_patch=1).kv_bytes == cached / 2
    assert (
        told(pipefusion_degree=2).kv_bytes == 2 * 2 * 2 * (92 + 12) * 128 * 4
    )  # the buffers of stale ones have them too, and those of text among itself
    for degree in ("ulysses_degree", "pipefusion_degree", "tensor_parallel_degree"):
        assert (
            told(**{degree: 2}, num_pipeline_patch=1).bytes_per_step
            == told(text=0, **{degree: 2}, num_pipeline_patch=1).bytes_per_step
        )


def test_sharded_weights_divide_over_the_ranks_that_hold_the_same(checkpoint):
    whole = plans(checkpoint)[0].weight_bytes
    assert plans(checkpoint, ulysses_degree=2, shard_weights=True)[0].weight_bytes == pytest.approx(
        whole / 2, rel=0.01
    )


def test_gathers_of_sharded_weights_are_counted(checkpoint):
    """A rank sends its shards of every block to the others once for each prompt; those of modulation, which
    is computed ahead, and what is in no block never."""
    sizes = {name: 4 * math.prod(checkpoint.shapes[name]) for name in checkpoint.parameters}
    modulation = {layer for name in checkpoint.block_names for layer in checkpoint.modulation[name]}
    blocks = {name: size for name, size in sizes.items() if checkpoint.parameters[name][0] is not None}
    ahead = sum(size for name, size in blocks.items() if name.rpartition(".")[0] in modulation)
    assert 0 < ahead < sum(blocks.values()) < sum(sizes.values())

    def sent(**fields) -> int:
        config = ParallelConfig(shard_weights=True, **fields)
        return describe(config, checkpoint, RequestSize(IMAGE, TEXT, prompts=2))[0].bytes_per_step["weights"]

    once = sum(blocks.values()) - ahead
    assert sent(ulysses_degree=2) == pytest.approx(2 * once / 2, rel=0.01)
    assert sent(ulysses_degree=4) == pytest.approx(2 * once * 3 / 4, rel=0.01)
    assert sent(ulysses_degree=2, cfg_degree=2) == sent(ulysses_degree=2) / 2
    assert sent(data_parallel_degree=2) == sent(ulysses_degree=2)
    assert "weights" not in plans(checkpoint, ulysses_degree=2)[0].bytes_per_step


@pytest.mark.parametrize("scheme, degree, different", [("megatron", 4, 1), ("column", 3, 2), ("2d", 4, 1)])
def test_tensor_ranks_that_hold_as_much_are_counted_once(tmp_path, monkeypatch, scheme, degree, different):
    """Of 256 columns, three ranks have 86, 85 and 85. The plans are those of ranks that are counted one by
    one, which took seconds of 16 ranks of a large model."""
    path = str(write_checkpoint(tmp_path / "flux-tiny.safetensors"))
    fields = {"tensor_parallel_degree": degree, "split_scheme": scheme}
    counted = []

    def held(*arguments):
        counted.append(arguments)
        return weights.held_parameters(*arguments)

    monkeypatch.setattr(workload, "held_parameters", held)
    found = plans(open_checkpoint(path), **fields)
    assert len(counted) == different
    monkeypatch.setattr(workload.Workload, "tensor_ranks_alike", range(degree))
    assert plans(open_checkpoint(path), **fields) == found and len(counted) == different + degree


def test_text_says_it_in_one_line(checkpoint):
    line = str(plans(checkpoint, pipefusion_degree=2, ulysses_degree=2)[1])
    assert (
        line.startswith("rank 1: stage 0, blocks 0-5, 4 heads, 2 patches")
        and "ulysses" in line
        and "\n" not in line
    )


def test_prompts_are_those_of_the_side_with_most(checkpoint):
    """Three positive ones and a negative one: a rank of the positive side keeps keys and values of three."""
    sample, _ = golden_request("size20x12")
    further = {
        f"positive{number}.{name}": sample.tensors[f"positive.{name}"]
        for number in (2, 3)
        for name in ("c_crossattn", "y", "guidance")
    }
    negative = {f"negative.{name}": sample.tensors[f"positive.{name}"] for name in ("c_crossattn", "y")}
    sample = replace(sample, tensors={**sample.tensors, **negative, **further})

    def held(**fields) -> list[int]:
        config = ParallelConfig(pipefusion_degree=2, **fields)
        size = size_of(sample, config, checkpoint)
        return [plan.kv_bytes for plan in describe(config, checkpoint, size, torch.float32)]

    each = [size // 4 for size in held()]
    assert held(cfg_degree=2) == [3 * size for size in each] * 2


def test_what_plans_find_of_a_checkpoint_is_cached_with_it(tmp_path):
    """Alike for all requests, and gone with the checkpoint, which maps a whole file."""
    opened = open_checkpoint(str(write_checkpoint(tmp_path / "flux-tiny.safetensors")))
    describe(ParallelConfig(), opened, RequestSize())
    found = dict(workload.FOUND[opened])
    describe(ParallelConfig(), opened, RequestSize(64, 8))
    assert found and workload.FOUND[opened].keys() == found.keys()
    assert all(workload.FOUND[opened][key] is value for key, value in found.items())
    gone = weakref.ref(opened)
    del opened
    gc.collect()
    assert gone() is None
