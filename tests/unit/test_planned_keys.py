"""Keys and values that a request holds: stale ones in buffers, and those of prompts, as they are planned."""

import itertools
from dataclasses import replace

import pytest
import torch
from families import LATENT_FORMATS, golden, model_call
from ranks.flux_requests import shortened
from tiny import write_checkpoint
from variants import VARIANTS, request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.parallel.attention.kv_buffers import KVBuffers
from backend.parallel.block_streams import block_list
from backend.parallel.modulation.modulation_cache import CachedLayer
from backend.parallel.sequence import Span
from backend.planner.machine import RequestEstimate
from backend.planner.memory import held
from backend.rank_plan import RequestSize, describe
from backend.rank_plan.request_size import size_of
from backend.rank_plan.shape_of import shape_of
from backend.sampling import model_call as calls
from backend.sampling import model_runner, step_loop
from backend.sampling.step_loop import Callbacks

SIDES = ("positive", "negative")
#: Keys and values that a request holds, as a multiple of those that are planned: of families that pad text,
#: or give it to every block anew.
MORE_KV = {"z-image-turbo": 1.27, "hidream": 1.29, "hunyuan-video15": 1.05}
CROSS = ("ltxv", "wan21-t2v", "pixart-sigma", "sana")
PLANS = [
    {"cfg_degree": 2},
    {"ulysses_degree": 2},
    {"tensor_parallel_degree": 2},
    {"pipefusion_degree": 2, "num_pipeline_patch": 1},
    {"data_parallel_degree": 2},
]


@pytest.mark.parametrize("family", CROSS)
def test_as_many_bytes_as_a_request_caches_are_planned(family, tmp_path):
    """Of each prompt and sample."""
    path = str(write_checkpoint(tmp_path / "tiny.safetensors", family))
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", path, "default")
    layers = [each for each in engine.models["tiny"].cache.layers if each.kind == "prompt"]
    keys = [each for each in layers if isinstance(each.layer, torch.nn.Linear)]
    found = []
    sample = shortened(golden(f"{family}__euler_simple", "tiny")[0], 1)
    engine.sample(sample, Callbacks(lambda step, x0: found.append(sum(each.bytes for each in keys))))
    text = sample.tensors["positive.c_crossattn"].shape[1]
    dtype = engine.models["tiny"].dtype

    def planned(**size) -> int:
        request = RequestSize(64, text, **size)
        return describe(ParallelConfig(), open_checkpoint(path), request, dtype)[0].kv_bytes

    assert sample.cfg != 1.0 and planned(prompts=2) == found[0] > 0
    assert planned(prompts=1) == found[0] / 2
    assert planned(prompts=2, batch=3) == 3 * planned(prompts=2)


@pytest.mark.parametrize("features", [True, False])
@pytest.mark.parametrize("name", ["wan21-i2v", "wan21-flf2v"])
def test_features_of_an_image_are_cached_and_planned(name, features, tmp_path):
    """Without them the prompt is read in their place, and cached twice."""
    path = str(write(tmp_path / "tiny.safetensors", name))
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", path, "default")
    model = engine.models["tiny"]
    sample = shortened(request(name), 2)
    tensors = {key: value for key, value in sample.tensors.items() if not key.endswith("clip_fea")}
    clip = sample.tensors["positive.clip_fea"]
    for side in SIDES:
        tensors[f"{side}.c_crossattn"] = sample.tensors["positive.c_crossattn"]
        tensors |= {f"{side}.clip_fea": clip} if features else {}
    sample = replace(sample, tensors=tensors)
    cached: list[int] = []
    engine.sample(sample, noting_prompts(model, cached))
    size = size_of(sample, ParallelConfig(), model.checkpoint)
    tokens = clip.shape[1] if features else size.text_tokens
    assert size.image_features == tokens
    [plan] = describe(ParallelConfig(), open_checkpoint(path), size, model.dtype)
    assert plan.kv_bytes == cached[-1] > 0
    size_of_usual = replace(size, image_features=None)
    usual = describe(ParallelConfig(), open_checkpoint(path), size_of_usual, model.dtype)[0]
    of_clip = 50 if name == "wan21-flf2v" else 257  # as many as it has positions
    assert usual.kv_bytes * (size.text_tokens + tokens) == plan.kv_bytes * (size.text_tokens + of_clip)


@pytest.mark.parametrize("family", CROSS)
def test_stale_steps_of_a_batch_hold_no_more_than_is_planned(family, tmp_path, monkeypatch):
    """The first step of a pipeline takes samples one by one, the others all at once."""
    whole = step_loop.Denoiser._micro_batches

    def as_in_a_pipeline(self, patch, index, prompts):
        contexts = whole(self, patch, index, prompts)
        spans = [Span(i, i + 1) for i in range(self.x.shape[0])] if patch is self.whole else [None]
        return [replace(each, sample_span=span or each.sample_span) for each in contexts for span in spans]

    monkeypatch.setattr(step_loop.Denoiser, "_micro_batches", as_in_a_pipeline)
    path = str(write_checkpoint(tmp_path / "tiny.safetensors", family))
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    engine.load("tiny", path, "default")
    sample = golden(f"{family}__euler_simple", "tiny")[0]
    tensors = sample.tensors | {
        name: sample.tensors[name].repeat_interleave(2, 0) for name in ("noise", "latent")
    }
    cached: list[int] = []
    two = replace(sample, num_pipeline_patch=2, tensors=tensors | {"sigmas": sample.tensors["sigmas"][:4]})
    engine.sample(two, noting_prompts(engine.models["tiny"], cached))
    assert len(cached) == 3 and len(set(cached)) == 1


@pytest.mark.parametrize("family", CROSS)
def test_samples_of_a_call_that_run_one_by_one_leave_nothing(family, tmp_path, monkeypatch):
    """Each one's keys and values are there while it runs, and a call may have hundreds of samples."""
    monkeypatch.setattr(calls, "samples_at_once", lambda tokens: 1)
    run, held = model_runner.Runner.run, []

    def noted(self, *arguments):
        output = run(self, *arguments)
        held.append(prompt_bytes(self.model))
        return output

    monkeypatch.setattr(model_runner.Runner, "run", noted)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / "tiny.safetensors", family)), "default")
    sample = golden(f"{family}__euler_simple", "tiny")[0]
    engine.forward(model_call(sample, engine.models["tiny"].family.name, 3))
    assert len(held) == 3 and len(set(held)) == 1 and held[0] > 0


@pytest.mark.parametrize("fields", PLANS, ids=str)
@pytest.mark.parametrize("family", [*CROSS, "ltx2", "ltx23", "wan21-vace", "wan21-i2v"])
def test_the_planner_counts_as_ranks_do(family, fields, tmp_path):
    made = write if family in VARIANTS else write_checkpoint
    checkpoint = open_checkpoint(str(made(tmp_path / "tiny.safetensors", family)))
    plan = ParallelConfig(**fields)
    shape = shape_of(checkpoint, checkpoint.dtype)
    ranks = describe(plan, checkpoint, RequestSize(2048, 128, batch=2, calls=1))
    planned = held(shape, plan, RequestEstimate(2048, 128, 20, 2, batch=2)).keys
    assert planned == pytest.approx(max(rank.kv_bytes for rank in ranks), rel=0.01)
    assert (planned > 0) == (family != "ltx23")


def recorded_buffers(monkeypatch) -> list[KVBuffers]:
    """The buffers of every request from now on."""
    made = []

    def recorded(*arguments):
        made.append(KVBuffers(*arguments))
        return made[-1]

    monkeypatch.setattr(model_runner, "KVBuffers", recorded)
    return made


def prompt_bytes(model) -> int:
    """The bytes of what cross-attention caches of prompts now."""
    lists = [block_list(model.transformer, name) for name in model.family.blocks.lists]
    every = itertools.chain(*(blocks.modules() for blocks in lists))
    return sum(each.bytes for each in every if isinstance(each, CachedLayer) and each.kind == "prompt")


def noting_prompts(model, found: list[int]) -> Callbacks:
    """Callbacks that note the bytes of what cross-attention caches of prompts."""
    return Callbacks(lambda step, x0: found.append(prompt_bytes(model)))


@pytest.mark.parametrize("family", LATENT_FORMATS)
def test_a_family_holds_the_keys_and_values_that_are_planned(tmp_path, family, monkeypatch):
    """Of every attention call: VACE's control blocks and LTX-2's two latents have their own. Two patches in
    one process hold what two stages hold together."""
    made = recorded_buffers(monkeypatch)
    path = str(write_checkpoint(tmp_path / "tiny.safetensors", family))
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    pristine = engine.check_load(path, "default").checkpoint
    engine.load("tiny", path, "default")
    sample = golden(f"{family}__euler_simple")[0]
    short = {**sample.tensors, "sigmas": sample.tensors["sigmas"][:3]}
    sample = replace(sample, num_pipeline_patch=2, tensors=short)
    model = engine.models["tiny"]
    cached: list[int] = []
    engine.sample(sample, noting_prompts(model, cached))
    config = ParallelConfig(pipefusion_degree=2)
    size = size_of(sample, config, model.checkpoint)
    planned = sum(plan.kv_bytes for plan in describe(config, pristine, size, model.dtype))
    held = made[0].bytes + cached[-1]
    assert planned <= held <= MORE_KV.get(family, 1.0) * planned


def test_keys_and_values_of_every_control_video_are_planned(tmp_path, monkeypatch):
    """Two for the positive prompt and one for the negative; the plan is that of the most for both."""
    made = recorded_buffers(monkeypatch)
    path = str(write(tmp_path / "tiny.safetensors", "wan21-vace-two"))
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    pristine = engine.check_load(path, "default").checkpoint
    engine.load("tiny", path, "default")
    model = engine.models["tiny"]
    config = ParallelConfig(pipefusion_degree=2)
    sample = replace(request("wan21-vace-two"), num_pipeline_patch=2)
    one = sample.tensors["negative.vace_context"]
    found = []
    for videos in (1, 2, 3):
        context = {f"{side}.vace_context": one.expand(1, videos, *one.shape[2:]) for side in SIDES}
        context |= {f"{side}.vace_strength": torch.ones(1, videos) for side in SIDES}
        sent = replace(sample, tensors={**sample.tensors, **context, "sigmas": sample.tensors["sigmas"][:3]})
        cached: list[int] = []
        engine.sample(sent, noting_prompts(model, cached))
        size = size_of(sent, config, model.checkpoint)
        plans = describe(config, pristine, size, model.dtype)
        assert size.controls == videos
        assert sum(plan.kv_bytes for plan in plans) == made[-1].bytes + cached[-1]
        found.append(plans[0].bytes_per_step["pipeline"])
    assert size_of(sample, config, model.checkpoint).controls == 2
    assert found == [found[0] * states // 2 for states in (2, 3, 4)]
