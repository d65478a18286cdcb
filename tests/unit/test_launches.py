"""A step in steady state waits for no device, and starts no more operations than are stored."""

import json
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import counted_methods
import launches
import launches_page
import meta_shapes
import packed_models
import released_sizes
from meta_device import META, meta_device
from meta_shapes import Mode
from operation_count import Count
from variants import VARIANTS, described, request

from backend.config import ParallelConfig
from backend.loading import staging
from backend.models import minimax_h3
from backend.protocol import Sample
from backend.quantization import gguf_blocks
from backend.quantization.packed_weight import quantized
from backend.sampling.step_loop import Callbacks
from backend.serving.progress import Previews

#: Methods of few ranks, and of more: these run the same code with other lengths, of which the fast tier looks
#: at one family.
FEW, MANY = ("one rank", "u2", "pp2"), ("u8", "ring 4", "pp8")
#: A function of diffusers that waits at every step -> what for. It cannot be done once a request, since the
#: noise level is in it.
OF_DIFFUSERS = {
    "transformer_hidream_image.moe_infer": "asks how many tokens each expert has",
}
#: More than was measured by at most this factor.
SLACK = 1.05
#: Operations on host tensors in a micro-step; Ulysses over 8 ranks had 9,140 of them.
MAX_ON_HOST = 200
#: Families that have more at their released depth -> what for, and how many.
MORE_ON_HOST = {"hidream": ("its experts' tokens are counted and divided on the host", 375)}


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_a_step_in_steady_state_waits_for_nothing(family):
    check(family, FEW)


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_nor_does_one_of_many_ranks(family):
    """And of tensor parallelism, in one family of each signature; of real sizes' halves, and of a hybrid, in
    two families."""
    check(family, (*MANY, *counted_methods.further_methods(family)))


@pytest.mark.parametrize("family", counted_methods.OF_REAL_SIZES)
def test_halves_are_counted_as_such(family):
    """They start more than whole tensors do, and only while they are counted."""
    counts = launches.stored()[family]
    assert counts["u2, halves"][0] > counts["u2"][0] and counts["tp2, halves"][0] > counts["tp2"][0]
    assert launches.measure(family, "u2", timing=False)[0].device_ops == counts["u2"][0]


def test_times_are_printed_as_json(monkeypatch, capsys):
    """Six fields a line, the host's microseconds among them."""
    monkeypatch.setattr(sys, "argv", "launches --json --only wan21-t2v --methods u2".split())
    launches.main()
    [line] = json.loads(capsys.readouterr().out)
    device, host, waits = launches.stored()["wan21-t2v"]["u2"]
    assert line.pop("host_us") > 0
    assert line == {
        "family": "wan21-t2v",
        "method": "u2",
        "waits": waits,
        "device_ops": device,
        "cpu_ops": host,
    }


#: Quantized models that the fast tier counts: many kernels to dequantize, and ranks that compare values.
FAST = ("flux-dev Q4_K", "flux-dev nvfp4, native")


@pytest.mark.parametrize(
    "model",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in launches.PACKED],
)
def test_nor_does_one_of_quantized_weights(model):
    check(model, counted_methods.PACKED_METHODS)


#: Matrices of a Flux with two blocks of each kind: 14 of a double block, 6 of a single one.
MATRICES = 2 * 14 + 2 * 6


@pytest.mark.parametrize("model", FAST)
def test_quantized_models_are_loaded_as_their_files_store_them(model):
    """Every matrix of the blocks, and none of them as bf16."""
    config = ParallelConfig()
    with meta_device(Count()), torch.inference_mode():
        loaded = packed_models.load(model, config, launches.mesh_of(config, 0))
    weights = quantized(loaded.modules)
    assert len(weights) == MATRICES
    assert {each.format_name for each in weights} == {packed_models.MODELS[model].form}
    assert {each.choice.kernel for each in weights} == {packed_models.MODELS[model].kernel}


def test_waits_of_dequantization_are_seen(monkeypatch):
    """Shifts that each product writes to the device anew."""
    monkeypatch.setattr(gguf_blocks, "_on_device", gguf_blocks._on_device.__wrapped__)
    _, waits = launches.measure("flux-dev Q4_K", "one rank", timing=False)
    assert set(waits) == {"tensor in gguf_blocks._on_device"}


def avoidable(waits: dict[str, int]) -> set[str]:
    """Return what waits, but for functions of diffusers that are listed."""
    return {place for place in waits if place.rpartition(" in ")[2] not in OF_DIFFUSERS}


def test_the_page_is_what_the_script_makes():
    assert launches_page.PART.read() == launches_page.table()
    assert len(launches_page.PART.rows()) == len(launches.FAMILIES + launches.PACKED)


def check(family: str, methods: tuple[str, ...]):
    for method in methods:
        line, waits = launches.measure(family, method, timing=False)
        assert avoidable(waits) == set()
        device, host, stored = launches.stored()[family][method]
        assert line.waits == stored, method
        assert line.device_ops <= SLACK * device, method
        assert line.cpu_ops <= min(SLACK * host, MAX_ON_HOST), method
        # what is stored is not of an older state, which would leave room for more
        assert device <= SLACK * line.device_ops and host <= SLACK * line.cpu_ops, method


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_released_depths_keep_the_host_as_free(family):
    """By what a block adds: all blocks are on one rank, and one or two on a stage of pp8."""
    counts = {method: host for method, (_, host, _) in launches.stored()[family].items()}
    blocks = launches.checkpoint_of(family).block_count
    of_a_block = (counts["one rank"] - counts["pp8"]) / (blocks - math.ceil(blocks / 8))
    further = max(0.0, of_a_block) * (released_sizes.checkpoint_of(family).block_count - blocks)
    most = MORE_ON_HOST[family][1] if family in MORE_ON_HOST else MAX_ON_HOST
    for method in ("one rank", "u2", "u8", "ring 4"):
        assert counts[method] + further <= most, method


#: Variants with noise levels, guides and masks of tokens, which patches cut.
OF_TOKENS = ("ltx2-i2v", "ltxv-smaller-guides", "minimax-h3-guides", "wan22-ti2v")


@pytest.mark.parametrize(
    "variant, method",
    [
        *((variant, "u2") for variant in sorted(VARIANTS)),
        *((variant, method) for variant in OF_TOKENS for method in ("one rank", "pp2")),
    ],
)
def test_nor_does_one_of_a_variant(monkeypatch, variant, method):
    """References, masks, guides and inputs that a golden request does not have."""
    sample = request(variant)
    sigmas = torch.linspace(sample.tensors["sigmas"][0].item(), 0, launches.STEPS + 1)
    sample = replace(sample, sampler="euler", tensors={**sample.tensors, "sigmas": sigmas})
    monkeypatch.setattr(minimax_h3, "_sequence", with_values(minimax_h3._sequence, sample))
    shapes = described(variant)["shapes"]
    monkeypatch.setattr(launches, "request_of", lambda family, steps: sample)
    monkeypatch.setattr(launches, "checkpoint_of", lambda family: launches.with_shapes(variant, shapes))
    line, waits = launches.measure(VARIANTS[variant].family, method, timing=False)
    assert line.device_ops > 0 and avoidable(waits) == set()


def with_values(sequence, sample: Sample):
    """MiniMax-H3's places of tokens, made once a request of the tags' values, which meta tensors have not."""

    def read(grid, cond, device):
        of_tokens = [name for name in ("given_tags", "text_tags") if name in cond]
        return sequence(grid, cond | {name: sample.tensors[f"positive.{name}"] for name in of_tokens}, device)

    return read


@pytest.mark.parametrize(
    "sampler",
    [
        *("dpmpp_2m", "uni_pc", "res_multistep", "euler_ancestral", "lcm"),
        *("dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde"),  # of a path that the host draws
    ],
)
def test_nor_does_one_of_another_solver(monkeypatch, sampler):
    """In a fifth step, which has the history that these solvers read."""
    sample = replace(launches.request_of("flux-dev", steps=5), sampler=sampler)
    monkeypatch.setattr(launches, "request_of", lambda family, steps: sample)
    line, waits = launches.measure("flux-dev", "pp2", timing=False)
    assert line.device_ops > 0 and not waits


#: Operations on the device for a preview: x0 as a latent, and its copy to the host.
PREVIEW = 3


def test_nor_does_a_step_with_a_preview():
    """The copy is started in one step and sent with the next; the last step starts another."""
    counts = {}
    for seconds in (0.0, 1e-9):
        previews = Previews(seconds, time.monotonic)
        # called in this turn of the loop
        callbacks = Callbacks(lambda step, start: previews.latest(start))  # noqa: B023
        counts[seconds] = Count()
        launches.run("flux-dev", ParallelConfig(), 0, counts[seconds], callbacks)
        assert not counts[seconds].waits
        assert previews.count == (1 if seconds else 0)
    without, shown = (count.device.total() for count in counts.values())
    assert 0 < shown - without <= PREVIEW


WAITS = {
    "a copy to the device": lambda x: torch.arange(3).to(META),
    "a copy of a number": lambda x: torch.tensor(2.0).to(META),
    "a copy to the device that is waited for": lambda x: staging.page_locked((3,), x.dtype).to(META),
    "a copy from pageable memory": lambda x: torch.arange(3).to(META, non_blocking=True),
    "a copy into the device's own": lambda x: x.copy_(staging.page_locked((3,), x.dtype)),
    "a copy from the device": lambda x: x.cpu(),
    "a copy to pageable memory": lambda x: torch.empty(3).copy_(x, non_blocking=True),
    "a copy that is waited for": lambda x: staging.page_locked((3,), x.dtype).copy_(x),
    "numbers of the host": lambda x: torch.tensor([1, 2], device=META),
    "a condition": lambda x: bool(x.all()),
    "a size": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "indices of the host": lambda x: x[torch.arange(2)],
    "a list of indices": lambda x: x[..., [1, 0]],
    "a put by a list": lambda x: x.__setitem__([1, 0], 0.0),
    "a put by a mask": lambda x: x.index_put_((x > 0,), torch.ones((), device=META)),
    "a tensor of repeats": lambda x: torch.repeat_interleave(x, x.int()),
    "a number of the host as a tensor": lambda x: torch.as_tensor(3, device=META),
}
FREE = {
    "a number of the host": lambda x: x * torch.tensor(2.0),
    "positions on the device": lambda x: x[torch.arange(2, device=META)],
    "a copy to page-locked memory": lambda x: staging.page_locked((3,), x.dtype).copy_(x, non_blocking=True),
    "a copy from page-locked memory": lambda x: staging.send(torch.arange(3), META),
    "a copy from there into the device's own": (
        lambda x: x.copy_(staging.page_locked((3,), x.dtype), non_blocking=True)
    ),
    "a cast": lambda x: x.to(torch.float64),
    "a number of repeats": lambda x: x.repeat_interleave(2),
}


class Watch(Mode):
    """A mode inside of a count, as a dry run's."""

    def __init__(self, count: Count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.count.watched(func, args, kwargs)


@pytest.mark.parametrize("what", [*WAITS, *FREE])
def test_what_counts_as_a_wait(what):
    """Once, also where another mode looks on."""
    counts = Count(), Count()
    for count, inside in zip(counts, (nullcontext(), Watch(counts[1]))):
        with meta_device(count), torch.inference_mode(), count, inside:
            x = torch.zeros(3, device=META)
            count.active = True
            (WAITS | FREE)[what](x)
            count.active = False
    alone, watched = counts
    assert (sum(alone.waits.values()) > 0) == (what in WAITS)
    assert (watched.waits, watched.device, watched.host) == (alone.waits, alone.device, alone.host)


#: Operations whose results differ in shape, strides, type or memory; several by the type of a number alone.
OPERATIONS = {
    "integers by an integer": lambda x: x.int() * 2,
    "integers by a float": lambda x: x.int() * 2.0,
    "integers by a truth value": lambda x: x.int() * True,
    "broadcast": lambda x: x[:, :, None] + x[:, None],
    "transposed": lambda x: x.t() + 1,
    "in place": lambda x: x.clone().add_(1),
    "into a part": lambda x: x.clone()[1:].add_(1),
    "into a part, by name": lambda x: torch.add(x[1:], 1, out=x.clone()[1:]),
    "into a parameter": lambda x: torch.nn.Parameter(x.clone(), requires_grad=False).fill_(1),
    "a product": lambda x: F.linear(x, x),
    "a view or a copy": lambda x: x.t().reshape(-1),
    "the same type": lambda x: x.to(x.dtype),
    "another type": lambda x: x.to(torch.bfloat16),
    "already contiguous": lambda x: x.contiguous(),
    "several results": lambda x: x.max(dim=0),
    "joined": lambda x: torch.cat([x, x.t()[:3]], dim=0) if x.shape[0] == x.shape[1] else torch.cat([x, x]),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_cached_results_are_torchs_own(what):
    """The first time and when they are cached, on a square, a long and an empty tensor."""
    for shape in ((3, 3), (5, 2), (0, 4)):
        if not shape[0] and what == "several results":
            continue
        x = torch.zeros(shape, device=META)
        with torch.inference_mode():
            wanted = _facts(x, OPERATIONS[what](x))
            for _ in range(2):
                with Count():
                    found = OPERATIONS[what](x)
                assert _facts(x, found) == wanted


def test_what_is_written_into_a_part_is_noted():
    """torch takes milliseconds to look at it on the meta device."""
    known = meta_shapes._KNOWN
    known.clear()
    x = torch.zeros(3, 3, device=META)
    with torch.inference_mode(), Count():
        x[1:].add_(1)
    assert {key[0].name(): found for key, found in known.items()}["aten::add_.Tensor"] == 0


def _facts(given: torch.Tensor, made) -> list[tuple]:
    own = given.untyped_storage()._cdata
    return [
        (each.shape, each.stride(), each.dtype, each.untyped_storage()._cdata == own)
        for each in ([made] if isinstance(made, torch.Tensor) else made)
    ]
