"""Latents as sequences of tokens: the layout in which solvers step, patches are cut and outputs travel.

(B, C, [T,] H, W) <-> (B, N, F) with N = t·h·w tokens in raster order and F = C·pt·ph·pw features (channel
slowest), the packing of Flux and of every raster-order DiT. A latent that the patch size does not divide is
padded circularly, as ComfyUI pads it, and cropped on the way back. Several latents of one request (nested, as
ComfyUI says: video and audio) travel packed, (B, 1, L), and share one sequence.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

#: Bytes -> a type of that size.
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(x: Tensor) -> Tensor:
    """View (..., pw) as (..., 1): neighbouring pixels of a token as one element, if there is a type of their
    size. Half the elements take half the time to move."""
    step = x.shape[-1]
    word = WORDS.get(x.shape[-1] * x.element_size())
    if step == 1 or word is None:
        return x
    whole = x.stride(-1) == 1 and not any(place % step for place in (x.storage_offset(), *x.stride()[:-1]))
    return (x if whole else x.clone(memory_format=torch.contiguous_format)).view(word)


@dataclass(frozen=True)
class TokenGrid:
    """How one latent is cut into tokens. shape: (C, [T,] H, W) of one latent; patch: (pt, ph, pw), pt is 1
    where there is no T."""

    shape: tuple[int, ...]
    patch: tuple[int, int, int]

    @property
    def extent(self) -> tuple[int, int, int]:
        """(T, H, W) in latent pixels."""
        t, h, w = (1, *self.shape[1:])[-3:]
        return t, h, w

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens along (T, H, W)."""
        t, h, w = (-(-size // step) for size, step in zip(self.extent, self.patch))
        return t, h, w

    @property
    def cells(self) -> int:
        """Tokens of the whole latent."""
        return math.prod(self.counts)

    @property
    def tokens(self) -> int:
        """Tokens that solvers step and the model is given."""
        return self.cells

    @property
    def features(self) -> int:
        """Features of a token."""
        return self.shape[0] * math.prod(self.patch)

    def pad(self, latent: Tensor) -> Tensor:
        """Pad (B, C, [T,] H, W) to (B, C, [T',] H', W'), every side a multiple of the patch."""
        x = latent.reshape(*latent.shape[:2], *self.extent)
        missing = [count * step - size for count, step, size in zip(self.counts, self.patch, self.extent)]
        x = F.pad(x, (0, missing[2], 0, missing[1], 0, missing[0]), mode="circular") if any(missing) else x
        return x.reshape(*latent.shape[:2], *x.shape[2:][-(latent.ndim - 2) :])

    @property
    def padded(self) -> "TokenGrid":
        """The grid of a latent that ``pad`` has returned: what a model's own patchify and unpatchify see."""
        sides = tuple(count * step for count, step in zip(self.counts, self.patch))
        return replace(self, shape=(self.shape[0], *sides[-(len(self.shape) - 1) :]))

    @property
    def is_padded(self) -> bool:
        """Do the last tokens of an axis hold more than the latent?"""
        return any(size % step for size, step in zip(self.extent, self.patch))

    def select(self, values: Tensor, dim: int) -> Tensor:
        """Return the entries of this grid's tokens; ``values`` have one for each of ``cells`` along
        ``dim``."""
        return values

    def to_tokens(self, latent: Tensor) -> Tensor:
        """Turn (B, C, [T,] H, W) into (B, N, F)."""
        (t, h, w), (pt, ph, pw) = self.counts, self.patch
        x = _words(self.pad(latent).reshape(latent.shape[0], -1, t, pt, h, ph, w, pw))
        tokens = x.new_empty(latent.shape[0], t, h, w, x.shape[1], pt, ph, x.shape[-1])
        # word by word: on the CPU five times as fast as one copy with inner loops as short as a patch
        for i, j, k in product(range(pt), range(ph), range(x.shape[-1])):
            tokens[..., i, j, k] = x[:, :, :, i, :, j, :, k].permute(0, 2, 3, 4, 1)
        return self.select(tokens.view(latent.dtype).view(latent.shape[0], self.cells, -1), 1)

    def to_latent(self, tokens: Tensor) -> Tensor:
        """Turn (B, N, F) into (B, C, [T,] H, W), the padding cropped."""
        (t, h, w), (pt, ph, pw) = self.counts, self.patch
        x = _words(tokens.reshape(tokens.shape[0], t, h, w, -1, pt, ph, pw))
        x = x.permute(0, 4, 1, 5, 2, 6, 3, 7).contiguous()
        x = x.view(tokens.dtype).view(tokens.shape[0], -1, t * pt, h * ph, w * pw)
        x = x[:, :, : self.extent[0], : self.extent[1], : self.extent[2]]
        return x.reshape(tokens.shape[0], -1, *self.shape[1:])


@dataclass(frozen=True)
class PartialGrid(TokenGrid):
    """A grid of which solvers and the model have some tokens alone: a latent made of them is 0 at the others.

    places: (n,), rising: which of ``cells`` they are.
    """

    places: Tensor = field(compare=False)
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def tokens(self) -> int:
        return len(self.places)

    def select(self, values: Tensor, dim: int) -> Tensor:
        return values.index_select(dim, self._places_on(values.device))

    def to_latent(self, tokens: Tensor) -> Tensor:
        whole = tokens.new_zeros(tokens.shape[0], self.cells, tokens.shape[2])
        return super().to_latent(whole.index_copy_(1, self._places_on(tokens.device), tokens))

    def _places_on(self, device: torch.device) -> Tensor:
        """Copy the places to a device once: a copy from the host at each step would wait for it."""
        if device not in self._copies:
            self._copies[device] = self.places.to(device)
        return self._copies[device]


@dataclass(frozen=True)
class NestedGrid:
    """Several latents in one sequence of tokens.

    grids: in ComfyUI's order; order: indices of grids, as their tokens follow each other. Packed latents are
    (B, 1, L), flattened one after the other. Tokens are (B, N, F), F the features of the widest latent;
    narrower tokens end in zeros, which stay zeros in every solver.
    """

    grids: tuple[TokenGrid, ...]
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(1, L) of one packed latent."""
        return 1, sum(math.prod(grid.shape) for grid in self.grids)

    @property
    def tokens(self) -> int:
        return sum(grid.tokens for grid in self.grids)

    @property
    def features(self) -> int:
        return max(grid.features for grid in self.grids)

    @property
    def is_padded(self) -> bool:
        """Is any of the latents padded?"""
        return any(grid.is_padded for grid in self.grids)

    def unpack(self, latent: Tensor) -> list[Tensor]:
        """Split (B, 1, L) into the latents (B, C, [T,] H, W)."""
        pieces = latent.split([math.prod(grid.shape) for grid in self.grids], dim=2)
        return [piece.reshape(latent.shape[0], *grid.shape) for piece, grid in zip(pieces, self.grids)]

    def join(self, tokens: list[Tensor]) -> Tensor:
        """Join the tokens of each latent into (B, N, F)."""
        padded = [F.pad(tokens[i], (0, self.features - tokens[i].shape[2])) for i in self.order]
        return torch.cat(padded, dim=1)

    def divide(self, tokens: Tensor) -> list[Tensor]:
        """Divide (B, N, F) into the tokens of each latent."""
        pieces = dict(zip(self.order, tokens.split([self.grids[i].tokens for i in self.order], dim=1)))
        return [pieces[i][..., : grid.features] for i, grid in enumerate(self.grids)]

    def to_tokens(self, latent: Tensor) -> Tensor:
        """Turn (B, 1, L) into (B, N, F)."""
        return self.join([grid.to_tokens(x) for grid, x in zip(self.grids, self.unpack(latent))])

    def to_latent(self, tokens: Tensor) -> Tensor:
        """Turn (B, N, F) into (B, 1, L), padding cropped."""
        latents = [grid.to_latent(x) for grid, x in zip(self.grids, self.divide(tokens))]
        return torch.cat([latent.flatten(1)[:, None] for latent in latents], dim=2)

    def per_token(self, factors: list[Tensor], like: Tensor) -> Tensor:
        """Repeat a number (0-d, CPU) of each latent for its tokens: (N, 1), of the type and on the device of
        ``like``, without a copy from the host."""
        return torch.cat([like.new_ones(self.grids[i].tokens, 1) * factors[i] for i in self.order])


def negated_tokens(output: Tensor, grid: TokenGrid) -> Tensor:
    """Return the tokens of an output of a latent's shape, of models that predict the other direction."""
    return -grid.padded.to_tokens(output)
