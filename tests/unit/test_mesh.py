"""The layout of ranks and their groups, without processes."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _world
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from backend.config import ParallelConfig
from backend.hardware.gpu_sharing import SHARED_GPU
from backend.parallel import comm, fsdp, mesh
from backend.parallel.mesh import layout
from backend.parallel.sequence import Span

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


@pytest.fixture
def rank_1(monkeypatch):
    """Return a function that builds this rank's mesh among ranks whose groups do nothing."""
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda *args, backend=None, **more: new_group(*args, **more))
    monkeypatch.setenv("LOCAL_RANK", "1")

    def build(config: ParallelConfig, device: str = "cpu") -> mesh.Mesh:
        if not dist.is_initialized():
            dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=config.world_size)
        return mesh.build(config, device)

    yield build
    dist.destroy_process_group()


@pytest.mark.parametrize("shared, index", [(None, 1), ("0", 1), ("1", 0)])
def test_a_rank_has_a_gpu_of_its_own_unless_all_share_one(monkeypatch, shared, index):
    """To NCCL each of those is on a host of its own: it refuses two ranks on one GPU of a host."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("NCCL_HOSTID", "")
    if shared:
        monkeypatch.setenv(SHARED_GPU, shared)
    assert mesh._own_gpu() == index
    assert os.environ["NCCL_HOSTID"] == ("" if index else "rank-1")


def of_degrees(dp=1, cfg=1, ring=1, ulysses=1, tp=1, **settings) -> ParallelConfig:
    return ParallelConfig(
        data_parallel_degree=dp,
        cfg_degree=cfg,
        ring_degree=ring,
        ulysses_degree=ulysses,
        tensor_parallel_degree=tp,
        **settings,
    )


@pytest.mark.parametrize(
    "degrees, holders",
    [
        ({"ulysses": 4}, [0, 1, 2, 3]),
        ({"ring": 4}, [0, 1, 2, 3]),
        ({"dp": 4}, [0, 1, 2, 3]),
        ({"cfg": 2, "ulysses": 4}, [0, 1, 2, 3]),
        ({"ring": 2, "ulysses": 2}, [0, 1, 2, 3]),
        ({"dp": 2, "cfg": 2, "ulysses": 2}, [0, 1, 4, 5]),
    ],
    ids=str,
)
def test_weights_are_gathered_over_a_group_of_their_own(rank_1, degrees, holders):
    """A communicator runs its operations in order: gathers would wait for the messages of attention."""
    found = rank_1(of_degrees(**degrees, shard_weights=True))
    assert found.weights.mesh_dim_names == ("weights",)
    group = found.weights.get_group()
    assert dist.get_process_group_ranks(group) == holders
    others = [value.group for value in vars(found).values() if isinstance(value, mesh.Axis)]
    assert all(group is not other for other in [*others, found.control, dist.group.WORLD])
    mesh.close(found)
    assert list(_world.pg_map) == [dist.group.WORLD]


def test_every_group_is_connected_when_it_is_made(rank_1, monkeypatch):
    """Once, in one order on all ranks: NCCL takes its memory then."""
    connected = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: connected.append(group))
    monkeypatch.setattr(dist, mesh.ALL_GATHER, lambda out, x, group: connected.append(group))
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, x, group: connected.append(group))
    found = rank_1(of_degrees(cfg=2, ring=2, ulysses=2, shard_weights=True))
    axes = [found.cfg, found.ring, found.ulysses, found.sp]
    assert (
        connected == [group for axis in axes for group in [axis.group] * 3] + [found.weights.get_group()] * 3
    )


@pytest.mark.filterwarnings("error::FutureWarning")
def test_nothing_is_called_by_a_name_that_torch_warns_of(rank_1):
    """Each rank would write the warnings into its log."""
    found = rank_1(of_degrees(cfg=2, ring=2, ulysses=2, shard_weights=True))
    x = torch.zeros(3, 5)
    assert [each.shape for each in comm.gather_equal(x, found.ring, "ring")] == [x.shape] * 2


def test_gpus_are_connected_for_few_numbers_and_for_many(monkeypatch):
    """Which NCCL sends by other algorithms, each with memory of its own."""
    sizes = []
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: sizes.append(x.numel()))
    monkeypatch.setattr(dist, mesh.ALL_GATHER, lambda out, x, group: sizes.append(out.numel()))
    monkeypatch.setattr(dist, "all_to_all_single", lambda out, x, group: sizes.append(out.numel()))
    mesh._connect_all("group", torch.device("meta"))
    few, many = mesh.FEW_AND_MANY
    assert sizes == [few, 2 * few, many, 2 * many, 2]


@pytest.mark.parametrize("shard_weights", [False, True])
def test_degrees_that_come_back_get_new_groups(rank_1, monkeypatch, shard_weights):
    """Before torch 2.10 a mesh that is flattened again may be given the group of an earlier one."""
    monkeypatch.delattr(DeviceMesh, "_flatten")
    both = of_degrees(cfg=2, ring=2, ulysses=2, shard_weights=shard_weights)
    for config in (both, of_degrees(cfg=2, ulysses=4), both):
        found = rank_1(config)
        groups = [found.sp.group, found.weights and found.weights.get_group()]
        assert all(group in _world.pg_map for group in groups if group is not None)
        assert found.sp.ranks == (0, 1, 2, 3)
        mesh.close(found)


def test_rows_of_weights_that_are_sharded_again(rank_1):
    """DTensor caches meshes by their ranks: the second weight's is the first one's, which is closed."""
    config = of_degrees(cfg=2, ulysses=2, shard_weights=True)
    for _ in range(2):
        found = rank_1(config)
        layer = torch.nn.Linear(4, 6).requires_grad_(False)
        fully_shard(layer, mesh=found.weights)
        assert fsdp.own_rows(layer.weight) == Span(3, 6)
        mesh.close(found)


def test_sequence_ranks_next_to_tensor_ranks(rank_1):
    assert rank_1(of_degrees(ring=2, ulysses=2, tp=2)).sp.ranks == (1, 3, 5, 7)


@pytest.mark.parametrize(
    "device, differ, found", [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_ranks_ask_whether_their_gpus_differ(rank_1, monkeypatch, device, differ, found):
    """Noise comes from one of them then."""
    asked, make = [], mesh.init_device_mesh
    monkeypatch.setattr(
        mesh, "init_device_mesh", lambda device, *shape, **names: make("cpu", *shape, **names)
    )
    monkeypatch.setattr(mesh, "_connect_all", lambda group, device: None)
    monkeypatch.setattr(mesh, "_differ", lambda name, group: asked.append(name) or differ)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    assert rank_1(of_degrees(ulysses=2), device).gpus_differ == found
    assert asked == (["GPU 1"] if device == "cuda" else [])


class Options:
    """In the place of ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None)


class OptionsWithoutConfig(Options):
    def __init__(self, is_high_priority_stream: bool = False):
        super().__init__(is_high_priority_stream)
        del self.config


#: Two pipelines of three stages, and what connects them: each stage to the next, and the last to the first.
PIPELINES = ParallelConfig(cfg_degree=2, pipefusion_degree=3)
PAIRS = [(0, 1), (3, 4), (1, 2), (4, 5), (2, 0), (5, 3)]


class EdgeLog:
    """What a rank asks of torch for its edges. made: of each group its ranks and arguments. sent, received:
    (peer, ranks of the group) of each message. waited: how many were waited for."""

    def __init__(self, monkeypatch, rank: int, options: type = Options):
        self.made: list[tuple[tuple[int, ...], dict]] = []
        self.sent: list[tuple] = []
        self.received: list[tuple] = []
        self.waited = 0
        self.groups: dict[int, tuple[int, ...]] = {}
        zeros = torch.zeros
        monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(size, device="meta"))
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "new_group", self.new_group)
        monkeypatch.setattr(dist, "isend", lambda x, peer, group: self.message(self.sent, peer, group))
        monkeypatch.setattr(dist, "irecv", lambda x, peer, group: self.message(self.received, peer, group))

    def new_group(self, ranks: list[int], **arguments) -> dist.ProcessGroup:
        group = dist.ProcessGroup(0, 2)
        self.made.append((tuple(ranks), arguments))
        self.groups[id(group)] = tuple(ranks)
        arguments["group"] = group  # it lives as long as its id is looked up
        return group

    def message(self, log: list, peer: int, group: dist.ProcessGroup):
        log.append((peer, self.groups[id(group)]))
        return SimpleNamespace(wait=self.wait)

    def wait(self):
        self.waited += 1


@pytest.mark.parametrize("options", [Options, OptionsWithoutConfig])
def test_edges_on_gpus_are_urgent_and_leave_most_of_the_gpu_to_blocks(monkeypatch, options):
    """Each by options of its own, which torch keeps. A torch whose NCCL is before 2.17 has no limit of CTAs:
    it ended every start."""
    log = EdgeLog(monkeypatch, 0, options)
    mesh._edges(PIPELINES, torch.device("cuda"))
    assert [ranks for ranks, _ in log.made] == PAIRS
    every = [arguments["pg_options"] for _, arguments in log.made]
    assert len({id(each) for each in every}) == len(PAIRS)
    for _, arguments in log.made:
        assert arguments["backend"] == "nccl" and arguments["timeout"] == mesh.TIMEOUT
        assert "device_id" not in arguments  # which would connect at once, and by a split of the whole group
    for each in every:
        assert each.is_high_priority_stream and each._timeout == mesh.TIMEOUT
        assert options is OptionsWithoutConfig or each.config.max_ctas == mesh.EDGE_CTAS == 4


def test_edges_on_cpus_are_gloos(monkeypatch):
    log = EdgeLog(monkeypatch, 0)
    mesh._edges(PIPELINES, torch.device("cpu"))
    assert [ranks for ranks, _ in log.made] == PAIRS
    for _, arguments in log.made:
        assert arguments["backend"] == "gloo" and arguments["timeout"] == mesh.TIMEOUT


def test_every_edge_is_connected_by_one_message_in_one_order(monkeypatch):
    """All ranks make all groups in the same order, and an edge's sender and receiver use the same one."""
    sent, received = [], []
    for rank in range(PIPELINES.world_size):
        with monkeypatch.context() as of_rank:
            log = EdgeLog(of_rank, rank)
            edges = mesh._edges(PIPELINES, torch.device("cuda"))
        assert [ranks for ranks, _ in log.made] == PAIRS
        assert log.waited == len(log.sent + log.received) == 2
        sent += [(rank, *each) for each in log.sent]
        received += [(peer, rank, ranks) for peer, ranks in log.received]
        place = rank % 3
        found = [group and log.groups[id(group)] for group in vars(edges).values()]
        outputs = PAIRS[4 + rank // 3]
        wanted = [
            None if place == 0 else (rank - 1, rank),
            None if place == 2 else (rank, rank + 1),
            None if place == 1 else outputs,
        ]
        assert found == wanted
    assert sorted(sent) == sorted(received) == sorted((*pair, pair) for pair in PAIRS)
