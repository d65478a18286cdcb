"""Ulysses' exchange of tokens for heads, all ranks one after the other in one process."""

import pytest
import torch

from backend.parallel import ulysses_ring
from backend.parallel.mesh import Axis

SIZE = 8


class Wires:
    """Stands for the all-to-all: a first pass of all ranks writes what they send, a second one reads it."""

    def __init__(self, monkeypatch, shares: tuple[float, ...]):
        self.shares = shares
        self.sent: dict[int, tuple[torch.Tensor, ...]] = {}
        monkeypatch.setattr(ulysses_ring, "exchange", self.exchange)

    def exchange(self, flat, sent, sizes, axis, mechanism):
        assert flat.is_contiguous() and flat.ndim == 1 and len(flat) == sum(sent)
        self.sent[axis.rank] = flat.split(sent)
        if len(self.sent) < axis.size:
            return flat.new_zeros(sum(sizes))
        received = [self.sent[rank][axis.rank] for rank in range(axis.size)]
        assert [len(piece) for piece in received] == sizes
        return torch.cat(received)

    def run(self, of_rank, ranks: int):
        """Return what every rank gets."""
        axes = [Axis(None, rank, ranks, tuple(range(ranks)), self.shares) for rank in range(ranks)]
        self.sent.clear()
        for axis in axes:
            of_rank(axis)
        return [of_rank(axis) for axis in axes]


@pytest.mark.parametrize(
    "heads, lengths, shares",
    [
        (4, [5, 5], ()),
        (8, [3, 2, 4], ()),
        (2, [4, 3, 2], ()),
        (5, [0, 7], ()),
        (10, [7, 3], (70, 30)),
        (10, [8, 6, 4, 2], (40, 30, 20, 10)),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_tokens_go_to_heads_and_back(heads, lengths, shares, batch, kinds, monkeypatch):
    """Even and uneven heads, heads by share, ranks without heads, ranks without tokens."""
    wires = Wires(monkeypatch, shares)
    ranks = len(lengths)
    whole = [torch.randn(batch, heads, sum(lengths), SIZE) for _ in range(kinds)]
    shards = [tensor.split(lengths, dim=2) for tensor in whole]

    def scatter(axis):
        return ulysses_ring.scatter_heads([shard[axis.rank] for shard in shards], lengths, axis)

    received = wires.run(scatter, ranks)
    of_heads = ulysses_ring.head_shards(heads, Axis(None, 0, ranks, (), shares))
    assert not shares or of_heads == [heads * share // 100 for share in shares]
    for tensor, kind in zip(whole, range(kinds)):
        for rank, part in enumerate(tensor.split(of_heads, dim=1)):
            assert received[rank][kind].equal(part)
            assert received[rank].stride(-1) == 1  # as the kernels want it

    def gather(axis):
        return ulysses_ring.gather_heads(received[axis.rank][0], heads, lengths, axis)

    for rank, found in enumerate(wires.run(gather, ranks)):
        assert found.equal(shards[0][rank])
        assert found.transpose(1, 2).flatten(2).data_ptr() == found.data_ptr()  # no copy for the projection
