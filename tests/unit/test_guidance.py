"""How the prompts of one CFG branch are mixed: ComfyUI's rule (comfy/samplers.py, calc_cond_batch)."""

import pytest
import torch

from backend.sampling.guidance import Prompt, mix

TOKENS = slice(2, 5)
FIRST, SECOND = torch.randn(2, 3, 3, 4, generator=torch.Generator().manual_seed(5)).unbind()


def masked(*weights: float) -> torch.Tensor:
    """A mask over a latent of six tokens, of which TOKENS have these weights."""
    return torch.tensor([9.0, 9.0, *weights, 9.0])[None, :, None].expand(1, 6, 4)


def test_one_plain_prompt_is_not_touched():
    assert mix([Prompt("positive")], [FIRST], TOKENS) is FIRST


@pytest.mark.parametrize("strength", [0.5, 2.0])
def test_the_strength_of_one_prompt_cancels(strength):
    torch.testing.assert_close(mix([Prompt("positive", strength)], [FIRST], TOKENS), FIRST)


def test_strengths_are_weights_of_a_mean():
    prompts = [Prompt("positive", 0.5), Prompt("positive", 2.0)]
    found = mix(prompts, [FIRST, SECOND], TOKENS)
    torch.testing.assert_close(found, (0.5 * FIRST + 2.0 * SECOND) / 2.5)


def test_masks_weigh_each_token_of_a_patch():
    prompts = [Prompt("positive", masked(1.0, 0.0, 3.0)), Prompt("positive", masked(0.0, 1.0, 1.0))]
    found = mix(prompts, [FIRST, SECOND], TOKENS)
    want = torch.stack([FIRST[:, 0], SECOND[:, 1], (3 * FIRST[:, 2] + SECOND[:, 2]) / 4], dim=1)
    torch.testing.assert_close(found, want)


def test_where_no_prompt_weighs_nothing_is_predicted():
    found = mix([Prompt("positive", masked(1.0, 0.0, 1.0))], [FIRST], TOKENS)
    assert not found[:, 1].any() and found.isfinite().all()


@pytest.mark.parametrize("sigma, counts", [(1.0, False), (0.9, True), (0.5, True), (0.2, True), (0.1, False)])
def test_a_prompt_counts_within_its_range(sigma, counts):
    prompt = Prompt("positive", highest=0.9, lowest=0.2)
    assert prompt.counts_at(torch.tensor(sigma, dtype=torch.float64)) == counts
