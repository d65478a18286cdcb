"""Which rows of the sequence a forward computes: PipeFusion patches, and their sequence-parallel shards.

The joint sequence is [text | image] or [image | text]; "image" is every latent token, of video too. Text
rides with patch 0 only. So do context
rows: rows at the end of the image stream that are given and not denoised, such as the tokens of a reference
picture.
"""

from dataclasses import dataclass, replace
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
    """Rows of text, of the latent and of context; ``text_position`` is where text sits in the joint sequence:
    first, last or None (no joint text).

    ``fresh``: so many rows at the end of the text are given to every block anew, and do not go on to the
    next.
    ``parts``: (name, rows) of latents that follow each other in the image, where a model attends to them
    apart: the name is a kind like "image".
    """

    text: int
    image: int
    text_position: str | None
    fresh: int = 0
    parts: tuple[tuple[str, int], ...] = ()
    context: int = 0

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
        return len(part) if part else {"joint": self.joint, "text": self.text}.get(kind, self.stream)

    @property
    def stream(self) -> int:
        """Rows of the image stream: the latent's and the context's."""
        return self.image + self.context

    @property
    def joint(self) -> int:
        return self.stream + (self.text if self.text_position else 0)


@dataclass(frozen=True)
class Share:
    """The rows of one forward on one SP rank: text, latent (``image``) and context rows, each a span of its
    own stream."""

    text: Span
    image: Span
    context: Span

    @property
    def stream(self) -> int:
        """Rows of the image stream."""
        return len(self.image) + len(self.context)

    def __len__(self) -> int:
        return len(self.text) + self.stream


@dataclass(frozen=True)
class Rows:
    """The rows of one forward, text, latent and context, and how the SP ranks share them. Positions are rows
    of the joint sequence."""

    sequence: Sequence
    text: Span
    image: Span
    sp_rank: int = 0
    sp_size: int = 1
    context: Span = Span(0, 0)

    @cached_property
    def shards(self) -> list[Share]:
        """The share of every SP rank."""
        return [
            Share(*(rows.shard(i, self.sp_size) for rows in (self.text, self.image, self.context)))
            for i in range(self.sp_size)
        ]

    @property
    def local(self) -> Share:
        """This rank's share."""
        return self.shards[self.sp_rank]

    @property
    def kept(self) -> int:
        """How many of this rank's text rows go on from block to block."""
        text = self.local.text
        return max(0, min(text.hi, self.sequence.text - self.sequence.fresh) - text.lo)

    @property
    def is_everything(self) -> bool:
        """True where no row is missing and none is on another rank: nothing needs cutting."""
        whole = self.sequence
        return self.sp_size == 1 and (len(self.text), len(self.image), len(self.context)) == (
            whole.text,
            whole.image,
            whole.context,
        )

    def lengths(self, kind: str) -> list[int]:
        """Rows of each SP rank in a ``kind`` ("joint" | "image" | "text") attention."""
        return [len(self._share_rows(kind, share)) for share in self.shards]

    def positions(self, kind: str, ranks: range | None = None) -> torch.Tensor:
        """Positions in the whole ``kind`` sequence of the rows that ``ranks`` (default: all SP ranks) hold,
        in the order in which a gather returns them."""
        shards = self.shards if ranks is None else [self.shards[i] for i in ranks]
        return torch.cat([self._share_rows(kind, share) for share in shards])

    def local_positions(self, kind: str) -> torch.Tensor:
        """Positions of this rank's own rows."""
        return self._share_rows(kind, self.local)

    def leading(self, count: int, kinds: tuple[str, ...]) -> tuple[int, ...]:
        """How many of this rank's rows are among the first ``count`` of the streams ``kinds`` ("text" |
        "image"), counted one behind the other."""
        found, before = [], 0
        for kind in kinds:
            span = self.local.text if kind == "text" else self.local.image
            found.append(max(0, min(count - before, span.hi) - span.lo))
            before += self.sequence.text if kind == "text" else self.sequence.image
        return tuple(found)

    def _share_rows(self, kind: str, share: Share) -> torch.Tensor:
        text, whole = torch.arange(share.text.lo, share.text.hi), self.sequence
        if kind == "text":
            return text
        part = whole.part(kind)
        if part:
            lo = min(max(share.image.lo, part.lo), part.hi)
            return torch.arange(lo - part.lo, max(lo, min(share.image.hi, part.hi)) - part.lo)
        where = whole.text_position if kind == "joint" else None
        offset = whole.text if where == "first" else 0
        image = torch.cat(
            [
                torch.arange(rows.lo, rows.hi) + start
                for rows, start in ((share.image, offset), (share.context, offset + whole.image))
            ]
        )
        if where is None:
            return image
        return torch.cat([text, image] if where == "first" else [image, text + whole.stream])


def everything(sequence: Sequence, sp_rank: int = 0, sp_size: int = 1) -> Rows:
    """The rows of a synchronous forward."""
    return Rows(
        sequence, Span(0, sequence.text), Span(0, sequence.image), sp_rank, sp_size, Span(0, sequence.context)
    )


def patches(sequence: Sequence, count: int, sp_rank: int = 0, sp_size: int = 1) -> list[Rows]:
    """The patches of one PipeFusion step, balanced over the joint sequence: patch 0 has all text and context
    and fewer latent rows.

    Every patch has at least one latent row for each SP rank, since a block may see no others; ``count`` x
    ``sp_size`` must not exceed the latent rows.
    """
    given = sequence.joint - sequence.image
    first = (
        max(sp_size, min(round(sequence.joint / count) - given, sequence.image - (count - 1) * sp_size))
        if count > 1
        else sequence.image
    )
    rest, none = Span(first, sequence.image), Span(0, 0)
    whole = everything(sequence, sp_rank, sp_size)
    later = [rest.shard(i, count - 1) for i in range(count - 1)]
    return [replace(whole, image=Span(0, first))] + [
        replace(whole, text=none, context=none, image=span) for span in later
    ]
