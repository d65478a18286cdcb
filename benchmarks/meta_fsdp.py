"""FSDP2 on meta tensors: torch's own code, between the ranks of a fake process group.

Streams are the CPU's, which do nothing. Gathers send nothing (meta_device.py); their bytes and the memory of
whole weights are counted here, since torch grows and empties it without an operation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
from meta_device import META
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from backend.config import ParallelConfig
from backend.parallel import comm


class Gathers:
    """What a rank gathers. mesh: of the ranks that shard weights, None where none do. peak: the most bytes of
    whole weights at once, with the buffers that they come in."""

    def __init__(self, mesh: DeviceMesh | None = None):
        self.mesh = mesh
        self.peak = 0
        self.is_under_way = False
        self._storages: WeakSet = WeakSet()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Note that what is allocated now is of whole weights."""
        self.is_under_way = True
        try:
            yield
        finally:
            self.is_under_way = False

    def hold(self, *tensors: Tensor):
        """Count ``tensors`` among the whole weights from now on, as large as torch makes them."""
        self._storages.update(tensor.untyped_storage() for tensor in tensors)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))


@contextmanager
def meta_fsdp(config: ParallelConfig, rank: int) -> Iterator[Gathers]:
    """Let weights on the meta device be sharded as ``config`` has it, over all of its ranks: those of one
    sequence. Bytes that ``rank`` sends are the mechanism "weights" of comm.SENT."""
    if not config.shard_weights:
        yield Gathers()
        return
    ranks = config.sharding_degree
    assert ranks == config.world_size, "all ranks share one set of weights"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        gathers = Gathers(init_device_mesh("cpu", (ranks,)))
        with (
            patch.object(torch, "meta", torch.cpu, create=True),
            patch.object(_fully_shard, "_get_device_from_mesh", lambda mesh: META),
            patch.object(_fsdp_param_group.FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
            _counted(gathers, ranks),
        ):
            yield gathers
    finally:
        dist.destroy_process_group()


@contextmanager
def _counted(gathers: Gathers, ranks: int) -> Iterator[None]:
    """Have FSDP2's gathers of a rank note what they send and hold."""
    gather = _fsdp_collectives.foreach_all_gather
    copy_out = _fsdp_collectives.foreach_all_gather_copy_out

    def gathered(parameters, *rest):
        with gathers.under_way():
            result = gather(parameters, *rest)
        assert result is not None, "the ranks are several"
        whole = result.all_gather_output
        comm.count("weights", whole.nbytes // ranks * (ranks - 1))
        gathers.hold(whole)
        return result

    def copied(result, parameters, group):
        with gathers.under_way():
            copy_out(result, parameters, group)
        gathers.hold(*(whole for each in parameters for whole in each.all_gather_outputs))

    with (
        patch.object(_fsdp_param_group, "foreach_all_gather", gathered),
        patch.object(_fsdp_param_group, "foreach_all_gather_copy_out", copied),
    ):
        yield
