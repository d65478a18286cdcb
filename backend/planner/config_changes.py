"""Changes of a configuration as the inputs of Parallel Config are set, for messages."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from ..config import ConfigError, ParallelConfig
from ..errors import UnsupportedError
from .auto_config import PLANNED

#: No method that divides tokens, blocks or matrices.
UNDIVIDED = {
    "ulysses_degree": 1,
    "ring_degree": 1,
    "num_pipeline_patch": 0,
    "shard_weights": False,
    "pipefusion_degree": 1,
    "tensor_parallel_degree": 1,
    "attn_layer_num_for_pp": "",
}
#: Named where they are set, whether they change or not: auto has chosen what the inputs do not say.
COMPLETE = (*PLANNED, "shares")


def dividing_weights(ranks: int) -> list[dict]:
    """Return the fields by which ``ranks`` each hold a part of the weights, the fastest plan first."""
    if ranks == 1:
        return []
    divided = [UNDIVIDED | {name: ranks} for name in ("tensor_parallel_degree", "pipefusion_degree")]
    return [*divided, UNDIVIDED | {"ulysses_degree": ranks, "shard_weights": True}]


def named_change(
    config: ParallelConfig, check: Callable[[ParallelConfig], None], sharded: bool = True
) -> str:
    """Name the settings of the first configuration that has as many ranks, divides the weights otherwise and
    is not refused by ``check``; empty where there is none. ``sharded``: shard_weights may be on."""
    for other in same_ranks(config):
        if other != config and (sharded or not other.shard_weights):
            with suppress(ConfigError, UnsupportedError):
                check(other.validate())
                return settings(config, other)
    return ""


def same_ranks(config: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yield configurations of as many ranks that divide the weights, those with the fewest changes first.
    They need not suit the model, nor their other settings (ParallelConfig.validate)."""
    yield replace(config, shard_weights=True)
    one_branch = replace(config, cfg_degree=1)
    one_replica = replace(one_branch, data_parallel_degree=1)
    for other in (config, one_branch, one_replica):
        ranks = config.world_size // (other.cfg_degree * other.data_parallel_degree)
        for fields in dividing_weights(ranks):
            yield replace(other, **fields)


def settings(before: ParallelConfig, after: ParallelConfig, own: ParallelConfig | None = None) -> str:
    """Name the inputs to set for ``after``: what differs from ``before``, and all degrees. So they are the
    same where ``before`` is a plan of auto, under which the inputs are at their defaults. ``own``: the
    backend's, where ``before`` has settings of a request: patches that it leaves open were chosen for that
    (client/auto/open_patches.py), and are named where they change."""
    default = ParallelConfig()
    chosen = {"num_pipeline_patch"} if own is not None and not own.num_pipeline_patch else set()
    named = {}
    for name, new in vars(after).items():
        is_set = name in COMPLETE and name not in chosen and new != getattr(default, name)
        if is_set or new != getattr(before, name):
            named[name] = new
    return " with ".join(f"{name} {_word(value)}" for name, value in named.items())


def _word(value) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else "empty"
