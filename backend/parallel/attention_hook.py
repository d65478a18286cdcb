"""The attention of wrapped blocks: one hook on F.scaled_dot_product_attention, where every diffusers
transformer ends up.

Inside a block that runs here the hook adds what the mesh asks for: Ulysses and ring exchanges, and
PipeFusion's key/value buffers (arXiv 2405.14430). Outside of one it is torch's function. Buffers hold the
whole sequence for this rank's heads; sequence-parallel ranks of a stage gather only the fresh rows of a
patch, so what is sent does not grow with the number of patches.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention_kernels, comm, ulysses_ring
from .kv_buffers import KVBuffers
from .mesh import Mesh
from .sequence import Rows, Span
from .token_mixing import Mixing


@dataclass
class LayerCall:
    """Where in the model the next attention calls happen: which block, of which guidance branch, over which
    rows of which batch items.

    stand_in: the block was given one row of text that is none, since it cannot do without. once: keys and
    values of text, which stands first, are kept from the
    call that has rows of it. text_mask: (B, text) true where keys may be read.
    """

    layer: int
    branch: str
    rows: Rows
    kinds: tuple[str | tuple[str, str], ...]
    items: slice
    stand_in: bool = False
    once: bool = False
    text_mask: Tensor | None = None
    calls: int = 0

    def next(self) -> tuple[str, tuple]:
        """(kind, key) of this call: "joint", "image" and "text" attend within the sequence, (part, part) from
        one part of it to another, "cross" to the prompt; "sum" and "surroundings" are no attention."""
        index, self.calls = self.calls, self.calls + 1
        return self.kinds[index % len(self.kinds)], (self.branch, self.layer, index)


@dataclass
class Attention:
    """The hook and its state."""

    mesh: Mesh
    kernel: str = "auto"
    buffers: KVBuffers | None = None
    call: LayerCall | None = None
    _kept: dict[tuple, Tensor] = field(default_factory=dict)
    _positions: dict[tuple, Tensor] = field(default_factory=dict)
    _last_mask: tuple[Tensor | None, bool] = (None, False)

    def __post_init__(self):
        self.mixing = Mixing(self)

    def install(self):
        """Take the place of torch's function."""
        F.scaled_dot_product_attention = self
        self.mixing.install()

    def uninstall(self):
        """Give torch's function its place back."""
        F.scaled_dot_product_attention = attention_kernels.SDPA
        self.mixing.uninstall()

    def begin_request(self, kernel: str, buffers: KVBuffers | None):
        """Forget every key and value of the request before; ``buffers`` where stale ones will be read."""
        self.kernel, self.buffers = kernel, buffers
        self._positions.clear()
        self._kept.clear()
        self._last_mask = (None, False)

    def __call__(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        if self.call is None:
            return attention_kernels.SDPA(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        assert not is_causal and not dropout_p, "denoisers attend in both directions, without dropout"
        kind, where = self.call.next()
        if kind == "cross":
            if not query.shape[2]:
                return query
            return attention_kernels.attend(self.kernel, query, key, value, attn_mask, scale)
        if kind == "joint" and self.call.text_mask is not None:
            attn_mask = self._key_mask()
        attn_mask = self._needed(attn_mask)
        if kind == "joint" and self.call.stand_in:
            return self._without_stand_in(query, key, value, attn_mask, scale, kind, where)
        return self._within_sequence(query, key, value, attn_mask, scale, kind, where)

    def _without_stand_in(self, q, k, v, mask, scale, kind, where):
        """Attention of the image rows alone; the text row that stands in gets zeros."""
        first = self.call.rows.sequence.text_position == "first"
        q, k, v = (t[:, :, 1:] if first else t[:, :, :-1] for t in (q, k, v))
        out = self._within_sequence(q, k, v, mask, scale, kind, where)
        return F.pad(out, (0, 0, 1, 0) if first else (0, 0, 0, 1))

    def _key_mask(self):
        """(B, 1, 1, text + image): the text mask as one over the keys of the whole joint sequence."""
        text, sequence = self.call.text_mask.bool(), self.call.rows.sequence
        image = text.new_ones(text.shape[0], sequence.stream)
        return torch.cat([text, image] if sequence.text_position == "first" else [image, text], dim=1)[
            :, None, None
        ]

    def _needed(self, mask):
        """None for a mask that hides nothing: without one the fast kernels run. The same mask comes to many
        layers, so the last verdict is kept."""
        if mask is None or mask.dtype != torch.bool:
            return mask
        source = mask if self.call.text_mask is None else self.call.text_mask
        if self._last_mask[0] is not source:
            self._last_mask = (source, bool(mask.all()))
        return None if self._last_mask[1] else mask

    def _within_sequence(self, q, k, v, mask, scale, kind, where):
        rows, heads = self.call.rows, q.shape[1]
        asking, kind = kind if isinstance(kind, tuple) else (kind, kind)
        lengths, sources, (first, u) = (
            rows.lengths(asking),
            rows.lengths(kind),
            (self.mesh.ring.rank * self.mesh.ulysses.size, self.mesh.ulysses),
        )
        if not any(lengths) and not any(sources):  # text, of which a later patch has none
            return q
        mine = range(first, first + u.size)  # SP ranks whose rows this Ulysses group holds
        if u.size > 1:
            if k.shape[1] != heads:  # grouped queries: heads must travel together
                k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
            if asking == kind:
                q, k, v = ulysses_ring.scatter_heads(torch.stack([q, k, v]), [lengths[i] for i in mine], u)
            else:
                (q,) = ulysses_ring.scatter_heads(q[None], [lengths[i] for i in mine], u)
                k, v = ulysses_ring.scatter_heads(torch.stack([k, v]), [sources[i] for i in mine], u)
        if self.buffers is not None:
            k, v = self._refresh(torch.stack([k, v]), kind, where)
            out = (
                q
                if not q.shape[2]
                else attention_kernels.attend(self.kernel, q, k, v, self._cut(mask, kind, mine, None), scale)
            )
        elif self.call.once and kind == "joint":
            out = self._with_text(q, torch.stack([k, v]), mask, scale, mine, where)
        elif self.mesh.ring.size > 1:
            out = self._ring(q, k, v, mask, scale, kind, mine)
        else:
            out = (
                q
                if not q.shape[2]
                else attention_kernels.attend(self.kernel, q, k, v, self._cut(mask, kind, mine, mine), scale)
            )
        return ulysses_ring.gather_heads(out, heads, [lengths[i] for i in mine], u) if u.size > 1 else out

    def _ring(self, q, k, v, mask, scale, kind, mine):
        u = self.mesh.ulysses.size
        turns = [range(i * u, (i + 1) * u) for i in range(self.mesh.ring.size)]
        lengths = self.call.rows.lengths(kind)
        masks = None if mask is None else [self._cut(mask, kind, mine, turn) for turn in turns]
        return ulysses_ring.ring_attend(
            self.kernel,
            q,
            torch.stack([k, v]),
            [sum(lengths[i] for i in turn) for turn in turns],
            self.mesh.ring,
            masks,
            scale,
        )

    def _with_text(self, q, kv, mask, scale, mine, where):
        """Attention to the text's keys and values, first, and to the image's: in a call without rows of text,
        to those of the call that had them."""
        rows, u, where = self.call.rows, self.mesh.ulysses.size, (*where, self.call.items.start)
        if len(rows.text):
            is_text = rows.positions("joint", mine) < rows.sequence.text
            self._kept[where], kv = (
                kv.index_select(3, part.nonzero().flatten().to(kv.device)) for part in (is_text, ~is_text)
            )
        kv, whole = torch.cat([self._kept[where], kv], dim=3), replace(rows, text=Span(0, rows.sequence.text))
        turns = [range(i * u, (i + 1) * u) for i in range(self.mesh.ring.size)]
        masks = (
            None
            if mask is None
            else [
                mask.index_select(
                    -1,
                    torch.cat(
                        [whole.positions("text", turn), rows.positions("image", turn) + rows.sequence.text]
                    ).to(mask.device),
                )
                for turn in turns
            ]
        )
        if len(turns) == 1:
            return (
                q
                if not q.shape[2]
                else attention_kernels.attend(self.kernel, q, *kv, masks and masks[0], scale)
            )
        lengths = whole.lengths("joint")
        return ulysses_ring.ring_attend(
            self.kernel,
            q,
            kv,
            [sum(lengths[i] for i in turn) for turn in turns],
            self.mesh.ring,
            masks,
            scale,
        )

    def _refresh(self, kv, kind, where):
        """Write the fresh rows of every SP rank of the stage into the buffer; the whole sequence's keys and
        values, fresh and stale."""
        rows, ring, u = self.call.rows, self.mesh.ring, self.mesh.ulysses.size
        lengths = rows.lengths(kind)
        turns = [sum(lengths[i * u : (i + 1) * u]) for i in range(ring.size)]
        kv = torch.cat(comm.gather(kv, [(*kv.shape[:3], n, kv.shape[4]) for n in turns], ring, "ring"), dim=3)
        return self.buffers.refresh(
            where, kv, self._rows(kind, kv.device), rows.sequence.rows_of(kind), self.call.items
        )

    def _rows(self, kind, device):
        """Positions of this forward's rows on all SP ranks: a slice where they are consecutive, else a
        tensor."""
        key = (id(self.call.rows), kind)
        if key not in self._positions:
            positions = self.call.rows.positions(kind)
            run = bool((positions.diff() == 1).all())
            first = int(positions[0]) if len(positions) else 0
            where = slice(first, first + len(positions)) if run else positions.to(device)
            self._positions[key] = (self.call.rows, where)  # the rows too: their id must stay theirs
        return self._positions[key][1]

    def _cut(self, mask, kind, query_ranks, key_ranks):
        """The mask's rows and columns for the rows of these ranks; ``key_ranks`` None: every key of the
        sequence."""
        if mask is None:
            return None
        rows = self.call.rows
        if key_ranks is not None and mask.shape[-1] > 1:
            mask = mask.index_select(-1, rows.positions(kind, key_ranks).to(mask.device))
        if mask.shape[-2] > 1:
            mask = mask.index_select(-2, rows.positions(kind, query_ranks).to(mask.device))
        return mask
