"""Files of the transformer alone, and what a header says of the model that no tensor shows."""

import json
from pathlib import Path

import pytest
import torch
from families import golden, to_vae_units
from header_forms import write_sparse_gguf
from headers import write_sparse
from quantized import write_plain_gguf
from safetensors.torch import load_file, save_file
from tiny import error_in_std, facts, write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.models import ltx2
from backend.models.common.ltx2_connectors import finish
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks


def write(folder: Path, form: str, state: dict, config: str | None) -> Path:
    """A safetensors or GGUF file whose header has ``config``."""
    path = folder / f"model.{form}"
    metadata = {} if config is None else {"config": config}
    if form == "gguf":
        pytest.importorskip("gguf")
        return write_plain_gguf(path, state, **metadata)
    save_file(state, path, metadata or None)
    return path


def finished(prompt: torch.Tensor, path: Path) -> torch.Tensor:
    """A prompt as ComfyUI's text encoder gives it where it has the connectors: theirs, side by side."""
    checkpoint = open_checkpoint(str(path))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    config = checkpoint.config
    parts = ltx2.widths(config)[1]
    prompts = prompt.split(parts, dim=2) if prompt.shape[2] == sum(parts) else [prompt] * 2
    names = ("caption_projection", "audio_caption_projection")
    with torch.inference_mode():
        return torch.cat(
            [
                finish(
                    checkpoint.transformer.get_submodule(name).connector,
                    torch.nn.functional.pad(each, (0, 1)),
                )
                for name, each in zip(names, prompts)
            ],
            dim=2,
        )


@pytest.mark.parametrize("form, has_config", [("safetensors", False), ("gguf", True)])
@pytest.mark.parametrize("family", ["ltx2", "ltx23"])
def test_ltx2_of_the_transformer_alone(family, form, has_config, tmp_path):
    """ComfyUI's text encoder finishes prompts where it is given the connectors: the latent is the golden
    one. A prompt that nobody has finished is refused."""
    whole = write_checkpoint(tmp_path / "whole.safetensors", family)
    known = facts(family)
    state = {name: value for name, value in load_file(whole).items() if "embeddings_connector" not in name}
    config = json.dumps({"transformer": known["unet_config"]}) if has_config else None
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path, form, state, config)), "default")
    sample, latent = golden(f"{family}__euler_simple")
    with pytest.raises(UnsupportedError, match="has not been through the connectors .*DualCLIPLoader"):
        engine.check_sample(sample)
    for branch in ("positive", "negative"):
        prompt = sample.tensors[f"{branch}.c_crossattn"]
        sample.tensors[f"{branch}.c_crossattn"] = finished(prompt, whole)
        sample.tensors.pop(f"{branch}.unprocessed_ltxav_embeds", None)
    engine.check_sample(sample)
    samples, _ = engine.sample(sample, Callbacks())
    assert error_in_std(to_vae_units(family, samples, sample.latent_shapes), latent) <= 1e-4


def test_released_ltx2_has_diffusers_multiplier():
    """Where no header says it: 1000 at the released width, as in diffusers and in every released header."""
    shapes = {name: tuple(shape) for name, shape in facts("ltx2")["shapes"].items()}
    assert ltx2.config_from_shapes(shapes)["cross_attn_timestep_scale_multiplier"] == 1
    shapes["patchify_proj.weight"] = (4096, 128)
    assert ltx2.config_from_shapes(shapes)["cross_attn_timestep_scale_multiplier"] == 1000


#: Golden family -> what the header of a released model says, and the entries of our configuration.
STATED = {
    "ltxv": ({"causal_temporal_positioning": True}, {"causal_temporal_positioning": True}),
    "ltx2": (
        {"av_ca_timestep_scale_multiplier": 1000.0, "frequencies_precision": "float32"},
        {"cross_attn_timestep_scale_multiplier": 1000.0, "rope_double_precision": False},
    ),
}


def without_data(folder: Path, form: str, family: str, config: str | None) -> Path:
    """A file of a family's tensors as write() makes it, whose data is a hole."""
    path, metadata = folder / f"model.{form}", {} if config is None else {"config": config}
    tensors = {key: ("F32", shape) for key, shape in facts(family)["shapes"].items()}
    if form == "gguf":
        pytest.importorskip("gguf")
        write_sparse_gguf(path, tensors, metadata)
        return path
    return write_sparse(path, tensors, metadata)


@pytest.mark.parametrize("family", STATED)
def test_a_gguf_header_says_what_a_safetensors_header_says(family, tmp_path):
    stated, want = STATED[family]
    config = json.dumps({"transformer": stated})
    plain, other, gguf = (
        open_checkpoint(str(without_data(tmp_path, form, family, text))).config
        for form, text in (("safetensors", None), ("safetensors", config), ("gguf", config))
    )
    assert gguf == other == plain | want != plain


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    "config, words",
    [
        ("{", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[1]", "without an object that describes the transformer"),
        ('{"transformer": 3}', "without an object that describes the transformer"),
        ('{"transformer": {"timestep_scale_multiplier": 0}}', "timestep_scale_multiplier is 0, and it is a"),
        ('{"transformer": {"timestep_scale_multiplier": "x"}}', "timestep_scale_multiplier is 'x'"),
    ],
)
def test_damaged_headers_are_refused(config, words, form, tmp_path):
    with pytest.raises(UnsupportedError, match=words):
        open_checkpoint(str(without_data(tmp_path, form, "ltx2", config)))


@pytest.mark.parametrize("form", ["safetensors", "gguf"])
@pytest.mark.parametrize(
    "stated, words",
    [
        ({"model_type": "animate2"}, "is Wan Animate 2, a variant"),
        ({"model_type": "flow_rvs"}, "is Wan FlowRVS, a variant"),
        ({"model_type": "later"}, "a model of type 'later'"),
        ({"causal_ar": True}, "causal Wan"),
        ({"model_type": "t2v", "causal_ar": False}, None),
        ({"dim": 256}, None),
    ],
)
def test_wan_models_that_the_header_alone_tells(stated, words, form, tmp_path):
    """They have the keys of text or image to video; ComfyUI gives each a class of its own."""
    path = without_data(tmp_path, form, "wan21-t2v", json.dumps({"transformer": stated}))
    if words is None:
        assert open_checkpoint(str(path)).family.name == "wan"
        return
    with pytest.raises(UnsupportedError, match=words):
        open_checkpoint(str(path))
