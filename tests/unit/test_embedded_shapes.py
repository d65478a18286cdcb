"""Stages after the first embed no latent: they are sent tokens, and read the shape of what embedders make."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import launches
from operation_count import Count

from backend.config import ParallelConfig
from backend.models.patterns import matches
from backend.parallel.block_streams import Forward
from backend.parallel.embedded_shapes import ShapeOnly
from backend.parallel.modulation.modulation_cache import LayerCache
from backend.parallel.pipeline_stage import Stage

#: Most bytes that a stage holds of all of them.
MAX_BYTES = 1000


def embedders(transformer, patterns: tuple[str, ...]) -> list[Any]:
    """What stands in the place of the modules that embed the latent."""
    return [module for name, module in transformer.named_modules() if matches(name, patterns)]


def prompts_of(family: str) -> set[str]:
    """The prompts of the golden request."""
    names = launches.request_of(family).tensors
    return {name.partition(".")[0] for name in names if name.endswith("c_crossattn")}


@pytest.mark.parametrize("family", launches.FAMILIES)
def test_every_family_says_what_embeds_its_latent(family):
    checkpoint = launches.checkpoint_of(family)
    patterns = checkpoint.family.cache.image_modules
    assert patterns and all(embedders(checkpoint.transformer, (pattern,)) for pattern in patterns)


@pytest.mark.parametrize("family", ["wan21-t2v", "hunyuan-video", "ltx2", "cogvideox"])
def test_a_later_stage_embeds_once_a_prompt_and_holds_nothing(family, monkeypatch):
    """In three steps, two of which have two patches: for the shape."""
    calls: Counter[int] = Counter()
    held: list[int] = []
    load = launches.load
    end = LayerCache.end_request

    def counted(*arguments):
        model = load(*arguments)
        for number, embedder in enumerate(embedders(model.transformer, model.family.cache.image_modules)):
            embedder.layer.register_forward_hook(lambda *_, number=number: calls.update([number]))
        return model

    def look(cache):
        answers = [x for layer in cache.layers if layer.kind == "shape" for x in layer.known.values()]
        held.append(sum(answer.untyped_storage().nbytes() for answer in answers))
        end(cache)

    monkeypatch.setattr(launches, "load", counted)
    monkeypatch.setattr(LayerCache, "end_request", look)
    launches.run(family, replace(ParallelConfig(), pipefusion_degree=2).validate(), 1, Count())
    assert set(calls.values()) == {len(prompts_of(family))}
    assert 0 < max(held) < MAX_BYTES


@pytest.mark.parametrize("family", ["qwen-image21", "ideogram4", "minimax-h3", "ltx2", "ltx23"])
def test_a_later_stage_joins_shapes(family, monkeypatch):
    """With the text, and video with audio: block 0, which is on another stage, is given a shape alone."""
    entered: list[torch.Tensor] = []
    enter = Stage._enter

    def look(stage, forward, index, streams):
        entered.append(streams["image"])
        return enter(stage, forward, index, streams)

    monkeypatch.setattr(Stage, "_enter", look)
    launches.run(family, replace(ParallelConfig(), pipefusion_degree=2).validate(), 1, Count())
    assert entered and not any(any(image.stride()) for image in entered)


@pytest.mark.parametrize("family", ["lumina2", "z-image-turbo", "flux3"])
def test_a_stage_that_is_sent_text_and_image_fills_up_neither(family, monkeypatch):
    """Where blocks of the image alone come first: before the model joins both, and after the last block."""
    filled: list[torch.Size] = []
    whole = Forward.whole

    def look(forward, image):
        filled.append(image.shape)
        return whole(forward, image)

    monkeypatch.setattr(Forward, "whole", look)
    launches.run(family, replace(ParallelConfig(), pipefusion_degree=8).validate(), 7, Count())
    assert not filled


def test_what_is_embedded_stays_without_values_until_the_blocks():
    """Through what diffusers does to it before: ``contiguous`` would write all of it."""
    shape = ShapeOnly.of(torch.rand(2, 6, 3, 4, 5, dtype=torch.float64))
    tokens = shape.flatten(2).transpose(1, 2).contiguous()
    assert type(tokens) is ShapeOnly and tokens.shape == (2, 60, 6) and tokens.dtype == torch.float64
    assert tokens.untyped_storage().nbytes() == tokens.dtype.itemsize
    for made in (tokens[:, :3], tokens + 1.0, torch.cat([tokens, torch.ones(2, 1, 6)], dim=1)):
        assert type(made) is torch.Tensor
    assert not tokens.any()
    with pytest.raises(RuntimeError, match="single memory location"):
        tokens.add_(1.0)
