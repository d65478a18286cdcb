"""Reference images: latents whose tokens follow the latent's in the image stream, at positions of their own
(ComfyUI's ref_latents_method), and latents that come as further channels."""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from ...protocol import REFERENCE_METHODS
from ..latent_tokens import TokenGrid
from .request_arguments import once

#: Ways to place references that Flux knows; it takes every other one for "offset".
METHODS = ("offset", "index", "uxo")
#: The method under which the tokens of references are modulated by timestep 0.
AT_ZERO = "index_timestep_zero"


def listed(cond: Mapping[str, Tensor], name: str) -> list[Tensor]:
    """Return the arguments NAME.0, NAME.1, ... of one prompt, in order."""
    keys = [key for key in cond if key.startswith(f"{name}.")]
    return [cond[key] for key in sorted(keys, key=lambda key: int(key.partition(".")[2]))]


def references(cond: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the reference latents (B, C, [T,] H, W) of one prompt, in order."""
    return listed(cond, "ref_latents")


def method(cond: Mapping[str, Tensor], default: str, known: Collection[str] = REFERENCE_METHODS) -> str:
    """Return how the references are placed: one of REFERENCE_METHODS. A model to which a method is not
    ``known`` takes it for "offset"."""
    how = default
    if "ref_latents_method" in cond:
        number = once(cond, "ref_latents_method", lambda: int(cond["ref_latents_method"].flatten()[0]))
        how = REFERENCE_METHODS[number]
    return how if how in known else "offset"


def refusal(config, grid: TokenGrid, cond: Mapping[str, Tensor]) -> str | None:
    """Return why references cannot be put next to this latent, or None: Conditioning.refusal."""
    names = [name for name in cond if name.partition(".")[0] == "ref_latents"]
    if not all(name.partition(".")[2].isdecimal() for name in names):
        called = ", ".join(names)
        return f"the references are called {called}; call them ref_latents.0, ref_latents.1 and so on."
    dimensions = len(grid.shape) + 1
    for name in names:
        shape = cond[name].shape
        if len(shape) not in (4, dimensions) or shape[1] != grid.shape[0] or not shape.numel():
            return (
                f"{name} has shape {list(shape)}, but the latent has {grid.shape[0]} channels in "
                f"{dimensions} dimensions; encode the reference with the VAE of this model."
            )
    number = int(cond["ref_latents_method"].flatten()[0]) if "ref_latents_method" in cond else 0
    if not 0 <= number < len(REFERENCE_METHODS):
        return (
            f"ref_latents_method is {number}; it is 0 to {len(REFERENCE_METHODS) - 1}, for "
            f"{', '.join(REFERENCE_METHODS)}."
        )
    return None


def latent_grid(latent: Tensor, grid: TokenGrid) -> TokenGrid:
    """Return ``latent``'s grid of tokens, with the patch of ``grid``."""
    return TokenGrid(tuple(latent.shape[1:]), grid.patch)


def grids(grid: TokenGrid, cond: Mapping[str, Tensor]) -> list[TokenGrid]:
    """Return the reference latents' grids of tokens."""
    return [latent_grid(latent, grid) for latent in references(cond)]


def token_count(config, grid: TokenGrid, cond: Mapping[str, Tensor]) -> int:
    """Count the tokens of all references: Conditioning.context_tokens."""
    return sum(reference.tokens for reference in grids(grid, cond))


def tokens(grid: TokenGrid, cond: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the references (B, tokens, F), to be put after the latent's own."""
    pairs = zip(grids(grid, cond), references(cond))
    return once(cond, "reference tokens", lambda: [one.to_tokens(latent) for one, latent in pairs])


def corners(grid: TokenGrid, references: list[TokenGrid], how: str) -> list[tuple[int, int, int]]:
    """Return (number, row, column), in tokens, where the top left corner of each reference is; the latent's
    own is at (0, 0, 0)."""
    placed = []
    height = width = 0
    _, ph, pw = grid.patch
    for number, reference in enumerate(references, 1):
        _, h, w = reference.extent
        index = 1
        row = 0
        column = 0
        if how in ("index", AT_ZERO):
            index = number
        elif how == "negative_index":
            index = -number
        elif how == "uxo":
            index = 0
            row = grid.counts[1] * ph + height
            column = grid.counts[2] * pw + width
            height = height + h
            width = width + w
        else:  # offset: side by side, along the shorter side of what there is
            row, column = (0, width) if h + height > w + width else (height, 0)
            height = max(height, h + row)
            width = max(width, w + column)
        placed.append((index, (row + ph // 2) // ph, (column + pw // 2) // pw))
    return placed


def positions(
    grid: TokenGrid, place: tuple[int, int, int] = (0, 0, 0), device=None, centred: bool = False
) -> Tensor:
    """Return (tokens, 3) of (t, y, x) in float32; ``centred``: rows and columns count from the middle of the
    image. An image's t is its number."""
    axes = [torch.arange(count, device=device, dtype=torch.float32) for count in grid.counts]
    middle = [count // 2 if centred else 0 for count in grid.counts]
    shifted = [
        axes[0] + (place[0] if grid.counts[0] == 1 else 0),
        axes[1] + place[1] - middle[1],
        axes[2] + place[2] - middle[2],
    ]
    return torch.cartesian_prod(*shifted)


def all_positions(
    grid: TokenGrid, cond: Mapping[str, Tensor], how: str, device: torch.device, centred: bool = False
) -> Tensor:
    """Return the positions (tokens of the latent and of all references, 3)."""
    found = grids(grid, cond)
    places = [(0, 0, 0), *corners(grid, found, how)]
    pairs = zip([grid, *found], places)
    return torch.cat([positions(one, corner, device, centred) for one, corner in pairs])


def of_tokens(
    modulation: Tensor, of_references: Tensor | None, scales: Collection[int] = ()
) -> Callable[[int], Tensor]:
    """Return a function that makes one part of a modulation (2B, parts, F) for each token, (B, tokens, F): of
    its second half, which is that of timestep 0, where ``of_references`` (tokens) is set. All parts at once
    would be as large as all else that a block holds. Without ``of_references`` the modulation is (B, parts,
    F), and a part (B, 1, F). Of ``scales`` it makes 1 more."""
    if of_references is None:

        def of_sample(index: int) -> Tensor:
            values = modulation[:, index, None]
            return 1 + values if index in scales else values

        return of_sample
    halves = modulation.chunk(2)
    # once for all scales, and not in place: the modulation may be cached
    halves_of_scales = (1 + modulation).chunk(2) if scales else halves

    def part(index: int) -> Tensor:
        own, zero = halves_of_scales if index in scales else halves
        return torch.where(of_references[:, None], zero[:, index, None], own[:, index, None])

    return part


def with_channels(latent: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
    """Return the latent with the image that comes as further channels (c_concat), where there is one."""
    return torch.cat([latent, cond["c_concat"]], dim=1) if "c_concat" in cond else latent


def with_features(tokens: Tensor, grid: TokenGrid, cond: Mapping[str, Tensor]) -> Tensor:
    """Return with_channels of the latent's tokens (B, N, F): a token's channels follow each other."""
    if "c_concat" not in cond:
        return tokens
    image = once(cond, "tokens of c_concat", grid.to_tokens, cond["c_concat"])
    return torch.cat([tokens, image], dim=2)


def wrong_channels(channels: int, grid: TokenGrid, cond: Mapping[str, Tensor]) -> str | None:
    """Return why a model of ``channels`` input channels cannot take this latent and image, or None."""
    channels_of_image = cond["c_concat"].shape[1] if "c_concat" in cond else 0
    if grid.shape[0] + channels_of_image == channels:
        return None
    return (
        f"c_concat has {channels_of_image} channels, but this model takes {channels - grid.shape[0]} "
        f"besides the latent's {grid.shape[0]}; use the conditioning node of this model."
    )
