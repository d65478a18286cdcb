"""Pipeline stages: balanced by work, never empty."""

import pytest
from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.checks import check_model
from backend.parallel.split import MOST_WEIGHTS, explicit_blocks, plan, stage_blocks


@pytest.mark.parametrize("blocks, stages", [(57, 8), (6, 4), (5, 5), (12, 1), (10, 7)])
def test_equal_blocks(blocks, stages):
    sizes = [len(stage) for stage in stage_blocks([1.0] * blocks, stages)]
    assert sum(sizes) == blocks and min(sizes) >= 1 and max(sizes) == -(-blocks // stages)


def test_dear_blocks_get_room():
    stages = stage_blocks([3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
    assert [list(stage) for stage in stages] == [[0, 1], [2, 3, 4, 5, 6, 7]]


#: Blocks as in Flux: of the same work, the first (double) with twice the matrices and four times the modulation of the others.
DOUBLE, SINGLE = 19, 38
COSTS, WEIGHTS = [1.0] * (DOUBLE + SINGLE), [24] * DOUBLE + [12] * SINGLE
MODULATION = [{f"double.{i}.image": 6, f"double.{i}.text": 6} for i in range(DOUBLE)] + [{f"single.{i}": 3} for i in range(SINGLE)]


def weights_of(stages):
    held = [sum(WEIGHTS[i] for i in blocks) for blocks in stages.blocks]
    for name, holder in stages.holders.items():
        held[holder] += {name: size for layers in MODULATION for name, size in layers.items()}[name]
    return held


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_modulation_balances_weights_at_no_cost_in_work(count):
    stages = plan(COSTS, WEIGHTS, MODULATION, count)
    assert stages.blocks == stage_blocks(COSTS, count)
    held = weights_of(stages)
    assert sum(held) == sum(WEIGHTS) + sum(sum(layers.values()) for layers in MODULATION)
    assert max(held) <= 1.1 * sum(held) / count
    assert all(stages.owners[name] == next(i for i, own in enumerate(stages.blocks) if block in own) for block, layers in enumerate(MODULATION) for name in layers)


def test_stages_that_are_balanced_keep_their_modulation():
    stages = plan([1.0] * 8, [24] * 8, MODULATION[:8], 4)
    assert stages.holders == stages.owners and not any(stages.lent(i) for i in range(4))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_without_modulation_work_gives_way_to_weights(count):
    """Chroma: the cheapest split of which no stage has more than MOST_WEIGHTS x the mean."""
    stages = plan(COSTS, WEIGHTS, [{}] * len(COSTS), count)
    assert max(weights_of_blocks := [sum(WEIGHTS[i] for i in own) for own in stages.blocks]) <= MOST_WEIGHTS * sum(weights_of_blocks) / count
    assert max(map(len, stages.blocks)) > -(-len(COSTS) // count)


def test_a_block_too_heavy_for_the_limit_is_split_by_work():
    assert plan([1.0] * 4, [100, 1, 1, 1], [{}] * 4, 2).blocks == [range(0, 2), range(2, 4)]


def test_listed_counts_are_kept():
    assert plan(COSTS, WEIGHTS, MODULATION, 2, [5, 52]).blocks == [range(0, 5), range(5, 57)]


def test_explicit_counts_are_prefix_sums():
    assert explicit_blocks([12, 15, 15, 15]) == [range(0, 12), range(12, 27), range(27, 42), range(42, 57)]


@pytest.mark.parametrize("text, says", [("3,x", "not a list"), ("3,9,1", "that many stages"), ("0,12", "at least one block")])
def test_bad_lists(text, says):
    with pytest.raises(ConfigError, match=says):
        ParallelConfig(pipefusion_degree=2, attn_layer_num_for_pp=text).validate()


def test_list_that_does_not_add_up():
    with pytest.raises(UnsupportedError, match="together 11 blocks, but tiny has 12"):
        check_model("tiny", 12, 8, ParallelConfig(pipefusion_degree=2, attn_layer_num_for_pp="5,6"))


@pytest.mark.parametrize("fields, says", [
    (dict(pipefusion_degree=13), "has 12 blocks"), (dict(ulysses_degree=9), "8 attention heads"),
    (dict(tensor_parallel_degree=3), "does not divide the 8"), (dict(tensor_parallel_degree=4, ulysses_degree=4), "has 2 attention heads")])
def test_degrees_that_do_not_fit_the_model(fields, says):
    with pytest.raises(UnsupportedError, match=says):
        check_model("tiny", 12, 8, ParallelConfig(**fields))
