"""Released files by their headers: ComfyUI's own detection, sampling and latent format next to those of this
pack's model object. tests/headers/comfy.json keeps them for docs/models.md (scripts/released_files.py).
"""

import json
from pathlib import Path

import pytest
from comfy_modules import comfy_modules
from detection import detected
from header_forms import forms, open_released
from variants import VARIANTS
from versions import skip_without_class

from backend.loading.unsupported_models import UNSUPPORTED
from backend.protocol import Loaded

with comfy_modules():
    import comfy.supported_models
    from parallel_dit.nodes.comfy_models.registry import FAMILIES, weightless_patcher

HEADERS = Path(__file__).parents[1] / "headers"
#: File -> [family, parameters, leftovers], or its refusal.
TABLE = json.loads((HEADERS / "released.json").read_text())
#: File -> [ComfyUI's class, type of its sampling, its settings, latent format].
COMFY = json.loads((HEADERS / "comfy.json").read_text())
TAKEN = [name for name, row in TABLE.items() if isinstance(row, list)]
#: Files that ComfyUI 0.33 does not take, for their prefix.
UNKNOWN = ("var__flux1-dev_prefixed_diffusion_model",)


def described(model, name: str) -> list:
    """[ComfyUI's class, type of sampling, settings, latent format] of a ComfyUI model object."""
    settings = {
        key: value for key, value in model.model_config.sampling_settings.items() if value is not None
    }
    kinds = [base.__name__ for base in type(model.model_sampling).__mro__[1:3]]
    return [name, kinds, settings, type(model.latent_format).__name__]


def model_of(name: str):
    """This pack's model object for a released file, and the name of its class in ComfyUI."""
    checkpoint = open_released(name)
    info = {
        "config": json.loads(json.dumps(checkpoint.config)),
        "conditioning": list(checkpoint.family.conditioning.accepted),
        "latent_format": checkpoint.latent_format,
        "generic": checkpoint.generic,
        "dtype": "float32",
        "weights": checkpoint.comfy_shapes,
    }
    model = weightless_patcher(Loaded("m", checkpoint.family.name, info)).model
    return model, FAMILIES[checkpoint.family.name].class_name(checkpoint.config)


def ours(name: str) -> list:
    """``described`` for this pack's model object for a released file."""
    return described(*model_of(name))


@pytest.mark.full
@pytest.mark.parametrize("name", TAKEN)
def test_sampling_and_latents_are_comfyuis(name):
    skip_without_class(COMFY[name][0])
    if name in forms()["gguf"]:
        pytest.importorskip("gguf")  # which ComfyUI does not need
    model, class_name = model_of(name)
    found = described(model, class_name)
    assert json.loads(json.dumps(found)) == COMFY[name]
    if name in forms()["folders"] or "diffusers_names" in name:  # of which ComfyUI reads few
        return
    header = forms()["gguf"].get(name, {"header": name})["header"]  # ComfyUI-GGUF hands on names and shapes
    native = detected(header)
    assert (native is None) == (name in UNKNOWN)
    if native is not None:
        config, _ = native
        assert described(config.get_model({}), type(config).__name__) == found
        # theirs has also what marks, metadata and embeddings of the empty prompt tell of the transformer
        assert model.model_config.unet_config.items() <= config.unet_config.items()


def test_every_taken_file_is_listed():
    assert list(COMFY) == TAKEN


#: ComfyUI's class -> what it is called where it is refused, which its family's file or the header tells.
NAMED = {
    "ChromaRadiance": "Chroma Radiance",
    "WAN21_CausalAR_T2V": "causal Wan",
    "WAN21_FlowRVS": "Wan FlowRVS",
    "WAN21_HuMo": "HuMo",
    "WAN21_SCAIL": "SCAIL",
    "WAN22_S2V": "Wan 2.2 S2V",
    "WAN22_WanDancer": "WanDancer",
    "WAN_Animate2": "Wan Animate 2",
    "ZImagePixelSpace": "Z-Image in pixels",
}
#: Name of a known model that is not supported -> ComfyUI's classes of it (comfy.supported_models).
KNOWN_CLASSES = {
    "Stable Video Diffusion or SV3D, a UNet": ("SVD_img2vid", "SV3D_u", "SV3D_p"),
    "Stable Diffusion XL, a UNet": (
        *("SDXL", "SDXL_instructpix2pix", "SSD1B"),
        *("Segmind_Vega", "KOALA_700M", "KOALA_1B"),
    ),
    "the refiner of Stable Diffusion XL, a UNet": ("SDXLRefiner",),
    "the upscaler of Stable Diffusion 2, a UNet": ("SD_X4Upscaler",),
    "Stable Diffusion 2, a UNet": ("SD20", "SD21UnclipL", "SD21UnclipH", "LotusD"),
    "Stable Diffusion, a UNet": ("SD15", "SD15_instructpix2pix", "Stable_Zero123"),
    "Stable Cascade (stage C)": ("Stable_Cascade_C",),
    "Stable Cascade (stage B)": ("Stable_Cascade_B",),
    "LongCat-Image": ("LongCatImage",),
    "JoyImage": ("JoyImage",),
    "Hunyuan3D 2": ("Hunyuan3Dv2", "Hunyuan3Dv2mini"),
    "Lens": ("Lens",),
    "Mage-Flow": ("MageFlow",),
    "Boogu-Image": ("Boogu",),
    "OmniGen2": ("Omnigen2",),
    "the refiner of HunyuanImage 2.1, which is given an image": ("HunyuanImage21Refiner",),
    "SCAIL 2, a Wan that follows poses": ("WAN21_SCAIL2",),
    "AuraFlow": ("AuraFlow",),
    "Mochi": ("GenmoMochi",),
    "Stable Audio": ("StableAudio", "StableAudio3"),
    "Cosmos": ("CosmosT2V", "CosmosI2V"),
    "Anima": ("Anima",),
    "Cosmos Predict 2": ("CosmosT2IPredict2", "CosmosI2VPredict2"),
    "PiD, a decoder": ("PiD",),
    "PixelDiT": ("PixelDiTT2I",),
    "SeedVR2": ("SeedVR2",),
    "Hunyuan3D 2.1": ("Hunyuan3Dv2_1",),
    "TripoSplat": ("TripoSplat",),
    "Trellis 2": ("Trellis2",),
    "HiDream O1": ("HiDreamO1",),
    "ACE-Step": ("ACEStep",),
    "ACE-Step 1.5": ("ACEStep15",),
    "MiniMax Music 3": ("MiniMaxMusic3",),
    "ERNIE-Image": ("ErnieImage",),
    "RT-DETR 4, a detector": ("RT_DETR_v4",),
    "SAM 3, a model of masks": ("SAM3", "SAM31"),
    "Depth Anything 3": ("DepthAnything3",),
}
#: ComfyUI's class -> its family, and the channels of a config that is of no released header.
BY_CHANNELS = {
    "HunyuanVideoSkyreelsI2V": ("hunyuan-video", {"in_channels": 32, "out_channels": 16}),
    "CogVideoX_Inpaint": ("cogvideox", {"in_channels": 48, "out_channels": 16}),
}


def test_every_class_of_comfyui_is_taken_or_refused_by_name():
    """A class of a later ComfyUI than the one this was written for fails here."""
    classes = {each.__name__ for each in comfy.supported_models.models}
    taken = {row[0] for row in COMFY.values()} | {each.comfy_class for each in VARIANTS.values()}
    refusals = [row for row in TABLE.values() if isinstance(row, str)]
    refusals += [known.name for known in UNSUPPORTED]
    unnamed = {name for name, what in NAMED.items() if not any(what in each for each in refusals)}
    assert not unnamed
    for name, (family, config) in BY_CHANNELS.items():
        assert FAMILIES[family].class_name(config) == name
    assert KNOWN_CLASSES.keys() <= {known.name for known in UNSUPPORTED}
    known = {name for names in KNOWN_CLASSES.values() for name in names}
    assert not known & taken
    assert classes <= known | taken | NAMED.keys() | BY_CHANNELS.keys()
