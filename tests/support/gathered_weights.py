"""What FSDP2 sends, on meta tensors: forward hooks in the order of torch's, since its own need a device with
streams."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from backend.loading.checkpoint import Checkpoint
from backend.parallel.block_streams import block_list
from backend.parallel.fsdp import PREFETCH
from backend.parallel.mesh import ALL_GATHER


class Gathered:
    """A module that fully_shard was given: its weights are gathered before its forward, into one buffer."""

    def __init__(self, module: nn.Module, group: str, ranks: int, without: set[nn.Parameter]):
        own = [each for each in module.parameters() if each not in without]
        without |= {*own}
        #: Numbers of this rank: each parameter's rows, filled up to as many on every rank.
        self.size = sum(-(-len(each) // ranks) * each[0].numel() for each in own)
        self.group, self.ranks = group, ranks
        self.under_way: tuple[dist.Work, torch.Tensor] | None = None
        self.ahead: list[Gathered] = []
        #: Does a forward leave the weights whole? The root's does, until a request ends.
        self.stays = False
        self.is_whole = False
        module.register_forward_pre_hook(lambda *_: self.enter())
        module.register_forward_hook(lambda *_: self.leave(), always_call=True)

    def start(self):
        """Begin to gather, where nobody has."""
        if not self.size or self.is_whole or self.under_way:
            return
        shard = torch.empty(self.size, dtype=torch.bfloat16, device="meta")
        whole = shard.new_empty(self.ranks * self.size)
        work = getattr(dist, ALL_GATHER)(whole, shard, group=self.group, async_op=True)
        self.under_way = (work, whole)

    def enter(self):
        """Wait for the weights, copy them to where parameters lie, and gather the next ones ahead."""
        self.start()
        if self.under_way:
            work, whole = self.under_way
            work.wait()
            torch.empty_like(whole).copy_(whole)
            self.under_way, self.is_whole = None, True
        for each in self.ahead:
            each.start()

    def leave(self):
        """Free what was gathered."""
        self.is_whole = self.stays and self.is_whole


def gather_weights(checkpoint: Checkpoint, group: str, ranks: int, apart: Mapping[str, Iterable[str]]):
    """Have a rank's transformer gather as Engine.load has it sharded: modulation apart, then its block, then
    the rest. ``apart``: block -> names of its modules that are gathered apart."""
    transformer = checkpoint.transformer
    known: set[nn.Parameter] = set()
    blocks = {}
    for name in checkpoint.block_names:
        for layer in apart[name]:
            Gathered(transformer.get_submodule(layer), group, ranks, known)
        block = transformer.get_submodule(name)
        blocks[block] = Gathered(block, group, ranks, known)
    Gathered(transformer, group, ranks, known).stays = True
    lists = checkpoint.family.blocks.lists
    in_order = [blocks[block] for name in lists for block in block_list(transformer, name)]
    for i, each in enumerate(in_order):
        each.ahead = in_order[i + 1 : i + 1 + PREFETCH]
