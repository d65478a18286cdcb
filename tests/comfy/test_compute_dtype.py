"""The type in which a model computes by default, compared with ComfyUI's own choice on the same GPU."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import variants
from comfy_modules import comfy_modules
from families import LATENT_FORMATS
from tiny import facts, write_checkpoint
from versions import skip_without_class

from backend.loading.compute_dtype import compute_dtype, fast_dtypes
from backend.loading.recognition import open_checkpoint

with comfy_modules():
    import comfy.model_management as management
    import comfy.supported_models
    from parallel_dit.nodes.comfy_models.registry import FAMILIES as NODE_FAMILIES
    from parallel_dit.nodes.comfy_models.registry import OURS

FILL = "flux-fill"
CUDA = torch.device("cuda")


@pytest.fixture(params=[(6, 0), (7, 0), (7, 5), (8, 0), (8, 9), (12, 0)], ids=str)
def capability(request, monkeypatch):
    """The compute capability of the one GPU that ComfyUI sees."""
    major, minor = request.param
    properties = SimpleNamespace(major=major, minor=minor, name="NVIDIA")
    monkeypatch.setattr(management, "cpu_state", management.CPUState.GPU)
    monkeypatch.setattr(management, "FORCE_FP32", False)
    monkeypatch.setattr(management, "get_torch_device", lambda: CUDA)
    monkeypatch.setattr(management, "maximum_vram_for_weights", lambda device=None: 24e9)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    return request.param


def comfy_choice(stored, listed, parameters):
    """What comfy.sd.load_diffusion_model_state_dict computes in; None: a quantized file."""
    dtype = management.unet_dtype(model_params=parameters, supported_dtypes=list(listed), weight_dtype=stored)
    cast = management.unet_manual_cast(dtype if stored else None, CUDA, listed)
    return cast or dtype


@pytest.fixture(scope="module", params=[*LATENT_FORMATS, FILL])
def listed(request, tmp_path_factory):
    """(the family's types, those of ComfyUI's class)."""
    path = tmp_path_factory.mktemp("models") / "model.safetensors"
    if request.param == FILL:
        variants.write(path, FILL)
        name = "FluxInpaint"
    else:
        name = facts(request.param)["comfy_class"]
        skip_without_class(name)
        write_checkpoint(path, request.param)
    if name in OURS:
        pytest.skip(f"ComfyUI has no {name}")
    checkpoint = open_checkpoint(str(path))
    if request.param != FILL:
        assert NODE_FAMILIES[checkpoint.family.name].class_name(checkpoint.config) == name
    return checkpoint.family.build.dtypes, getattr(comfy.supported_models, name).supported_inference_dtypes


def test_the_type_is_comfyuis(listed, capability):
    """Of every type of file, and of models that fit on the GPU and do not."""
    ours, comfys = listed
    cases = list(itertools.product((torch.float32, torch.bfloat16, torch.float16, None), (1e9, 3e10)))
    able = fast_dtypes(CUDA, capability)
    found = {case: compute_dtype(case[0], ours, able) for case in cases}
    assert found == {case: comfy_choice(case[0], comfys, case[1]) for case in cases}
