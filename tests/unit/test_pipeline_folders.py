"""How parts of a diffusers folder are opened: no pickle, no network, no code of the folder's own, and nothing
that waits. diffusers is a stand-in that notes what it is asked for."""

import json
import os
import sys
from types import SimpleNamespace

import pack  # noqa: F401  # makes parallel_dit importable
import pytest
import torch
from parallel_dit.nodes.diffusers_folder import pipelines

from backend.errors import UnsupportedError
from backend.loading.files.regular_files import check_regular
from backend.protocol import RefusedError

SAFE = {"use_safetensors": True, "local_files_only": True}
SANA = {
    "_class_name": "SanaPipeline",
    "text_encoder": ["transformers", "Gemma2Model"],
    "tokenizer": ["transformers", "GemmaTokenizer"],
    "transformer": ["diffusers", "SanaTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderDC"],
}
PARTS = ("text_encoder", "tokenizer", "vae")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, dict]]:
    """What diffusers was asked to open, and how."""
    found = []

    def from_pretrained(path, **options):
        found.append((path, options))
        return SimpleNamespace(text_encoder=torch.nn.Linear(1, 1), tokenizer=None, eval=torch.nn.Module)

    def load(name):
        def loaded(**options):
            found.append((name, options))
            return torch.nn.Linear(1, 1) if name == "text_encoder" else None

        return SimpleNamespace(name=name, load=loaded)

    class Block:
        expected_components = [load("text_encoder"), load("tokenizer")]

        def init_pipeline(self):
            return SimpleNamespace(update_components=lambda **parts: None)

    opener = SimpleNamespace(from_pretrained=from_pretrained)
    stand_ins = {
        "diffusers": SimpleNamespace(
            Flux3ModularPipeline=SimpleNamespace(default_blocks_name="Blocks"),
            Blocks=lambda: SimpleNamespace(sub_blocks={"text_encoder": Block()}),
        ),
        "diffusers.models.auto_model": SimpleNamespace(AutoModel=opener),
        "diffusers.pipelines.pipeline_utils": SimpleNamespace(DiffusionPipeline=opener),
    }
    for name, module in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.fixture
def folder(tmp_path):
    return written(tmp_path / "sana", SANA)


def written(folder, index: dict):
    """A folder with the parts that prompts and latents need, each with a file."""
    for part in PARTS:
        (folder / part / "inside").mkdir(parents=True)
        (folder / part / "config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_a_vae_is_of_safetensors_on_this_disk(asked, folder):
    pipelines.open_vae(folder, torch.bfloat16)
    assert asked == [(str(folder / "vae"), {"dtype": torch.bfloat16, **SAFE})]


def test_text_encoders_are_of_safetensors_on_this_disk(asked, folder):
    """The other parts are left out."""
    assert set(pipelines.open_text(folder).modules) == {"text_encoder"}
    [(path, options)] = asked
    assert path == str(folder) and SAFE.items() <= options.items()
    assert (options["transformer"], options["vae"]) == (None, None) and "text_encoder" not in options


@pytest.mark.parametrize("part", ["folder", "what", "action"])
def test_a_part_may_have_any_name(asked, tmp_path, part):
    """A part that prompts do not need is left out by its name."""
    pipelines.open_text(written(tmp_path / "sana", {**SANA, part: ["diffusers", "Other"]}))
    [(_, options)] = asked
    assert options[part] is None


def test_a_text_encoder_of_blocks_is_of_safetensors_on_this_disk(asked, tmp_path):
    """A tokenizer has no weights."""
    folder = written(tmp_path / "flux3", {"_class_name": "Flux3ModularPipeline"})
    assert set(pipelines.open_text(folder).modules) == {"text_encoder"}
    given = dict(asked)
    assert given.keys() == {"text_encoder", "tokenizer"} and SAFE.items() <= given["text_encoder"].items()
    for name, options in given.items():
        own = {"pretrained_model_name_or_path": str(folder), "subfolder": name, "local_files_only": True}
        assert own.items() <= options.items()


@pytest.mark.parametrize("part", ["text_encoder", "text_encoder_2", "tokenizer", "processor"])
def test_code_of_a_folder_is_not_run(asked, tmp_path, part):
    """diffusers would import the module that an index names."""
    folder = written(tmp_path / "sana", {**SANA, part: ["own_module", "Encoder"]})
    with pytest.raises(RefusedError, match=rf"code of its own for its '{part} \(own_module\)', which is not"):
        pipelines.open_text(folder)
    assert not asked


def test_a_folder_without_text_encoder_is_no_pipeline_for_prompts(asked, tmp_path):
    folder = written(tmp_path / "sana", {**SANA, "text_encoder": [None, None]})
    with pytest.raises(RefusedError, match="names no text encoder in its model_index.json"):
        pipelines.open_text(folder)
    assert not asked


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("where", ["", "inside"])
def test_a_pipe_in_a_part_is_not_opened(asked, folder, part, where):
    """Its reader would wait for ever, in the process of ComfyUI."""
    os.mkfifo(folder / part / where / "model.safetensors")
    with pytest.raises(RefusedError, match="'model.safetensors' is a pipe, socket or device; delete it"):
        pipelines.open_vae(folder, torch.bfloat16) if part == "vae" else pipelines.open_text(folder)
    assert not asked


def test_a_pipe_in_a_part_of_blocks_is_not_opened(asked, tmp_path):
    folder = written(tmp_path / "flux3", {"_class_name": "Flux3ModularPipeline"})
    os.mkfifo(folder / "text_encoder" / "model.safetensors")
    with pytest.raises(RefusedError, match="is a pipe, socket or device"):
        pipelines.open_text(folder)
    assert not asked


def test_links_are_what_they_lead_to(tmp_path):
    """A hub's cache has links to its files; one to a device has no end."""
    (tmp_path / "blob").write_bytes(b"weights")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "model.safetensors").symlink_to(tmp_path / "blob")
    check_regular(tmp_path)
    (tmp_path / "part" / "endless").symlink_to("/dev/zero")
    with pytest.raises(UnsupportedError, match="'endless' is a pipe, socket or device"):
        check_regular(tmp_path)


@pytest.mark.parametrize(
    "config, says",
    [
        ({"text_config": {"num_hidden_layers": 10**6}}, "1000000.* as num_hidden_layers, 1,024 at most"),
        ({"_attn_implementation": "somebody/kernels"}, "names code to load"),
    ],
)
def test_a_part_that_would_build_or_load_too_much_is_not_opened(asked, folder, config, says):
    """In ComfyUI's own process, whose pages would hang."""
    (folder / "text_encoder/config.json").write_text(json.dumps(config))
    with pytest.raises(RefusedError, match=says):
        pipelines.open_text(folder)
    assert not asked
