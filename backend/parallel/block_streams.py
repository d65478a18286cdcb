"""The token streams of one forward, and how the arguments of a block are cut to the tokens of this rank.

Streams are {"image": (B, tokens, D), "text": (B, tokens, D) or None}; joined blocks take one tensor.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..models.blocks import IMAGE_ONLY, JOINED
from ..models.common.shape_only import shape_only
from ..models.family import Family
from .local_embedding import LocalTokens
from .request_caches import Positions, cuts_of, select
from .sequence import EMPTY, SequenceLengths, Span, TokenShards, latent_span, whole_sequence
from .step_context import StepContext

Streams = dict[str, Any]


@dataclass(frozen=True)
class BlockStructure:
    """How the blocks of a transformer follow each other.

    joined[i]: whether block i takes text and image in one tensor. entry: the block at which text enters.
    skip_sources[i]: the block whose image tokens block i takes as a long skip, or None.
    """

    family: Family
    joined: list[bool]
    entry: int
    skip_sources: list[int | None]

    @classmethod
    def of(cls, transformer: nn.Module, family: Family) -> "BlockStructure":
        """Find which blocks take joined streams, and which earlier block's output each takes too."""
        joined: list[bool] = []
        entry = 0
        for name, kind in family.blocks.lists.items():
            count = len(block_list(transformer, name))
            joined += [kind == JOINED] * count
            entry += count if kind == IMAGE_ONLY else 0
        adapter = family.blocks.adapter
        total = len(joined)
        return cls(family, joined, entry, [adapter.skip_source(i, total) for i in range(total)])

    @property
    def total(self) -> int:
        return len(self.joined)

    def can_skip(self, index: int) -> bool:
        """Return whether another stage's block is passed over: no entry or exit, no new layout after it."""
        edges = (0, self.entry - 1, self.entry, self.total - 1)
        return index not in edges and self.joined[index] == self.joined[index + 1]

    def crossing(self, boundary: int) -> list[int]:
        """List the blocks before ``boundary`` whose output travels with the activation, for a later block."""
        return [source for source in self.skip_sources[boundary:] if source is not None and source < boundary]

    def split(self, joined: Tensor, text_tokens: int) -> Streams:
        """Take the streams of a joined tensor (B, tokens, D) apart."""
        if self.family.blocks.text_position == "first":
            return {"text": joined[:, :text_tokens], "image": joined[:, text_tokens:]}
        image_tokens = joined.shape[1] - text_tokens
        return {"image": joined[:, :image_tokens], "text": joined[:, image_tokens:]}

    def join(self, streams: Streams) -> Tensor:
        """Put both streams into one tensor (B, tokens, D)."""
        text = streams["text"]
        image = streams["image"]
        first = self.family.blocks.text_position == "first"
        return torch.cat([text, image] if first else [image, text], dim=1)


def block_list(transformer: nn.Module, name: str) -> nn.ModuleList:
    """Return the transformer's list of blocks of this name."""
    blocks = transformer.get_submodule(name)
    assert isinstance(blocks, nn.ModuleList), "a family names lists of blocks"
    return blocks


def blocks_of(transformer: nn.Module, family: Family) -> list[nn.Module]:
    """List the blocks of a transformer in pipeline order."""
    return [block for name in family.blocks.lists for block in block_list(transformer, name)]


@lru_cache(maxsize=1024)  # one object for each patch, with the lengths that it has counted
def token_shards(
    image: Span | None, sequence: SequenceLengths, with_text: bool, rank: int, size: int, shares: tuple
) -> TokenShards:
    """Return the tokens of ``image`` (None: of the whole latent); ``with_text``: text and references too.
    ``rank``, ``size``, ``shares``: of sequence parallelism."""
    whole = whole_sequence(sequence, rank, size, shares)
    tokens = replace(whole, image=image or whole.image)
    return tokens if with_text else replace(tokens, text=EMPTY, reference=EMPTY)


@dataclass
class Forward:
    """One forward of the transformer under way on this rank.

    latent: image tokens, of which ``latents`` has each nested one's. reference, per_block_text: see
    SequenceLengths. skips: block -> image tokens (b, tokens,
    D) for long skips. positions, cuts: of the request: an argument -> its cuts, since the same object comes
    to every block, and often at every step.
    """

    structure: BlockStructure
    context: StepContext
    latent: int
    reference: int
    per_block_text: int
    positions: Positions
    cuts: WeakTensorKeyDictionary
    latents: tuple[tuple[str, int], ...]
    skips: dict[int, Tensor] = field(default_factory=dict)
    entered: TokenShards | None = None

    @property
    def tokens(self) -> TokenShards:
        """The tokens of this forward, known from its first block on."""
        assert self.entered is not None, "block 0 comes first"
        return self.entered

    def embedded(
        self, tokens: int, latent: str, with_text: bool, rank: int, size: int, shares: tuple
    ) -> tuple[Span, ...]:
        """Return which of the ``tokens`` of an embedder go into the blocks of the SP rank ``rank``: of the
        latent, or of the nested one that is named ``latent``, and with the text of its references. () for
        all, and for tokens of something else."""
        image = self.context.image or Span(0, self.latent)
        whole = latent_span(self.latents, latent) or Span(0, self.latent)
        own = image.shard(rank, size, shares).within(whole)
        given = tokens - len(whole)
        if self.structure.family.cache.references_first and given >= 0:
            spans = [Span(0, given if with_text else 0), own.moved(given)]
        elif given in (0, self.reference):
            spans = [own, Span(len(whole), tokens if with_text else len(whole))]
        else:
            return ()
        needed = tuple(span for span in spans if len(span)) or (EMPTY,)
        return () if sum(map(len, needed)) == tokens else needed

    def streams(self, index: int, call: dict[str, Any]) -> Streams:
        """Return this rank's tokens among a block's arguments; whole where they enter."""
        structure = self.structure
        blocks = structure.family.blocks
        enters = index in (0, structure.entry)
        if structure.joined[index]:
            both = call[blocks.image]
            if enters:
                text_tokens = both.shape[1] - self.latent - self.reference
            else:
                text_tokens = self.tokens.carried_text + self.tokens.sequence.per_block_text
            split = structure.split(both, text_tokens)
        else:
            text = call[blocks.text] if blocks.text and index >= structure.entry else None
            split = {"image": blocks.adapter.image(blocks, call), "text": text}
        return split if enters else self._cut_whole_streams(split)

    def sequence(self, index: int, streams: Streams) -> SequenceLengths:
        """Measure the sequence of streams that enter at block ``index``; references come with the text, or
        with the image where the model has put them after it before."""
        text = streams["text"]
        image = streams["image"]
        reference = self.reference
        if index < self.structure.entry:
            reference = max(0, min(reference, image.shape[1] - self.latent))
        return SequenceLengths(
            text=0 if text is None else text.shape[1],
            image=image.shape[1] - reference,
            text_position=self.structure.family.blocks.text_position,
            per_block_text=self.per_block_text,
            latents=self.latents,
            reference=reference,
        )

    def enter(self, streams: Streams) -> Streams:
        """Cut whole streams to this rank's tokens."""
        text = streams["text"]
        if text is not None:
            text = text[:, self.tokens.local.text.indices]
        return {"image": self._local_image(streams["image"]), "text": text}

    def _cut_whole_streams(self, streams: Streams) -> Streams:
        """Cut what the model hands over whole: the image stream between block lists, and per-block text."""
        shard = self.tokens.local
        sequence = self.tokens.sequence
        text = streams["text"]
        image = streams["image"]
        if image.shape[1] != shard.stream:
            image = self._local_image(image)
        if sequence.per_block_text:
            carried = self.tokens.carried_text
            anew = shard.text.within(Span(sequence.text - sequence.per_block_text, sequence.text))
            own = slice(carried + anew.lo, carried + anew.hi)
            text = torch.cat([text[:, :carried], text[:, own]], dim=1)
        return {"text": text, "image": image}

    def _local_image(self, image: Tensor) -> Tensor:
        shard = self.tokens.local
        own = image[:, shard.image.indices]
        if len(shard.reference):
            references = image[:, self.tokens.sequence.image :]
            own = torch.cat([own, references[:, shard.reference.indices]], dim=1)
        assert not isinstance(own, LocalTokens), "an embedder is given the tokens of the forward"
        return own

    def put_streams(self, index: int, call: dict[str, Any], streams: Streams, dummy: bool):
        """Put the streams into a block's arguments, and cut the others; ``dummy``: text is a dummy token."""
        structure = self.structure
        blocks = structure.family.blocks
        adapter = blocks.adapter
        if structure.joined[index]:
            call[blocks.image] = structure.join(streams)
        else:
            call |= adapter.image_arguments(blocks, call, streams["image"], self.tokens)
            if blocks.text and index >= structure.entry:
                call[blocks.text] = streams["text"]
        if not self.tokens.is_whole:
            for name, (kind, dim, *dims) in blocks.per_token.items():
                if name in call and (not dims or call[name].ndim == dims[0]):
                    call[name] = self._cut(call[name], kind, dim, dummy)
            call |= adapter.cut(call, self.tokens)
        source = structure.skip_sources[index]
        if source is not None:
            call[adapter.skip_argument] = self.skips.pop(source)

    def _cut(self, value, kind, dim: int, dummy: bool):
        """Return this rank's tokens of a per-token argument; one entry where one stands for all tokens."""
        if value is None:
            return None
        if isinstance(value, (tuple, list)):
            kinds = kind if isinstance(kind, tuple) else [kind] * len(value)
            return type(value)(self._cut(element, each, dim, dummy) for element, each in zip(value, kinds))
        constant = value.shape[dim] == 1 or value.stride(dim) == 0
        if constant and self.tokens.sequence.length_of(kind) > 1:
            return value.narrow(dim, 0, 1)
        cuts = cuts_of(value, self.cuts)
        key = (id(self.tokens), kind, dim, dummy)
        if key not in cuts:
            position = self.structure.family.blocks.text_position if dummy and kind != "image" else None
            own = range(self.tokens.sp_rank, self.tokens.sp_rank + 1)
            where = self.positions.of(self.tokens, kind, value.device, own, position or "")
            cuts[key] = select(value, dim, where)
        return cuts[key]

    def result(self, index: int, call: dict[str, Any], streams: Streams):
        """Return what block ``index`` itself would return."""
        if self.structure.joined[index]:
            return self.structure.join(streams)
        if index < self.structure.entry:
            return streams["image"]
        blocks = self.structure.family.blocks
        return blocks.adapter.result(blocks, call, streams, self.tokens)

    def leave(self, streams: Streams) -> Streams:
        """Fill the streams after the last block up to the sequence, but the image before an output layer."""
        if self.tokens.is_whole:
            return streams
        text = streams["text"]
        if text is not None and self.structure.joined[self.structure.entry]:
            text = self.whole_text(text)  # the model counts on the text that it handed in
        elif text is not None:
            text = self.structure.family.blocks.adapter.text_after_blocks(text, self.whole_text)
        image = streams["image"]
        has_last = self.structure.family.blocks.output_layer is not None
        return {
            "image": image[:, : len(self.tokens.local.image)] if has_last else self.whole(image),
            "text": text,
        }

    def whole_output(self, output: Tensor) -> Tensor:
        """Return the model's output (B, latent tokens, F), of which this forward's carry values; as many
        tokens more as there are of text, where the last layer is given that too."""
        span = self.tokens.local.image
        count = self.tokens.sequence.image
        text_tokens = output.shape[1] - len(span)
        assert text_tokens in (0, self.tokens.sequence.text), "a model counts tokens before its last layer"
        full = output.new_zeros(output.shape[0], count + text_tokens, output.shape[2])
        start = text_tokens if self.structure.family.blocks.text_position == "first" else 0
        full[:, start : start + count][:, span.indices] = output[:, start : start + len(span)]
        return full

    def whole_text(self, text: Tensor) -> Tensor:
        """Return text in the shape in which the model handed it in, without values."""
        return shape_only(text, self.tokens.sequence.text)

    def whole(self, image: Tensor) -> Tensor:
        """Return the whole image stream, of which this forward's tokens carry values."""
        if self.tokens.is_whole:
            return image
        sequence = self.tokens.sequence
        span = self.tokens.local.image
        reference = self.tokens.local.reference
        full = image.new_zeros(image.shape[0], sequence.stream, image.shape[2])
        full[:, span.indices] = image[:, : len(span)]
        if len(reference):
            start = sequence.image + reference.lo
            full[:, start : start + len(reference)] = image[:, len(span) :]
        return full
