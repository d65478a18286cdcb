"""Context windows over LTX-2's guides on the MODEL of Parallel Model: ComfyUI makes their positions anew
for each window, by what it reads of the transformer."""

import pytest
import torch
from comfy_modules import comfy_modules
from pairs import ksampler

with comfy_modules():
    from comfy.nested_tensor import NestedTensor
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode
    from comfy_extras.nodes_lt import LTXVAddGuide

#: Frames of the video's latent, and its rows and columns.
FRAMES, SIDES = 9, (4, 4)
SCALES = (8, 32, 32)
SETTINGS = {"context_schedule": "standard_static", "context_stride": 1, "closed_loop": False}
SETTINGS |= {"fuse_method": "pyramid", "dim": 2, "freenoise": False, "causal_window_fix": True}


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def guided(pair, factor):
    """A video with a guide at its first and one at its last frame, which are smaller by a ``factor``, and its
    audio, as KSampler's inputs."""
    size = [side // factor for side in SIDES]
    video, mask = randn(1, 128, FRAMES, *SIDES), torch.ones(1, 1, FRAMES, *SIDES)
    positive, negative = pair.positive, pair.negative
    for frame in (0, (FRAMES - 1) * SCALES[0]):
        guide, gaps = LTXVAddGuide.dilate_latent(randn(1, 128, 1, *size) + frame, factor)
        of_factor = {"guide_mask": gaps, "latent_downscale_factor": factor}
        positive, negative, video, mask = LTXVAddGuide.append_keyframe(
            positive, negative, frame, video, mask, guide, 0.8, SCALES, **of_factor
        )
        entry = {
            "pre_filter_count": SIDES[0] * SIDES[1],
            "strength": 0.8,
            "pixel_mask": None,
            "latent_shape": [1, *size],
        }
        for prompt in (positive, negative):
            entries = prompt[0][1].get("guide_attention_entries", [])
            prompt[0][1]["guide_attention_entries"] = [*entries, entry]
    audio = torch.zeros(1, 8, 18, 16)
    return {
        "positive": positive,
        "negative": negative,
        "noise": NestedTensor([randn(*video.shape), randn(*audio.shape)]),
        "latent_image": NestedTensor([video, audio]),
        "noise_mask": NestedTensor([mask, torch.ones(1, 1, 18, 16)]),
    }


@pytest.mark.parametrize("factor", [1, 2])
def test_guides_in_windows(pairs, factor):
    """The first and the last window have one, those between them none."""
    pair = pairs("ltx2")
    inputs = guided(pair, factor)

    def windowed(model):
        (model,) = ContextWindowsManualNode.execute(model, 4, 1, **SETTINGS).result
        video, audio = ksampler(pair, steps=2, **inputs)(model).unbind()
        return NestedTensor([video[:, :, :FRAMES], audio])  # noise is left in the gaps of guides

    assert pair.error(windowed) <= 1e-4
