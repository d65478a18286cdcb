"""PipeFusion's patches and the memos, in one process that computes patches in a pipeline's order."""

from dataclasses import replace

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from tiny import BLOCKS as OF_A_KIND
from tiny import batch_request, golden_request, relative, write_shallow_flux
from tolerance import assert_same_bits, assert_ulps

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.parallel import mesh
from backend.parallel.attention import attention_kernels
from backend.parallel.attention.attention_hook import Attention
from backend.parallel.modulation import modulation_cache as cached
from backend.parallel.modulation import modulation_chunks, modulation_plan
from backend.parallel.sequence import SequenceLengths, Span, patches
from backend.parallel.step_context import StepContext
from backend.runtime.opaque_ops import RUNNING, Running
from backend.sampling import model_runner, request
from backend.sampling.step_loop import Callbacks

#: Of the shallow Flux, double and single ones.
BLOCKS = 2 * OF_A_KIND
#: Of the golden case, a model call each.
STEPS = 6


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    path = write_shallow_flux(tmp_path_factory.mktemp("models") / "flux.safetensors")
    engine.load("tiny", str(path), "default")
    return engine


def simulate(engine, case="euler_simple", **changes):
    sample, _ = golden_request(case)
    return engine.sample(replace(sample, **changes), Callbacks())[0]


def same_latent(engine, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(patch, synchronous result of its tokens): a patch step after a synchronous step on the same latent."""
    model = engine.models["tiny"]
    sample = replace(golden_request("euler_simple")[0], num_pipeline_patch=count)
    built = request.build(sample, engine.config, model.checkpoint, model.dtype, torch.device("cpu"))
    x, sigma, items = built.start(), built.sigmas[0], Span(0, 1)
    with torch.inference_mode(), model_runner.running(model, built) as calls:
        calls.plan([sigma, sigma])
        calls.begin_evaluation(0, 0.0)
        whole = calls.run(x, sigma, StepContext("positive", 0, items))
        calls.begin_evaluation(1, 0.0)
        return [
            (
                calls.run(x, sigma, StepContext("positive", 1, items, patch.image, with_text=index == 0)),
                whole[:, patch.image.indices],
            )
            for index, patch in enumerate(patches(SequenceLengths(12, 64, "first"), count))
        ]


@pytest.mark.parametrize("count", [2, 4, 7])
def test_patches_of_the_same_latent_equal_the_whole(engine, count):
    """With buffers that hold every token of this very latent, each patch must give the synchronous result, of
    fewer tokens: to rounding.
    """
    for part, whole in same_latent(engine, count):
        assert_ulps(part, whole, BLOCKS)


def test_stale_keys_and_values_are_used(engine):
    exact, stale = simulate(engine, num_pipeline_patch=1), simulate(engine, num_pipeline_patch=4)
    assert 1e-4 < relative(stale, exact) < 0.2


def by_hand(query, key, value, **named):
    """Attention of (B, S, H, D) that no hook sees."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return ((q @ k.transpose(2, 3) * q.shape[3] ** -0.5).softmax(dim=3) @ v).transpose(1, 2)


def test_an_attention_backend_of_the_environment_is_not_used(engine, monkeypatch):
    """DIFFUSERS_ATTN_BACKEND sets the active backend when diffusers is imported."""
    want = simulate(engine, num_pipeline_patch=4)
    other = AttentionBackendName._NATIVE_MATH
    monkeypatch.setitem(_AttentionBackendRegistry._backends, other, by_hand)
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", other)
    assert_same_bits(simulate(engine, num_pipeline_patch=4), want)


def test_attention_that_bypasses_the_hook_is_refused(engine, monkeypatch):
    native = AttentionBackendName.NATIVE
    monkeypatch.setitem(_AttentionBackendRegistry._backends, native, by_hand)
    with pytest.raises(UnsupportedError, match="block 0 of flux made 0 attention calls .* its family says 1"):
        simulate(engine, num_pipeline_patch=4)


def test_all_warm_up_is_exact(engine):
    """To rounding: keys and values lie in buffers, and not behind each other."""
    assert_ulps(
        simulate(engine, num_pipeline_patch=4, warmup_steps=6),
        simulate(engine, num_pipeline_patch=1),
        BLOCKS * STEPS,
    )


def test_extrapolation_needs_two_points(engine):
    """After one synchronous step there is no line to follow: the first stale step reuses (the same kernels on
    the same shapes: the same bits), later differ.
    """
    reuse, extrapolate = (
        simulate(engine, num_pipeline_patch=2, warmup_steps=5, stale_kv=kind)
        for kind in ("reuse", "extrapolate")
    )
    assert not reuse.equal(extrapolate)
    reuse, extrapolate = (
        simulate(engine, num_pipeline_patch=2, warmup_steps=1, stale_kv=kind, tensors=two_steps())
        for kind in ("reuse", "extrapolate")
    )
    assert_same_bits(reuse, extrapolate)


def two_steps() -> dict:
    tensors = golden_request("euler_simple")[0].tensors
    return {**tensors, "sigmas": tensors["sigmas"][:3]}


def test_nothing_survives_a_request(engine):
    simulate(engine, num_pipeline_patch=4)
    model = engine.models["tiny"]
    assert model.stage.attention.buffers is None
    assert not any(layer.known for layer in model.cache.layers)
    assert_same_bits(simulate(engine, num_pipeline_patch=4), simulate(engine, num_pipeline_patch=4))


def test_nothing_survives_a_request_that_fails_in_a_block(engine, monkeypatch):
    """One rank goes on when its memory runs out: attention before the next request's blocks is torch's."""
    want = simulate(engine, num_pipeline_patch=2)
    stage = engine.models["tiny"].stage
    kernels = iter([attention_kernels.attend] * (BLOCKS + 3))

    def attend(*arguments):
        kernel = next(kernels, None)
        if kernel is None:
            raise torch.OutOfMemoryError
        return kernel(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(attention_kernels, "attend", attend)
        with pytest.raises(torch.OutOfMemoryError):
            simulate(engine, num_pipeline_patch=2)
    assert stage.attention.call is None and vars(RUNNING) == vars(Running())
    assert_same_bits(simulate(engine, num_pipeline_patch=2), want)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_every_token_is_computed_once_a_step(engine, count, monkeypatch):
    """Text rides with patch 0 only: a step costs image + text tokens, however many patches there are."""
    seen = []
    attend = Attention._within_sequence

    def spy(self, call, q, *rest):
        if call.layer == 0:
            seen.append(q.shape[2])
        return attend(self, call, q, *rest)

    monkeypatch.setattr(Attention, "_within_sequence", spy)
    simulate(
        engine,
        num_pipeline_patch=count,
        tensors={
            k: v for k, v in golden_request("euler_simple")[0].tensors.items() if not k.startswith("negative")
        },
        cfg=1.0,
    )
    assert sum(seen) == 6 * (64 + 12)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_the_end_of_the_model_sees_the_tokens_of_the_patch(engine, count):
    """Every image token is projected once a step, however many patches there are."""
    seen = []
    last = engine.models["tiny"].transformer.proj_out
    handle = last.register_forward_pre_hook(lambda layer, args: seen.append(args[0].shape[1]))
    prompt = {k: v for k, v in golden_request("euler_simple")[0].tensors.items() if "negative" not in k}
    simulate(engine, num_pipeline_patch=count, tensors=prompt, cfg=1.0)
    handle.remove()
    assert sum(seen) == STEPS * 64 and len(seen) == 1 + (STEPS - 1) * count


@pytest.mark.parametrize("count", [1, 4])
def test_modulation_is_one_gemm_a_layer(engine, count):
    """Double blocks have two modulations and single ones one: a GEMM each for all steps, prompts and
    patches."""
    simulate(engine, num_pipeline_patch=count)
    assert cached.COMPUTED["modulation"] == LAYERS


#: Modulation layers, and bytes of a row of all of them in float32.
LAYERS, ROW = OF_A_KIND * (2 + 1), 4 * 256 * OF_A_KIND * (2 * 6 + 3)


@pytest.mark.parametrize("case, calls", [("euler_simple", 6), ("heun_simple", 11)])
def test_modulation_ahead_is_bounded(engine, monkeypatch, case, calls):
    """In chunks of 4 rows, of two prompts; Heun calls the model twice a step, and again at the noise level at
    which it just did, which shares the row. A chunk is a product of fewer rows.
    """
    whole, most = simulate(engine, case, num_pipeline_patch=2), engine.models["tiny"].cache.most_bytes
    levels = len(golden_request(case)[0].tensors["sigmas"]) - 1
    assert most == 2 * levels * ROW
    monkeypatch.setattr(modulation_chunks, "AHEAD", 4 * ROW + 1)
    assert_ulps(simulate(engine, case, num_pipeline_patch=2), whole, BLOCKS * calls)
    assert engine.models["tiny"].cache.most_bytes == 4 * ROW
    assert cached.COMPUTED["modulation"] == LAYERS * -(-levels // 2)


def test_equal_rows_of_modulation_are_computed_once(engine, monkeypatch):
    """Three samples of one pooled prompt share what one has, of three, or two, each has its own; the latents
    are those without memory.
    """
    sample = batch_request(3)
    sample.tensors["sigmas"] = sample.tensors["sigmas"][-STEPS // 2 :]

    def pooled(*factors):
        return sample.tensors | {
            f"{side}.y": sample.tensors[f"{side}.y"][:1] * torch.tensor(factors)[:, None]
            for side in ("positive", "negative")
        }

    requests = [(pooled(1.0, 1.0, 1.0), 2), (pooled(1.0, 0.5, 2.0), 2 * 3), (pooled(1.0, 0.5, 1.0), 2 * 2)]
    computed = []
    for tensors, rows in requests:
        computed.append(engine.sample(replace(sample, tensors=tensors), Callbacks())[0])
        assert engine.models["tiny"].cache.most_bytes == rows * (len(tensors["sigmas"]) - 1) * ROW
    monkeypatch.setattr(model_runner.Runner, "modulate_ahead", lambda self, *rest: None)
    for tensors, latent in zip((tensors for tensors, _ in requests), computed):
        alone = engine.sample(replace(sample, tensors=tensors), Callbacks())[0]
        assert_ulps(alone, latent, BLOCKS * (len(tensors["sigmas"]) - 1))


def test_modulation_ahead_changes_nothing(engine, monkeypatch):
    ahead = simulate(engine, num_pipeline_patch=1)
    monkeypatch.setattr(model_runner.Runner, "modulate_ahead", lambda self, *rest: None)
    each = simulate(engine, num_pipeline_patch=1)
    assert cached.COMPUTED["modulation"] == STEPS * 2 * LAYERS
    assert_ulps(ahead, each, BLOCKS * STEPS)


def test_offloaded_modulation_lives_elsewhere_between_requests(engine, tmp_path, monkeypatch):
    """Its weights are copied to the device while a request begins, each once, and are the same memory
    afterwards; the latent is the same to the last bit."""
    offloading = Engine(ParallelConfig(offload_modulation=True), mesh.single())
    offloading.load("tiny", str(write_shallow_flux(tmp_path / "flux.safetensors")), "default")
    cache = offloading.models["tiny"].cache
    cache.offload_device = torch.device("cpu", 0)  # another name of the same memory: not the device's
    layers = [layer.layer for layer in cache.modulations]
    before = [layer.weight.data_ptr() for layer in layers]
    copied, on_device = [], cached.on_device
    monkeypatch.setattr(
        cached, "on_device", lambda layer, where: copied.append(layer) or on_device(layer, where)
    )
    assert_same_bits(simulate(offloading, num_pipeline_patch=0), simulate(engine, num_pipeline_patch=1))
    assert copied == layers
    assert [layer.weight.data_ptr() for layer in layers] == before
    assert cached.COMPUTED["modulation"] == len(layers)


class Fused(torch.nn.Linear):
    """A layer with a tensor that is no parameter, which moves with it, as a LoRA next to packed weights."""

    def __init__(self):
        super().__init__(2, 4)
        self.table = torch.nn.Buffer(torch.ones(4))
        self.adapter = torch.ones(3)

    def _apply(self, fn, recurse=True):
        self.adapter = fn(self.adapter)
        return super()._apply(fn, recurse)


def test_what_waits_in_host_memory_is_not_copied_back():
    layer = Fused()
    tensors = ("weight", "bias", "table", "adapter")
    before = [getattr(layer, name).data_ptr() for name in tensors]
    with cached.on_device(layer, torch.device("meta")):
        assert all(getattr(layer, name).is_meta for name in tensors)
    assert [getattr(layer, name).data_ptr() for name in tensors] == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_rows_are_found_alike_however_many_there_are(monkeypatch, dtype):
    """Each with each other one, or sorted; NaN equals nothing."""
    different = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    order = torch.tensor([3, 0, 3, 1, 4, 0, 2, 3])
    rows = different[order]
    for few in (len(order), 0):
        monkeypatch.setattr(modulation_plan, "FEW", few)
        groups = modulation_plan.equal_rows(rows)
        assert (groups[:, None] == groups).equal(order[:, None] == order)
    monkeypatch.undo()
    rows[1] = float("nan")
    groups = modulation_plan.equal_rows(rows).tolist()
    assert groups.count(groups[1]) == 1 and groups[0] == groups[2] == groups[7]
