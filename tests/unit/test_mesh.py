"""The layout of ranks, without processes."""

import pytest

from backend.config import ParallelConfig
from backend.parallel.mesh import layout

SIXTEEN = ParallelConfig(data_parallel_degree=2, cfg_degree=2, pipefusion_degree=2, ulysses_degree=2)
#: axis -> groups of 16 ranks at dp2 cfg2 pp2 sp2.
TABLE = {
    "sp": [{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}],
    "pp": [{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}],
    "cfg": [{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}],
    "dp": [{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}],
}
DIMENSION = {"dp": 0, "cfg": 1, "pp": 2, "sp": 4}


@pytest.mark.parametrize("axis", TABLE)
def test_sixteen_ranks(axis):
    groups = layout(SIXTEEN).movedim(DIMENSION[axis], -1).reshape(-1, 2)
    assert sorted(map(set, groups.tolist()), key=min) == TABLE[axis]


def test_replicas():
    assert [set(r.flatten().tolist()) for r in layout(SIXTEEN)] == [set(range(8)), set(range(8, 16))]


def test_world_size_is_the_product():
    assert (
        ParallelConfig(cfg_degree=2, pipefusion_degree=2, ring_degree=3, num_pipeline_patch=7).world_size
        == 12
    )
