"""Weight sharding, as far as one process shows it; what it computes is in test_ranks.py."""

from types import SimpleNamespace
from unittest import mock

from torch import nn

from backend.parallel import fsdp


def test_modulation_is_gathered_apart():
    """Its layers are sharded before their block, which then leaves them out."""
    block = nn.ModuleDict({"norm": nn.Linear(2, 6), "out": nn.Linear(2, 2)})
    with mock.patch.object(fsdp, "fully_shard") as fully_shard:
        whole = nn.ModuleDict({"block": block})
        fsdp.shard_block(whole, "block", ["block.norm"], SimpleNamespace(weights="mesh"))
    assert [call.args[0] for call in fully_shard.call_args_list] == [block["norm"], block]


def test_the_next_block_is_gathered_while_one_computes():
    """Across the end of a list of blocks too; the last has nothing ahead."""
    blocks = [nn.Identity() for _ in range(5)]
    for block in blocks:
        block.set_modules_to_forward_prefetch = mock.Mock()
    transformer = nn.ModuleDict({"paired": nn.ModuleList(blocks[:2]), "single": nn.ModuleList(blocks[2:])})
    with mock.patch.object(fsdp, "fully_shard") as fully_shard:
        mesh = SimpleNamespace(weights="mesh")
        for name in ("paired.0", "paired.1", "single.0", "single.1", "single.2"):
            fsdp.shard_block(transformer, name, (), mesh)
        fsdp.shard_rest(transformer, ("paired", "single"), mesh)
    assert [call.args[0] for call in fully_shard.call_args_list] == [*blocks, transformer]
    assert [block.set_modules_to_forward_prefetch.call_args.args[0] for block in blocks] == [
        [block] for block in blocks[1:]
    ] + [[]]
