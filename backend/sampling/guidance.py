"""The prompts of a request: two sides, positive and negative, each of one prompt or of several that are
mixed.

ComfyUI's rule (comfy/samplers.py, calc_cond_batch): a side's prediction is the mean of its prompts'
predictions, weighted by strength and mask, over those whose range holds the noise level. Prompts are
evaluated one by one, so mixing is elementwise and exact for every part of the latent.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ..protocol import Sample

#: The sides in the order of the cfg axis.
GUIDANCE = ("positive", "negative")
_NAME = re.compile("(positive|negative)([0-9]{0,4})")
#: ComfyUI's stand-in for no weight at all.
NO_WEIGHT = 1e-37


@dataclass(frozen=True)
class Prompt:
    """``weight``: a number, or (B, N, F) tokens; the prompt counts at noise levels from ``highest`` down to
    ``lowest``."""

    guidance: str
    weight: float | Tensor = 1.0
    highest: float = float("inf")
    lowest: float = float("-inf")

    @property
    def is_plain(self) -> bool:
        """Does it weigh 1 everywhere?"""
        return not isinstance(self.weight, Tensor) and self.weight == 1.0

    def counts_at(self, sigma: Tensor) -> bool:
        """At noise level ``sigma`` (0-d, CPU)?"""
        return not (sigma > self.highest or sigma < self.lowest)

    def weigh(self, denoised: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """(weighted prediction, weight) of some rows."""
        weight = (
            self.weight[:, tokens]
            if isinstance(self.weight, Tensor)
            else torch.full_like(denoised[:1, :1, :1], self.weight)
        )
        return denoised * weight, weight


def names(sample: Sample) -> list[str]:
    """The prompts of a request, the positive ones first, as ComfyUI lists them."""
    found = {name for name in (key.partition(".")[0] for key in sample.tensors) if _NAME.fullmatch(name)}

    def place(name):
        return (GUIDANCE.index(guidance_of(name)), int(_NAME.fullmatch(name)[2] or 1))

    return sorted(found, key=place)


def guidance_of(name: str) -> str:
    """The side of the prompt ``name`` ("negative2" -> "negative")."""
    return _NAME.fullmatch(name)[1]


def mix(prompts: list[Prompt], predictions: list[Tensor], tokens: slice) -> Tensor:
    """The prediction of a side from those of its prompts, each (B, rows, F)."""
    if len(prompts) == 1 and prompts[0].is_plain:
        return predictions[0]
    weighed = [prompt.weigh(denoised, tokens) for prompt, denoised in zip(prompts, predictions)]
    return sum(prediction for prediction, _ in weighed) / (sum(weight for _, weight in weighed) + NO_WEIGHT)
