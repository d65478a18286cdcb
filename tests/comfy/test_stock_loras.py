"""ComfyUI's own LoRA loaders on the MODEL of Parallel Model: handed to the ranks, or refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfy_modules import comfy_modules
from loras import MODULES, lora
from pairs import Pair, ksampler
from parallel_dit.backend.protocol import RefusedError
from parallel_dit.nodes.host import stock_loras
from safetensors.torch import save_file
from stock_lora_models import flux, with_loras  # noqa: F401  # a fixture

with comfy_modules():
    import comfy.samplers
    import comfy.sd
    from comfy_extras import nodes_custom_sampler
    from parallel_dit.nodes.host.handle import with_lora
    from parallel_dit.nodes.host.remote_patcher import take_bypass_loras
    from parallel_dit.nodes.parallel_model import remote_model


@pytest.mark.parametrize("spelling", MODULES)
def test_it_is_ksamplers_image(flux, spelling):
    file, _ = lora(MODULES[spelling], spelling)
    sample = ksampler(flux, steps=2)
    assert flux.error(lambda model: sample(with_loras(model, file))) <= 1e-4
    plain, changed = sample(flux.ours), sample(with_loras(flux.ours, file))
    assert (plain - changed).abs().max() / plain.std() > 1e-2


def test_metadata_of_parallel_loras_reaches_the_model(tmp_path):
    """Get IC-LoRA Parameters reads it off the MODEL, and takes factor 1 where there is none. As with
    ComfyUI's loaders the last file that has metadata counts."""
    read = pytest.importorskip("comfy_extras.nodes_lt")
    if not hasattr(read, "GetICLoRAParameters"):
        pytest.skip("this ComfyUI has no GetICLoRAParameters")
    dit = Pair("ltx2", tmp_path).dit
    module = "transformer_blocks.0.attn1.to_q"
    weights, _ = lora({module: tuple(dit.loaded.info["weights"][f"{module}.weight"])}, "comfyui")
    found = []
    for name, metadata in (("none", None), ("two", "2"), ("four", "4"), ("plain", None)):
        path = tmp_path / f"{name}.safetensors"
        save_file(weights, path, metadata and {"reference_downscale_factor": metadata})
        dit = with_lora(dit, str(path), 0.8)
        (parameters,) = read.GetICLoRAParameters.execute(remote_model(dit)).result
        found.append(parameters["reference_downscale_factor"])
    assert found == [1, 2, 4, 4]


def test_differences_of_parameters_that_are_no_weights(monkeypatch, tmp_path):
    """Wan's blocks have a parameter "modulation" of their own, and so has its head. ComfyUI's patcher leaves
    both as they are, so its MODEL has the changed parameters here."""
    monkeypatch.setattr(stock_loras, "folder", lambda: str(tmp_path))
    wan = Pair("wan21-t2v", tmp_path)
    names = ("blocks.0.modulation", "blocks.1.modulation", "head.modulation", "blocks.0.norm3.bias")
    parameters = wan.native.model.diffusion_model.get_parameter
    changes = {name: torch.full_like(parameters(name), 0.1 + 0.1 * i) for i, name in enumerate(names)}
    sample = ksampler(wan, steps=2)
    plain = sample(wan.ours)
    wan.ours.add_patches({f"diffusion_model.{name}": ("diff", (it,)) for name, it in changes.items()}, 0.8)
    for name, change in changes.items():
        parameters(name).data += 0.8 * change
    assert wan.error(sample) <= 1e-4
    assert (plain - sample(wan.ours)).abs().max() / plain.std() > 1e-2


def test_keys_that_name_nothing_are_logged(flux, caplog, monkeypatch):
    """The ranks find no such parameter, while ComfyUI's names say there is one."""
    weights = flux.dit.loaded.info["weights"]
    monkeypatch.setitem(weights, "double_blocks.0.no_such.weight", [4, 4])
    file = lora(MODULES["comfyui"], "comfyui")[0]
    with_loras(flux.ours, file)
    assert "were not loaded" not in caplog.text
    key = "diffusion_model.double_blocks.0.no_such"
    with_loras(flux.ours, file | {f"{key}.diff": torch.ones(4, 4)})
    assert f"{key}.diff" in caplog.text and "1 keys of the LoRA" in caplog.text


def test_several_are_added_and_the_model_without_them_stays(flux):
    files = [lora(MODULES[spelling], spelling, seed=5)[0] for spelling in ("comfyui", "diffusers")]
    sample = ksampler(flux, steps=2)
    plain = sample(flux.ours)
    assert flux.error(lambda model: sample(with_loras(model, *files))) <= 1e-4
    assert torch.equal(sample(flux.ours), plain)


def test_bypass_loaders_add_the_same(flux, monkeypatch):
    """And ComfyUI's own MODEL gets them as before."""
    stock = getattr(comfy.sd, "load_bypass_lora_for_models", None)
    if stock is None:
        pytest.skip("this ComfyUI has no Load LoRA (Bypass)")
    monkeypatch.setattr(comfy.sd, "load_bypass_lora_for_models", stock)  # which puts it back
    take_bypass_loras()
    file, _ = lora(MODULES["comfyui"], "comfyui")

    def bypassed(model):
        model, _ = comfy.sd.load_bypass_lora_for_models(model, None, dict(file), 0.8, 0.0)
        return model

    assert bypassed(flux.native).injections
    sample = ksampler(flux, steps=2)
    assert flux.error(lambda model: sample(bypassed(model))) <= 1e-4
    assert torch.equal(sample(bypassed(flux.ours)), sample(with_loras(flux.ours, file)))


def test_files_that_a_cleaner_removes_are_written_again(flux):
    """ComfyUI caches the MODEL, so the loader's node does not run again."""
    model = with_loras(flux.ours, lora(MODULES["comfyui"], "comfyui")[0])
    sample = ksampler(flux, steps=1)
    wanted = sample(model)
    (file,) = Path(stock_loras.folder()).iterdir()
    file.unlink()
    assert torch.equal(sample(model), wanted) and file.exists()


def test_a_lora_for_the_text_encoder_alone(flux):
    """Of a kind that its transformer's part would be refused for; at an address, too, nothing is sent."""
    file, _ = REFUSED["another kind"]
    model, _ = comfy.sd.load_lora_for_models(flux.ours, None, dict(file), 0.0, 1.0)
    sample = ksampler(flux, steps=1)
    assert torch.equal(sample(model), sample(flux.ours))
    far = remote_model(replace(flux.dit, config=replace(flux.dit.config, address="10.0.0.1:7777")))
    patch = {"text_encoder.a.weight": ("diff", (torch.ones(2, 2),))}
    assert far.add_patches(patch) == [*patch]
    with pytest.raises(RefusedError, match="a backend with an address"):
        with_loras(far, lora(MODULES["comfyui"], "comfyui")[0])


def sampled_by_two(pair, model, negative):
    """What SamplerCustomAdvanced returns with DualModelGuider."""
    guider = nodes_custom_sampler.Guider_DualModel(model, negative)
    guider.set_conds(pair.positive, pair.negative)
    guider.set_cfg(3.0)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 2)
    sampler = comfy.samplers.sampler_object("euler")
    return guider.sample(pair.noise, pair.latent, sampler, sigmas, disable_pbar=True, seed=7)


@pytest.mark.skipif(
    not hasattr(nodes_custom_sampler, "Guider_DualModel"), reason="this ComfyUI has no DualModelGuider"
)
@pytest.mark.parametrize("changed", [(True, False), (False, True), (True, True)], ids=str)
def test_each_of_two_models_has_its_own(flux, changed, tmp_path):
    """DualModelGuider samples the negative prompt by another MODEL, under the options of the first."""
    file, _ = lora(MODULES["comfyui"], "comfyui")
    other, _ = lora(MODULES["kohya"], "kohya")
    unconditional = {
        flux.native: with_loras(Pair("flux-dev", tmp_path).native, other),
        flux.ours: with_loras(remote_model(flux.dit), other),
    }

    def sample(model, changed=changed):
        models = (model, unconditional[model])
        return sampled_by_two(flux, *(with_loras(m, file) if has else m for m, has in zip(models, changed)))

    assert flux.error(sample) <= 1e-4
    plain = sample(flux.ours, (False, False))
    assert (plain - sample(flux.ours)).abs().max() / plain.std() > 1e-2


REFUSED = {
    "another kind": (
        {
            "diffusion_model.double_blocks.0.img_attn.proj.lokr_w1": torch.ones(2, 2),
            "diffusion_model.double_blocks.0.img_attn.proj.lokr_w2": torch.ones(128, 128),
        },
        "double_blocks.0.img_attn.proj.weight gets a patch of the kind LoKr",
    ),
    "no weight": ({"some.lora_up.weight": torch.ones(2, 2)}, "a LoRA without a weight of this transformer"),
    "not a number": (
        {
            "diffusion_model.double_blocks.0.img_attn.proj.lora_up.weight": torch.full((256, 2), torch.nan),
            "diffusion_model.double_blocks.0.img_attn.proj.lora_down.weight": torch.ones(2, 256),
        },
        "NaN",
    ),
}


@pytest.mark.parametrize("file, says", REFUSED.values(), ids=REFUSED)
def test_what_is_no_plain_lora_is_refused_at_its_node(flux, file, says):
    with pytest.raises(RefusedError, match=says) as error:
        with_loras(flux.ours, file)
    assert "\n" not in str(error.value)
