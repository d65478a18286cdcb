"""What a model is given of a solver's tokens: these, where its input is tokens, and a latent otherwise."""

import inspect
from dataclasses import replace

import pytest
import torch
from cropping import cropped
from families import golden
from tiny import write_checkpoint
from tolerance import assert_same_bits
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.models import FAMILIES
from backend.models.family import ModelIO
from backend.models.latent_tokens import NestedGrid, TokenGrid
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

IO = ModelIO(lambda *_: {}, takes_tokens=True)
#: Families whose class of diffusers is given tokens.
TAKE_TOKENS = {
    *("flux", "chroma", "flux2", "flux3", "krea2", "qwen-image", "qwen-image-2.1", "ideogram4"),
    *("ltxv", "ltx2", "minimax-h3", "minimax-h3-curves"),
}


def engine_of(path) -> Engine:
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "default")
    return engine


@pytest.mark.parametrize("case", ["flux-dev", "ltx2"])
def test_a_step_makes_no_latent_of_tokens(case, tmp_path, monkeypatch):
    """Nor tokens of a latent: those of a request are made as it begins, its latent as it ends."""
    engine = engine_of(write_checkpoint(tmp_path / f"{case}.safetensors", case))
    sample = golden(f"{case}__euler_simple")[0]
    changes = []
    for grid in (TokenGrid, NestedGrid):
        for name in ("to_latent", "to_tokens"):
            change = getattr(grid, name)

            def counted(self, tensor, name=name, change=change):
                changes.append(name)
                return change(self, tensor)

            monkeypatch.setattr(grid, name, counted)
    counts = []
    for steps in (1, 3):
        changes.clear()
        engine.sample(replace(sample, tensors=first_steps(sample.tensors, steps)), Callbacks())
        counts.append(list(changes))
    assert counts[0] and counts[0] == counts[1]


def first_steps(tensors: dict, steps: int) -> dict:
    """The tensors of a request with its first ``steps`` alone."""
    return tensors | {"sigmas": tensors["sigmas"][: steps + 1]}


def test_references_are_cut_into_tokens_once(tmp_path, monkeypatch):
    """They are as large as the image, and the same in every step."""
    name = "flux-kontext"
    engine = engine_of(write(tmp_path / f"{name}.safetensors", name))
    sample, cut = request(name), []
    change = TokenGrid.to_tokens

    def counted(self, latent):
        cut.append(tuple(latent.shape))
        return change(self, latent)

    monkeypatch.setattr(TokenGrid, "to_tokens", counted)
    counts = []
    for steps in (1, 3):
        cut.clear()
        engine.sample(replace(sample, tensors=first_steps(sample.tensors, steps)), Callbacks())
        counts.append(list(cut))
    assert counts[0] == counts[1] and len(counts[0]) > 2


@pytest.mark.parametrize("height", [8, 7])
def test_tokens_that_hold_more_than_the_latent_are_filled_up_from_it(height):
    """As ComfyUI pads its latent at each step: a solver moves what is beyond the latent's edge elsewhere."""
    grid = TokenGrid((4, height, 6), (1, 2, 2))
    tokens = torch.randn(2, grid.tokens, grid.features)
    given = IO.of_tokens(tokens, grid)
    assert_same_bits(given, grid.to_tokens(grid.to_latent(tokens)))
    assert (given is tokens) == (height == 8) and grid.is_padded == (height == 7)


def test_one_padded_latent_fills_up_nested_ones():
    grids = TokenGrid((4, 2, 5, 4), (1, 2, 2)), TokenGrid((2, 1, 6), (1, 1, 1))
    nested = NestedGrid(grids, (0, 1))
    tokens = nested.to_tokens(torch.randn(1, *nested.shape))
    moved = tokens + torch.cat([torch.randn(1, grids[0].tokens, 16), torch.zeros(1, 6, 16)], dim=1)
    assert nested.is_padded
    assert_same_bits(IO.of_tokens(moved, nested), nested.to_tokens(nested.to_latent(moved)))


def test_an_odd_size_is_sampled_as_a_model_of_latents_would(tmp_path, monkeypatch):
    """Flux of an odd number of rows: as if every step made the latent and cut it into tokens."""
    engine = engine_of(write_checkpoint(tmp_path / "flux.safetensors", "flux-dev"))
    sample = golden("flux-dev__euler_simple")[0]
    sample = replace(sample, tensors=first_steps(cropped(sample.tensors, 7), 3))
    assert sample.tensors["noise"].shape[-2:] == (7, 7)
    samples, _ = engine.sample(sample, Callbacks())
    monkeypatch.setattr(ModelIO, "of_tokens", lambda io, x, grid: grid.to_tokens(grid.to_latent(x)))
    assert_same_bits(samples, engine.sample(sample, Callbacks())[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_cuts_the_latent_into_tokens_itself(name):
    """At each step: those that need its tokens are given them."""
    assert "to_tokens(latent)" not in inspect.getsource(FAMILIES[name].io.arguments)


def test_what_takes_tokens():
    assert {name for name, family in FAMILIES.items() if family.io.takes_tokens} == TAKE_TOKENS
