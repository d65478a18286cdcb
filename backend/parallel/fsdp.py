"""Weight sharding: torch's FSDP2 over the ranks that would otherwise hold the same weights."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from .block_streams import block_list
from .mesh import Mesh
from .sequence import Span

#: Blocks whose weights are gathered ahead while one computes. No link and no size of blocks asks for more: a
#: gather shorter than the compute before it is hidden by one, and a longer one keeps the link busy anyway
#: (tests/unit/test_fsdp.py). Each more would hold one more block whole.
PREFETCH = 1
#: What brings a module's parameters to the rank's device, where fully_shard leaves them; it would copy each
#: from a mapped file's pages itself (loading/staging.py).
Upload = Callable[[nn.Module, torch.device], None]


def shard_block(transformer: nn.Module, name: str, modulation: Iterable[str], mesh: Mesh, upload: Upload):
    """Shard the block of that name over ``mesh.weights``; its weights are whole while it runs. Those of its
    ``modulation`` layers, which is computed for many steps at once, are gathered for that alone."""
    for module in map(transformer.get_submodule, (*modulation, name)):
        upload(module, mesh.device)
        fully_shard(module, mesh=mesh.weights)


def shard_rest(transformer: nn.Module, block_lists: Iterable[str], mesh: Mesh, upload: Upload):
    """Shard what is in none of the blocks, and have each gathered ahead of its turn."""
    upload(transformer, mesh.device)
    fully_shard(transformer, mesh=mesh.weights)
    blocks = [block for name in block_lists for block in block_list(transformer, name)]
    whole = cast(FSDPModule, transformer)
    # a CPU has no stream of its own for gathers, which the host would wait for
    if mesh.device.type == "cpu" and hasattr(whole, "_set_unshard_async_op"):
        whole._set_unshard_async_op(True)
    sharded = [cast(FSDPModule, block) for block in blocks]  # shard_block has made them that
    for i, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + PREFETCH])


def reshard(transformer: nn.Module):
    """Free the weights that forwards have left whole, and what they noted for a backward; needed before
    ``assign``, and before each request, since nothing else ends those notes. No collective.

    A forward that an exception left, as those in which modulation is computed ahead, has the root's weights
    whole: what is assigned to them then would never be gathered.
    """
    if not isinstance(transformer, FSDPModule):
        return
    state = transformer._get_fsdp_state()
    if not state._is_root:  # the first forward makes it that
        return
    if hasattr(transformer, "reset_iter_state"):
        transformer.reset_iter_state()
        return
    # what of that inference needs, before torch had it
    state._state_ctx.iter_forward_root = None
    state._comm_ctx.post_forward_order.clear()
    for each in state._state_ctx.all_states:
        group = each._fsdp_param_group
        if group is not None:
            each._training_state = group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group.reshard()


def held_bytes(parameter: nn.Parameter) -> int:
    """Count the bytes of ``parameter`` that this rank holds: its own rows' where it is sharded."""
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return own.numel() * own.element_size()


def bytes_on(module: nn.Module, device: torch.device) -> int:
    """Count the bytes of this rank's parameters of a module on ``device``: not what waits on the host."""
    return sum(held_bytes(each) for each in module.parameters() if each.device.type == device.type)


def own_rows(parameter: Tensor) -> Span | None:
    """Return this rank's rows of a sharded parameter; None where it is whole."""
    if not isinstance(parameter, DTensor):
        return None
    height = parameter.shape[0]
    size = -(-parameter.shape[0] // parameter.device_mesh.size())
    # its mesh may be an earlier one with these ranks, which DTensor caches, and whose group is closed
    place = parameter.device_mesh.get_coordinate()
    assert place is not None, "this rank holds a shard"
    first = min(place[0] * size, height)
    return Span(first, min(first + size, height))


def own_runs(parameter: Tensor, most: int) -> list[Span | None]:
    """Cut this rank's rows of a sharded parameter into runs of at most so many values, but whole rows: sums
    of all would be several times what a card may have left. None: a parameter that is whole, at once."""
    here = own_rows(parameter)
    if here is None:
        return [None]
    step = max(1, most * parameter.shape[0] // max(1, parameter.numel()))
    return [Span(lo, min(lo + step, here.hi)) for lo in range(here.lo, here.hi, step)]


def assign(parameter: nn.Parameter, value: Tensor, rows: Span | None = None):
    """Replace a parameter's values; of a sharded one these ``rows`` of this rank's, by default all."""
    own = own_rows(parameter)
    if isinstance(parameter, DTensor) and own is not None:
        some = rows or own
        local = parameter.to_local()
        local[some.lo - own.lo : some.hi - own.lo].copy_(value)  # in place: the gather reads this memory
    elif parameter.data.is_pinned():  # of a layer that waits on the host: it stays page locked
        parameter.data.copy_(value)
    else:
        # not in place: it may be the checkpoint's own, mapped from the file
        parameter.data = value.to(parameter.device)
