"""Text encoders of a folder that do not fit, and empty latents of another model."""

from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules

with comfy_modules():
    import comfy.latent_formats
    import comfy.model_patcher
    from parallel_dit.backend.protocol import RefusedError
    from parallel_dit.nodes.comfy_models.own_models import QwenImage21Latent, SanaLatent
    from parallel_dit.nodes.diffusers_folder.text_encoder import DiffusersCLIP
    from parallel_dit.nodes.host.sampling_checks import check_latent


def test_text_encoders_that_do_not_fit_leave_the_gpu(monkeypatch):
    """Those of their layers that a load had moved before memory ran out would stay. The meta device is the
    GPU here, which has room for two layers; only their places are noted."""
    import comfy.model_management as management

    class Layers(torch.nn.ModuleList):
        def to(self, device):
            for index, layer in enumerate(self):
                if torch.device(device).type == "meta" and index == 2:
                    raise management.OOM_EXCEPTION
                layer.place = torch.device(device).type
            return self

    layers = Layers(torch.nn.Linear(2, 2) for _ in range(4))
    patcher = comfy.model_patcher.ModelPatcher(layers, torch.device("meta"), torch.device("cpu"))
    monkeypatch.setattr(management, "load_models_gpu", lambda patchers, **options: layers.to("meta"))
    with pytest.raises(RefusedError, match="do not fit on meta"):
        DiffusersCLIP(SimpleNamespace(name="Pipeline", modules=layers), patcher).encode("a red fox in snow")
    assert [layer.place for layer in layers] == ["cpu"] * 4


@pytest.mark.parametrize(
    "format, channels, told, node",
    [
        (QwenImage21Latent, 16, {}, "EmptyFlux2LatentImage"),
        (SanaLatent, 4, {}, "EmptyHunyuanImageLatent"),
        (SanaLatent, 16, {}, "EmptyHunyuanImageLatent"),
        (SanaLatent, 64, {}, None),
        (SanaLatent, 32, {}, None),
        (SanaLatent, 4, {"downscale_ratio_spacial": 8}, None),
        (comfy.latent_formats.Flux, 4, {}, None),
    ],
)
def test_empty_latents_of_another_size(format, channels, told, node):
    """An empty latent at 1/8 of the size is refused where this ComfyUI does not scale it: for SANA it would
    be an image of four times the sides."""
    latent = {"samples": torch.zeros(1, channels, 16, 16), **told}
    if node is None:
        check_latent(latent, format(), ())
    else:
        with pytest.raises(RefusedError, match=f"at 1/8 .* are at 1/(16|32), .* make it with {node}"):
            check_latent(latent, format(), ())


def test_an_empty_latent_of_a_video_is_told_what_makes_one_of_an_image():
    """There is no image to encode."""
    with pytest.raises(
        RefusedError, match="latent_image is of a video and has the shape .* empty-latent node"
    ):
        check_latent({"samples": torch.zeros(1, 16, 3, 16, 16)}, comfy.latent_formats.Flux(), ())
