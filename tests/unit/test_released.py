"""Files as they are released: what each header is recognised as, or why it is refused."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from header_forms import names, open_released
from headers import HeaderFiles, released
from safetensors.torch import save_file

from backend.errors import UnsupportedError
from backend.loading.checkpoint import Checkpoint
from backend.loading.files.config_limits import check_config
from backend.loading.files.safetensors_files import weight_paths
from backend.loading.recognition import recognise
from backend.loading.unsupported_models import UNSUPPORTED, UNSUPPORTED_FORMATS, check_supported
from backend.models.key_layout import PREFIXES

#: File -> [family, parameters filled, tensors that nothing reads], or its refusal.
TABLE = json.loads((Path(__file__).parents[1] / "headers" / "released.json").read_text())
#: Refused ones, and then the others by family and number of parameters.
BY_MODEL = sorted(TABLE, key=lambda name: "" if isinstance(TABLE[name], str) else str(TABLE[name][:2]))
#: Models that are built at the same time: a thousand modules each.
MAX_MODELS = 4


def found(name: str) -> list | str:
    """What the table must say of a file."""
    try:
        checkpoint = open_released(name)
    except UnsupportedError as error:
        return str(error)
    read = {checkpoint.keys.get(source.key, source.key) for source in checkpoint.sources.values()}
    unread = [ours for ours, key in checkpoint.keys.items() if key not in read]
    return [checkpoint.family.name, len(checkpoint.sources), unread]


@pytest.fixture(scope="module", autouse=True)
def built_once():
    """Files of one model, which BY_MODEL has one after the other, share the transformer that the first one
    has built: nobody loads its weights, and most of the time are constructors."""
    build, models = Checkpoint._build, {}

    def built(checkpoint: Checkpoint, include_buffers: bool) -> torch.nn.Module:
        name, config = checkpoint.transformer_class.__name__, checkpoint.config
        check_config(checkpoint.name, name, config, checkpoint.files.shapes)
        key = (name, checkpoint.family.build.patch_module, repr(config), include_buffers)
        if key not in models:
            models[key] = build(checkpoint, include_buffers)
            if len(models) > MAX_MODELS:
                del models[next(iter(models))]
        return models[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Checkpoint, "_build", built)
        yield


@pytest.mark.parametrize("name", BY_MODEL)
def test_a_released_file(name):
    assert found(name) == TABLE[name]


def test_every_header_is_in_the_table():
    assert list(TABLE) == names()


def test_the_page_lists_the_table(monkeypatch):
    """scripts/released_files.py --write brings the page up to date."""
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "scripts")
    script = runpy.run_path(str(root / "scripts/released_files.py"))
    assert script["PART"].read() == script["listed"]()


@pytest.mark.parametrize("known", UNSUPPORTED, ids=lambda known: f"{known.name} {known.keys[-1]}")
def test_a_known_model_is_refused_by_its_name(known):
    for prefix in PREFIXES:
        shapes = {f"{prefix}{key}": (1,) for key in known.keys}
        for key, (axis, size) in known.sizes.items():
            shapes[prefix + key] = (*(1,) * axis, size)
        with pytest.raises(UnsupportedError, match="which is not supported") as error:
            check_supported("model", shapes)
        assert str(error.value).startswith("model is ")


@pytest.mark.parametrize("end", UNSUPPORTED_FORMATS)
def test_a_known_format_is_refused(end):
    with pytest.raises(UnsupportedError, match=re.escape(f"quantized {UNSUPPORTED_FORMATS[end]}, which")):
        check_supported("model", {"blocks.0.attn.img_in.weight": (4, 4), f"blocks.0.attn.{end}": (4,)})


PLAIN, INDEX = "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"
BF16, FP16 = "diffusion_pytorch_model.bf16.safetensors", "diffusion_pytorch_model.fp16.safetensors"
SHARD = "diffusion_pytorch_model-00001-of-00002.safetensors"
FP16_SHARD = "diffusion_pytorch_model-00001-of-00002.fp16.safetensors"


@pytest.mark.parametrize(
    "files, chosen",
    [
        ([PLAIN], PLAIN),
        ([PLAIN, FP16], PLAIN),
        ([BF16, FP16], BF16),
        ([FP16], FP16),
        ([INDEX, SHARD, FP16], SHARD),
        ([INDEX, SHARD, "diffusion_pytorch_model.fp16.safetensors.index.json", FP16_SHARD], SHARD),
        (["diffusion_pytorch_model.fp16.safetensors.index.json", FP16_SHARD], FP16_SHARD),
        (["diffusion_pytorch_model.safetensors.index.fp16.json", FP16_SHARD], FP16_SHARD),
        (["model-00001-of-00001.safetensors"], "model-00001-of-00001.safetensors"),
    ],
)
def test_the_precision_of_a_folder(tmp_path, files, chosen):
    for name in files:
        shard = FP16_SHARD if "fp16" in name else SHARD
        weights = {"weight_map": {"x": shard}}
        (tmp_path / name).write_text(json.dumps(weights) if name.endswith(".json") else "")
    assert weight_paths(tmp_path) == [tmp_path / chosen]


def test_a_folder_of_several_files_and_no_index_is_refused(tmp_path):
    for name in (SHARD, SHARD.replace("00001-of", "00002-of")):
        save_file({"x": torch.ones(1)}, tmp_path / name)
    with pytest.raises(UnsupportedError, match="holds 2 safetensors files and no index"):
        weight_paths(tmp_path)


def test_a_wan_whose_convolution_lost_a_dimension(tmp_path):
    header = dict(released()["wan2.1-t2v-1.3B"])
    header["tensors"] = header["tensors"] | {"patch_embedding.weight": [["F16", [24576, 1, 2, 2], None]]}
    with pytest.raises(UnsupportedError, match="has 4 dimensions, .* and Wan's has 5"):
        recognise("wan.gguf", HeaderFiles("wan", header))
