"""The layers after the blocks are given the tokens of their forward, where they are token by token."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import launches
from operation_count import Count

from backend.config import ParallelConfig

#: Families whose model counts tokens only after its last layer, of each way in which blocks end.
WITH_LAST_LAYER = ("flux-dev", "hunyuan-video", "hunyuan-video15", "hidream", "ltxv", "flux3")
#: Families whose last layer is given the text too, whole and without values.
WITH_TEXT = ("lumina2", "z-image-turbo", "ideogram4")
#: Families whose layers after the blocks are given the full sequence -> why.
WHOLE_TAIL = {
    "qwen-image21": "its last norm chooses the modulation of each token of the whole sequence",
    "kandinsky5": "tokens are put back into frames before the last norm",
    "kandinsky5-image": "tokens are put back into frames before the last norm",
    "minimax-h3": "its last norm has a noise level for each token of the whole sequence",
    "ltx2": "video and audio end in layers of their own",
    "ltx23": "video and audio end in layers of their own",
}


def test_families_without_a_last_layer_are_listed():
    families = {each: launches.checkpoint_of(each).family for each in launches.FAMILIES}
    assert {each for each, family in families.items() if not family.blocks.output_layer} == set(WHOLE_TAIL)


@pytest.mark.parametrize("family", (*WITH_LAST_LAYER, *WITH_TEXT))
@pytest.mark.parametrize(
    "config", [ParallelConfig(ulysses_degree=2), ParallelConfig(pipefusion_degree=2)], ids=["u2", "pp2"]
)
def test_the_last_layer_sees_the_tokens_of_its_forward(monkeypatch, family, config):
    """Not the whole sequence, filled up with zeros, but in a pipeline's first step."""
    seen, load = [], launches.load

    def watched(*args):
        model = load(*args)
        layer = model.transformer.get_submodule(model.family.blocks.output_layer)

        def see(layer, args):
            text = model.stage.current.tokens.sequence.text if family in WITH_TEXT else 0
            seen.append(args[0].shape[1] - text)

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
