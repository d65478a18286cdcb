"""Ulysses' all-to-all from tokens to heads, and what a ring makes of its hops: ranks one after the other in
one process."""

import pytest
import torch
import torch.nn.functional as F

from backend.parallel.attention import ulysses_ring
from backend.parallel.attention.attention_kernels import NOTHING
from backend.parallel.mesh import Axis
from backend.parallel.sequence import Span
from backend.parallel.wire import pack, unpack
from backend.parallel.wire_bytes import FP8, FULL, kv_heads_sent
from backend.shares import shard_sizes

SIZE = 8


class Wires:
    """Stands for the all-to-all: a first pass of all ranks writes what they send, a second one reads it."""

    def __init__(self, monkeypatch, shares: tuple[float, ...]):
        self.shares = shares
        self.sent: dict[int, tuple[torch.Tensor, ...]] = {}
        monkeypatch.setattr(ulysses_ring, "begin_all_to_all", self.begin_all_to_all)

    def begin_all_to_all(self, flat, sent, sizes, axis, mechanism):
        assert flat.is_contiguous() and flat.ndim == 1 and len(flat) == sum(sent)
        self.sent[axis.rank] = flat.split(sent)
        if len(self.sent) < axis.size:
            return [flat.new_zeros(sum(sizes))].pop
        received = [self.sent[rank][axis.rank] for rank in range(axis.size)]
        assert [len(piece) for piece in received] == sizes
        return [torch.cat(received)].pop

    def run(self, of_rank, ranks: int):
        """Return what every rank gets."""
        axes = [Axis(None, rank, ranks, tuple(range(ranks)), self.shares) for rank in range(ranks)]
        self.sent.clear()
        for axis in axes:
            of_rank(axis)
        return [of_rank(axis) for axis in axes]


#: Heads, tokens of each rank, shares of heads.
CASES = [
    (4, [5, 5], ()),
    (8, [3, 2, 4], ()),
    (2, [4, 3, 2], ()),
    (5, [0, 7], ()),
    (2, [2] * 4, ()),
    (10, [7, 3], (70, 30)),
    (10, [8, 6, 4, 2], (40, 30, 20, 10)),
]
#: With groups of heads.
BY_GROUPS = [(24, [5, 4], (), 6), (48, [3] * 4, (), 12)]


@pytest.mark.parametrize("heads, lengths, shares", CASES)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kinds", [1, 2, 3])
@pytest.mark.parametrize("chunk, chunks", [(0, 1), (0, 2), (1, 2)])
def test_tokens_go_to_heads(heads, lengths, shares, batch, kinds, chunk, chunks, monkeypatch):
    """Even and uneven heads, heads by share, ranks without heads or tokens; all heads or half of them."""
    wires = Wires(monkeypatch, shares)
    ranks = len(lengths)
    whole = [torch.randn(batch, heads, sum(lengths), SIZE) for _ in range(kinds)]
    shards = [tensor.split(lengths, dim=2) for tensor in whole]

    def scatter(axis):
        return ulysses_ring.scatter_heads(
            [shard[axis.rank] for shard in shards], lengths, axis, chunk, chunks
        )(torch.float32)

    received = wires.run(scatter, ranks)
    of_heads = shard_sizes(heads, ranks, shares)
    assert not shares or of_heads == [heads * share // 100 for share in shares]
    for tensor, kind in zip(whole, range(kinds)):
        for rank, own in enumerate(tensor.split(of_heads, dim=1)):
            chosen = Span(0, own.shape[1]).shard(chunk, chunks)
            assert received[rank][kind].equal(own[:, chosen.indices])
            assert received[rank][kind].stride(-1) == 1  # as the kernels want it


@pytest.mark.parametrize(
    "heads, kv_heads, ranks, shares, sent",
    [
        (48, 12, 1, (), 12),
        (48, 12, 4, (), 12),
        (48, 12, 8, (), 24),  # Krea 2: two ranks for three groups
        (48, 12, 16, (), 48),
        (24, 8, 8, (), 8),
        (24, 8, 3, (), 24),
        (24, 24, 5, (), 24),
        (48, 12, 2, (70, 30), 48),
    ],
)
def test_keys_and_values_are_repeated_no_more_than_ranks_need(heads, kv_heads, ranks, shares, sent):
    assert kv_heads_sent(heads, kv_heads, ranks, shares) == sent


#: Heads of queries, of keys and values, tokens of each rank.
GROUPED = [(8, 2, [5, 3]), (12, 6, [4, 4]), (24, 3, [2, 0, 3]), (24, 12, [3] * 4)]


@pytest.mark.parametrize("heads, kv_heads, lengths", GROUPED)
@pytest.mark.parametrize("wire", [FULL, FP8])
@pytest.mark.parametrize("chunks", [1, 2])
def test_groups_travel_whole(heads, kv_heads, lengths, wire, chunks, monkeypatch):
    """Queries with their keys and values in one message, in order, and what comes of them back; a chunk has
    whole groups."""
    wires, ranks = Wires(monkeypatch, ()), len(lengths)
    whole = [torch.randn(2, count, sum(lengths), SIZE) for count in (heads, kv_heads, kv_heads)]
    exact = [unpack(pack(each, wire), each.dtype) for each in whole]
    found = [[] for _ in lengths]
    for chunk in range(chunks):

        def scatter(axis, chunk=chunk):
            own = [pack(each.split(lengths, dim=2)[axis.rank], wire) for each in whole]
            return ulysses_ring.scatter_heads(own, lengths, axis, chunk, chunks, kv_heads)(torch.float32)

        for rank, (q, *kv) in enumerate(wires.run(scatter, ranks)):
            assert q.shape[1] * kv_heads == kv[0].shape[1] * heads and q.shape[-1] == SIZE
            found[rank].append((q, *kv))
    for kind, wanted in enumerate(exact):
        by_rank = wanted.chunk(ranks, dim=1)
        for own, parts in zip(by_rank, found, strict=True):
            assert torch.cat([part[kind] for part in parts], dim=1).equal(own)


@pytest.mark.parametrize("heads, groups, ranks, chunks", [(48, 12, 4, 2), (24, 8, 8, 1), (48, 24, 8, 2)])
def test_halves_have_whole_groups(heads, groups, ranks, chunks):
    axis = Axis(None, 0, ranks, tuple(range(ranks)))
    assert ulysses_ring.head_chunks(heads, 1, 75600, axis, groups) == chunks


@pytest.mark.parametrize("heads, lengths, shares, groups", [(*case, 0) for case in CASES] + BY_GROUPS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("chunks", [1, 2])
def test_heads_go_back_to_tokens(heads, lengths, shares, groups, batch, chunks, monkeypatch):
    """The same, back; chunks that are sent one after the other end in one tensor."""
    ranks = len(lengths)
    whole = torch.randn(batch, heads, sum(lengths), SIZE)
    axes = [Axis(None, rank, ranks, tuple(range(ranks)), shares) for rank in range(ranks)]
    of_heads = whole.split(shard_sizes(heads, ranks, shares), dim=1)
    all_going = [ulysses_ring.GatheredHeads(heads, lengths, axis, chunks, groups) for axis in axes]
    for chunk in range(chunks):
        sent = {}
        wires = Wires(monkeypatch, shares)
        for going, own in zip(all_going, of_heads):
            of_group = heads // groups if groups else 1
            chosen = Span(0, own.shape[1] // of_group).shard(chunk, chunks)
            sent[going.axis.rank] = own[:, chosen.lo * of_group : chosen.hi * of_group]

        def send(axis, going=all_going, sent=sent, chunk=chunk):
            del going[axis.rank].under_way[chunk:]  # of the first pass
            going[axis.rank].send(sent[axis.rank])

        wires.run(send, ranks)
    for going, expected in zip(all_going, whole.split(lengths, dim=2)):
        found = going.wait()
        assert found.equal(expected)
        assert found.transpose(1, 2).flatten(2).data_ptr() == found.data_ptr()  # no copy for the projection


@pytest.mark.parametrize(
    "heads, batch, tokens, ranks, expected",
    [(24, 1, 4608, 2, 2), (24, 1, 4608, 8, 1), (40, 1, 75600, 8, 2), (12, 1, 1152, 2, 1), (5, 4, 4096, 4, 1)],
)
def test_halves_are_large_enough(heads, batch, tokens, ranks, expected):
    """Flux and Wan 14B; never half of one head."""
    assert (
        ulysses_ring.head_chunks(heads, batch, tokens, Axis(None, 0, ranks, tuple(range(ranks)))) == expected
    )


@pytest.mark.parametrize("rank", range(3))
def test_queries_of_a_ring_that_see_nothing_at_first(rank, monkeypatch):
    """As padding before a long prompt: their own rank's keys are hidden from them, and the next hop's."""
    lengths = [4, 3, 5]
    ends = [sum(lengths[: index + 1]) for index in range(3)]
    keys = [torch.randn(2, 2, 2, length, SIZE) for length in lengths]
    q = torch.randn(2, 2, 6, SIZE)
    visible = torch.rand(2, 1, 6, sum(lengths)) < 0.5
    for hops in range(3):  # query 1 sees nothing of the first hop, query 2 of two; query 0 sees a bit of all
        for hop in range(hops):
            source = (rank - hop) % 3
            visible[:, :, hops, ends[source] - lengths[source] : ends[source]] = False
    visible[:, :, 0] = True
    visible[:, :, :, [ends[index] - 1 for index in range(3) if index not in (rank, (rank - 1) % 3)]] = True
    arriving = iter([keys[(rank - hop) % 3] for hop in (1, 2)])
    monkeypatch.setattr(ulysses_ring, "pass_on", lambda *_: lambda: next(arriving))
    masks = visible.split(lengths, dim=-1)
    axis = Axis(object(), rank, 3, (0, 1, 2))  # pyright: ignore[reportArgumentType]  # nothing is sent
    found = ulysses_ring.ring_attend("auto", q, [keys[rank]], lengths, axis, masks, None)
    want = F.scaled_dot_product_attention(q, *torch.cat(keys, dim=3), attn_mask=visible)
    assert (found - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize("first", [True, False])
def test_rows_that_see_nothing_of_a_hop_are_the_other_hops(first):
    """To the bit, whichever hop it is; and of neither hop still nothing, which a third one replaces."""
    seen, other = torch.randn(2, 1, 3, 2, SIZE)
    of_seen, of_other = torch.randn(2, 1, 2, 3)  # by head and query
    seen[:, :2] = other[:, 0] = other[:, 2] = 0
    of_seen[..., :2] = of_other[..., 0] = of_other[..., 2] = NOTHING
    hops = [(seen, of_seen), (other, of_other)]
    out, lse = None, None
    for block, block_lse in hops if first else hops[::-1]:
        out, lse = ulysses_ring.merge_block(out, lse, block.clone(), block_lse)
    assert out is not None and lse is not None
    want = torch.stack([torch.zeros_like(seen[:, 0]), other[:, 1], seen[:, 2]], dim=1)
    sums = torch.stack([torch.full((1, 2), NOTHING), of_other[..., 1], of_seen[..., 2]], dim=1)
    assert out.equal(want) and lse[..., 0].equal(sums)
    block, block_lse = torch.randn(1, 3, 2, SIZE), torch.randn(1, 2, 3)
    out, lse = ulysses_ring.merge_block(out, lse, block, block_lse)
    assert out[:, 0].equal(block[:, 0]) and lse[:, 0, :, 0].equal(block_lse[..., 0])
