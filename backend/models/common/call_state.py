"""What the hooks of a transformer keep of one call, and which tokens the layers after its blocks get."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from ..blocks import BlockAdapter


def call_state(transformer: nn.Module, taken: Mapping[str, Any] = {}, **between: Any) -> SimpleNamespace:
    """Return a place for what hooks of ``transformer`` keep of the call under way. ``taken``: arguments that
    its forward is given by name and does not know, which go there; what each is without one. After each call,
    finished or not, it holds these and ``between`` again: no prompt or control video stays on the device."""
    between = {**taken, **between}
    call = SimpleNamespace(**between)

    def take(module, args, kwargs):
        vars(call).update({name: kwargs.pop(name, usual) for name, usual in taken.items()})
        return args, kwargs

    def release(module, args, output):
        vars(call).update(between)

    if taken:
        transformer.register_forward_pre_hook(take, with_kwargs=True)
    transformer.register_forward_hook(release, always_call=True)
    return call


class OwnTokens(BlockAdapter):
    """Note in ``transformer.call.own`` which tokens of the image stream the layers after the blocks are given
    on this rank. Where nobody notes it, they are given all, slice(None)."""

    def leave(self, transformer, tokens):
        cast(Any, transformer).call.own = tokens.local.image.indices
