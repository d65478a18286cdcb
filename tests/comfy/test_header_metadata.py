"""What a file's header says of the model: the latent is that of ComfyUI's model with the same entries."""

import json

import pytest
import torch
from comfy_modules import comfy_modules
from families import golden, load, to_vae_units
from native import native_model
from pairs import _conditioning, parts
from quantized import write_plain_gguf
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import GOLDEN, error_in_std, facts, weights_module

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

with comfy_modules():
    import comfy.sample
    from comfy.model_detection import model_config_from_unet
    from comfy.nested_tensor import NestedTensor

#: Golden family -> entries of the header's config.
STATED = {
    "ltxv": {"causal_temporal_positioning": True},
    "ltx2": {"av_ca_timestep_scale_multiplier": 1000.0},
}


def native_latent(family: str) -> torch.Tensor:
    """What ComfyUI's KSampler makes of the golden request with a model of these entries, packed."""
    stored, shapes = load(f"{family}__euler_simple")
    with safe_open(GOLDEN / f"{family}__euler_simple.safetensors", "pt") as file:
        args = json.loads(file.metadata()["args"])
    noise = stored["noise"]
    if shapes:
        sizes = [torch.Size(shape).numel() for shape in shapes]
        noise = NestedTensor(
            [part.reshape(1, *shape) for part, shape in zip(noise.split(sizes, dim=2), shapes)]
        )
    found = comfy.sample.sample(
        native_model(family, STATED[family]),
        noise,
        args["steps"],
        args["cfg"],
        args["sampler"],
        args["scheduler"],
        _conditioning(stored, "positive"),
        _conditioning(stored, "negative"),
        noise * 0.0,
        seed=args["seed"],
        disable_pbar=True,
    )
    if not shapes:
        return found
    return torch.cat([part.flatten(1)[:, None] for part in parts(found)], dim=2)


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize("family", STATED)
@torch.inference_mode()
def test_a_header_is_read_as_comfyui_reads_it(family, form, tmp_path):
    told = facts(family)
    config = json.dumps({"transformer": told["unet_config"] | STATED[family]})
    state = weights_module().state_dict(told["shapes"])
    engine = Engine(ParallelConfig(), mesh.single())
    path = tmp_path / f"model.{form}"
    if form == "gguf":
        pytest.importorskip("gguf")
        write_plain_gguf(path, state, config=config)
    else:
        save_file(state, path, {"config": config})
    engine.load("tiny", str(path), "default")
    sample, plain = golden(f"{family}__euler_simple")
    samples, _ = engine.sample(sample, Callbacks())
    want = native_latent(family)
    found = to_vae_units(family, samples, sample.latent_shapes)
    assert error_in_std(found, want) <= 1e-4 < error_in_std(plain, want)


@pytest.mark.parametrize(
    "stated", [{"model_type": "animate2"}, {"model_type": "flow_rvs"}, {"causal_ar": True}, {}]
)
def test_wan_is_refused_where_comfyui_takes_another_class(stated, tmp_path):
    state = weights_module().state_dict(facts("wan21-t2v")["shapes"])
    metadata = {"config": json.dumps({"transformer": stated})}
    theirs = model_config_from_unet(state, "", metadata=metadata)
    save_file(state, tmp_path / "model.safetensors", metadata)
    if type(theirs).__name__ == "WAN21_T2V":
        assert not stated and open_checkpoint(str(tmp_path / "model.safetensors")).family.name == "wan"
        return
    with pytest.raises(UnsupportedError, match="a variant of wan that is not supported"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
