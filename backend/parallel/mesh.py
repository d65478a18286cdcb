"""The mesh of a configuration, and every process group of the backend. Nothing else creates groups.

Axes, slowest first: dp, cfg, pp, ring, ulysses, tp (config.AXES).
"""

import hashlib
import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, Store  # pyright: ignore[reportPrivateImportUsage]  # documented
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import shares
from ..config import ParallelConfig
from ..hardware.gpu_sharing import shares_gpu
from ..protocol.heartbeats import MAX_COLLECTIVE_SECONDS

#: Of every process group.
TIMEOUT = timedelta(seconds=MAX_COLLECTIVE_SECONDS)

#: all_gather_single by its name in torch.distributed. From torch 2.13 on the longer one warns.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

#: Most CTAs of a GPU that copy along an edge of a pipeline: NVLink is full with fewer, and blocks want them.
EDGE_CTAS = 4
#: Numbers of the first messages: NCCL has one algorithm for few and another for many, and takes the memory of
#: each when it is first used (NCCL_RUNTIME_CONNECT, from 2.22 on).
FEW_AND_MANY = (1, 1 << 22)


@dataclass(frozen=True)
class Axis:
    """This rank's place on a mesh axis, or on several flattened ones. shares: of each index, () if equal."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    ranks: tuple[int, ...]
    shares: tuple[float, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    def neighbour(self, offset: int) -> int:
        """Return the global rank of the neighbour ``offset`` places on, around the end."""
        return self.ranks[(self.rank + offset) % self.size]


#: The axis of a process without others.
ALONE = Axis(group=None, rank=0, size=1, ranks=(0,))


@dataclass(frozen=True)
class Edges:
    """Two-rank groups of the pipeline around this stage, None where it has no such neighbour: from the stage
    before, to the next one, and from the last stage to the first (outputs).

    Groups of their own, since one NCCL communicator runs its operations in order: an edge would wait for
    another one, and the two directions for each other.
    """

    before: dist.ProcessGroup | None = None
    after: dist.ProcessGroup | None = None
    outputs: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands, and its process groups.

    An axis of size 1 has no group. edges carry what goes from stage to stage; pp is for the collectives of
    all stages. weights, for FSDP, has a group of its own over the axes whose ranks hold the same weights.
    tp_inputs x tp_outputs is tp as a grid, for 2d tensor parallelism. control is gloo over all ranks:
    requests, cancel flags, failures.
    replica_shares: of dp x cfg, as Axis.shares. gpus_differ: ranks have GPUs of several models.
    """

    device: torch.device
    rank: int
    world_size: int
    dp: Axis
    cfg: Axis
    pp: Axis
    ring: Axis
    ulysses: Axis
    tp: Axis
    sp: Axis
    tp_inputs: Axis
    tp_outputs: Axis
    weights: DeviceMesh | None
    edges: Edges
    control: dist.ProcessGroup | None
    replica_shares: tuple[float, ...] = ()
    gpus_differ: bool = False


def single(device: str = "cpu") -> Mesh:
    """Make the mesh of one process, without torch.distributed."""
    return Mesh(torch.device(device), 0, 1, *[ALONE] * 9, weights=None, edges=Edges(), control=None)


def layout(config: ParallelConfig) -> torch.Tensor:
    """Arrange the ranks as an array of shape (dp, cfg, pp, ring, ulysses, tp)."""
    return torch.arange(config.world_size).reshape(tuple(config.degrees.values()))


def file_store(path: str) -> FileStore:
    """Return a store in the file ``path``, where the ranks of a machine meet without a port. The file is new
    for each start, in a folder that only this user can enter."""
    store = FileStore(path, int(os.environ["LOCAL_WORLD_SIZE"]))
    store.set_timeout(TIMEOUT)
    return store


def build(config: ParallelConfig, device: str, store: Store | None = None) -> Mesh:
    """Join the default group at ``store`` (None: torchrun's), and build every group of ``config`` on
    ``device`` ("cuda" or "cpu")."""
    local = torch.device(device, _own_gpu()) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            timeout=TIMEOUT,
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    wide = {name: size for name, size in config.degrees.items() if size > 1} or {"dp": 1}
    mesh = init_device_mesh(device, tuple(wide.values()), mesh_dim_names=tuple(wide))
    alone = Axis(group=None, rank=0, size=1, ranks=(dist.get_rank(),))
    axes = dict.fromkeys(config.degrees, alone)
    for name in wide:
        group = mesh.get_group(name)
        _set_timeout(group)
        axes[name] = _axis(group, config.shares_of(name))
    weights = _weights(config, device) if config.shard_weights else None
    control = _own_group(dist.new_group(backend="gloo", timeout=TIMEOUT))
    built = Mesh(
        local,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        **axes,
        sp=_sp_axis(config, axes),
        **_tp_grid(config, alone),
        weights=weights,
        edges=_edges(config, local),
        control=control,
        replica_shares=config.shares_of("dp", "cfg"),
        gpus_differ=device == "cuda" and _differ(torch.cuda.get_device_name(local), control),
    )
    for group in _groups(built):
        _connect_all(group, local)
    return built


def _own_gpu() -> int:
    """Return this rank's GPU, or the one that all share: NCCL takes ranks of one GPU where each names a host
    of its own, and sends through sockets."""
    if not shares_gpu():
        return int(os.environ["LOCAL_RANK"])
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
    return 0


def _groups(mesh: Mesh) -> list[dist.ProcessGroup]:
    """Return the groups of axes and of sharded weights, each once, in the same order on all ranks."""
    groups = [value.group for value in vars(mesh).values() if isinstance(value, Axis)]
    groups.append(mesh.weights and mesh.weights.get_group())
    return list({id(group): group for group in groups if group is not None}.values())


def _differ(name: str, group: dist.ProcessGroup) -> bool:
    own = torch.frombuffer(bytearray(hashlib.sha256(name.encode()).digest()), dtype=torch.uint8)
    names = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(names, own, group=group)
    return not all(each.equal(own) for each in names)


def close(mesh: Mesh):
    """Give back a mesh's groups and threads, on every rank at once; the default group stays for the next."""
    groups = [*_groups(mesh), *filter(None, [*vars(mesh.edges).values(), mesh.control])]
    dist.barrier(group=mesh.control)
    for group in groups:
        if group is not dist.group.WORLD:  # an axis of all ranks may have been given the default group
            dist.destroy_process_group(group)


def _own_group(group: dist.ProcessGroup | int | None) -> dist.ProcessGroup:
    """Return the group that torch made: this rank is in it, so it is neither None nor NON_GROUP_MEMBER."""
    assert isinstance(group, dist.ProcessGroup), "every rank is in one group of an enumeration"
    return group


def require_work(work: dist.Work | None) -> dist.Work:
    """Return the handle of a communication, which every rank of its group has."""
    assert work is not None, "torch returns None to ranks outside of the group"
    return work


def _set_timeout(group: dist.ProcessGroup):
    """Give a group of init_device_mesh the timeout, which that does not take."""
    # before torch 2.14 the private name alone, which warns from then on
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(TIMEOUT, group)


def _axis(group: dist.ProcessGroup, shares: tuple[float, ...]) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(group=group, rank=ranks.index(dist.get_rank()), size=len(ranks), ranks=ranks, shares=shares)


def all_gather_single(whole: Tensor, own: Tensor, group: dist.ProcessGroup | None):
    """Gather every rank's ``own``, all of one shape, in ``whole``."""
    getattr(dist, ALL_GATHER)(whole, own, group=group)


# The groups below are enumerated, not made by DeviceMesh._flatten: before torch 2.10 it finds meshes by
# value, and gives a mesh the group of an earlier one of the same degrees, which close has destroyed.


def _sp_axis(config: ParallelConfig, axes: dict[str, Axis]) -> Axis:
    """Return ring and ulysses flattened; where one of them is 1 the other's group serves."""
    uneven = config.shares_of("ring", "ulysses")
    if config.ring_degree > 1 and config.ulysses_degree > 1:
        return _enumerated(layout(config).movedim(5, 0).flatten(4), uneven)
    return replace(axes["ring" if config.ring_degree > 1 else "ulysses"], shares=uneven)


def _weights(config: ParallelConfig, device: str) -> DeviceMesh:
    """Make the group of the ranks that hold the same weights, on dp x ring x ulysses. No axis' group serves:
    one NCCL communicator runs its operations in order, so gathers would wait for attention's messages."""
    holders = layout(config).permute(1, 2, 5, 0, 3, 4).flatten(3)  # cfg, pp, tp, dp x ring x ulysses
    group = _own_group(_enumerated(holders, ()).group)
    return DeviceMesh.from_group(group, device, mesh_dim_names=("weights",))


def _edges(config: ParallelConfig, device: torch.device) -> Edges:
    """Make the groups of every pipeline's edges, in the same order on all ranks, and connect this rank's."""
    stages = config.pipefusion_degree
    if stages == 1:
        return Edges()
    own = dist.get_rank()
    groups: dict[tuple[int, int], dist.ProcessGroup] = {}
    pipelines = layout(config).movedim(2, -1).reshape(-1, stages).tolist()
    for source in range(stages):
        for ranks in pipelines:
            pair = (ranks[source], ranks[(source + 1) % stages])
            group = _edge(pair, device)
            if own in pair:
                groups[pair] = _own_group(group)
    for (sender, receiver), group in groups.items():
        _connect(sender, receiver, group, device)
    line = next(ranks for ranks in pipelines if own in ranks)
    place = line.index(own)
    return Edges(
        before=None if place == 0 else groups[line[place - 1], own],
        after=None if place == stages - 1 else groups[own, line[place + 1]],
        outputs=groups.get((line[-1], line[0])) if own in (line[0], line[-1]) else None,
    )


def _edge(pair: tuple[int, int], device: torch.device) -> dist.ProcessGroup | int | None:
    """Make the process group of two neighbouring stages.

    On CUDA it has a stream of high priority: a block's kernels do not delay what the next stage waits for.
    And few thread blocks copy, so that most of the GPU keeps computing; as many as NCCL likes where torch was
    built with one before 2.17, whose communicators cannot be configured.
    """
    if device.type != "cuda":
        return dist.new_group(list(pair), backend="gloo", timeout=TIMEOUT)
    # a new one for each group, which holds it
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = TIMEOUT
    if hasattr(options, "config"):
        options.config.max_ctas = EDGE_CTAS
    return dist.new_group(list(pair), backend="nccl", timeout=TIMEOUT, pg_options=options)


def _connect(sender: int, receiver: int, group: dist.ProcessGroup, device: torch.device):
    """Send a first number, so that no request waits for the connection. NCCL connects the pair for such
    single sends and receives alone, on a stream of its own."""
    x = torch.zeros(1, device=device)
    if dist.get_rank() == sender:
        work = dist.isend(x, receiver, group=group)
    else:
        work = dist.irecv(x, sender, group=group)
    require_work(work).wait()


def _connect_all(group: dist.ProcessGroup, device: torch.device):
    """Run all_reduce, all_gather and all_to_all, so that NCCL allocates its memory now. Ranks look at what is
    free after this; in the middle of a request NCCL could not use what torch caches."""
    ranks = dist.get_world_size(group)
    for count in (1,) if device.type == "cpu" else FEW_AND_MANY:
        x = torch.zeros(count, device=device)
        dist.all_reduce(x, group=group)
        all_gather_single(x.new_empty(ranks * count), x, group)
    sent = torch.zeros(ranks, device=device)
    dist.all_to_all_single(torch.empty_like(sent), sent, group=group)


def _tp_grid(config: ParallelConfig, alone: Axis) -> dict[str, Axis]:
    """Return tp as r x c ranks (tp_rows), for inputs (r) and outputs (c); ``alone`` for both elsewhere."""
    tp = config.tensor_parallel_degree
    if tp == 1 or config.split_scheme != "2d":
        return {"tp_inputs": alone, "tp_outputs": alone}
    rows = tp_rows(tp)
    of_rows, of_columns = shares.grid_shares(config.shares_of("tp"), rows)
    grid = layout(config).reshape(-1, rows, tp // rows)
    inputs = _enumerated(grid.movedim(1, -1), of_rows)
    return {"tp_inputs": inputs, "tp_outputs": _enumerated(grid, of_columns)}


def tp_rows(tp: int) -> int:
    """Count the rows of the grid of ``tp`` ranks: the largest divisor up to the square root."""
    return max(r for r in range(1, tp + 1) if tp % r == 0 and r * r <= tp)


def _enumerated(groups: torch.Tensor, shares: tuple[float, ...]) -> Axis:
    """Return this rank's group among those in the last dimension of ``groups``, whose ranks ascend."""
    lists = groups.reshape(-1, groups.shape[-1]).tolist()
    assert all(ranks == sorted(ranks) for ranks in lists), "torch sorts the ranks of a group"
    return _axis(_own_group(dist.new_subgroups_by_enumeration(lists, timeout=TIMEOUT)[0]), shares)
