"""What a header says of the model that no tensor shows."""

import json
from pathlib import Path

import pytest
from quantized import write_plain_gguf
from safetensors.torch import save_file
from tiny import facts, weights_module

from backend.errors import UnsupportedError
from backend.loading.checkpoint import open_checkpoint


def write(folder: Path, form: str, state: dict, config: str | None) -> Path:
    """A safetensors or GGUF file whose header has ``config``."""
    path = folder / f"model.{form}"
    metadata = {} if config is None else {"config": config}
    if form == "gguf":
        pytest.importorskip("gguf")
        return write_plain_gguf(path, state, **metadata)
    save_file(state, path, metadata or None)
    return path


#: Golden family -> what the header of a released model says, and the entries of our configuration.
STATED = {
    "ltxv": ({"causal_temporal_positioning": True}, {"causal_temporal_positioning": True}),
    "ltx2": (
        {"av_ca_timestep_scale_multiplier": 1000.0, "frequencies_precision": "float32"},
        {"cross_attn_timestep_scale_multiplier": 1000.0, "rope_double_precision": False},
    ),
}


@pytest.mark.parametrize("family", STATED)
def test_a_gguf_header_says_what_a_safetensors_header_says(family, tmp_path):
    state = weights_module().state_dict(facts(family)["shapes"])
    stated, want = STATED[family]
    config = json.dumps({"transformer": stated})
    plain, other, gguf = (
        open_checkpoint(str(write(tmp_path, form, state, text))).config
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
    state = weights_module().state_dict(facts("ltx2")["shapes"])
    with pytest.raises(UnsupportedError, match=words):
        open_checkpoint(str(write(tmp_path, form, state, config)))
