"""Latents as rows of tokens: the layout in which solvers step, patches are cut and outputs travel.

(B, C, [T,] H, W) <-> (B, N, F) with N = t·h·w tokens in raster order and F = C·pt·ph·pw features (channel slowest), the packing of Flux and of
every raster-order DiT. A latent that the patch size does not divide is padded circularly, as ComfyUI pads it, and cropped on the way back.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class TokenGrid:
    """shape: (C, [T,] H, W) of one latent; patch: (pt, ph, pw), pt is 1 where there is no T."""

    shape: tuple[int, ...]
    patch: tuple[int, int, int]

    @property
    def extent(self) -> tuple[int, int, int]:
        """(T, H, W) in latent pixels."""
        return (1, *self.shape[1:])[-3:]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Tokens along (T, H, W)."""
        return tuple(-(-size // step) for size, step in zip(self.extent, self.patch))

    @property
    def tokens(self) -> int:
        t, h, w = self.counts
        return t * h * w

    def pad(self, latent: Tensor) -> Tensor:
        """(B, C, [T,] H, W) -> (B, C, [T',] H', W'), every side a multiple of the patch."""
        x = latent.reshape(*latent.shape[:2], *self.extent)
        missing = [count * step - size for count, step, size in zip(self.counts, self.patch, self.extent)]
        x = F.pad(x, (0, missing[2], 0, missing[1], 0, missing[0]), mode="circular") if any(missing) else x
        return x.reshape(*latent.shape[:2], *x.shape[2:][-(latent.ndim - 2):])

    @property
    def padded(self) -> "TokenGrid":
        """The grid of a latent that ``pad`` has returned: what a model's own patchify and unpatchify see."""
        sides = tuple(count * step for count, step in zip(self.counts, self.patch))
        return TokenGrid((self.shape[0], *sides[-(len(self.shape) - 1):]), self.patch)

    def to_tokens(self, latent: Tensor) -> Tensor:
        """(B, C, [T,] H, W) -> (B, N, F)."""
        (t, h, w), (pt, ph, pw) = self.counts, self.patch
        x = self.pad(latent).reshape(latent.shape[0], -1, t, pt, h, ph, w, pw)
        return x.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(latent.shape[0], self.tokens, -1)

    def to_latent(self, tokens: Tensor) -> Tensor:
        """(B, N, F) -> (B, C, [T,] H, W), the padding cropped."""
        (t, h, w), (pt, ph, pw) = self.counts, self.patch
        x = tokens.reshape(tokens.shape[0], t, h, w, -1, pt, ph, pw).permute(0, 4, 1, 5, 2, 6, 3, 7)
        x = x.reshape(tokens.shape[0], -1, t * pt, h * ph, w * pw)
        x = x[:, :, : self.extent[0], : self.extent[1], : self.extent[2]]
        return x.reshape(tokens.shape[0], -1, *self.shape[1:])
