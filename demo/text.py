"""A text encoder without weights: every word is a fixed pseudo-random vector."""

import functools
import zlib

import torch

from .scenes import words_of

TOKENS = 16  # text length the model sees
WIDTH = 64  # channels per token

_POSITION_WEIGHT = (
    0.3  # small next to the word itself, yet enough to separate the first object from the second
)


def encode_prompt(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a prompt: (tokens (1, 16, 64), pooled (1, 64)), float32, no units; "" gives zeros."""
    tokens = torch.zeros(1, TOKENS, WIDTH)
    positions = _position_vectors()
    for index, word in enumerate(words_of(text)[:TOKENS]):
        tokens[0, index] = _word_vector(word) + _POSITION_WEIGHT * positions[index]
    return tokens, tokens.mean(dim=1)


@functools.lru_cache(maxsize=4096)
def _word_vector(word: str) -> torch.Tensor:
    """(64,) vector of a word; crc32 gives the same seed in every process, unlike hash()."""
    return _normal((WIDTH,), seed=zlib.crc32(word.encode()))


@functools.lru_cache(maxsize=1)
def _position_vectors() -> torch.Tensor:
    """(16, 64) vectors, one for each place in the text."""
    return _normal((TOKENS, WIDTH), seed=zlib.crc32(b"<positions>"))


def _normal(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
