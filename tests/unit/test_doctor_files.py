"""Files that scripts/doctor.py --full makes."""

import doctor_files
import doctor_lab
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def flux(tmp_path_factory):
    """A small Flux as the doctor writes it."""
    import common  # of benchmarks, which doctor_lab has put on the path

    arguments = common.FLUX | dict(num_layers=1, num_single_layers=1)
    return doctor_files.write_flux(tmp_path_factory.mktemp("model") / "flux", arguments, torch.bfloat16)


def test_the_flux_has_weights_as_large_as_torch_makes_them(flux):
    model = FluxTransformer2DModel.from_pretrained(flux, torch_dtype=torch.bfloat16)
    torch.manual_seed(0)
    usual = FluxTransformer2DModel.from_config(FluxTransformer2DModel.load_config(flux)).bfloat16()
    wanted = dict(usual.named_parameters())
    for name, parameter in model.named_parameters():
        spread = wanted[name].float().std(correction=0).item()
        assert parameter.float().std(correction=0).item() == pytest.approx(spread, rel=0.2, abs=1e-6), name
        assert parameter.float().mean().item() == pytest.approx(wanted[name].float().mean().item(), abs=0.02)


def test_no_two_matrices_of_a_shape_are_alike(flux):
    state = load_file(flux / "diffusion_pytorch_model.safetensors")
    of_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for value in state.values():
        if value.ndim == 2:
            of_shape.setdefault(value.shape, []).append(value)
    assert max(map(len, of_shape.values())) > 2
    for alike in of_shape.values():
        for index, one in enumerate(alike):
            assert not any(one.equal(other) for other in alike[:index])


def test_the_lora_is_on_every_matrix_of_the_blocks(flux, tmp_path):
    """In the names of the model's own file."""
    path, strength = doctor_files.write_lora_of(flux, tmp_path / "lora.safetensors")
    keys = set(load_file(path))
    assert 0 < strength < 1
    assert "transformer.single_transformer_blocks.0.proj_out.lora_B.weight" in keys
    assert "transformer.transformer_blocks.0.ff_context.net.2.lora_A.weight" in keys
    assert not [key for key in keys if "norm_q" in key or "x_embedder" in key]


def test_a_torch_that_lacks_the_type_of_scales_makes_their_files(monkeypatch):
    """As torch 2.6: their bytes are the same."""
    import quantized  # of tests/support

    weight = torch.ones(32, 64)
    tensors, _ = quantized.layer(weight, "mxfp8", seed=0)
    scales = tensors["weight_scale"].view(torch.uint8)
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    older, _ = quantized.layer(weight, "mxfp8", seed=0)
    assert older["weight_scale"].dtype == torch.uint8 and older["weight_scale"].equal(scales)


def test_the_lora_of_a_single_file_has_its_names():
    """As of the tiny model, which runs on the CPU."""
    lab = doctor_lab.Lab("cpu", 1, 10.0)
    path, _, _ = lab.released("flux-dev")
    lora, _ = lab.released_lora("flux-dev")
    keys = set(load_file(lora))
    names = {key.removeprefix("diffusion_model.").removesuffix(".lora_up.weight") for key in keys}
    changed = {f"{name}.weight" for name in names if f"diffusion_model.{name}.alpha" in keys}
    assert len(changed) > 10 and changed < set(load_file(path))
    lab.close()
