"""The first stage embeds the tokens of its forward alone, and what follows sees a tensor of all."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tolerance import assert_same_bits
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import launches
from operation_count import Count

from backend.config import ParallelConfig
from backend.models.common.shape_only import has_values
from backend.models.family import Cache
from backend.models.patterns import matches
from backend.parallel.block_streams import Forward
from backend.parallel.local_embedding import LocalEmbedder, LocalTokens, embed_local_tokens
from backend.parallel.request_caches import Positions
from backend.parallel.sequence import Span
from backend.quantization import kernels
from backend.quantization.formats import FORMATS
from backend.quantization.kernels import MatmulChoice
from backend.quantization.packed import Packed
from backend.quantization.packed_weight import PackedWeight

#: Families whose embedders are given every token -> why.
WHOLE = {
    "z-image-turbo": "samples are one after the other, padded",
    "cogvideox": "frames are samples of its embedder",
}
#: Families of two latents, each with an embedder of its own.
NESTED = ("ltx2", "ltx23", "minimax-h3", "minimax-h3-curves")
METHODS = [ParallelConfig(ulysses_degree=2), ParallelConfig(pipefusion_degree=2)]


def layers_of(family: str) -> list[nn.Module]:
    checkpoint = launches.checkpoint_of(family)
    patterns = checkpoint.family.cache.token_modules
    return [each for name, each in checkpoint.transformer.named_modules() if matches(name, patterns)]


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_layers_that_are_named_see_no_neighbours(family):
    layers = layers_of(family)
    assert bool(layers) == (family not in WHOLE)
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            assert isinstance(layer, (nn.Conv2d, nn.Conv3d))
            assert layer.stride == layer.kernel_size and not any(layer.padding) and layer.groups == 1
            assert set(layer.dilation) == {1} and layer.kernel_size[:-2] in ((), (1,))


def watch(monkeypatch, seen: list[int], filled: list[torch.Size]):
    """Note how many tokens embedders are given where these are some, and what is filled up."""
    take, whole = LocalEmbedder.take, LocalTokens.whole

    def look(self, layer, args, output):
        found = take(self, layer, args, output)
        if found is not None:
            seen.append(found.local.shape[1])
        return found

    def look_whole(self):
        filled.append(self.shape)
        return whole(self)

    monkeypatch.setattr(LocalEmbedder, "take", look)
    monkeypatch.setattr(LocalTokens, "whole", look_whole)


@pytest.mark.parametrize("family", [each for each in launches.FAMILIES if each not in (*WHOLE, *NESTED)])
@pytest.mark.parametrize("config", METHODS, ids=["u2", "pp2"])
def test_an_embedder_is_given_the_tokens_of_its_forward(monkeypatch, family, config):
    """And nothing fills them up before the blocks cut them."""
    seen: list[int] = []
    filled: list[torch.Size] = []
    watch(monkeypatch, seen, filled)
    tokens = launches.run(family, config, 0, Count()).request.grid.tokens
    assert not filled
    if config.ulysses_degree > 1:
        assert set(seen) == {tokens // 2}
    else:  # in every step but the first, which has no patches
        assert max(seen) < tokens and not sum(seen) % ((launches.STEPS - 1) * tokens)


@pytest.mark.parametrize("family", NESTED)
@pytest.mark.parametrize("config", METHODS, ids=["u2", "pp2"])
def test_embedders_of_two_latents_are_given_those_of_both(monkeypatch, family, config):
    """Each its own, of which a forward may have none."""
    seen: list[int] = []
    filled: list[torch.Size] = []
    watch(monkeypatch, [], filled)
    embedded = Forward.embedded

    def look(self, tokens, *rest):
        spans = embedded(self, tokens, *rest)
        seen.append(sum(map(len, spans)) if spans else tokens)
        return spans

    monkeypatch.setattr(Forward, "embedded", look)
    tokens = launches.run(family, config, 0, Count()).request.grid.tokens
    assert not filled
    sums = [a + b for a, b in zip(seen[::2], seen[1::2])]
    if config.ulysses_degree > 1:
        assert set(sums) == {len(Span(0, tokens).shard(0, 2))}
        return
    later = launches.STEPS - 1
    prompts = len(sums) // (1 + 2 * later)  # one call of each, then two patches of each in every step
    assert sums[:prompts] == [tokens] * prompts
    assert max(sums[prompts:]) < tokens and sum(sums[prompts:]) == later * prompts * tokens


@pytest.mark.parametrize("with_text", [True, False], ids=["first patch", "later patch"])
def test_references_before_the_latent_come_with_the_text(with_text):
    """In what an embedder is given, of MiniMax-H3's two latents (audio first) too."""
    structure: Any = SimpleNamespace(family=SimpleNamespace(cache=Cache(references_first=True)))
    context: Any = SimpleNamespace(image=Span(4, 10))
    latents = (("audio", 6), ("video", 20))
    forward = Forward(structure, context, 26, 0, 0, Positions(), WeakTensorKeyDictionary(), latents)

    def needed(tokens: int, latent: str) -> tuple[Span, ...]:
        return forward.embedded(tokens, latent, with_text, 0, 1, ())

    assert needed(26, "") == (Span(4, 10),)
    assert needed(29, "") == ((Span(0, 3), Span(7, 13)) if with_text else (Span(7, 13),))
    assert needed(6, "audio") == (Span(4, 6),)
    assert needed(7, "audio") == ((Span(0, 1), Span(5, 7)) if with_text else (Span(5, 7),))
    assert needed(22, "video") == ((Span(0, 2), Span(2, 6)) if with_text else (Span(2, 6),))
    assert needed(19, "video") == ()  # of something else
    context.image = Span(8, 10)
    assert [len(span) for span in needed(6, "audio")] == [0]


@pytest.mark.parametrize(
    "config, has_hooks", [(METHODS[0], True), (METHODS[1], False), (ParallelConfig(), False)]
)
def test_later_stages_and_single_ranks_have_no_such_hooks(monkeypatch, config, has_hooks):
    calls: list[nn.Module] = []
    give = LocalEmbedder.give

    def look(self, layer, args):
        calls.append(layer)
        return give(self, layer, args)

    monkeypatch.setattr(LocalEmbedder, "give", look)
    launches.run("wan21-t2v", config, config.world_size - 1, Count())
    assert bool(calls) == has_hooks


SPANS = [(Span(0, 5),), (Span(4, 17),), (Span(23, 24),), (Span(3, 9), Span(20, 24))]


def embedded(layer: nn.Module, x: torch.Tensor, spans: tuple[Span, ...]) -> tuple[Any, torch.Tensor]:
    """What stands for all tokens of x, and all of them."""
    want = layer(x)
    hooks = embed_local_tokens(
        nn.Sequential(layer), ("0",), lambda tokens, latent: spans if tokens == 24 else ()
    )
    found = layer(x)
    for hook in hooks:
        hook.remove()
    return found, want


def check(found: Any, want: torch.Tensor, spans: tuple[Span, ...]):
    """The tokens of ``spans`` have their values, and all others are NaN where somebody asks for them."""
    assert type(found) is LocalTokens and found.shape == want.shape and found.dtype == want.dtype
    where = [place for span in spans for place in range(span.lo, span.hi)]
    tokens = want.flatten(2).transpose(1, 2) if found.features_first else want.flatten(1, -2)
    torch.testing.assert_close(found.local, tokens[:, where], rtol=0, atol=1e-6)
    whole = found * 1.0
    assert type(whole) is torch.Tensor and whole.shape == want.shape
    every = whole.flatten(2).transpose(1, 2) if found.features_first else whole.flatten(1, -2)
    assert_same_bits(every[:, where], found.local)
    others = [place for place in range(24) if place not in where]
    assert every[:, others].isnan().all()


@pytest.mark.parametrize("spans", SPANS[:3])
@pytest.mark.parametrize(
    "layer, sides",
    [
        (nn.Conv3d(3, 7, (1, 2, 2), (1, 2, 2)), (2, 6, 8)),
        (nn.Conv3d(3, 7, 1), (2, 3, 4)),
        (nn.Conv2d(3, 7, 2, 2), (8, 12)),
    ],
)
def test_convolutions_are_given_whole_lines(layer, sides, spans):
    """And the tokens before and after them are left out: the same values, to the last bit."""
    found, want = embedded(layer, torch.randn(2, 3, *sides), spans)
    check(found, want, spans)
    assert_same_bits(found.local, want.flatten(2).transpose(1, 2)[:, spans[0].indices])
    tokens = found.flatten(2).transpose(1, 2).contiguous()
    check(tokens, want.flatten(2).transpose(1, 2), spans)
    assert tokens.local.is_contiguous() and not tokens.features_first
    check(found + want, want + want, spans)


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("sides", [(24,), (2, 3, 4)])
def test_linear_layers_are_given_tokens_of_any_grid(spans, sides):
    found, want = embedded(nn.Linear(5, 7), torch.randn(2, *sides, 5), spans)
    check(found, want, spans)
    tokens, flat = found.flatten(1, -2), want.flatten(1, -2)
    check(tokens, flat, spans)
    table = torch.randn(1, 24, 7, dtype=torch.float64)
    check((tokens + table).to(torch.float32), (flat + table).to(torch.float32), spans)
    check(tokens + 1, flat + 1, spans)
    check(1 + tokens, flat + 1, spans)
    check(torch.cat([tokens, tokens + table], dim=-1), torch.cat([flat, flat + table], dim=2), spans)


@pytest.mark.parametrize("spans", SPANS[:3])
def test_references_follow_the_tokens_of_the_latent(spans):
    """All of them: a rank takes its own later."""
    found, want = embedded(nn.Conv2d(3, 7, 2, 2), torch.randn(2, 3, 8, 12), spans)
    references = [torch.randn(2, 7, count) for count in (3, 2)]
    joined = torch.cat([found.flatten(2), *references], dim=2)
    every = torch.cat([want.flatten(2), *references], dim=2)
    assert joined.spans == (*spans, Span(24, 27), Span(27, 29)) and joined.shape == every.shape
    where = [*range(spans[0].lo, spans[0].hi), *range(24, 29)]
    assert_same_bits(joined.local, every.transpose(1, 2)[:, where])
    assert_same_bits(joined.whole()[..., where], every[..., where])
    assert joined.transpose(dim0=1, dim1=2).spans == joined.spans


@pytest.mark.parametrize("spans", SPANS)
def test_text_and_another_latent_come_before(spans):
    """Text, all of it; of the other latent, which is narrower, some or none."""
    found, want = embedded(nn.Linear(5, 7), torch.randn(2, 24, 5), spans)
    text = torch.randn(2, 3, 7)
    for others in (SPANS[0], (Span(0, 0),)):
        other, others_want = embedded(nn.Linear(5, 4), torch.randn(2, 24, 5), others)
        joined = torch.cat([text, nn.functional.pad(other, (0, 3)), found], dim=1)
        every = torch.cat([text, nn.functional.pad(others_want, (0, 3)), want], dim=1)
        assert type(joined) is LocalTokens and joined.shape == every.shape
        where = [0, 1, 2]
        where += [3 + place for span in others for place in range(span.lo, span.hi)]
        where += [27 + place for span in spans for place in range(span.lo, span.hi)]
        assert torch.allclose(joined.local, every[:, where], rtol=0, atol=1e-6)
        assert joined.whole()[:, where].equal(joined.local)
        assert joined.whole()[:, [i for i in range(51) if i not in where]].isnan().all()
        assert_same_bits(joined[:, :3], text)
        check(joined[:, 27:], want, spans)
        assert has_values(joined) and has_values(other)


@pytest.mark.parametrize("spans", SPANS)
def test_a_slice_of_tokens_in_memory_is_a_view_of_them(spans):
    found, want = embedded(nn.Linear(5, 7), torch.randn(2, 24, 5), spans)
    start = 0
    for span in spans:
        part = found[:, span.indices]
        assert (
            type(part) is torch.Tensor
            and part.untyped_storage()._cdata == found.local.untyped_storage()._cdata
        )
        assert_same_bits(part, found.local[:, start : start + len(span)])
        start += len(span)
    assert found[:, 2:2].shape == (2, 0, 7) and found[:, 30:].shape == (2, 0, 7)
    part = found[:, 1:-1]
    assert part.shape == (2, 22, 7)
    torch.testing.assert_close(part * 1.0, found.whole()[:, 1:-1], rtol=0, atol=0, equal_nan=True)
    check(found[:, :], want, spans)


def test_what_mixes_tokens_is_given_all():
    """Larger operands, features that change places, other slices than of tokens in their order."""
    spans = SPANS[1]
    found, _ = embedded(nn.Linear(5, 7), torch.randn(1, 24, 5), spans)
    whole = found.whole()
    for function in (
        lambda x: torch.cat([torch.ones(1, 24, 7), x], dim=0),
        lambda x: x + torch.ones(3, 1, 7),
        lambda x: x.flatten(),
        lambda x: x[:, 2],
        lambda x: x[:, 2:5:2],
        lambda x: x[:, [2, 3]],
        lambda x: x[:, 2:5, 3:],
        lambda x: x[..., 3:],
        lambda x: nn.functional.pad(x, (0, 0, 1, 1)),
        lambda x: x.transpose(0, 2),
        lambda x: nn.functional.layer_norm(x, (7,)),
        lambda x: torch.ones(1, 24, 7).copy_(x),
        lambda x: torch.ones(3).to(x),
    ):
        made = function(found)
        assert type(made) is torch.Tensor
        torch.testing.assert_close(made, function(whole), rtol=0, atol=0, equal_nan=True)
    assert has_values(found) and len(found) == 1 and found.size(1) == 24
    other, _ = embedded(nn.Linear(5, 7), torch.randn(1, 24, 5), SPANS[0])
    torch.testing.assert_close(found + other, whole + other.whole(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.__setitem__(0, 1.0)])
def test_nothing_writes_into_a_copy(write):
    found, _ = embedded(nn.Linear(5, 7), torch.randn(1, 24, 5), SPANS[0])
    with pytest.raises(RuntimeError, match="of which some alone are in memory"):
        write(found)


@pytest.mark.parametrize(
    "layer, x",
    [
        (nn.Linear(5, 7), torch.randn(1, 23, 5)),  # tokens of something else
        (nn.Conv3d(3, 7, 2, 2), torch.randn(1, 3, 4, 6, 8)),  # two frames a token
        (nn.Conv2d(3, 7, 2, 2), torch.randn(1, 3, 9, 12)),  # sides that the kernel does not divide
    ],
)
def test_other_inputs_are_embedded_whole(layer, x):
    found, want = embedded(layer, x, SPANS[0])
    assert type(found) is torch.Tensor
    assert_same_bits(found, want)


def nvfp4_weight(**more: torch.Tensor) -> PackedWeight:
    """A matrix of 32 x 64, whose inputs are quantized too."""
    tensors = {
        "values": torch.full((32, 32), 0x22, dtype=torch.uint8),
        "block_scales": torch.ones(32, 4).to(torch.float8_e4m3fn),
        "tensor_scale": torch.ones(1),
        **more,
    }
    packed = Packed(FORMATS["nvfp4"], {"format": "nvfp4"}, tensors, 64, (range(64),))
    return PackedWeight(packed, torch.float32, MatmulChoice(kernels.nvfp4, ""))


def test_inputs_under_one_scale_are_quantized_whole():
    """Ranks with some of the tokens would each have a scale of their own."""
    layer: Any = nn.Identity()
    layer.weight = nvfp4_weight()
    asked: list[int] = []
    LocalEmbedder(layer, lambda tokens, latent: asked.append(tokens) or SPANS[0])
    x = torch.randn(1, 24, 64)
    assert layer(x) is x and not asked
    layer.weight = nvfp4_weight(input_scale=torch.ones(1))
    assert layer(x).local.shape == (1, 5, 64) and asked == [24]
