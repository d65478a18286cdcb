"""Patches and shards cover every token once, at any size."""

import pytest
import torch

from backend.models.latent_tokens import NestedGrid, TokenGrid
from backend.parallel.attention.attention_hook import Attention
from backend.parallel.block_streams import token_shards
from backend.parallel.mesh import single
from backend.parallel.request_caches import Masks, Positions, select
from backend.parallel.sequence import SequenceLengths, TokenShards, patches, whole_sequence


@pytest.mark.parametrize(
    "text, image, count, sp",
    [(12, 64, 4, 1), (12, 64, 5, 3), (40, 64, 4, 2), (3, 7, 7, 1), (0, 50, 3, 2), (1, 9, 2, 4)],
)
@pytest.mark.parametrize("position", ["first", "last", None])
def test_patches_cover_the_sequence(text, image, count, sp, position):
    sequence = SequenceLengths(text if position else 0, image, position)
    positions = torch.cat([p.positions("joint") for p in patches(sequence, count, 0, sp)])
    assert positions.sort().values.equal(torch.arange(sequence.joint))


@pytest.mark.parametrize("text, image, count", [(512, 4096, 8), (12, 64, 4), (512, 600, 2)])
def test_patches_are_balanced_over_the_joint_sequence(text, image, count):
    sizes = [len(p.text) + len(p.image) for p in patches(SequenceLengths(text, image, "first"), count)]
    assert max(sizes) - min(sizes) <= 1


def test_text_longer_than_a_patch_leaves_the_rest_balanced():
    sizes = [(len(p.text), len(p.image)) for p in patches(SequenceLengths(100, 61, "first"), 4)]
    assert sizes == [(100, 1), (0, 20), (0, 20), (0, 20)]


@pytest.mark.parametrize("count, sp", [(1, 1), (4, 1), (3, 2), (5, 3)])
@pytest.mark.parametrize("position", ["first", "last", None])
def test_context_rows_ride_with_patch_0(count, sp, position):
    sequence = SequenceLengths(12 if position else 0, 64, position, reference=30)
    found = patches(sequence, count, 0, sp)
    assert [len(p.reference) for p in found] == [30] + [0] * (count - 1)
    assert torch.cat([p.positions("joint") for p in found]).sort().values.equal(torch.arange(sequence.joint))
    assert torch.cat([p.positions("image") for p in found]).sort().values.equal(torch.arange(94))
    assert len(found[0].image) <= len(found[-1].image)


@pytest.mark.parametrize("count, sp", [(1, 1), (4, 1), (3, 2), (5, 3)])
@pytest.mark.parametrize("position", ["first", "last", None])
def test_stages_compute_the_tokens_of_the_patches(count, sp, position):
    """A stage is given a patch's image tokens, and whether text comes too: references come with it."""
    sequence = SequenceLengths(12 if position else 0, 64, position, reference=30)
    for rank in range(sp):
        wanted = patches(sequence, count, rank, sp)
        found = [token_shards(p.image, sequence, p is wanted[0], rank, sp, ()) for p in wanted]
        assert found == wanted


def own_positions(tokens: TokenShards, kind: str) -> torch.Tensor:
    return tokens.positions(kind, range(tokens.sp_rank, tokens.sp_rank + 1))


def test_positions_put_context_behind_the_latent():
    first, last = (
        whole_sequence(SequenceLengths(2, 3, position, reference=4), 1, 2) for position in ("first", "last")
    )
    assert own_positions(first, "joint").tolist() == [1, 3, 4, 7, 8] and own_positions(
        first, "image"
    ).tolist() == [1, 2, 5, 6]
    assert own_positions(last, "joint").tolist() == [1, 2, 5, 6, 8]


def test_positions_put_text_where_the_family_has_it():
    first = whole_sequence(SequenceLengths(2, 3, "first"), 1, 2)
    last = whole_sequence(SequenceLengths(2, 3, "last"), 1, 2)
    assert own_positions(first, "joint").tolist() == [1, 3, 4]
    assert own_positions(last, "joint").tolist() == [1, 2, 4]
    assert own_positions(first, "image").tolist() == [1, 2]


def test_every_rank_has_tokens_of_every_patch():
    """However long the text: blocks that see the latent alone have nothing else."""
    for patch in patches(SequenceLengths(500, 64, "first"), 4, 0, 3):
        assert min(len(shard.image) for shard in patch.shards) >= 1


@pytest.mark.parametrize("sp", [1, 2, 3, 4])
def test_per_block_text_is_not_carried(sp):
    shards = [
        whole_sequence(SequenceLengths(11, 8, "last", per_block_text=4), rank, sp) for rank in range(sp)
    ]
    assert sum(shard.carried_text for shard in shards) == 7
    assert all(
        shard.carried_text == len([at for at in own_positions(shard, "text") if at < 7]) for shard in shards
    )


def test_nested_latents_are_tokens_of_one_sequence_and_back():
    """Video padded to its patch and stereo audio, in the model's order; narrower tokens end in zeros."""
    grid = NestedGrid((TokenGrid((3, 2, 5, 4), (1, 2, 2)), TokenGrid((7, 2, 6), (1, 1, 1))), (1, 0))
    video, audio = torch.randn(2, 3, 2, 5, 4), torch.randn(2, 7, 2, 6)
    packed = torch.cat([video.flatten(1), audio.flatten(1)], dim=1)[:, None]
    tokens = grid.to_tokens(packed)
    assert tokens.shape == (2, grid.tokens, grid.features) == (2, 12 + 12, 12)
    assert tokens[:, :12, :7].equal(audio.flatten(2).transpose(1, 2)) and not tokens[:, :12, 7:].any()
    assert grid.to_latent(tokens).equal(packed) and grid.shape == tuple(packed.shape[1:])
    assert (
        grid.per_token([torch.tensor(1.0), torch.tensor(2.0)], tokens).flatten().tolist()
        == [2.0] * 12 + [1.0] * 12
    )


def test_leading_rows_of_a_rank():
    shards = [whole_sequence(SequenceLengths(10, 20, "last"), rank, 2) for rank in (0, 1)]
    assert [shard.leading(13, ("image",)) for shard in shards] == [(10,), (3,)]
    assert [shard.leading(13, ("text", "image")) for shard in shards] == [(5, 3), (5, 0)]
    assert [shard.leading(4, ("text", "image")) for shard in shards] == [(4, 0), (0, 0)]


LATENTS = (("audio", 9), ("video", 55))


@pytest.mark.parametrize("kind", ["joint", "text", "image", "audio", "video"])
@pytest.mark.parametrize("position", ["first", "last", None])
@pytest.mark.parametrize("count, sp", [(1, 1), (1, 3), (4, 1), (3, 4)])
def test_lengths_by_arithmetic_are_those_of_the_positions(kind, position, count, sp):
    sequence = SequenceLengths(12 if position else 0, 64, position, latents=LATENTS, reference=10)
    for tokens in patches(sequence, count, 0, sp):
        counted = [len(tokens.positions(kind, range(rank, rank + 1))) for rank in range(sp)]
        assert tokens.lengths(kind) == counted


@pytest.mark.parametrize("position", ["first", "last"])
@pytest.mark.parametrize("sp", [1, 2])
def test_tokens_are_taken_at_their_positions(position, sp):
    """Adjacent ones as a slice, which copies nothing; a dummy token takes the first."""
    positions = Positions()
    sequence = SequenceLengths(12, 64, position, reference=10)
    table = torch.arange(sequence.joint)
    for tokens in patches(sequence, 3, 0, sp):
        for kind in ("joint", "image"):
            where = positions.of(tokens, kind, table.device)
            assert select(table, 0, where).equal(tokens.positions(kind))
            assert positions.of(tokens, kind, table.device) is where
        own = own_positions(tokens, "joint").tolist()
        dummy_first = positions.of(tokens, "joint", table.device, range(1), position)
        with_dummy = select(table, 0, dummy_first).tolist()
        assert with_dummy == ([0, *own] if position == "first" else [*own, 0])
    assert isinstance(positions.of(patches(sequence, 3)[1], "joint", table.device), slice)


def test_text_and_image_are_separated_once_a_request():
    """Every layer asks, and each answer would wait for a GPU twice."""
    positions = Positions()
    device = torch.device("cpu")
    for tokens in patches(SequenceLengths(12, 64, "first", reference=10), 3, 0, 2):
        for ranks in (range(1), range(1, 2), range(2)):
            found = positions.text_and_image(tokens, device, ranks)
            assert positions.text_and_image(tokens, device, ranks) is found
            of_text, of_image = (tokens.positions("joint", ranks)[where] for where in found)
            assert bool((of_text < 12).all()) and bool((of_image >= 12).all())
            assert len(of_text) + len(of_image) == len(tokens.positions("joint", ranks))


def test_a_masks_verdict_is_asked_for_once_a_request(monkeypatch):
    """Each step brings another tensor of the same values."""
    asked = []
    ask = torch.Tensor.all
    monkeypatch.setattr(torch.Tensor, "all", lambda self: asked.append(1) or ask(self))
    attention = Attention(single())
    masks = attention.masks
    seen = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    some = seen.clone()
    some[..., :3] = False
    tokens = whole_sequence(SequenceLengths(4, 16, "first"), 0, 2)
    for _ in range(3):
        assert masks.needed(seen.clone(), ("positive", 0, 0)) is None
        needed = masks.needed(some.clone(), ("negative", 0, 0))
        cut = masks.cut(tokens, needed, "joint", range(0, 1), range(1, 2))
        assert cut.equal(some[..., tokens.positions("joint", range(1, 2))])
    assert len(asked) == 2
    attention.begin_request("auto", None)
    assert attention.masks.needed(some, ("positive", 0, 0)) is some


def test_a_mask_of_text_hides_keys_of_the_joint_sequence():
    masks = Masks(Positions())
    text = torch.tensor([[1, 1, 0]])
    for position, want in (("first", [1, 1, 0, 1, 1]), ("last", [1, 1, 1, 1, 0])):
        tokens = whole_sequence(SequenceLengths(3, 2, position))
        found = masks.of_text(text.clone(), tokens, (position, 0, 0))
        assert found.shape == (1, 1, 1, 5) and found.flatten().tolist() == [bool(each) for each in want]
    assert masks.of_text(torch.ones(1, 3), tokens, ("positive", 1, 0)) is None
