"""Where a model mixes tokens otherwise than by softmax attention, a family's modules call these, by attribute
of this module.

One process has every token at hand: then they hand back what they are given. While a request runs on several
ranks or in patches, their place is taken by parallel/token_mixing.py, as that of
F.scaled_dot_product_attention is by parallel/attention_hook.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Halo(NamedTuple):
    """Image tokens with their neighbours.

    tokens: (B, n, F), the tokens asked for and their neighbours; first: position in the image of the first of
    them; before: how many neighbours come before the tokens asked for.
    """

    tokens: Tensor
    first: int
    before: int


def sum_over_tokens(share: Callable[[slice], Tensor]) -> Tensor:
    """Sum over all image tokens of the sequence, the linear-attention state (B, ...).

    ``share``: slice of the local tokens -> their share of the sum, (B, ...).
    """
    return share(slice(None))


def with_halo(x: Tensor, width: int) -> Halo:
    """Return the local image tokens x (B, n, F) with up to ``width`` neighbours on either side."""
    return Halo(x, 0, 0)


def text_tokens(whole: int) -> int:
    """How many tokens of text are at hand, of ``whole`` in the sequence: where a block tells them from the
    image's by itself."""
    return whole


#: Name -> function, as they are without ranks and patches.
ALONE = {"sum_over_tokens": sum_over_tokens, "with_halo": with_halo, "text_tokens": text_tokens}
