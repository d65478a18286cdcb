"""Blocks that are given a mask of the text, which attention applies in their place."""

from dataclasses import dataclass

from ..blocks import BlockAdapter


@dataclass(frozen=True)
class MaskedText(BlockAdapter):
    """argument: the block's name of the mask (B, text)."""

    argument: str

    def take_text_mask(self, call):
        mask, call[self.argument] = call.get(self.argument), None
        return mask
