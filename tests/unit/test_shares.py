"""Shares of the work of ranks that differ: who gets how many tokens, heads, blocks and samples."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from published import A100, FLUX
from tiny import write_checkpoint

from backend import shares
from backend.config import ConfigError, ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.parallel.stage_split import plan, stage_blocks
from backend.planner.auto_config import AutoConfig
from backend.planner.choose import MEMORY, Question, choose
from backend.planner.cost import Cost
from backend.planner.machine import RESERVE, Machine, RequestEstimate
from backend.planner.weight_swaps import WeightSwaps
from backend.rank_plan import RequestSize, describe
from backend.rank_plan.weights import tensor_mesh
from backend.sampling.model_call import samples_of_replicas

GB = 1_000_000_000
REQUEST = RequestEstimate(4096, 512, 20, 1)
TP = ParallelConfig(tensor_parallel_degree=2)


def mixed(speeds=(1.0, 1.6), gigabytes=(80, 80), names=("A", "B")) -> Machine:
    """GPUs of such speeds and memory."""
    return replace(A100, names=names, speeds=speeds, memory=tuple(size * GB for size in gigabytes))


@pytest.mark.parametrize("total", [0, 1, 3, 4, 5, 10, 57, 4608])
@pytest.mark.parametrize("given", [(), (70, 30), (40, 30, 20, 10), (1000, 1, 1), (1, 1, 1000)])
def test_shards_follow_shares_and_none_is_empty(total, given):
    count = len(given) or 3
    ends = shares.shard_edges(total, count, given)
    sizes = [end - start for start, end in pairwise(ends)]
    assert ends[0] == 0 and ends[-1] == total and min(sizes) >= (total >= count)
    wanted = [total * share / sum(given) for share in given] or [total / count] * count
    # each other share may give up one, so that none is empty
    bound = 1 if min(wanted) >= 1 else count
    assert all(abs(size - want) < bound for size, want in zip(sizes, wanted))


def test_the_share_of_an_index_is_that_of_its_ranks():
    config = ParallelConfig(ring_degree=2, ulysses_degree=2, shares="40,30,20,10").validate()
    assert config.shares_of("ring") == (70, 30) and config.shares_of("ulysses") == (60, 40)
    assert config.shares_of("ring", "ulysses") == (40, 30, 20, 10) and config.shares_of("tp") == ()
    assert ParallelConfig(ulysses_degree=2, shares="5,5").shares_of("ulysses") == ()
    assert replace(config, shares="40,10,40,10").shares_of("ring") == ()


def test_stages_are_as_long_as_they_are_fast():
    """Blocks of equal work, and blocks whose weights have a limit too."""
    sizes = [len(blocks) for blocks in stage_blocks([1.0] * 10, 4, shares=(40, 30, 20, 10))]
    assert sizes == [4, 3, 2, 1]
    layers = [{str(index): 5} for index in range(20)]
    stages = plan([1.0] * 20, [10] * 20, layers, 2, shares=(70, 30))
    held = [10 * len(blocks) for blocks in stages.blocks]
    for stage in stages.holders.values():
        held[stage] += 5
    assert [len(blocks) for blocks in stages.blocks] == [14, 6] and held == [210, 90]


def test_listed_blocks_stay():
    stages = plan([1.0] * 4, [1] * 4, [{}] * 4, 2, counts=(1, 3), shares=(70, 30))
    assert [len(blocks) for blocks in stages.blocks] == [1, 3]


def test_samples_of_a_call_follow_shares():
    groups = replace(
        mesh.single(), dp=mesh.Axis(None, 0, 2, (0, 1)), replica_shares=(70.0, 30.0), world_size=2
    )
    assert [len(each) for each in samples_of_replicas(10, groups)] == [7, 3]
    assert [len(each) for each in samples_of_replicas(10, replace(groups, replica_shares=()))] == [5, 5]
    assert [len(each) for each in samples_of_replicas(1, groups)] == [1, 1]


def test_replicas_of_sharded_weights_call_the_model_equally_often():
    """Each call gathers weights of all of them: one call more would wait for the others for ever."""
    weights: Any = object()
    groups = replace(
        mesh.single(), dp=mesh.Axis(None, 0, 2, (0, 1)), replica_shares=(70.0, 30.0), weights=weights
    )
    assert [len(each) for each in samples_of_replicas(10, groups)] == [5, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = write_checkpoint(tmp_path_factory.mktemp("models") / "flux-tiny.safetensors")
    return Engine(ParallelConfig(), mesh.single()).check_load(str(path), "default").checkpoint


def test_more_share_is_more_work(checkpoint):
    """Counts of describe(): tokens, heads, blocks and samples, 3 to 1 on two ranks of 8 heads, 12 blocks."""

    def ranks(**fields):
        config = replace(ParallelConfig(shares="75,25"), **fields).validate()
        return describe(config, checkpoint, RequestSize(2048, 128, batch=4))

    tokens = [sum(map(sum, rank.patches)) for rank in ranks(ulysses_degree=2)]
    assert tokens == [1632, 544] and [rank.heads for rank in ranks(ulysses_degree=2)] == [6, 2]
    assert [sum(map(sum, rank.patches)) for rank in ranks(ring_degree=2)] == tokens
    assert [rank.samples for rank in ranks(data_parallel_degree=2)] == [3, 1]
    stages = ranks(pipefusion_degree=2)
    blocks = [rank.blocks[1] - rank.blocks[0] for rank in stages]
    assert sum(blocks) == 12 and blocks[0] >= 2 * blocks[1]
    assert stages[0].weight_bytes > 2 * stages[1].weight_bytes
    matrices = ranks(tensor_parallel_degree=2)
    assert [rank.heads for rank in matrices] == [6, 2]
    assert matrices[0].weight_bytes > 2 * matrices[1].weight_bytes


def test_heads_are_whole(checkpoint):
    """A tensor-parallel rank's queries, keys, values and rows of the output are of the same heads."""
    config = ParallelConfig(tensor_parallel_degree=2, shares="70,30")
    plan = checkpoint.cut_plan(config)
    size = checkpoint.family.blocks.head_size(checkpoint.config)
    for rank, heads in enumerate((6, 2)):
        found = plan.shards(tensor_mesh(config, rank))
        for name in ("to_q", "to_k", "to_v", "add_q_proj"):
            [span] = found[f"transformer_blocks.0.attn.{name}"].outputs
            assert len(span) == heads * size and span.lo % size == 0
        [span] = found["transformer_blocks.0.attn.to_out.0"].inputs
        assert len(span) == heads * size


@pytest.mark.parametrize("axis", ["ulysses_degree", "tensor_parallel_degree"])
def test_measured_shares_are_faster_than_equal_ones(axis):
    machine = mixed(speeds=(1.5, 1.0))
    equal, uneven = (
        Cost(FLUX, replace(ParallelConfig(shares=given), **{axis: 2}), machine, REQUEST).total
        for given in ("", "60,40")
    )
    assert uneven < 0.92 * equal


def test_auto_shares_by_speed_and_says_so():
    """A faster GPU comes first and gets more; those that are alike get equal shares."""
    machine = mixed()
    order = machine.fastest_first()
    choice = choose(Question(FLUX, REQUEST, machine.ordered(order), 2))
    assert order == [1, 0] and choice.option.plan.validate().shares == "61.5,38.5"
    assert "shares 61.5,38.5" in choice.lines[0]
    assert choice.lines[1] == "GPUs differ: B 1.60x, A 1.00x the speed of the slowest (one timed step)."
    through_host = replace(machine.ordered(order), links="GPUs send through the host here.")
    assert choose(Question(FLUX, REQUEST, through_host, 2)).lines[2] == "GPUs send through the host here."
    alike = choose(Question(FLUX, REQUEST, mixed((1.0, 1.05), names=("A", "A")), 2))
    assert alike.option.plan.shares == "" and len(alike.lines) == 1 + len(alike.runners_up)


def test_auto_shares_by_memory_where_speed_does_not_fit():
    """Of two GPUs of the same speed one holds half as much: neither is given more than it holds."""
    machine = mixed(speeds=(1.0, 1.0), gigabytes=(22, 11), names=("A", "A"))
    question = Question(FLUX, REQUEST, machine, 2)
    for method in ("auto", MEMORY):
        option = choose(question, method).option
        assert option.fits and option.plan.shares
        assert not question.option(replace(option.plan, shares="")).fits


def test_auto_fills_unlike_gpus_alike_where_nothing_else_fits():
    """What a GPU holds whatever its share, here of many tokens, is too much for a share by memory."""
    machine = mixed(speeds=(1.6, 1.0), gigabytes=(26, 10), names=("B", "A"))
    question = Question(FLUX, replace(REQUEST, image_tokens=65536), machine, 2)
    for given in ("61.5,38.5", "73.8,26.2", ""):
        assert not question.option(replace(TP, shares=given)).fits
    option = choose(question).option
    assert option.fits and option.plan.shares == "76.5,23.5"


def test_alike_gpus_of_which_one_has_less_room_share_by_it():
    """As GPU 0, which has ComfyUI and a desktop, where stages of as many blocks just miss."""
    plan = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=2)
    machine = mixed(speeds=(1.0, 1.0), gigabytes=(80, 80), names=("A", "A"))
    size = Question(FLUX, REQUEST, machine, 2).option(plan).bytes + RESERVE
    machine = replace(machine, memory=(size - 200_000_000, size + 1_200_000_000))
    question = Question(FLUX, REQUEST, machine, 2)
    assert not question.option(plan).fits and machine.memory[1] < 1.1 * machine.memory[0]
    fitting = [each.plan for each in question.options() if each.fits and each.plan.has_stale_kv]
    assert fitting and {each.shares for each in fitting} == {"47.5,52.5"}


def test_a_gpu_that_others_have_taken_is_used_last():
    """Plans of two to three GPUs would all contain the second one."""
    machine = mixed(speeds=(1.0,) * 4, gigabytes=(24, 2, 24, 23), names=("A",) * 4)
    assert machine.fastest_first() == [0, 2, 3, 1]
    assert mixed(speeds=(1.0, 1.0), gigabytes=(24, 12), names=("A", "A")).fastest_first() == [0, 1]


def test_comfyuis_gpu_is_used_after_others_that_are_alike():
    """It has the text encoder and VAE, for which weights leave and come back."""
    alike = mixed(speeds=(1.0,) * 3, gigabytes=(24, 23, 22), names=("A",) * 3)
    order = alike.fastest_first(0)
    assert order == [1, 2, 0] and alike.fastest_first() == [0, 1, 2] and alike.roomiest_first(0) == [0, 1, 2]
    assert mixed(speeds=(1.5, 1.0)).fastest_first(0) == [0, 1]
    two_alike = mixed(speeds=(2.013, 2.009, 1.0), gigabytes=(24,) * 3, names=("A", "A", "B"))
    preferred = two_alike.fastest_first(0)
    assert preferred == [1, 0, 2] and two_alike.fastest_first() == [0, 1, 2]
    unlike = two_alike.ordered(preferred, usual=two_alike.fastest_first())
    used = [[preferred[at] for at in unlike.gpus_of_ranks(ranks)] for ranks in (1, 2, 3)]
    assert used == [[1], [0, 1], [0, 1, 2]]
    machine = alike.ordered(order, usual=alike.fastest_first())
    rooms = [machine.in_rank_order(ranks).rooms(ranks) for ranks in (1, 2, 3)]
    assert [[(room + RESERVE) // 10**9 for room in each] for each in rooms] == [[23], [23, 22], [24, 23, 22]]
    question = Question(FLUX, REQUEST, machine, 3, swaps=WeightSwaps(left_by_comfyui=((2, 0),)))
    two = question.option(ParallelConfig(ulysses_degree=2))
    assert two.yield_seconds == 0 < question.option(ParallelConfig(ulysses_degree=3)).yield_seconds
    assert question.of_first(3).swaps.left_by_comfyui == ((0, 0),)


def test_shares_of_the_user_stay():
    """Which are no speeds: a GPU with more of the work, for its memory, takes longer for it."""
    machine = mixed(speeds=(1.0, 1.0), names=("A", "A"))
    question = Question(FLUX, REQUEST, machine, 2, shares=(60.0, 40.0))
    assert {option.plan.shares for option in question.options()} == {"", "60,40"}
    assert {option.plan.shares for option in question.options() if option.plan.world_size == 2} == {"60,40"}
    alone, ring = ParallelConfig(), ParallelConfig(ring_degree=2, shares="60,40")
    even = question.option(replace(ring, shares="")).seconds
    assert even < question.option(ring).seconds < question.option(alone).seconds


@pytest.mark.parametrize("text", ["60", "60,40,10", "1,0", "nan,1", "a,b"])
def test_shares_that_do_not_fit_the_gpus_are_refused(text):
    with pytest.raises(ConfigError, match="shares is"):
        AutoConfig(gpus="2", shares=text).devices(2)
    assert AutoConfig(gpus="2", shares="60,40").devices(2) == [0, 1]


def test_a_cached_machine_has_its_speeds():
    machine = mixed()
    assert Machine.from_dict({**machine.as_dict(), "all_to_all": {"2": 1e9}}).speeds == machine.speeds
    with pytest.raises(ValueError):
        Machine.from_dict({**machine.as_dict(), "speeds": [1.0, float("nan")]})


def test_a_grid_of_ranks_has_rows_and_columns():
    assert shares.written((3, 1)) == "75,25" and shares.grid_shares((4, 3, 2, 1), 2) == ((7, 3), (6, 4))
