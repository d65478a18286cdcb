"""PipeFusion's patches after the first have no text: its half of a block is not called, and the latent is the
one with it, to the last bit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from families import golden
from ranks.flux_requests import STALE_STEPS, shortened
from tiny import write_checkpoint
from tolerance import assert_same_bits
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.models.patterns import matches
from backend.parallel import mesh
from backend.parallel.token_mixing import TokenMixing
from backend.sampling.step_loop import Callbacks

PATCHES = 4


def stale(sample):
    """The request in patches, over few steps."""
    return shortened(replace(sample, num_pipeline_patch=PATCHES), STALE_STEPS)


def tokens_of_text(model: Any) -> int:
    """How many tokens of text the forward under way has."""
    return len(model.stage.attention.call.tokens.text)


def text_calls(model: Any) -> list[int]:
    """The tokens of text of the forward in which a block has called a layer of text, one entry a call: a list
    that the next requests fill."""
    calls = []

    def note(*_):
        if model.stage.attention.call is not None:  # modulation is computed ahead
            calls.append(tokens_of_text(model))

    for block in model.stage.own_blocks:
        for layer, module in block.named_modules():
            if matches(layer, model.family.blocks.text_layers):
                module.register_forward_pre_hook(note)
    return calls


@pytest.mark.parametrize("family", ["flux-dev", "qwen-image"])
def test_no_layer_of_text_is_called(family, tmp_path, monkeypatch):
    engine = Engine(ParallelConfig(num_pipeline_patch=PATCHES), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "default")
    calls, sample = text_calls(engine.models["tiny"]), stale(golden(f"{family}__euler_simple")[0])
    found, _ = engine.sample(sample, Callbacks())
    assert calls and all(calls)
    monkeypatch.setattr(TokenMixing, "has_text", lambda self: True)
    assert_same_bits(found, engine.sample(sample, Callbacks())[0])
    assert not all(calls)


@pytest.mark.parametrize("variant", ["qwen-image-edit", "qwen-image-edit-2511"])
def test_no_token_stands_for_the_text_of_edit_models(variant, tmp_path):
    """Those of two timesteps call diffusers' own block, on text without tokens."""
    engine = Engine(ParallelConfig(num_pipeline_patch=PATCHES), mesh.single())
    engine.load("tiny", str(write(tmp_path / f"{variant}.safetensors", variant)), "default")
    seen = []
    model: Any = engine.models["tiny"]
    block = model.transformer.transformer_blocks[0].block
    block.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(
            (kwargs["encoder_hidden_states"].shape[1], len(model.stage.current.tokens.text))
        ),
        with_kwargs=True,
    )
    engine.sample(stale(request(variant)), Callbacks())
    assert all(given == tokens for given, tokens in seen) and {tokens > 0 for _, tokens in seen} == {
        True,
        False,
    }


@pytest.mark.parametrize(
    "patches, compiled, text, has",
    [(True, False, 0, False), (True, False, 3, True), (True, True, 0, True), (False, False, 0, True)],
)
def test_what_other_ranks_may_wait_for_is_called(patches, compiled, text, has):
    """A compiled block calls the layers of text, and attention that sends values early waits for them."""
    call = SimpleNamespace(dummy=False, tokens=SimpleNamespace(text=range(text)))
    mesh_of_one = SimpleNamespace(sp=None)
    attention = SimpleNamespace(call=call, buffers=patches or None, compiled=compiled, mesh=mesh_of_one)
    mixing = TokenMixing(attention)
    assert mixing.has_text() == has
    attention.call = None
    assert mixing.has_text()
