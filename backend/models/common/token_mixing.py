"""What a family's modules call, by attribute of this module, to mix tokens other than by softmax attention.

One process has every token: then these return what they are given. On several ranks or in patches
parallel/token_mixing.py takes their place, as attention_hook.py that of F.scaled_dot_product_attention.
"""

from typing import NamedTuple

from torch import Tensor


class Halo(NamedTuple):
    """Image tokens with their neighbours.

    tokens: (B, n, F); first: position in the image of the first of them; before: neighbours at the start.
    """

    tokens: Tensor
    first: int
    before: int


def linear_state(keys: Tensor, values: Tensor) -> Tensor:
    """Return keys^T values summed over all image tokens of the sequence, the state of linear attention:
    (B, H, n, D) and (B, H, n, E) of the local tokens -> (B, H, D, E)."""
    return keys.transpose(2, 3) @ values


def with_halo(x: Tensor, width: int) -> Halo:
    """Return the local image tokens x (B, n, F) with up to ``width`` neighbours on either side."""
    return Halo(x, first=0, before=0)


def local_text_tokens(whole: int) -> int:
    """Count the local text tokens, of ``whole`` in the sequence."""
    return whole


def has_text() -> bool:
    """Return whether text tokens pass the block that runs: False only where no rank has any, and none waits
    for what a layer of text would send."""
    return True


#: Name -> function, as they are without ranks and patches.
ALONE = {
    "linear_state": linear_state,
    "with_halo": with_halo,
    "local_text_tokens": local_text_tokens,
    "has_text": has_text,
}
