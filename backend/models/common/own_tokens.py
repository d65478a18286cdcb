"""Which tokens the layers after the blocks are given, for models that treat some of them otherwise."""

from typing import Any, cast

from ..blocks import BlockAdapter
from .call_state import call_state


class OwnTokens(BlockAdapter):
    """Tells the model after its blocks which tokens of the image stream are this rank's (share_own)."""

    def leave(self, transformer, tokens):
        span = tokens.local.image
        cast(Any, transformer).call.own = slice(span.lo, span.hi)


def share_own(transformer):
    """Keep in ``transformer.call.own``, after the blocks, a slice of the image stream: the tokens that the
    layers there are given. It is all of it where nothing says otherwise."""
    transformer.call = call_state(transformer, own=slice(None))
