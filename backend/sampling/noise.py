"""A request's random numbers: ComfyUI's, over the whole latent, of which patches and ranks take slices."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from ..loading.staging import send
from ..models.latent_tokens import NestedGrid, TokenGrid
from ..runtime.callbacks import unchanged

#: Draws that are cached: a step's patches are at most one model call apart, which consumes at most two.
CACHED = 4


def next_seed(seed: int) -> int:
    """Return the seed by which ComfyUI draws further noise on the CPU: one more, after the last the first."""
    return (seed + 1) % (1 << 64)


@dataclass
class FreshNoise:
    """Noise of the stochastic solvers, as tokens (B, N, F) on ``device``; drawn when first asked for.
    ``same_on_all_ranks`` makes one of what ranks with other GPUs draw from the same seed."""

    seed: int
    batch: int
    grid: TokenGrid | NestedGrid
    device: torch.device
    sigmas: Tensor
    same_on_all_ranks: Callable[[Tensor], Tensor] = unchanged
    count: int = 0
    drawn: dict[object, Tensor] = field(default_factory=dict)

    def __post_init__(self):
        own = next_seed(self.seed) if self.device.type == "cpu" else self.seed  # as ComfyUI's
        self.generator = torch.Generator(self.device).manual_seed(own)
        self.shape = (self.batch, *self.grid.shape)

    def draw(self, index: int) -> Tensor:
        """Return the ``index``-th draw of the seeded generator, (B, N, F)."""
        while self.count <= index:
            drawn = torch.randn(self.shape, generator=self.generator, device=self.device)
            self._cache(self.count, self.same_on_all_ranks(drawn))
            self.count += 1
        return self.drawn[index]

    def brownian(self, sigma: Tensor, target: Tensor) -> Tensor:
        """Return the Brownian path's increment (B, N, F) from noise level ``sigma`` to ``target``, over its
        standard deviation.

        ComfyUI's BrownianTreeNoiseSampler: the tree spans the schedule and is drawn on the CPU, so every
        device has the same path. The device need not have caught up for the copy to it.
        """
        key = (float(sigma), float(target))
        if key not in self.drawn:
            sign = 1 if key[0] < key[1] else -1
            deviation = (target.cpu() - sigma.cpu()).abs().sqrt()
            with warnings.catch_warnings():
                # it rounds the schedule's ends, then finds the queries outside by as much
                warnings.simplefilter("ignore")
                increment = cast(Tensor, self._tree(min(key), max(key)))  # a tuple with more arguments
            self._cache(key, send(increment * sign / deviation, self.device))
        return self.drawn[key]

    @cached_property
    def _tree(self):
        import torchsde  # here, since only these solvers need it

        lowest = self.sigmas[self.sigmas > 0].min().item()
        highest = self.sigmas.max().item()
        return torchsde.BrownianTree(lowest, torch.zeros(self.shape), highest, entropy=self.seed)

    def _cache(self, key: object, noise: Tensor):
        self.drawn[key] = self.grid.to_tokens(noise)
        if len(self.drawn) > CACHED:
            self.drawn.pop(next(iter(self.drawn)))
