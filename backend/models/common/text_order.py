"""Several texts in one stream, in the order that HunyuanVideo 1.5 and HunyuanImage 2.1 give them: tokens that
attention reads, then the others. diffusers indexes by masks for that, and so waits for the device at each
call."""

from collections.abc import Sequence

import torch
from torch import Tensor


class TextOrder:
    """The order of a request's text tokens, by the ``masks`` (B, tokens) of its texts, and whether one of
    these ``hides`` a token. One text alone is not reordered. No tuple: FSDP2 makes new ones of those.

    mask: (B, tokens of all texts), true for what attention reads; None where it reads everything.
    """

    def __init__(self, masks: Sequence[Tensor], hides: bool):
        self.mask = torch.cat([mask.bool() for mask in masks], dim=1) if hides else None
        self._places = None
        if self.mask is not None and len(masks) > 1:
            self._places = self.mask.logical_not().byte().argsort(dim=1, stable=True)
            self.mask = self.mask.gather(1, self._places)

    def joined(self, *texts: Tensor) -> Tensor:
        """Return the tokens (B, tokens, D) of all texts in this order."""
        text = torch.cat(texts, dim=1)
        return text if self._places is None else text.gather(1, self._places[..., None].expand_as(text))
