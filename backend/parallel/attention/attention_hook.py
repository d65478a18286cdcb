"""The attention of wrapped blocks: one hook on F.scaled_dot_product_attention, where diffusers' models end.

Inside a block that runs here the hook adds the all-to-all of Ulysses (arXiv 2309.14509), the hops of ring
attention (arXiv 2310.01889), and PipeFusion's key/value buffers (arXiv 2405.14430). Elsewhere it is torch's
function. Buffers hold the whole sequence for this rank's heads. The SP ranks of a stage gather only the fresh
tokens of a patch, so the bytes sent do not grow with the number of patches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime import opaque_ops
from .. import comm
from ..mesh import Mesh
from ..request_caches import Masks, Positions
from ..sequence import Span, TokenShards
from ..step_context import StepContext
from ..token_mixing import TokenMixing
from ..wire import pack, unpack
from ..wire_bytes import FULL, kv_heads_sent
from . import attention_kernels, ulysses_ring
from .early_values import EarlyValues
from .kv_buffers import KVBuffers

#: A kind of attention, or two of them: whose queries, whose keys.
Kind = str | tuple[str, str]


@dataclass
class BlockCall:
    """The block that runs now, and how many attention calls it has made.

    dummy: the text is one dummy token. static_text: keys and values of text, which stands first, are cached.
    text_mask: (B, text), true where keys may be read. values: those of the next attention call that are on
    their way; made: what some of its value layers have made.
    """

    layer: int
    context: StepContext
    tokens: TokenShards
    kinds: tuple[Kind, ...]
    dummy: bool = False
    static_text: bool = False
    text_mask: Tensor | None = None
    calls: int = 0
    values: EarlyValues | None = None
    made: dict[int, Tensor] = field(default_factory=dict)

    @property
    def next_kind(self) -> Kind:
        return self.kinds[self.calls % len(self.kinds)]

    def next(self) -> tuple[Kind, tuple]:
        """Count one call; return its kind (Blocks.attention) and its key (prompt, layer, call)."""
        kind = self.next_kind
        index = self.calls
        self.calls += 1
        return kind, (self.context.prompt, self.layer, index)

    @property
    def dummy_first(self) -> bool:
        return self.tokens.sequence.text_position == "first"

    def without_dummy(self, x: Tensor, dim: int) -> Tensor:
        """Return ``x`` without the dummy token, the first or the last along ``dim``."""
        return x.narrow(dim, int(self.dummy_first), x.shape[dim] - 1)


@dataclass
class Attention:
    """The hook and its state. head_size: features of a head, of whose values some leave early."""

    mesh: Mesh
    head_size: int = 0
    kernel: str = "auto"
    #: How tensors travel between SP ranks (wire.py).
    wire: str = FULL
    buffers: KVBuffers | None = None
    #: Whether blocks run compiled. What a rank sends may not depend on whether its own compiler works.
    compiled: bool = False
    call: BlockCall | None = None
    #: (prompt, layer, call, first sample), with Ulysses the chunk of the heads before the sample -> keys and
    #: values of static text, (2, b, H, tokens, D).
    static_text: dict[tuple, Tensor] = field(default_factory=dict)
    positions: Positions = field(default_factory=Positions)

    def __post_init__(self):
        size = self.mesh.ulysses.size
        #: SP ranks of every Ulysses group, in the order of the ring, and of this rank's.
        self.groups = [range(i * size, (i + 1) * size) for i in range(self.mesh.ring.size)]
        self.own = self.groups[self.mesh.ring.rank]
        self.mixing = TokenMixing(self)
        self.masks = Masks(self.positions)

    def install(self):
        """Replace torch's attention and the models' token mixing by this hook, for the whole process."""
        opaque_ops.RUNNING.attention = self
        F.scaled_dot_product_attention = opaque_ops.attention
        self.mixing.install()

    def uninstall(self):
        """Put torch's attention and the models' token mixing back, and forget the call."""
        F.scaled_dot_product_attention = attention_kernels.SDPA
        opaque_ops.RUNNING.attention = None
        opaque_ops.RUNNING.text = None
        self.call = None  # where a block has failed: the next request begins outside of blocks
        self.mixing.uninstall()

    def begin_request(self, kernel: str, buffers: KVBuffers | None, wire: str = FULL, compiled: bool = False):
        """Forget every key and value of the request before; ``buffers`` where stale ones will be read."""
        self.kernel = kernel
        self.buffers = buffers
        self.wire = wire
        self.compiled = compiled
        self.positions = Positions()
        self.masks = Masks(self.positions)
        self.static_text.clear()

    def __call__(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):
        call = self.call
        if call is None:
            return attention_kernels.sdpa(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        assert not is_causal and not dropout_p, "denoisers attend in both directions, without dropout"
        kind, where = call.next()
        if kind == "cross":
            return self._attend(query, key, value, attn_mask, scale)
        mask_key = (*where, call.context.sample_span)
        if kind == "joint" and call.text_mask is not None:
            attn_mask = self.masks.of_text(call.text_mask, call.tokens, mask_key)
        else:
            attn_mask = self.masks.needed(attn_mask, mask_key)
        if kind == "joint" and call.dummy:
            return self._without_dummy(call, query, key, value, attn_mask, scale, where)
        return self._within_sequence(call, query, key, value, attn_mask, scale, kind, where)

    @property
    def overlaps(self) -> bool:
        """Return whether a block's other products may follow the queries and keys that are sent. Ranks whose
        compiler works call them before: those of a rank whose compiler has failed may send, too."""
        return self.call is not None and self.mesh.ulysses.size > 1 and not self.compiled

    @property
    def sends_values(self) -> bool:
        """Return whether values travel before the queries and keys of the block that runs."""
        with_queries = self.mesh.ulysses.size == 1 or self.buffers is not None or self.compiled
        return self.call is not None and not with_queries

    def note_values(self, index: int, count: int, made: Tensor):
        """Collect the values (B, tokens, features) of the block's next attention call: ``made`` is of value
        layer ``index`` of ``count``. The last one starts the send to the ranks of the heads.

        Values travel with queries and keys where stale ones are read (PipeFusion's patches leave less to
        overlap), and in compiled blocks, which norm and rotate in a kernel or two.
        """
        call = self.call
        if call is None or not self.sends_values:
            return
        call.made[index] = made
        if len(call.made) < count:
            return
        made = comm.cat_or_same([call.made.pop(i) for i in range(count)], 1)
        kind = call.next_kind
        assert isinstance(kind, str) and kind != "cross", "Blocks.values are of calls within the sequence"
        assert call.values is None, "each call uses its own"
        lengths = call.tokens.lengths(kind)
        if not any(lengths):
            return
        if call.dummy and kind == "joint":
            made = call.without_dummy(made, 1)
        values = made.unflatten(2, (-1, self.head_size)).transpose(1, 2)
        own = [lengths[i] for i in self.own]
        coming = ulysses_ring.scatter_heads([pack(values, self.wire)], own, self.mesh.ulysses)
        call.values = EarlyValues(coming, values.dtype)

    def _attend(self, q, k, v, mask, scale):
        return q if not q.shape[2] else attention_kernels.attend(self.kernel, q, k, v, mask, scale)

    def _without_dummy(self, call: BlockCall, q, k, v, mask, scale, where):
        """Attend among image tokens alone; the dummy token gets zeros."""
        q, k, v = (call.without_dummy(t, 2) for t in (q, k, v))
        out = self._within_sequence(call, q, k, v, mask, scale, "joint", where)
        return F.pad(out, (0, 0, 1, 0) if call.dummy_first else (0, 0, 0, 1))

    def _within_sequence(self, call: BlockCall, q, k, v, mask, scale, kind: Kind, where: tuple):
        heads = q.shape[1]
        u = self.mesh.ulysses
        query_kind, key_kind = kind if isinstance(kind, tuple) else (kind, kind)
        lengths = call.tokens.lengths(query_kind)
        key_lengths = call.tokens.lengths(key_kind)
        if not any(lengths) and not any(key_lengths):  # text, of which a later patch has none
            return q
        in_common = (call, mask, scale, key_kind)
        if u.size == 1:
            return self._of_own_heads(q, (k, v), *in_common, where)
        kv_heads = kv_heads_sent(heads=heads, kv_heads=k.shape[1], ranks=u.size, shares=u.shares)
        if kv_heads != k.shape[1]:  # no rank has part of a group
            k, v = (t.repeat_interleave(kv_heads // t.shape[1], 1) for t in (k, v))
        own_lengths = [lengths[i] for i in self.own]
        chunks = 1
        if self.buffers is None:  # of a patch there is less to hide
            tokens = call.tokens.sequence.length_of(query_kind)
            chunks = ulysses_ring.head_chunks(heads, batch=q.shape[0], tokens=tokens, axis=u, groups=kv_heads)
        early = call.values
        call.values = None
        sent = [pack(tensor, self.wire) for tensor in ((q, k) if early else (q, k, v))]
        messages = [(sent, own_lengths)]
        if query_kind != key_kind:
            messages = [(sent[:1], own_lengths), (sent[1:], [key_lengths[i] for i in self.own])]
        coming = [
            [ulysses_ring.scatter_heads(*message, u, chunk, chunks, kv_heads) for message in messages]
            for chunk in range(chunks)
        ]
        dtype = q.dtype
        del sent, messages, k, v  # what was packed or repeated is copied by now
        opaque_ops.run_meanwhile()
        going = ulysses_ring.GatheredHeads(heads, own_lengths, u, chunks, kv_heads)
        for chunk, waits in enumerate(coming):
            own_q, *kv = (tensor for wait in waits for tensor in wait(dtype))
            if early:
                kv.append(early.of_heads(chunk, chunks))
                assert kv[0].shape == kv[1].shape, "values are those of their keys' tokens"
            out = self._of_own_heads(own_q, kv, *in_common, (*where, chunk))
            del own_q, kv  # freed before the output is copied, and before the next chunk comes
            going.send(pack(out, self.wire))
            del out
        return unpack(going.wait(), dtype)

    def _of_own_heads(self, q, kv: Sequence[Tensor], call: BlockCall, mask, scale, key_kind: str, where):
        """Attend with the heads that this Ulysses rank has, to the tokens of its group and of the ring."""
        tokens = call.tokens
        if self.buffers is not None:
            k, v = self._refresh(call, self.buffers, kv, key_kind, where)
            return self._attend(q, k, v, self.masks.cut(tokens, mask, key_kind, self.own, None), scale)
        if call.static_text and key_kind == "joint":
            return self._with_static_text(call, q, kv, mask, scale, where)
        masks = [self.masks.cut(tokens, mask, key_kind, self.own, ranks) for ranks in self.groups]
        if self.mesh.ring.size == 1:
            k, v = kv
            return self._attend(q, k, v, masks[0], scale)
        counts = self._group_counts(tokens, key_kind)
        both = [torch.stack(list(kv))]  # a copy, freed once it has been sent and attended to
        return ulysses_ring.ring_attend(self.kernel, q, both, counts, self.mesh.ring, masks, scale, self.wire)

    def _with_static_text(self, call: BlockCall, q, kv: Sequence[Tensor], mask, scale, where: tuple):
        """Attend to the image's keys and values and the text's, cached from the call that had its tokens."""
        tokens = call.tokens
        masks = [self.masks.cut_static_text(tokens, mask, ranks) for ranks in self.groups]
        both = [self._after_static_text(call, kv, where)]
        if self.mesh.ring.size == 1:
            k, v = both.pop()
            return self._attend(q, k, v, masks[0], scale)
        counts = self._group_counts(replace(tokens, text=Span(0, tokens.sequence.text)), "joint")
        return ulysses_ring.ring_attend(self.kernel, q, both, counts, self.mesh.ring, masks, scale, self.wire)

    def _group_counts(self, tokens: TokenShards, kind: str) -> list[int]:
        lengths = tokens.lengths(kind)
        return [sum(lengths[i] for i in ranks) for ranks in self.groups]

    def _after_static_text(self, call: BlockCall, kv: Sequence[Tensor], where: tuple) -> Tensor:
        """Return (2, B, H, tokens, D): the text, cached from the call that had its tokens, then image."""
        both = torch.stack(list(kv))
        where = (*where, call.context.sample_span.lo)
        if len(call.tokens.text):
            text_at, image_at = self.positions.text_and_image(call.tokens, both.device, self.own)
            self.static_text[where] = both.index_select(3, text_at)
            both = both.index_select(3, image_at)
        return torch.cat([self.static_text[where], both], dim=3)

    def _refresh(self, call: BlockCall, buffers: KVBuffers, kv: Sequence[Tensor], kind: str, where: tuple):
        """Write the fresh tokens of the stage's SP ranks into the buffer; return all keys and values."""
        if self.mesh.ring.size > 1:
            both = torch.stack(list(kv))
            counts = self._group_counts(call.tokens, kind)
            sent = pack(both, self.wire)
            shapes = [(*sent.shape[:3], count, sent.shape[4]) for count in counts]
            came = comm.all_gather(sent, shapes, self.mesh.ring, "ring")
            came[self.mesh.ring.rank] = both  # own keys and values did not travel
            kv = torch.cat([unpack(each, both.dtype) for each in came], dim=3).unbind()
        positions = self.positions.of(call.tokens, kind, kv[0].device)
        return buffers.refresh(
            where, kv, positions=positions, total=call.tokens.sequence.length_of(kind), context=call.context
        )
