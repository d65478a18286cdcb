"""What plans are counted with: cards that differ, groups of heads, shared links, LoRAs and text."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from published import FLUX, QWEN, RTX4090

from backend.client.auto import planning
from backend.client.auto.model_choice import ModelChoice
from backend.config import CHOICES, ConfigError, ParallelConfig
from backend.hardware import gpu_kernels
from backend.parallel.attention.kernel_table import kernel_of, merges
from backend.planner.auto_config import AutoConfig
from backend.planner.candidates import candidates
from backend.planner.choose import Question, choose
from backend.planner.cost import Cost
from backend.planner.machine import RequestEstimate, samples_at_once
from backend.planner.memory import held, held_by_rank
from backend.planner.model_shape import NONE, stages_of
from backend.planner.option import TIGHT, Option
from backend.planner.weight_swaps import WeightSwaps
from backend.quantization.lora_bytes import LoraBytes
from backend.runtime import torch_version

GB = 1_000_000_000
ONE, TP = ParallelConfig(), ParallelConfig(tensor_parallel_degree=2)
SHARDED = ParallelConfig(ring_degree=2, shard_weights=True)


def packed(shape, bits: int = 4):
    """``shape`` from a file of so many bits a weight, dequantized at each use."""
    blocks = [
        replace(b, weights=b.weights * bits // 16, unpacked=b.weights, dequantizing=2 * b.weights)
        for b in shape.blocks
    ]
    return replace(shape, blocks=tuple(blocks), is_quantized=True)


def test_one_card_reads_weights_at_its_own_rate():
    """A fast card next to a slow one is not as slow as that by itself."""
    shape, request = packed(FLUX), RequestEstimate(4096, 512, 20, 1)
    machine = replace(
        RTX4090, names=("fast", "slow"), speeds=(3.0, 1.0), bandwidth=0.3e12, bandwidths=(1.2e12, 0.3e12)
    )
    alone = Cost(shape, ONE, machine, request)
    assert alone._reading == [pytest.approx(0.25)]
    assert alone.total < 0.8 * Cost(shape, ONE, replace(machine, bandwidths=()), request).total
    shares = replace(TP, shares="75,25")
    assert Cost(shape, shares, machine, request)._reading == [pytest.approx(max(1.5 / 4, 0.5))]
    turned = machine.ordered([1, 0])
    assert turned.bandwidths == (0.3e12, 1.2e12)


def test_tensor_parallelism_divides_groups_of_heads():
    """Krea 2 has 48 heads and 12 of keys: no plan may have 8 ranks cut them."""
    shape = replace(FLUX, heads=48, head_groups=12)
    plans = list(candidates(shape, RequestEstimate(4096, 512, 20, 1), 8, ParallelConfig()))
    assert {plan.tensor_parallel_degree for plan in plans} == {1, 2, 4}


@pytest.mark.parametrize("drained", [False, True])
def test_gathered_weights_and_tokens_take_the_same_links(drained):
    """As they are stored; modulation at each call of a model that is called, and once for many steps else."""
    shape = packed(QWEN)
    cost = Cost(shape, SHARDED, RTX4090, RequestEstimate(4096, 512, 20, 1, drained=drained))
    stored = sum(b.weights + (b.modulation if drained else 0) for b in shape.blocks)
    tokens = cost._travelling(shape.blocks, 1)
    latency = RTX4090.latency * len(shape.blocks)
    want = stored / 2 / RTX4090.neighbour(2) + latency + tokens
    assert tokens > 0 and cost._gather_weights(shape.blocks, 1) == pytest.approx(want)


@pytest.mark.parametrize(
    "plan, tokens, prompts, times",
    [
        (ONE, 4096, 1, 1),
        (ONE, 4096, 2, 2),
        (ONE, 8193, 2, 1),  # so many tokens keep a device busy: one after the other
        (ParallelConfig(cfg_degree=2), 4096, 2, 1),
        (ParallelConfig(pipefusion_degree=2, num_pipeline_patch=1), 4096, 2, 1),
    ],
)
def test_prompts_of_a_call_go_through_the_model_together(plan, tokens, prompts, times):
    """Under Parallel Model; a request of Parallel Sampler takes one after the other."""
    call = RequestEstimate(tokens, 512, 20, prompts, drained=True)
    sample = replace(call, drained=False)
    assert held(FLUX, plan, call).activations == times * held(FLUX, plan, sample).activations


@pytest.mark.parametrize("attention", CHOICES["attention"])
def test_rings_are_planned_with_kernels_that_can_merge(attention):
    """Others are refused by the ranks, for a degree that auto has chosen."""
    base = ParallelConfig(attention=attention)
    plans = list(candidates(FLUX, RequestEstimate(4096, 512, 20, 1), 4, base))
    refused = [plan for plan in plans if merges(plan) and not kernel_of(attention).lse]
    assert not refused and any(plan.ring_degree > 1 for plan in plans)  # PipeFusion's rings do not merge
    assert any(merges(plan) for plan in plans) == kernel_of(attention).lse


def seconds(plan: ParallelConfig, **request) -> float:
    return Cost(FLUX, plan, RTX4090, RequestEstimate(4096, 512, 20, **request)).total


def test_samples_of_a_batch_follow_each_other_through_a_pipeline_of_one_patch():
    """Each by itself: two take half as long again on two stages, and the memory of one."""
    plan = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=1)
    one, two = (seconds(plan, prompts=1, batch=batch) for batch in (1, 2))
    assert two == pytest.approx(1.5 * one, rel=1e-6)
    prompts = seconds(plan, prompts=2, batch=1)
    assert prompts == pytest.approx(two, rel=1e-6)
    one, two = (held(FLUX, plan, RequestEstimate(4096, 512, 20, 1, batch)).activations for batch in (1, 2))
    assert one <= two < 1.3 * one


def test_long_skips_count_where_they_arrive():
    """A stage holds those that its first block is given until its own blocks have taken them."""
    plan, request = ParallelConfig(pipefusion_degree=2), RequestEstimate(4096, 512, 20, 1)
    first = stages_of(FLUX, 2, ())[1].start
    blocks = [replace(block, skips=3 * (index + 1 == first)) for index, block in enumerate(FLUX.blocks)]
    before, after = held_by_rank(replace(FLUX, blocks=tuple(blocks)), plan, request)
    plain = held_by_rank(FLUX, plan, request)
    assert before.activations == plain[0].activations
    skips = 3 * FLUX.width * FLUX.itemsize * (4096 + 512)
    assert after.activations == pytest.approx(plain[1].activations + skips, rel=1e-6)


def test_prompts_of_a_call_read_the_weights_once():
    """They go through the model together, under Parallel Model."""
    plan = ParallelConfig(ulysses_degree=2, shard_weights=True)
    together = seconds(plan, prompts=2, drained=True)
    assert together == pytest.approx(seconds(plan, prompts=1, batch=2, drained=True), rel=1e-6)
    assert together < seconds(plan, prompts=2)


def test_the_last_samples_of_a_call_are_as_few_as_they_are():
    """Of 5184 tokens three go together: of four samples the other one alone, not three more."""
    tokens = 5184
    assert samples_at_once(tokens) == 3

    def products(prompts, batch):
        request = RequestEstimate(tokens, 512, 1, prompts, batch, drained=True)
        machine = replace(RTX4090, launch=0.0, half_rate=0.0, bandwidth=1e18)
        return Cost(FLUX, ONE, machine, request).total

    assert products(2, 2) == pytest.approx(4 * products(1, 1), rel=1e-3)
    assert products(1, 5) == pytest.approx(5 * products(1, 1), rel=1e-3)


def test_modulation_in_host_memory_comes_at_every_call():
    plan = ParallelConfig(tensor_parallel_degree=2)
    away = replace(plan, offload_modulation=True)
    size = sum(block.modulation for block in FLUX.blocks) / 2 / RTX4090.host_link
    assert size > 0
    assert seconds(away, prompts=1) - seconds(plan, prompts=1) == pytest.approx(size)
    called = seconds(away, prompts=1, drained=True) - seconds(plan, prompts=1, drained=True)
    assert called == pytest.approx(20 * size)


def test_what_offloading_would_make_fit_is_told():
    machine = replace(RTX4090, memory=(round(12.6 * GB),) * 2)
    question = Question(FLUX, RequestEstimate(4096, 512, 20, 1), machine, 2)
    with pytest.raises(ConfigError, match="use offload_modulation of Parallel Config, with which it fits, "):
        choose(question)
    with pytest.raises(ConfigError) as error:  # in host memory that is the GPUs' own
        choose(replace(question, swaps=WeightSwaps(unified=(0, 1))))
    assert "offload_modulation" not in str(error.value)
    tiny = replace(machine, memory=(4 * GB,) * 2)
    with pytest.raises(ConfigError) as error:
        choose(replace(question, machine=tiny))
    assert "offload_modulation" not in str(error.value)


def test_offloaded_modulation_stays_in_memory_that_is_the_hosts():
    """A plan that offloads holds there what it holds without."""
    away = ParallelConfig(offload_modulation=True)
    question = Question(FLUX, RequestEstimate(4096, 512, 20, 1), replace(RTX4090, memory=(24 * GB,)), 1)
    there, here = (
        replace(question, swaps=WeightSwaps(unified=places)).option(away).bytes for places in ((), (0,))
    )
    assert here - there == pytest.approx(sum(block.modulation for block in FLUX.blocks), abs=2)
    assert here == question.option(ONE).bytes


def test_a_little_doubt_costs_a_little():
    """Of a step, a little more memory could make the choice a slower one."""
    sure = Option(ONE, 10.0, 8 * GB, 12 * GB, 10 * GB)
    scores = [replace(sure, room=room).score for room in (10 * GB, 19 * GB // 2, 9 * GB, 8 * GB)]
    assert scores == sorted(scores) and len(set(scores)) == 4
    assert scores[0] == sure.score and scores[-1] == pytest.approx(TIGHT * sure.score)


@pytest.mark.parametrize("loras", [LoraBytes(GB), LoraBytes(copies=GB), LoraBytes(uncut=GB)])
def test_loras_are_whole_next_to_sharded_weights(loras):
    with_loras, without = (
        held(FLUX, SHARDED, RequestEstimate(4096, 512, 20, 1, loras=each)).weights
        for each in (loras, LoraBytes())
    )
    assert with_loras - without == pytest.approx(GB, abs=2)


def test_loras_of_models_that_take_turns_are_their_own():
    shape = packed(QWEN)
    request = RequestEstimate(4096, 512, 20, 1, loras=LoraBytes(GB), other_loras=LoraBytes(2 * GB))
    own, without = (held(shape, ONE, each).weights for each in (request, replace(request, loras=LoraBytes())))
    assert own - without == pytest.approx(GB, rel=1e-6)
    both = held(shape, ONE, request, (shape,)).weights - held(shape, ONE, request, ()).weights
    assert both == pytest.approx(without + 2 * GB, rel=1e-6)


@pytest.mark.parametrize("ring", [1, 2])
def test_static_text_is_cached(ring):
    shape = replace(QWEN, static_text=True)
    plan = ParallelConfig(ring_degree=ring)
    token = 2 * shape.heads * shape.head_size * shape.itemsize * len(shape.blocks)
    assert held(shape, plan, RequestEstimate(4096, 1000, 20, 2)).keys == 2 * token * 1000 // ring
    assert held(QWEN, plan, RequestEstimate(4096, 1000, 20, 2)).keys == 0


def test_a_pipeline_of_one_patch_is_exact_at_any_steps():
    plans = list(candidates(FLUX, RequestEstimate(4096, 512, 4, 2), 2, ParallelConfig()))
    staged = [plan for plan in plans if plan.pipefusion_degree == 2]
    assert staged and all(plan.patches == 1 for plan in staged)


def test_patches_begin_at_eight_steps():
    """The fewest of which docs/drift.md has measured the drift."""
    most = [
        max(
            plan.patches
            for plan in candidates(FLUX, RequestEstimate(4096, 512, steps, 2), 2, ParallelConfig())
        )
        for steps in (7, 8)
    ]
    assert most[0] == 1 < most[1]


def test_a_small_latent_is_cut_no_finer_for_its_references():
    """Ranks and patches need a token of the latent each (sampling.validation.check_patches)."""
    request = RequestEstimate(4096 + 3, 512, 28, 1, reference_tokens=4096)
    plans = list(candidates(FLUX, request, 4, ParallelConfig()))
    assert plans and all(plan.patches * plan.sp_degree <= 3 for plan in plans)
    assert replace(request, image_tokens=256).latent_tokens == 1  # one GPU is always left


NEEDS = "torch 2.12, which can shard the quantized weights"


def test_a_refusal_names_the_torch_that_can_share_a_quantized_file():
    machine = replace(RTX4090, memory=(2 * GB,) * 2)
    shape = replace(packed(FLUX), sharding_needs=NEEDS)
    with pytest.raises(ConfigError, match=f"use {NEEDS}"):
        choose(Question(shape, RequestEstimate(4096, 512, 4, 1), machine, 2))


@pytest.mark.parametrize("here", ["2.6.0", "2.13.0"])
@pytest.mark.parametrize("needs", ["", NEEDS])
def test_the_torch_of_the_ranks_decides_what_is_sharded(monkeypatch, here, needs):
    """Not ComfyUI's, where ranks have a Python of their own."""
    monkeypatch.setattr(torch_version, "torch_version", lambda: here)
    shape = replace(packed(FLUX), is_quantized=True, sharding_needs=needs)
    plans = candidates(shape, RequestEstimate(4096, 512, 20, 2), 2, ParallelConfig())
    assert any(plan.shard_weights for plan in plans) == (not needs)


@pytest.mark.parametrize("rings", [False, True])
def test_rings_are_planned_where_the_ranks_have_them(rings):
    plans = candidates(replace(FLUX, rings=rings), RequestEstimate(4096, 512, 20, 2), 4, ParallelConfig())
    assert any(plan.ring_degree > 1 for plan in plans) == rings


CARDS = {0: (8, 9), 1: (6, 1), 2: (8, 9)}


@pytest.mark.parametrize("gpus, used", [("", [0, 2]), ("0,1", [0, 1]), ("3", [0, 1, 2])])
def test_cards_without_kernels_are_used_where_they_are_named(monkeypatch, gpus, used):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_86", "compute_90"])
    found = {index: SimpleNamespace(major=major, minor=minor) for index, (major, minor) in CARDS.items()}
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    assert planning.devices_of(AutoConfig(gpus=gpus)) == used
    assert [gpu_kernels.has_kernels(index) for index in CARDS] == [True, False, True]


DEFAULT_DEVICE = ",".join(map(str, range(32)))  # what ComfyUI makes of --default-device 0


@pytest.mark.parametrize(
    "visible, says", [("0", "CUDA_VISIBLE_DEVICES is '0'"), ("", ""), (DEFAULT_DEVICE, "")]
)
def test_one_visible_card_is_said_to_be_one_of_several(monkeypatch, visible, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)  # as of a torch for CPUs
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _, lines = planning.plan_for(
        planning.Asked(AutoConfig(), ModelChoice("m"), lambda shape: RequestEstimate())
    )
    assert lines == () if not says else says in lines[0]


def test_ulysses_with_tensor_parallelism_takes_the_slower_links():
    """Tensor parallelism's ranks are neighbours, so Ulysses' are not: of bridged pairs it crosses over."""
    request, machine = RequestEstimate(4096, 512, 20, 1), replace(RTX4090, ranks=4, memory=(24 * GB,) * 4)
    bridged = replace(machine, all_to_all={2: 40e9, 4: 3e9})
    plain = replace(machine, all_to_all={2: 3e9, 4: 3e9})

    def seconds(machine, **degrees) -> float:
        return Cost(FLUX, ParallelConfig(**degrees), machine, request)._all_to_all(FLUX.blocks, 1)

    assert seconds(bridged, ulysses_degree=2) < seconds(plain, ulysses_degree=2)
    both = dict(ulysses_degree=2, tensor_parallel_degree=2)
    assert seconds(bridged, **both) == seconds(plain, **both)


def test_attention_that_sends_nothing_costs_no_links():
    """Linear attention, as SANA's: its state is small, and no buffer of keys and values waits for it."""
    silent = replace(FLUX, blocks=tuple(replace(b, queries=NONE, keys=NONE) for b in FLUX.blocks))
    request = RequestEstimate(4096, 512, 20, 1)
    plan = ParallelConfig(ulysses_degree=2)
    machine = replace(RTX4090, latency=0.0)
    assert Cost(silent, plan, machine, request)._all_to_all(silent.blocks, 1) == 0
    assert Cost(FLUX, plan, machine, request)._all_to_all(FLUX.blocks, 1) > 0
    stale = ParallelConfig(pipefusion_degree=2)
    assert held(silent, stale, request).keys == 0 < held(FLUX, stale, request).keys
