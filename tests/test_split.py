"""Pipeline stages: balanced by work, never empty."""

import pytest
from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.checks import check_model
from backend.parallel.split import explicit_blocks, stage_blocks


@pytest.mark.parametrize("blocks, stages", [(57, 8), (6, 4), (5, 5), (12, 1), (10, 7)])
def test_equal_blocks(blocks, stages):
    sizes = [len(stage) for stage in stage_blocks([1.0] * blocks, stages)]
    assert sum(sizes) == blocks and min(sizes) >= 1 and max(sizes) == -(-blocks // stages)


def test_dear_blocks_get_room():
    stages = stage_blocks([3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2)
    assert [list(stage) for stage in stages] == [[0, 1], [2, 3, 4, 5, 6, 7]]


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
