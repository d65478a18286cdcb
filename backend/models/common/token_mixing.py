"""Where a model mixes rows otherwise than by softmax attention, a family's modules call these, by attribute
of this module.

One process has every row at hand: then they hand back what they are given. While a request runs on several
ranks or in patches, their place is taken by parallel/mixing.py, as that of F.scaled_dot_product_attention is
by parallel/attention.py.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Halo(NamedTuple):
    """rows (B, n, F): those asked about and others around them; first: position of the first one in the
    image; before: how many are in front of those asked about."""

    tokens: Tensor
    first: int
    before: int


def sum_over_tokens(share: Callable[[slice], Tensor]) -> Tensor:
    """The sum over all image rows of the sequence; ``part``: (slice of the rows at hand) -> its share, (B,
    ...)."""
    return share(slice(None))


def with_halo(x: Tensor, width: int) -> Halo:
    """The image rows at hand, x (B, n, F), with up to ``reach`` rows of the sequence before and behind
    them."""
    return Halo(x, 0, 0)


def text_tokens(whole: int) -> int:
    """How many rows of text are at hand, of ``whole`` in the sequence: where a block tells them from the
    image's by itself."""
    return whole


#: Name -> function, as they are without ranks and patches.
ALONE = {"sum_over_tokens": sum_over_tokens, "with_halo": with_halo, "text_tokens": text_tokens}
