"""Every send meets its receive, in an order that no communicator stops at, and is waited for when what it
brings is needed: all ranks one after the other in one process, on meta tensors (support/wires.py)."""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import wires
from gathered_weights import gather_weights
from tiny import shallow_flux
from wires import Log, Message, Operation

from backend.config import ParallelConfig
from backend.loading.checkpoint import Checkpoint
from backend.parallel import compiled_blocks, tensor_parallel
from backend.parallel.attention import ulysses_ring
from backend.rank_plan.shape_of import shape_of
from backend.sampling.model_runner import running
from backend.sampling.request import build
from backend.sampling.step_loop import Callbacks

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import launches
from meta_device import META, meta_device
from operation_count import Count
from waiting import waiting

METHODS = ("cfg", "pipefusion", "ulysses", "ring", "data_parallel", "tensor_parallel")
#: Method -> its group, what stands for the work that hides its messages: attention (meta_device.py), and
#: products; and how many of a block's messages have it to hide behind: of Ulysses the values, which leave
#: before queries and keys, the second half of these, and the first half of the outputs.
MULTIPLIES = {"aten::mul", "aten::mul_"}
PRODUCTS = {"aten::addmm", "aten::mm", "aten::linear"}
HIDDEN_BEHIND = {"ulysses": ("ulysses", MULTIPLIES, 3 / 5), "tensor_parallel": ("tp", {"aten::mm"}, 1 / 2)}
#: Families with two streams, one, both in turn, masks and two attention calls.
OF_VALUES = ("flux-dev", "wan21-t2v", "hunyuan-video", "z-image-turbo", "hidream", "sd3", "cogvideox")
#: What every family is run under: pipelines with their patches, and what cuts tokens.
OF_FAMILIES = (("pipefusion", "ulysses"), ("ring", "tensor_parallel"))
#: Single blocks of the Flux that runs under all hybrids, besides two double ones: each of two stages has two
#: alike, one of them both kinds, and of four stages none is empty. The whole one is among the families.
SINGLE = 4
#: Steps of a request without a pipeline. One has launches.STEPS: warm-up, a step after it, a steady one.
EXACT_STEPS = 2
SECOND = range(1, 2)  # the only rank that some tests look at
#: Weights that ranks gather from each other, under what divides the work.
SHARDED = (("ulysses",), ("ring",), ("data_parallel",), ("cfg", "ulysses"))


def configuration(methods: tuple[str, ...], **settings) -> ParallelConfig:
    degrees = Counter(methods)
    return ParallelConfig(**{f"{m}_degree": 2**n for m, n in degrees.items()}, **settings).validate()


def run(
    family: str,
    config: ParallelConfig,
    checkpoint: Checkpoint | None = None,
    ranks: range | None = None,
    steps: int = 0,
) -> list[Log]:
    """Return what every rank of a configuration, or each of ``ranks``, does for the family's golden request.
    ``checkpoint``: another one than the golden. ``steps``: as many as steps_of(), if not given."""
    checkpoint = checkpoint or launches.checkpoint_of(family)
    stages = checkpoint.stages(config)
    steps = steps or steps_of(config)
    ranks = ranks or range(config.world_size)
    return [one_rank(family, checkpoint, config, rank, stages, steps) for rank in ranks]


def steps_of(config: ParallelConfig) -> int:
    return launches.STEPS if config.pipefusion_degree > 1 else EXACT_STEPS


def one_rank(
    family: str, checkpoint: Checkpoint, config: ParallelConfig, rank: int, stages, steps: int
) -> Log:
    log = Log(rank)
    mesh = launches.mesh_of(config, rank)
    own = replace(checkpoint)  # whose transformer is the rank's own
    with torch.inference_mode():
        _ = own.transformer  # built before operations are recorded, in half of the time
    if config.shard_weights:
        gather_weights(own, str(mesh.weights), config.sp_degree * config.data_parallel_degree, own.modulation)
    # of loading, messages alone count: to see its operations costs a third of it
    with meta_device(Count()), torch.inference_mode(), wires.recorded(log, operations=False):
        model = launches.load(own, config, mesh, stages)
    count = Count()
    with meta_device(count), torch.inference_mode(), wires.recorded(log, count=count):
        sample = launches.request_of(family, batch=mesh.dp.size, steps=steps)
        sample = replace(sample, wire=config.wire, compile=config.compile)
        request = build(sample, config, model.checkpoint, model.dtype, META, mesh.dp.rank)
        with running(model, request) as runner:
            loop = launches.LastStep(mesh, request, runner, Callbacks())
            loop.mode = count
            loop.run()
    if steps >= launches.steps_until_steady(family, config):
        log.host_waits = [*count.waits]
    return log


@cache
def shallow_checkpoint() -> Checkpoint:
    return launches.with_shapes("flux-dev", shallow_flux(single=SINGLE))


@cache
def of_shallow_flux(config: ParallelConfig) -> list[Log]:
    """What several tests look at."""
    return run("flux-dev", config, shallow_checkpoint())


@pytest.fixture(scope="module", autouse=True)
def forgotten():
    yield
    of_shallow_flux.cache_clear()


def check(logs: list[Log], is_steady: bool = True):
    """``is_steady``: the last step was in steady state, in which the host may wait for nothing."""
    assert wires.differences(logs) == []
    assert wires.deadlock(logs) is None
    forgotten = [op.group for log in logs for op in log.operations if op.received and op.waited is None]
    assert forgotten == []
    assert [each for log in logs for each in log.early_waits] == []
    assert [log.host_waits for log in logs] == [[] if is_steady else None for _ in logs]


PAIRS = [(a, b) for i, a in enumerate(METHODS) for b in METHODS[i:] if a != b or a in METHODS[1:4]]


@pytest.mark.parametrize("methods", [*((m,) for m in METHODS), *PAIRS], ids="+".join)
def test_flux_under_all_hybrids(methods):
    config = configuration(methods)
    check(of_shallow_flux(config))
    if "pipefusion" in methods:
        check(of_shallow_flux(configuration(methods, num_pipeline_patch=1)))


def halve(monkeypatch):
    """Have tiny tensors sent and summed in two halves, as those of real sizes are."""
    monkeypatch.setattr(ulysses_ring, "TILES_OF_A_CHUNK", 1)
    monkeypatch.setattr(tensor_parallel, "MIN_TOKENS_TO_HALVE", 1)


def test_halves_meet_on_all_ranks(monkeypatch):
    """More messages than of whole tensors, in an order that no communicator stops at."""
    config = configuration(("ulysses", "tensor_parallel"))
    whole = of_shallow_flux(config)
    halve(monkeypatch)
    halves = run("flux-dev", config, shallow_checkpoint())
    check(halves)
    counts = [[len(log.operations) for log in logs] for logs in (whole, halves)]
    assert all(one < other for one, other in zip(*counts, strict=True))


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_every_family(family, monkeypatch):
    """In halves; heads, which stages' buffers do not halve, of some families, with float8 on the wire.

    A step less than Flux has under all hybrids, which shows one step after another: warm-up and the
    step after it. Only where text is in the first step alone do later ones differ by family."""
    halve(monkeypatch)
    fewer = 0 if launches.checkpoint_of(family).family.cache.static_text else 1
    configs = [configuration(methods) for methods in OF_FAMILIES]
    if family in OF_VALUES:
        configs.append(configuration(("ulysses",), wire="fp8"))
    for config in configs:
        steps = steps_of(config) - fewer
        check(run(family, config, steps=steps), steps >= launches.steps_until_steady(family, config))


def test_activations_come_while_the_stage_computes():
    """A stage's receives are under way while it computes the patch before. The first of an evaluation is
    not: a request may be cancelled before it, and then nobody would send."""
    patches = 4
    [log] = run("flux-dev", configuration(("pipefusion",), num_pipeline_patch=patches), ranks=SECOND)
    steady = [op for op in log.operations if op.received][-patches:]
    micro_step = min(b.waited - a.waited for a, b in pairwise(steady))
    assert all(op.waited - op.started > 0.9 * micro_step for op in steady[1:])


@pytest.mark.parametrize("methods", SHARDED, ids="+".join)
def test_weights_are_gathered_in_one_order(methods):
    """Each block's at every evaluation, while the block before computes."""
    logs = run("flux-dev", configuration(methods, shard_weights=True), shallow_checkpoint())
    check(logs)
    for log in logs:
        gathers = [op for op in log.operations if op.group.startswith("weights")]
        assert len(gathers) >= EXACT_STEPS * shallow_checkpoint().block_count
        ahead = [op for op in gathers if PRODUCTS & {*log.meanwhile(op)}]
        assert len(ahead) >= EXACT_STEPS * (shallow_checkpoint().block_count - 1)


@pytest.mark.parametrize(
    "method, family",
    [
        *product(("ulysses", "ring"), ("flux-dev", "wan21-t2v", "z-image-turbo")),
        ("data_parallel", "flux-dev"),  # the only one with a golden batch
    ],
)
def test_a_step_gathers_the_weights_that_the_planner_counts(family, method):
    """Those of all blocks, for each prompt, without modulation and what is outside of blocks."""
    checkpoint = launches.checkpoint_of(family)
    config = configuration((method,), shard_weights=True)
    gathered = []
    for steps in (EXACT_STEPS, EXACT_STEPS + 1):
        (log,) = run(family, config, checkpoint, SECOND, steps)
        of_weights = [op for op in log.operations if op.group.startswith("weights")]
        gathered.append(sum(value.nbytes for op in of_weights for value in op.received))
    counted = sum(block.weights for block in shape_of(checkpoint, torch.bfloat16).blocks)
    tensors = launches.request_of(family).tensors
    prompts = len({"positive", "negative"} & {name.partition(".")[0] for name in tensors})
    assert gathered[1] - gathered[0] == pytest.approx(prompts * counted, rel=1e-2)


def test_a_rank_that_gathers_once_more_is_found():
    """As one that has found more different embeddings than the others have."""
    config = configuration(("ulysses",), shard_weights=True)
    logs = [*run("flux-dev", config, shallow_checkpoint())]
    own = logs[1].events
    first = next(event for event in own if event[1].group.startswith("weights"))
    own.insert(0, (first[0], replace(first[1])))
    assert wires.differences(logs) and wires.deadlock(logs)


@pytest.mark.parametrize("methods", [("ulysses",), ("ring",), ("pipefusion", "ring")], ids="+".join)
def test_float8_travels_in_as_many_messages(methods):
    """Values and scales in one message, in the order of those in full."""
    config = configuration(methods)
    full, packed = of_shallow_flux(config), of_shallow_flux(replace(config, wire="fp8"))
    check(packed)
    kinds = [
        [[(m.direction, m.peer) for op in log.operations for m in op.messages] for log in logs]
        for logs in (full, packed)
    ]
    assert kinds[0] == kinds[1]
    numbers = {word for log in packed for op in log.operations for m in op.messages for word in m.what}
    assert "uint8" in numbers


@pytest.mark.parametrize(
    "method, wire", [*((method, "full") for method in HIDDEN_BEHIND), ("ulysses", "fp8")]
)
def test_halves_travel_while_others_are_computed(method, wire, monkeypatch):
    """Values come while queries and keys are rotated. Of two halves of heads, the second comes while the
    first attends, which goes while the second attends. Of two halves of tokens, the first is summed while the
    second multiplies."""
    halve(monkeypatch)
    group, work, part = HIDDEN_BEHIND[method]
    [log] = run("flux-dev", replace(configuration((method,)), wire=wire), ranks=SECOND)
    own = [op for op in log.operations if op.group.startswith(group) and op.received]
    # not outputs, which are float32, nor modulation, which is gathered
    blocks = [
        op
        for op in own
        if op.messages[0].what[0] in ("bfloat16", "uint8", "all_reduce") and len(op.messages) != 2
    ]
    hidden = [op for op in blocks if work & {*log.meanwhile(op)}]
    assert 0 < len(hidden) == part * len(blocks)


@pytest.mark.parametrize("family", OF_VALUES)
def test_values_travel_while_queries_and_keys_are_made_ready(family):
    """Of a block's three all-to-alls values are the first; queries and keys, twice as much, follow once they
    are multiplied, normed and rotated, and outputs go back."""
    [log] = run(family, configuration(("ulysses",)), ranks=SECOND)
    all_to_alls = [op for op in log.operations if op.group.startswith("ulysses") and len(op.messages) == 4]
    count = len(all_to_alls) // 3
    assert count and len(all_to_alls) == 3 * count
    for values, both, outputs in zip(*[iter(all_to_alls)] * 3):
        of_values, of_both, of_outputs = ([m.what[1] for m in op.messages] for op in (values, both, outputs))
        assert of_both == [2 * size for size in of_values] and sum(of_outputs) == sum(of_values)
        meanwhile = {*log.names[values.started : both.started]}
        assert (MULTIPLIES | {"aten::rms_norm"}) & meanwhile and PRODUCTS & meanwhile
        assert values.waited >= both.waited


def test_the_mlp_multiplies_while_queries_and_keys_travel():
    """In blocks of one stream, which need its product only after attention."""
    log = of_shallow_flux(configuration(("ulysses",)))[1]
    all_to_alls = [op for op in log.operations if op.group.startswith("ulysses") and len(op.messages) == 4]
    products = [sum(name in PRODUCTS for name in log.meanwhile(op)) for op in all_to_alls[1::3]]
    assert products == [0, 0, *[1] * SINGLE] * (len(products) // (2 + SINGLE)) != []


def test_values_of_compiled_blocks_go_with_the_rest_also_where_a_rank_cannot_compile(monkeypatch):
    """It sends what the others do."""
    monkeypatch.setattr(compiled_blocks, "unavailable", lambda: "no compiler here")
    [log] = run("flux-dev", configuration(("ulysses",), compile="blocks"), ranks=SECOND)
    all_to_alls = [op for op in log.operations if op.group.startswith("ulysses") and len(op.messages) == 4]
    sizes = [[m.what[1] for m in op.messages] for op in all_to_alls]
    assert sizes and sizes[0::2] == [[3 * size for size in outputs] for outputs in sizes[1::2]]


RECORDED = wires.recorded
WAITS = [("ulysses", {}), ("ring", {}), ("tensor_parallel", {}), ("pipefusion", {"num_pipeline_patch": 3})]


@pytest.mark.parametrize("method, settings", [*WAITS, ("data_parallel", {"shard_weights": True})])
def test_ranks_that_wait_at_once_hide_nothing(method, settings, monkeypatch):
    """benchmarks/waiting.py: nothing is between a send and its wait. Stages still post receives ahead."""
    halve(monkeypatch)
    config = configuration((method,), **settings)
    logs = {"usual": run("flux-dev", config, shallow_checkpoint())}
    monkeypatch.setattr(wires, "recorded", recorded_waiting)
    logs["waiting"] = run("flux-dev", config, shallow_checkpoint())
    assert wires.differences(logs["waiting"]) == [] and wires.deadlock(logs["waiting"]) is None
    for usual, log in zip(*logs.values(), strict=True):
        assert [op.messages for op in log.operations] == [op.messages for op in usual.operations]
    assert any(op.waited != op.started for log in logs["usual"] for op in begun_in(log))
    assert all(op.waited == op.started for log in logs["waiting"] for op in begun_in(log))


def begun_in(log: Log) -> list[Operation]:
    """Return what is no receive alone."""
    return [op for op in log.operations if {message.direction for message in op.messages} != {"receive"}]


@contextmanager
def recorded_waiting(log: Log, operations: bool = True, count: Count | None = None):
    with RECORDED(log, operations, count), waiting():
        yield


def edge(direction: str, peer: int, count: int, group="edge:0,1") -> Operation:
    return Operation(group, [Message(direction, peer, ("float32", count))], [], 0)


@pytest.mark.parametrize("wrong", ["size", "missing", "both send first"])
def test_what_does_not_match_is_found(wrong):
    """The checks above can fail."""
    first, second = Log(0), Log(1)
    sends = [edge("send", 1, 4), edge("receive", 1, 3)]
    answers = [edge("receive", 0, 4), edge("send", 0, 3)]
    if wrong == "size":
        answers[0] = edge("receive", 0, 5)
    elif wrong == "missing":
        del answers[1]
    else:
        answers.reverse()
    first.events = [("start", operation) for operation in sends]
    second.events = [("start", operation) for operation in answers]
    assert wires.deadlock([first, second]) is not None
    assert bool(wires.differences([first, second])) == (wrong != "both send first")
