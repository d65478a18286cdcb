"""Which rows of the sequence a forward computes: PipeFusion patches, and their sequence-parallel shards.

The joint sequence is [text | image] or [image | text]; "image" is every latent token, of video too. Text rides with patch 0 only.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Span:
    """Rows lo <= row < hi of one stream."""

    lo: int
    hi: int

    def __len__(self) -> int:
        return self.hi - self.lo

    def shard(self, index: int, count: int) -> "Span":
        """The ``index``-th of ``count`` nearly equal parts; sizes differ by at most one row."""
        size = len(self)
        return Span(self.lo + size * index // count, self.lo + size * (index + 1) // count)


@dataclass(frozen=True)
class Sequence:
    """Sizes of the two streams; ``text_position`` is where text sits in the joint sequence: first, last or None (no joint text).

    ``fresh``: so many rows at the end of the text are given to every block anew, and do not go on to the next.
    ``parts``: (name, rows) of latents that follow each other in the image, where a model attends to them apart: the name is a kind like "image".
    """

    text: int
    image: int
    text_position: str | None
    fresh: int = 0
    parts: tuple[tuple[str, int], ...] = ()

    def part(self, kind: str) -> Span | None:
        """The image rows of a part; None for other kinds."""
        start = 0
        for name, rows in self.parts:
            if name == kind:
                return Span(start, start + rows)
            start += rows
        return None

    def rows_of(self, kind: str) -> int:
        """All rows that a ``kind`` of attention reads."""
        part = self.part(kind)
        return len(part) if part else self.joint if kind == "joint" else self.image

    @property
    def joint(self) -> int:
        return self.image + (self.text if self.text_position else 0)


@dataclass(frozen=True)
class Rows:
    """The rows of one forward, text and image, and how the SP ranks share them.

    ``shards[i]`` is (text span, image span) of SP rank i. Positions are rows of the joint sequence.
    """

    sequence: Sequence
    text: Span
    image: Span
    sp_rank: int = 0
    sp_size: int = 1

    @cached_property
    def shards(self) -> list[tuple[Span, Span]]:
        return [(self.text.shard(i, self.sp_size), self.image.shard(i, self.sp_size)) for i in range(self.sp_size)]

    @property
    def local(self) -> tuple[Span, Span]:
        """(text span, image span) of this rank."""
        return self.shards[self.sp_rank]

    @property
    def kept(self) -> int:
        """How many of this rank's text rows go on from block to block."""
        text = self.local[0]
        return max(0, min(text.hi, self.sequence.text - self.sequence.fresh) - text.lo)

    @property
    def is_everything(self) -> bool:
        """True where no row is missing and none is on another rank: nothing needs cutting."""
        return self.sp_size == 1 and len(self.image) == self.sequence.image and len(self.text) == self.sequence.text

    def lengths(self, kind: str) -> list[int]:
        """Rows of each SP rank in a ``kind`` ("joint" | "image" | "text") attention."""
        return [len(self._span_rows(kind, text, image)) for text, image in self.shards]

    def positions(self, kind: str, ranks: range | None = None) -> torch.Tensor:
        """Positions in the whole ``kind`` sequence of the rows that ``ranks`` (default: all SP ranks) hold, in the order in which a gather returns them."""
        shards = self.shards if ranks is None else [self.shards[i] for i in ranks]
        return torch.cat([self._span_rows(kind, text, image) for text, image in shards])

    def local_positions(self, kind: str) -> torch.Tensor:
        """Positions of this rank's own rows."""
        return self._span_rows(kind, *self.local)

    def _span_rows(self, kind: str, text: Span, image: Span) -> torch.Tensor:
        if kind == "text":
            return torch.arange(text.lo, text.hi)
        part = self.sequence.part(kind)
        if part:
            lo = min(max(image.lo, part.lo), part.hi)
            return torch.arange(lo - part.lo, max(lo, min(image.hi, part.hi)) - part.lo)
        where = self.sequence.text_position if kind == "joint" else None
        offset = self.sequence.text if where == "first" else 0
        image_rows = torch.arange(image.lo + offset, image.hi + offset)
        if where is None:
            return image_rows
        text_rows = torch.arange(text.lo, text.hi) + (0 if where == "first" else self.sequence.image)
        return torch.cat([text_rows, image_rows] if where == "first" else [image_rows, text_rows])


def everything(sequence: Sequence, sp_rank: int = 0, sp_size: int = 1) -> Rows:
    """The rows of a synchronous forward."""
    return Rows(sequence, Span(0, sequence.text), Span(0, sequence.image), sp_rank, sp_size)


def patches(sequence: Sequence, count: int, sp_rank: int = 0, sp_size: int = 1) -> list[Rows]:
    """The patches of one PipeFusion step, balanced over the joint sequence: patch 0 has all text and fewer image rows.

    Every patch has at least one image row; ``count`` must not exceed the image rows.
    """
    text = sequence.text if sequence.text_position else 0
    first = max(1, min(round(sequence.joint / count) - text, sequence.image - (count - 1))) if count > 1 else sequence.image
    rest = Span(first, sequence.image)
    spans = [Span(0, first)] + [rest.shard(i, count - 1) for i in range(count - 1)]
    none = Span(0, 0)
    return [Rows(sequence, Span(0, sequence.text) if i == 0 else none, span, sp_rank, sp_size) for i, span in enumerate(spans)]
