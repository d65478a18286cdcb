"""Guides of a smaller image (IC-LoRA) in LTX-Video and LTX-2: their gaps are no tokens."""

from dataclasses import replace

import pytest
from ranks.flux_requests import shortened
from variants import request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks


@pytest.mark.parametrize("name", ["ltxv-smaller-guides", "ltx25-smaller-guides"])
def test_gaps_of_smaller_guides_are_no_tokens(name, tmp_path):
    """The blocks are given a quarter of the guide's tokens, and what lies in its gaps changes nothing."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / f"{name}.safetensors", name)), "default")
    sample = shortened(request(name), 2)
    engine.check_sample(sample)
    given = []
    block = engine.models["tiny"].transformer.transformer_blocks[0]
    block.attn1.register_forward_pre_hook(
        lambda module, args, kwargs: given.append((args or list(kwargs.values()))[0].shape[1]),
        with_kwargs=True,
    )
    samples, _ = engine.sample(sample, Callbacks())
    mask = sample.tensors["denoise_mask"].expand(samples.shape)
    guide = sample.tensors["positive.denoise_mask"][0, 0, -1]
    frame = guide.numel()
    assert set(given) == {2 * frame + int((guide >= 0).sum())}
    assert not samples[mask < 0].any() and samples[mask >= 0].all()
    noise, latent = (sample.tensors[key] + 5.0 * (mask < 0) for key in ("noise", "latent"))
    other = replace(sample, tensors=sample.tensors | {"noise": noise, "latent": latent})
    assert engine.sample(other, Callbacks())[0].equal(samples)
