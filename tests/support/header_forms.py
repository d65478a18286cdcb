"""Released models as GGUF files and as diffusers folders: real files of which the headers alone are there.

tests/headers/forms.json says which. "gguf": file -> header of the same model, type of its blocks, strings of
its metadata. "folders": folder -> class, its config.json, and a header with diffusers' names, or null where
the class's own parameters are the file's; pipeline: further configurations.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import diffusers
import numpy
import torch
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from headers import RELEASED, Tensors, opened, released, unfold, write_sparse

from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import open_checkpoint

#: Prefixes that files are converted without.
PREFIXES = ("model.diffusion_model.", "model.model.", "model.")
#: Fewer values than these are not quantized (ComfyUI-GGUF, tools/convert.py).
MIN_VALUES = 1024
SHARD = "diffusion_pytorch_model-{:05}-of-00002.safetensors"


@cache
def forms() -> dict[str, dict]:
    """Return kind of file -> name -> what it is."""
    return json.loads((RELEASED.parent / "forms.json").read_text())


def names() -> list[str]:
    """Return every released file: safetensors by their headers, GGUF files, folders."""
    return [*released(), *forms()["gguf"], *forms()["folders"]]


def open_released(name: str) -> Checkpoint:
    """Open a released file or folder by its headers. Raises UnsupportedError."""
    if name in released():
        return opened(name)
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        if name in forms()["gguf"]:
            write_gguf(path, **forms()["gguf"][name])
        else:
            write_folder(path, **forms()["folders"][name])
        return open_checkpoint(str(path))


def write_gguf(path: Path, header: str, kind: str, metadata: Mapping[str, str] = {}):
    """Write what ComfyUI-GGUF's tools/convert.py makes of a file: matrices in blocks of ``kind``, or in F16
    where rows hold no whole blocks; everything else in F32, tensors of five dimensions too."""
    import gguf  # which few need

    tensors = {}
    for key, (_, shape) in unfold(released()[header]["tensors"]).items():
        block, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        chosen = "F32"
        if len(shape) == 2 and math.prod(shape) > MIN_VALUES:
            chosen = "F16" if shape[1] % block else kind
        name = next((key.removeprefix(prefix) for prefix in PREFIXES if key.startswith(prefix)), key)
        tensors[name] = (chosen, shape)
    write_sparse_gguf(path, tensors, metadata)


def write_sparse_gguf(path: Path, tensors: Tensors, metadata: Mapping[str, str] = {}):
    """Write a GGUF file of these tensors, (type, shape) of each, whose data is a hole."""
    import gguf

    writer = gguf.GGUFWriter(path, "diffusion", use_temp_file=False)
    for key, value in metadata.items():
        writer.add_string(key, value)
    size = 0
    for name, (kind, shape) in tensors.items():
        stored = gguf.GGMLQuantizationType[kind]
        block, width = gguf.GGML_QUANT_SIZES[stored]
        count = math.prod(shape) // block * width
        writer.add_tensor_info(name, shape, numpy.dtype("float16"), count, stored)
        size += writer.ggml_pad(count, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        start = writer.ggml_pad(path.stat().st_size, writer.data_alignment)
        file.truncate(start + size)


def write_folder(
    path: Path, config: Mapping, header: str | None = None, pipeline: Mapping = {}, shards: bool = False
):
    """Write a pipeline's folder: its transformer in one file or two with an index; ``pipeline``: folder of
    another part -> its configuration."""
    inner = path / "transformer"
    inner.mkdir(parents=True)
    (path / "model_index.json").write_text(json.dumps({"_class_name": "DiffusionPipeline"}))
    (inner / "config.json").write_text(json.dumps(config))
    for part, settings in pipeline.items():
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        (path / part).mkdir()
        (path / part / name).write_text(json.dumps(settings))
    tensors = unfold(released()[header]["tensors"]) if header else own_tensors(config)
    if not shards:
        write_sparse(inner / "diffusion_pytorch_model.safetensors", tensors)
        return
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    where = {}
    for i, half in enumerate(halves, 1):
        write_sparse(inner / SHARD.format(i), half)
        where |= dict.fromkeys(half, SHARD.format(i))
    index = inner / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))


def own_tensors(config: Mapping) -> Tensors:
    """Return the parameters of the class that a configuration names."""
    settings = {key: value for key, value in config.items() if not key.startswith("_")}
    cls = getattr(diffusers, config["_class_name"])
    with torch.device("meta"), no_init_weights(), init_empty_weights(include_buffers=True):
        transformer = cls(**settings)
    return {name: ("BF16", list(value.shape)) for name, value in transformer.state_dict().items()}
