"""Weight sharding: torch's FSDP2 over the ranks that would otherwise hold the same weights (sequence and data parallel)."""

from torch import nn
from torch.distributed.fsdp import fully_shard

from ..mesh import Mesh

#: Blocks whose weights are gathered ahead while one computes.
PREFETCH = 1


def shard(transformer: nn.Module, block_lists: tuple[str, ...], mesh: Mesh):
    """Shard every block, then the rest, over ``mesh.weights``; a block's weights are whole only while it runs and its predecessor does."""
    blocks = [block for name in block_lists for block in getattr(transformer, name)]
    for block in blocks:
        fully_shard(block, mesh=mesh.weights)
    fully_shard(transformer, mesh=mesh.weights)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1: i + 1 + PREFETCH])
