"""The layers after the blocks are given the tokens of their forward, where they are token by token."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import launches
from operation_count import Count

from backend.config import ParallelConfig
from backend.models import ltxv

#: Families whose last layer is given tokens of the latents alone, of each way in which blocks end.
WITH_LAST_LAYER = (
    "flux-dev",
    "hunyuan-video",
    "hunyuan-video15",
    "hidream",
    "ltxv",
    "flux3",
    "kandinsky5",
    "qwen-image21",
    "minimax-h3",
    "ideogram4",
    "ltx2",
    "ltx23",
)
#: Families whose last layer is given the text too, whole and without values.
WITH_TEXT = ("lumina2", "z-image-turbo")


def test_every_family_says_where_its_tokens_are_counted():
    families = {each: launches.checkpoint_of(each).family for each in launches.FAMILIES}
    assert not {each for each, family in families.items() if not family.blocks.output_layer}


METHODS = [ParallelConfig(ulysses_degree=2), ParallelConfig(pipefusion_degree=2)]


def check_tokens_seen(monkeypatch, family, config):
    """Not the whole sequence, filled up with zeros, but in a pipeline's first step."""
    seen, load = [], launches.load

    def watched(*args):
        model = load(*args)
        stage: Any = model.stage
        layer = model.transformer.get_submodule(str(model.family.blocks.output_layer))

        def see(layer, args):
            text = stage.current.tokens.sequence.text if family in WITH_TEXT else 0
            inputs = args[0] if isinstance(args[0], list | tuple) else args[:1]  # of several latents
            seen.append(sum(each.shape[1] for each in inputs) - text)

        layer.register_forward_pre_hook(see)
        return model

    monkeypatch.setattr(launches, "load", watched)
    whole = launches.run(family, config, 1, Count()).request.grid.tokens
    if config.ulysses_degree > 1:
        assert set(seen) == {whole - whole // 2}
        return
    later = launches.STEPS - 1
    prompts = len(seen) // (1 + 2 * later)  # one call of each, then two patches of each in every step
    assert seen[:prompts] == [whole] * prompts
    assert max(seen[prompts:]) < whole and sum(seen[prompts:]) == later * prompts * whole


@pytest.mark.parametrize("family", (*WITH_LAST_LAYER, *WITH_TEXT))
@pytest.mark.parametrize("config", METHODS, ids=["u2", "pp2"])
def test_the_last_layer_sees_the_tokens_of_its_forward(monkeypatch, family, config):
    check_tokens_seen(monkeypatch, family, config)


@pytest.mark.parametrize("config", METHODS, ids=["u2", "pp2"])
def test_so_does_that_of_ltx_video_under_a_mask(monkeypatch, config):
    """Where each token has a noise level of its own."""
    plain = launches.request_of
    levels = []

    def masked(*args, **kwargs):
        sample = plain(*args, **kwargs)
        mask = torch.ones(1, 1, *sample.tensors["noise"].shape[2:])
        masks = {f"{branch}.denoise_mask": mask for branch in ("positive", "negative")}
        return replace(sample, tensors={**sample.tensors, **masks})

    def distinct(tokens):  # on meta tensors nothing is equal
        levels.append(tokens.shape)
        return tokens.new_empty(2), tokens.new_empty(tokens.shape, dtype=torch.long)

    monkeypatch.setattr(launches, "request_of", masked)
    monkeypatch.setattr(ltxv, "distinct", distinct)
    check_tokens_seen(monkeypatch, "ltxv", config)
    assert levels
