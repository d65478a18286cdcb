"""The prompts of a request. Classifier-free guidance (arXiv 2207.12598) has two branches, positive (cond) and
negative (uncond), each of one prompt or of several that are mixed.

ComfyUI's rule (comfy/samplers.py, calc_cond_batch): the prediction of a branch is the mean of its prompts'
predictions, weighted by strength and mask, over those whose range holds the noise level. Prompts are
evaluated one by one, so mixing is elementwise and exact for every patch.
"""

import re
from dataclasses import dataclass
from string import digits

import torch
from torch import Tensor

from ..protocol import Sample

#: The CFG branches, in the order of the cfg axis.
CFG_BRANCHES = ("positive", "negative")
_NAME = re.compile("(positive|negative)([0-9]{0,4})")
#: What ComfyUI adds to the sum of weights, so that no weight at all is no division by zero.
NO_WEIGHT = 1e-37


@dataclass(frozen=True)
class Prompt:
    """One prompt. weight: a number or (B, N, F). It counts from noise level ``highest`` to ``lowest``."""

    branch: str
    weight: float | Tensor = 1.0
    highest: float = float("inf")
    lowest: float = float("-inf")

    def counts_at(self, sigma: Tensor) -> bool:
        """Return whether it counts at noise level ``sigma`` (0-d, CPU)."""
        return not (sigma > self.highest or sigma < self.lowest)

    def weigh(self, denoised: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """Return (weighted prediction, weight) of some tokens."""
        if isinstance(self.weight, Tensor):
            weight = self.weight[:, tokens]
        else:
            weight = torch.full_like(denoised[:1, :1, :1], self.weight)
        return denoised * weight, weight


def names(sample: Sample) -> list[str]:
    """List the prompts of a request, the positive ones first, as ComfyUI does."""
    found = {key.partition(".")[0] for key in sample.tensors}
    return sorted(filter(_NAME.fullmatch, found), key=_place)


def branch_of(name: str) -> str:
    """Return the CFG branch of the prompt ``name`` ("negative2" -> "negative")."""
    return name.rstrip(digits)


def _place(name: str) -> tuple[int, int]:
    branch = branch_of(name)
    return CFG_BRANCHES.index(branch), int(name.removeprefix(branch) or 1)


def mix(prompts: list[Prompt], predictions: list[Tensor], tokens: slice) -> Tensor:
    """Mix the predictions of the prompts of one CFG branch, each (B, tokens, F), into one."""
    first = prompts[0].weight
    if len(prompts) == 1 and not isinstance(first, Tensor) and first == 1.0:
        return predictions[0]
    weighed = [prompt.weigh(denoised, tokens) for prompt, denoised in zip(prompts, predictions)]
    prediction, weight = weighed[0]
    for further, its_weight in weighed[1:]:
        prediction = prediction + further
        weight = weight + its_weight
    return prediction / (weight + NO_WEIGHT)
