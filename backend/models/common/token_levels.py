"""Noise levels that differ from token to token, as a mask of given frames makes them.

Modulation is computed once a level. Blocks are given the number of each token's level, which the engine cuts
to the tokens of a forward, and make one part of its modulation at a time, where it is used. All parts of all
tokens would be six times as large as the stream, in float32 and in the stream's type.
"""

from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .call_state import call_state


def share_levels(transformer: Any, modules: Iterable[nn.Module]):
    """Let the transformer's forward take ``level_of_token`` (B, tokens), and apply the last modulation to the
    tokens that arrive there; diffusers makes it for the whole sequence, before the blocks.

    The transformer's ``call`` is the ``levels`` of ``modules``, the embedder of the timestep and blocks. It
    keeps of a call: modulation (levels, parts, D) of the blocks and embedding (levels, D) for the last norm,
    which the embedder puts there, and own, which tokens arrive at that norm (OwnTokens).
    """
    between: dict[str, Any] = dict(modulation=None, embedding=None, own=slice(None), normed=None)
    levels = call_state(transformer, {"level_of_token": None}, **between)
    transformer.call = levels
    for module in modules:
        vars(module)["levels"] = levels

    def last_levels():
        if levels.level_of_token is None:
            return None
        return levels.embedding, levels.level_of_token[:, levels.own]

    modulate_arriving(transformer, "", levels, last_levels)


def modulate_arriving(transformer: Any, prefix: str, call: Any, last_levels: Callable[[], Any]):
    """Apply the last modulation to the tokens that arrive between the layers norm_out and proj_out, whose
    names begin with ``prefix``.

    last_levels: () -> the levels' embedding (levels, D) and the level of each of these tokens (B, n) in the
    call under way; None where a sample has one level, which diffusers' own modulation is for. call: the state
    of a call (call_state), whose ``normed`` is None in between.
    """

    def keep(norm, args, normed):
        """Have diffusers modulate one token, which nobody reads."""
        if last_levels() is None:
            return None
        call.normed = normed
        return normed[:, :1]

    def modulate(projection, args):
        if call.normed is None:
            return None
        embedding, level_of_token = last_levels()
        table = getattr(transformer, f"{prefix}scale_shift_table").view(2, -1)  # shift, scale
        part = added_part(table, embedding[:, None].expand(-1, 2, -1), level_of_token, scales=(1,))
        x = call.normed * part(1)
        call.normed = None
        return ((x + part(0)).to(args[0].dtype),)

    transformer.get_submodule(f"{prefix}norm_out").register_forward_hook(keep)
    transformer.get_submodule(f"{prefix}proj_out").register_forward_pre_hook(modulate)


def part_of_tokens(modulation: Tensor, level_of_token: Tensor | None) -> Callable[[int], Tensor]:
    """Return a function that makes one part of a modulation (levels, parts, D) for each token, (B, tokens,
    D). level_of_token: (B, tokens); without it there is a level a sample, and a part is (B, 1, D)."""

    def part(index: int) -> Tensor:
        if level_of_token is None:
            return modulation[:, index, None]
        return modulation[:, index][level_of_token]

    return part


def added_part(
    table: Tensor, modulation: Tensor, level_of_token: Tensor, scales: Container[int]
) -> Callable[[int], Tensor]:
    """Return what part_of_tokens does of table (parts, D) + modulation, and of 1 more for ``scales``.

    A soft mask has a level for each token of the whole video. Where those are more than the tokens here, the
    tokens' levels are taken first, so that a shard or patch adds for its own alone. The bits are the same.
    """
    take_first = len(modulation) > level_of_token.numel()

    def part(index: int) -> Tensor:
        values = modulation[:, index]
        values = table[index] + (values[level_of_token] if take_first else values)
        if index in scales:
            values = 1 + values
        return values if take_first else values[level_of_token]

    return part


def distinct(tokens):
    """Return the values of a mask's ``tokens`` (B, n), which are few, and the index of each token's (B, n).
    It waits for the device: once for each prompt and group of samples, and not at every noise level."""
    return torch.unique(tokens, return_inverse=True)


def levels_of(known, times, batch):
    """Return the noise levels (L,) of what ``distinct`` returned at ``times`` (0-d, or one of each sample),
    and the index of every token's (B n,). There are no more levels than tokens: a soft mask's values at every
    sample's time could be B times as many."""
    values, indices = known
    times = times.reshape(-1, 1)
    tokens = batch * indices.shape[1]
    if len(values) * len(times) > tokens:
        return (values[indices] * times).flatten(), torch.arange(tokens, device=indices.device)
    levels = values * times  # (1 or B, values)
    if len(times) > 1:
        indices = indices + len(values) * torch.arange(batch, device=indices.device)[:, None]
    return levels.flatten(), indices.expand(batch, -1).flatten()


def levels_of_frames(frames: Tensor, tokens: int) -> Tensor:
    """Return the number of each token's level, (B, frames x tokens), where ``frames`` (B, frames) has a level
    for each frame of so many ``tokens``."""
    numbers = torch.arange(frames.numel(), device=frames.device).view(frames.shape)
    return numbers.repeat_interleave(tokens, dim=1)
