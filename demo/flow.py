"""What training and evaluation share: Flux's token layout and a plain Euler sampler."""

from itertools import pairwise

import torch
import torch.nn.functional as F

from . import latents, scenes, text

LATENT_SIDE = scenes.SIZE // 2  # latent cells per side of a training image


def to_tokens(latent: torch.Tensor) -> torch.Tensor:
    """(B, 16, h, w) -> (B, h/2 * w/2, 64): "b c (h ph) (w pw) -> b (h w) (c ph pw)"."""
    return F.pixel_unshuffle(latent, 2).flatten(2).transpose(1, 2)


def from_tokens(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(B, h/2 * w/2, 64) -> (B, 16, h, w); `height` and `width` count latent cells."""
    grid = tokens.transpose(1, 2).unflatten(2, (height // 2, width // 2))
    return F.pixel_shuffle(grid, 2)


def image_ids(height: int, width: int, stride: int = 1) -> torch.Tensor:
    """(h/2 * w/2, 3) rotary positions [0, y, x] of the tokens, in tokens of a full-size image.

    `stride` is how many full-size tokens one token spans each way: 2 for a half-size image.
    """
    rows, columns = (torch.arange(side // 2) * stride + (stride - 1) / 2 for side in (height, width))
    return torch.cartesian_prod(torch.zeros(1), rows, columns)


def text_ids() -> torch.Tensor:
    """(16, 3) rotary positions of the text: all zero, as in Flux."""
    return torch.zeros(text.TOKENS, 3)


def encode_prompts(prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """B prompts -> (tokens (B, 16, 64), pooled (B, 64))."""
    pairs = [text.encode_prompt(prompt) for prompt in prompts]
    return torch.cat([tokens for tokens, _ in pairs]), torch.cat([pooled for _, pooled in pairs])


def velocity(model, tokens, time, caption, stride: int = 1) -> torch.Tensor:
    """The model's guess of noise - image, (B, N, 64).

    tokens (B, N, 64), time (B,) in [0, 1] with 1 = pure noise, caption from `encode_prompts`,
    stride: full-size side over image side.
    """
    side = LATENT_SIDE // stride
    return model(
        hidden_states=tokens,
        encoder_hidden_states=caption[0],
        pooled_projections=caption[1],
        timestep=time,
        img_ids=image_ids(side, side, stride),
        txt_ids=text_ids(),
        return_dict=False,
    )[0]


def sigmas(steps: int, shift: float) -> torch.Tensor:
    """(steps + 1,) noise levels from 1 to 0; a shift above 1 spends more steps on high noise."""
    linear = torch.linspace(1, 0, steps + 1)
    return shift * linear / (1 + (shift - 1) * linear)


@torch.no_grad()
def sample(model, prompts: list[str], steps: int, cfg: float, shift: float, seed: int) -> torch.Tensor:
    """Paint prompts by Euler steps: latents in VAE units (B, 16, 32, 32)."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(len(prompts), latents.CHANNELS, LATENT_SIDE, LATENT_SIDE, generator=generator)
    tokens = to_tokens(noise)
    caption, empty = encode_prompts(prompts), encode_prompts([""] * len(prompts))
    levels = sigmas(steps, shift)
    for now, following in pairwise(levels):
        time = now.repeat(len(prompts))
        unguided = velocity(model, tokens, time, empty)
        guided = unguided + cfg * (velocity(model, tokens, time, caption) - unguided)
        tokens = tokens + (following - now) * guided
    return latents.to_vae_units(from_tokens(tokens, LATENT_SIDE, LATENT_SIDE))
