"""The text of HunyuanVideo 1.5 and HunyuanImage 2.1, in an order that is made once a request."""

from unittest import mock

import pytest
import torch
from diffusers import HunyuanImageTransformer2DModel, HunyuanVideo15Transformer3DModel
from tiny import relative, write_checkpoint

from backend.loading.recognition import open_checkpoint
from backend.models.common.text_order import TextOrder
from backend.models.hunyuan_video import all_tokens
from backend.models.latent_tokens import TokenGrid
from backend.parallel.pipeline_stage import model_output

#: Tokens of the second prompt that attention leaves out, at its end and within it.
HOLES = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 1]])
VIDEO_WIDTHS = {
    "c_crossattn": "text_embed_dim",
    "txt_byt5": "text_embed_2_dim",
    "clip_fea": "image_embed_dim",
}


def loaded(folder, name):
    checkpoint = open_checkpoint(str(write_checkpoint(folder / f"{name}.safetensors", name)))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    return checkpoint


def features(checkpoint, name, tokens):
    """Embeddings of two prompts."""
    return torch.randn(2, tokens, checkpoint.config[VIDEO_WIDTHS[name]])


def ours(checkpoint, grid, latent, cond):
    """The tokens that the family's forward returns."""
    io = checkpoint.family.io
    arguments = io.arguments(checkpoint.config, grid, latent, torch.tensor(0.7), cond)
    return io.output(model_output(checkpoint.transformer, arguments), grid)


@pytest.mark.parametrize("mask", [HOLES, None], ids=["holes", "whole"])
@pytest.mark.parametrize("glyphs", [3, 0])
@pytest.mark.parametrize("image", ["image", "zeros", "none"])
@torch.inference_mode()
def test_a_video_is_what_diffusers_own_forward_returns(tmp_path, mask, glyphs, image):
    checkpoint = loaded(tmp_path, "hunyuan-video15")
    channels = checkpoint.config["out_channels"]
    grid = TokenGrid((channels, 2, 4, 4), (1, 1, 1))
    latent = torch.randn(2, *grid.shape)
    cond = {"c_crossattn": features(checkpoint, "c_crossattn", 7)}
    cond |= {} if mask is None else {"attention_mask": mask}
    cond |= {"txt_byt5": features(checkpoint, "txt_byt5", glyphs)} if glyphs else {}
    clip_features = features(checkpoint, "clip_fea", 5) * (image == "image")
    cond |= {} if image == "none" else {"clip_fea": clip_features}
    found = ours(checkpoint, grid, latent, cond)
    byt5 = cond.get("txt_byt5", torch.zeros(2, 0, checkpoint.config["text_embed_2_dim"]))
    zeros = torch.zeros(2, checkpoint.config["in_channels"] - channels, *grid.shape[1:])
    (wanted,) = HunyuanVideo15Transformer3DModel.forward(
        checkpoint.transformer,
        torch.cat([latent, zeros], dim=1),
        torch.full((2,), 700.0),
        cond["c_crossattn"],
        HOLES if mask is HOLES else torch.ones_like(HOLES),
        encoder_hidden_states_2=byt5,
        encoder_attention_mask_2=all_tokens(byt5),
        image_embeds=cond.get("clip_fea", clip_features[:, :0]),
        return_dict=False,
    )
    check(found, grid.to_tokens(wanted), mask is not None or image == "zeros")


@pytest.mark.parametrize("mask", [HOLES, None], ids=["holes", "whole"])
@pytest.mark.parametrize("glyphs", [3, 0])
@torch.inference_mode()
def test_an_image_is_what_diffusers_own_forward_returns(tmp_path, mask, glyphs):
    checkpoint = loaded(tmp_path, "hunyuan-image21")
    grid = TokenGrid((checkpoint.config["in_channels"], 4, 6), (1, 1, 1))
    latent = torch.randn(2, *grid.shape)
    cond = {"c_crossattn": features(checkpoint, "c_crossattn", 7)}
    cond |= {} if mask is None else {"attention_mask": mask}
    cond |= {"txt_byt5": features(checkpoint, "txt_byt5", glyphs)} if glyphs else {}
    found = ours(checkpoint, grid, latent, cond)
    byt5 = cond.get("txt_byt5")
    (wanted,) = HunyuanImageTransformer2DModel.forward(
        checkpoint.transformer,
        latent,
        torch.full((2,), 700.0),
        cond["c_crossattn"],
        HOLES if mask is HOLES else torch.ones_like(HOLES),
        encoder_hidden_states_2=byt5,
        encoder_attention_mask_2=None if byt5 is None else all_tokens(byt5),
        return_dict=False,
    )
    check(found, grid.to_tokens(wanted), mask is not None)


def check(found, wanted, hides):
    """Bits, but where diffusers' mask hides nothing, for which torch has another kernel."""
    assert torch.equal(found, wanted) if hides else relative(found, wanted) < 1e-5


def test_hidden_tokens_go_to_the_end_and_nothing_moves_without_any():
    image, words = torch.tensor([[0.0, 1], [2, 3]]), torch.tensor([[4.0, 5, 6], [7, 8, 9]])
    masks = [torch.tensor([[1, 1], [0, 1]]), torch.tensor([[1, 0, 1], [1, 1, 1]])]
    order = TextOrder(masks, hides=True)
    joined = order.joined(image[..., None], words[..., None])
    assert joined[..., 0].tolist() == [[0, 1, 4, 6, 5], [3, 7, 8, 9, 2]]
    assert order.mask is not None
    assert order.mask.tolist() == [[True] * 4 + [False]] * 2
    alone = TextOrder(masks[1:], hides=True)
    assert torch.equal(alone.joined(words[..., None])[..., 0], words)
    assert alone.mask is not None and torch.equal(alone.mask, masks[1].bool())
    whole = TextOrder([torch.ones(2, 2), torch.ones(2, 3)], hides=False)
    with mock.patch.object(torch.Tensor, "gather", side_effect=AssertionError):
        assert whole.joined(image[..., None], words[..., None]).shape == (2, 5, 1)
    assert whole.mask is None
