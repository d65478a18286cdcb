"""Weight sharding, as far as one process shows it; what it computes is in test_ranks.py."""

from types import SimpleNamespace
from unittest import mock

from backend.parallel import fsdp


def test_the_next_block_is_gathered_while_one_computes():
    """Across the end of a list of blocks too; the last has nothing ahead."""
    blocks = [mock.Mock(name=f"block {i}") for i in range(5)]
    transformer = mock.Mock(get_submodule={"double": blocks[:2], "single": blocks[2:]}.get)
    with mock.patch.object(fsdp, "fully_shard") as fully_shard:
        fsdp.shard(transformer, ("double", "single"), SimpleNamespace(weights="mesh"))
    assert [call.args[0] for call in fully_shard.call_args_list] == [*blocks, transformer]
    assert [block.set_modules_to_forward_prefetch.call_args.args[0] for block in blocks] == [
        [block] for block in blocks[1:]
    ] + [[]]
