"""Positions and masks on the device, made once a request: micro-steps neither copy them nor wait for them."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .sequence import Span, TokenShards


def select(x: Tensor, dim: int, where: slice | Tensor) -> Tensor:
    """Return the entries of ``x`` at ``where`` along ``dim``; a view where they are adjacent."""
    if isinstance(where, slice):
        return x.narrow(dim, where.start, where.stop - where.start)
    return x.index_select(dim, where)


def cuts_of(x: Tensor, known: WeakTensorKeyDictionary) -> dict[tuple, Any]:
    """Return what has been cut of ``x``; forgotten with it."""
    return cast(dict[tuple, Any], known.setdefault(x, {}))


@dataclass
class Positions:
    _found: dict[tuple, tuple[TokenShards, slice | Tensor]] = field(default_factory=dict)
    _apart: dict[tuple, tuple[TokenShards, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def of(
        self,
        tokens: TokenShards,
        kind: str,
        device: torch.device,
        ranks: range | None = None,
        dummy: str = "",
    ) -> slice | Tensor:
        """Return where the tokens of SP ``ranks`` (default: all) stand in a ``kind`` of sequence: a slice if
        they are adjacent. ``dummy``: where a dummy token stands ("first" | "last"), "" without one."""
        key = (id(tokens), kind, device, ranks, dummy)
        if key not in self._found:
            positions = tokens.positions(kind, ranks)
            if dummy:
                padding = positions.new_zeros(1)
                positions = torch.cat([padding, positions] if dummy == "first" else [positions, padding])
            # keep the tokens alive: their id is the key
            self._found[key] = tokens, _adjacent(positions, device)
        return self._found[key][1]

    def text_and_image(
        self, tokens: TokenShards, device: torch.device, ranks: range
    ) -> tuple[Tensor, Tensor]:
        """Return which tokens of SP ``ranks`` are text, which are not, where text stands first."""
        key = (id(tokens), device, ranks)
        if key not in self._apart:
            is_text = tokens.positions("joint", ranks) < tokens.sequence.text
            text, image = (each.nonzero().flatten().to(device) for each in (is_text, ~is_text))
            self._apart[key] = tokens, (text, image)
        return self._apart[key][1]


def _adjacent(positions: Tensor, device: torch.device) -> slice | Tensor:
    first = int(positions[0]) if len(positions) else 0
    if positions.equal(torch.arange(first, first + len(positions))):
        return slice(first, first + len(positions))
    return positions.to(device)


@dataclass
class Masks:
    """Attention masks. The first mask that an attention call gets in a request is reused for all steps: masks
    follow from prompts, and no family changes one with the noise level.

    _first: (prompt, layer, call, samples, ...) -> the first mask there. _needed: that mask -> what is applied
    of it, None where it hides nothing. _cuts: that -> (tokens, kind, ranks) -> its rows and columns.
    """

    positions: Positions
    _first: dict[tuple, Tensor] = field(default_factory=dict)
    _needed: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _cuts: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def needed(self, mask: Tensor | None, where: tuple) -> Tensor | None:
        """Return a call's mask; None, for the fast kernels, if it is boolean and hides nothing."""
        if mask is None or mask.dtype != torch.bool:
            return mask
        known = self._known(mask, where)
        if known not in self._needed:
            self._needed[known] = None if bool(known.all()) else known
        return self._needed[known]

    def of_text(self, text: Tensor, tokens: TokenShards, where: tuple) -> Tensor | None:
        """Return a mask of text (B, text) for all keys, (B, 1, 1, text + image); None if it hides nothing."""
        known = self._known(text, where)
        if known not in self._needed:
            seen = known.bool()
            self._needed[known] = None if bool(seen.all()) else _key_mask(seen, tokens)
        return self._needed[known]

    def _known(self, mask: Tensor, where: tuple) -> Tensor:
        return self._first.setdefault((*where, tuple(mask.shape)), mask)

    def cut(
        self, tokens: TokenShards, mask: Tensor | None, kind: str, queries: range, keys: range | None
    ) -> Tensor | None:
        """Return the mask for the queries and keys of these SP ranks; ``keys`` None: for every key."""
        if mask is None:
            return None
        cuts = cuts_of(mask, self._cuts)
        which = (id(tokens), kind, queries, keys)
        if which not in cuts:
            selected = mask
            if keys is not None and mask.shape[-1] > 1:
                selected = select(selected, -1, self.positions.of(tokens, kind, mask.device, keys))
            if mask.shape[-2] > 1:
                selected = select(selected, -2, self.positions.of(tokens, kind, mask.device, queries))
            cuts[which] = tokens, selected
        return cuts[which][1]

    def cut_static_text(self, tokens: TokenShards, mask: Tensor | None, ranks: range) -> Tensor | None:
        """Return the mask for the keys of SP ``ranks``: their cached text, then their image tokens."""
        if mask is None:
            return None
        cuts = cuts_of(mask, self._cuts)
        which = (id(tokens), "static text", ranks)
        if which not in cuts:
            whole = replace(tokens, text=Span(0, tokens.sequence.text))
            image = whole.positions("image", ranks) + whole.sequence.text
            positions = torch.cat([whole.positions("text", ranks), image]).to(mask.device)
            cuts[which] = tokens, mask.index_select(-1, positions)
        return cuts[which][1]


def _key_mask(text_mask: Tensor, tokens: TokenShards) -> Tensor:
    """Return the mask (B, 1, 1, tokens) of all keys, of the text's (B, text tokens)."""
    sequence = tokens.sequence
    image = text_mask.new_ones(text_mask.shape[0], sequence.stream)
    is_first = sequence.text_position == "first"
    joint = torch.cat([text_mask, image] if is_first else [image, text_mask], dim=1)
    return joint[:, None, None]
