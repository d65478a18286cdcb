"""What a Describe must satisfy: a request of numbers, without a tensor."""

from typing import Any

from ..config import ParallelConfig
from ..errors import UnsupportedError
from ..loading.checkpoint import Checkpoint
from ..models.latent_tokens import TokenGrid
from ..protocol import Describe
from .tensor_validation import is_latent
from .validation import check_patches, check_wire

#: Sides of a latent, samples, and tokens of a prompt.
MAX_SIDE = 1 << 16
#: Reference latents of a prompt.
MAX_REFERENCES = 64


def check_workload(message: Describe, config: ParallelConfig, checkpoint: Checkpoint) -> int:
    """Count the tokens of the latent in a Describe and of its references; refuse one that is none. Raises
    UnsupportedError."""
    family = checkpoint.family
    latent = message.latent
    nested = family.latent.nested
    channels = nested.channels(checkpoint.config)[0] if nested else family.latent.channels(checkpoint.config)
    if not is_latent(latent, channels) or max(latent) > MAX_SIDE:
        raise UnsupportedError(
            f"the latent to describe has shape {latent!r:.200} but {family.name} wants ({channels} "
            f"channels, [frames,] height, width), sides of at most {MAX_SIDE}."
        )
    for_branches = message.drained or message.prompts >= config.cfg_degree
    if message.prompts not in (1, 2) or not for_branches or not 0 <= message.text_tokens <= MAX_SIDE:
        raise UnsupportedError(
            f"cannot describe {message.prompts} prompts of {message.text_tokens} tokens under cfg_degree "
            f"{config.cfg_degree}; give one or two of at most {MAX_SIDE} tokens, and two under cfg_degree 2."
        )
    if not 1 <= message.batch <= MAX_SIDE:
        raise UnsupportedError(f"cannot describe {message.batch} samples; give 1 to {MAX_SIDE}.")
    patch = family.latent.patch(checkpoint.config)
    grid = TokenGrid(tuple(latent), patch)
    check_patches(config, grid)
    check_wire(config.validate(), family)
    references = [TokenGrid((channels, *sides), patch) for sides in _references(message.references)]
    return grid.tokens + sum(each.tokens for each in references)


def _references(references: Any) -> list[tuple[int, int, int]]:
    """Return the (T, H, W) of references. Raises UnsupportedError for what has other sides."""
    is_list = isinstance(references, list) and len(references) <= MAX_REFERENCES
    if not is_list or not all(map(_is_sides, references)):
        raise UnsupportedError(
            f"the references to describe are {references!r:.200}; give at most {MAX_REFERENCES} lists of "
            f"(frames, height, width), each from 1 to {MAX_SIDE}."
        )
    return [(time, height, width) for time, height, width in references]


def _is_sides(sides: Any) -> bool:
    is_triple = isinstance(sides, list) and len(sides) == 3
    return is_triple and all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides)
