"""Forwards of ours whose last layers can be given some of the tokens: what they return of all is what
diffusers' own forwards return."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.transformers import (
    transformer_ideogram4,
    transformer_kandinsky,
    transformer_minimax_h3,
)
from families import golden
from tiny import relative, write_checkpoint
from variants import VARIANTS, request, write

from backend.loading.recognition import open_checkpoint
from backend.parallel.pipeline_stage import model_output

SIGMA = torch.tensor(0.7)


class Call:
    """A call of a case's model with its positive prompt, as its family makes it."""

    def __init__(self, folder: Path, case: str, **further: torch.Tensor):
        path = folder / f"{case}.safetensors"
        is_variant = case in VARIANTS
        self.checkpoint = open_checkpoint(
            str(write(path, case) if is_variant else write_checkpoint(path, case))
        )
        self.checkpoint.load(range(self.checkpoint.block_count), torch.float32, torch.device("cpu"))
        sample = request(case) if is_variant else golden(f"{case}__euler_simple")[0]
        names = [name for name in sample.tensors if name.startswith("positive.")]
        self.cond = {name.partition(".")[2]: sample.tensors[name] for name in names} | further
        self.family = self.checkpoint.family
        self.transformer: Any = self.checkpoint.transformer
        self.noise = sample.tensors["noise"][:1]
        shape = tuple(self.noise.shape[1:])
        latent = self.family.latent
        self.grid: Any = latent.grid(self.checkpoint.config, shape, sample.latent_shapes, [self.cond])
        given = self.family.io.of_latent(self.noise, self.grid)
        self.arguments = self.family.io.arguments(self.checkpoint.config, self.grid, given, SIGMA, self.cond)

    def ours(self) -> torch.Tensor:
        """Return the tokens that the family makes of it."""
        output = model_output(self.transformer, self.arguments)
        return self.family.io.output(output, self.grid)


@torch.inference_mode()
@pytest.mark.parametrize("case", ["kandinsky5", "kandinsky5-image"])
def test_kandinsky_5_is_diffusers(case, tmp_path):
    call = Call(tmp_path, case)
    found = call.ours()
    call.transformer.out_layer.__class__ = transformer_kandinsky.Kandinsky5OutLayer
    forward = transformer_kandinsky.Kandinsky5Transformer3DModel.forward
    wanted: Any = forward(call.transformer, **call.arguments, return_dict=False)
    assert found.equal(call.grid.padded.to_tokens(wanted.movedim(-1, 1)))


@torch.inference_mode()
@pytest.mark.parametrize("hidden", [0, 2])
def test_ideogram_4_is_diffusers(hidden, tmp_path):
    """Which sends text and image through the layers of both; ``hidden``: tokens that the mask hides."""
    words = golden("ideogram4__euler_simple")[0].tensors["positive.c_crossattn"].shape[1]
    shown = torch.arange(words)[None] < words - hidden
    call = Call(tmp_path, "ideogram4", attention_mask=shown.long())
    found = call.ours()
    given = call.arguments
    tokens = call.grid.tokens
    kinds = torch.cat([shown[0] * transformer_ideogram4.LLM_TOKEN_INDICATOR, torch.full((tokens,), 2)])
    assert transformer_ideogram4.OUTPUT_IMAGE_INDICATOR == 2
    (wanted,) = transformer_ideogram4.Ideogram4Transformer2DModel.forward(
        call.transformer,
        hidden_states=F.pad(given["hidden_states"], (0, 0, words, 0)),
        timestep=given["timestep"],
        encoder_hidden_states=F.pad(given["encoder_hidden_states"], (0, 0, 0, tokens)),
        position_ids=given["position_ids"],
        segment_ids=given["segment_ids"],
        indicator=kinds[None],
        return_dict=False,
    )
    assert relative(found, call.family.io.output(wanted[:, -tokens:], call.grid)) < 1e-6


@torch.inference_mode()
@pytest.mark.parametrize("case", ["minimax-h3", "minimax-h3-guides"])
def test_minimax_h3_is_diffusers(case, tmp_path):
    """Whose last layers see text, reference tokens and those of the other latent too."""
    call = Call(tmp_path, case)
    found = call.ours()
    arguments = {name: value for name, value in call.arguments.items() if name != "latent_tokens"}
    forward = transformer_minimax_h3.MiniMaxH3Transformer3DModel.forward
    outputs: Any = forward(call.transformer, **arguments, return_dict=False)
    latents = [tokens[:, -one.tokens :] for tokens, one in zip(outputs, call.grid.grids)]
    assert relative(found, -call.grid.join(latents)) < 1e-6
