"""Which tokens of the sequence a forward computes: PipeFusion patches, and their sequence-parallel shards.

The joint sequence is [text | image] or [image | text]; "image" is every latent token, of video too. Text and
reference tokens, which end the image stream, ride with patch 0 only.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..shares import shard_edges


@dataclass(frozen=True)
class Span:
    """Tokens (or samples, blocks, features) lo <= i < hi of one stream."""

    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo

    @property
    def indices(self) -> slice:
        return slice(self.lo, self.hi)

    def within(self, other: "Span") -> "Span":
        """Return what both have, counted from the first of ``other``; empty where they do not meet."""
        lo = min(max(self.lo, other.lo), other.hi)
        return Span(lo - other.lo, max(lo, min(self.hi, other.hi)) - other.lo)

    def moved(self, by: int) -> "Span":
        """Return the span ``by`` further on."""
        return Span(self.lo + by, self.hi + by)

    def overlaps(self, other: "Span") -> bool:
        """Return whether some are in both; neither is empty."""
        return self.lo < other.hi and other.lo < self.hi

    def shard(self, index: int, count: int, shares: tuple[float, ...] = ()) -> "Span":
        """Return the ``index``-th of ``count`` shards, cut by ``shares``, or equally (shares.shard_edges)."""
        lo, hi = shard_edges(len(self), count=count, shares=shares)[index : index + 2]
        return Span(self.lo + lo, self.lo + hi)


EMPTY = Span(0, 0)


def latent_span(latents: tuple[tuple[str, int], ...], kind: str) -> Span | None:
    """Return where the one of this kind lies among ``latents`` (kind, tokens); None where there is none."""
    start = 0
    for name, tokens in latents:
        if name == kind:
            return Span(start, start + tokens)
        start += tokens
    return None


@dataclass(frozen=True)
class SequenceLengths:
    """How many tokens a forward has: of text, of the latent, and of references.

    text_position: where text sits in the joint sequence: "first", "last" or None (no joint text).
    per_block_text: tokens at the end of the text that are given to every block anew, and go no further.
    latents: (kind of attention, tokens) of nested latents in the image stream.
    """

    text: int
    image: int
    text_position: str | None
    per_block_text: int = 0
    latents: tuple[tuple[str, int], ...] = ()
    reference: int = 0

    def latent_span(self, kind: str) -> Span | None:
        """Return where the latent of this kind lies among the image tokens; None where there is none."""
        return latent_span(self.latents, kind)

    def length_of(self, kind: str) -> int:
        """Count the tokens that a ``kind`` of attention reads."""
        latent = self.latent_span(kind)
        if latent is not None:
            return len(latent)
        return {"joint": self.joint, "text": self.text}.get(kind, self.stream)

    @property
    def stream(self) -> int:
        """Tokens of the image stream: the latent's and the references'."""
        return self.image + self.reference

    @property
    def joint(self) -> int:
        return self.stream + (self.text if self.text_position else 0)


@dataclass(frozen=True)
class TokenShard:
    """The tokens of one forward on one SP rank; ``image`` and ``reference`` are spans of their own."""

    text: Span
    image: Span
    reference: Span

    @property
    def stream(self) -> int:
        return len(self.image) + len(self.reference)

    def __len__(self) -> int:
        return len(self.text) + self.stream


@dataclass(frozen=True)
class TokenShards:
    """The tokens of one forward, and how the SP ranks shard them: by ``shares``, () for equally."""

    sequence: SequenceLengths
    text: Span
    image: Span
    sp_rank: int = 0
    sp_size: int = 1
    reference: Span = EMPTY
    shares: tuple[float, ...] = ()

    @cached_property
    def shards(self) -> list[TokenShard]:
        spans = (self.text, self.image, self.reference)
        return [
            TokenShard(*(span.shard(i, self.sp_size, self.shares) for span in spans))
            for i in range(self.sp_size)
        ]

    @cached_property
    def local(self) -> TokenShard:
        return self.shards[self.sp_rank]

    @property
    def carried_text(self) -> int:
        """How many of this rank's text tokens go on from block to block."""
        carried = Span(0, self.sequence.text - self.sequence.per_block_text)
        return len(self.local.text.within(carried))

    @cached_property
    def is_whole(self) -> bool:
        """Return whether no token is missing, and none on another rank: nothing needs cutting."""
        whole = self.sequence
        here = (len(self.text), len(self.image), len(self.reference))
        return self.sp_size == 1 and here == (whole.text, whole.image, whole.reference)

    def lengths(self, kind: str) -> list[int]:
        """Count each SP rank's tokens in a ``kind`` of attention: joint, image, text, or a nested latent."""
        if kind not in self._lengths:
            self._lengths[kind] = [sum(map(len, self._runs(kind, shard))) for shard in self.shards]
        return self._lengths[kind]

    @cached_property
    def _lengths(self) -> dict[str, list[int]]:
        return {}

    def positions(self, kind: str, ranks: range | None = None) -> torch.Tensor:
        """Return the positions (tokens,) in the whole ``kind`` sequence of the tokens of ``ranks`` (default:
        all SP ranks), in the order of an all-gather."""
        shards = self.shards if ranks is None else [self.shards[i] for i in ranks]
        runs = [run for shard in shards for run in self._runs(kind, shard)]
        return torch.cat([torch.arange(run.lo, run.hi) for run in runs])

    def leading(self, count: int, kinds: tuple[str, ...]) -> tuple[int, ...]:
        """Count this rank's tokens of consecutive streams ("text" | "image") among their first ``count``."""
        counts: list[int] = []
        left = count
        for kind in kinds:
            span = self.local.text if kind == "text" else self.local.image
            counts.append(len(span.within(Span(0, max(0, left)))))
            left -= self.sequence.text if kind == "text" else self.sequence.image
        return tuple(counts)

    def _runs(self, kind: str, shard: TokenShard) -> list[Span]:
        """Return where a shard's tokens are in the whole ``kind`` sequence, in the order in which the rank
        holds them (and sends them)."""
        whole = self.sequence
        if kind == "text":
            return [shard.text]
        latent = whole.latent_span(kind)
        if latent is not None:
            return [shard.image.within(latent)]
        where = whole.text_position if kind == "joint" else None
        first = whole.text if where == "first" else 0
        image = [shard.image.moved(first), shard.reference.moved(first + whole.image)]
        if where == "first":
            return [shard.text, *image]
        return [*image, shard.text.moved(whole.stream)] if where else image


def whole_sequence(
    sequence: SequenceLengths, sp_rank: int = 0, sp_size: int = 1, shares: tuple[float, ...] = ()
) -> TokenShards:
    """Return the shards of a forward of all tokens, as in warm-up: no patch is cut out."""
    text = Span(0, sequence.text)
    image = Span(0, sequence.image)
    reference = Span(0, sequence.reference)
    return TokenShards(sequence, text, image, sp_rank, sp_size, reference, shares)


def patches(
    sequence: SequenceLengths, count: int, sp_rank: int = 0, sp_size: int = 1, shares: tuple[float, ...] = ()
) -> list[TokenShards]:
    """Return the patches of one PipeFusion step (arXiv 2405.14430), balanced over the joint sequence: patch 0
    has all text and reference tokens and fewer latent tokens.

    Every patch has a latent token for each SP rank, so these must be ``count`` x ``sp_size`` at least.
    """
    not_denoised = sequence.joint - sequence.image
    first = sequence.image
    if count > 1:
        most = sequence.image - (count - 1) * sp_size
        first = max(sp_size, min(round(sequence.joint / count) - not_denoised, most))
    whole = whole_sequence(sequence, sp_rank=sp_rank, sp_size=sp_size, shares=shares)
    rest = replace(whole, text=EMPTY, reference=EMPTY, image=Span(first, sequence.image))
    later = [replace(rest, image=rest.image.shard(i, count - 1)) for i in range(count - 1)]
    return [replace(whole, image=Span(0, first)), *later]
