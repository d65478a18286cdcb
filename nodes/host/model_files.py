"""The models that ComfyUI's folders hold, for the loader nodes."""

import json
import os
import struct
from functools import lru_cache

import comfy.utils
import folder_paths

from ...backend.client.auto.model_choice import ModelChoice
from ...backend.loading.files.regular_files import MAX_HEADER_BYTES
from ...backend.loading.lora.lora_file_bytes import file_bytes
from ...backend.quantization.lora_bytes import LoraBytes
from ..diffusers_folder.pipelines import INDEXES
from . import stock_loras

#: Where GGUF files are: ComfyUI's own list leaves them out, and ComfyUI-GGUF has one of its own.
#: Of one name in both the first counts.
GGUF_FOLDERS = ("diffusion_models", "unet_gguf")
#: Where all-in-one files are, with VAE and text encoders, which the ranks do not read; and the ends of names
#: that are no pickles.
CHECKPOINTS = "checkpoints"
UNPICKLED = (".safetensors", ".sft", ".gguf")
#: Parts of a pipeline's folder that are transformers of their own, besides the one that its name stands for.
FURTHER_TRANSFORMERS = ("transformer_2",)
#: Of a folder with one of these files it is a pipeline or a transformer.
HOLD = {*INDEXES, "config.json"}
#: LoRAs whose headers are counted once for each state of their files.
MAX_LORAS = 64
#: What reading the header of a broken file raises.
BROKEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error)


def model_paths() -> dict[str, str]:
    """Return name -> path of what can be loaded: files of diffusion_models, GGUF included, and of
    checkpoints, folders of diffusers that hold a transformer, and further transformers of a pipeline (Wan
    2.2's low-noise expert). Of one name in two places it is the first."""
    paths = {
        name: folder_paths.get_full_path("diffusion_models", name)
        for name in folder_paths.get_filename_list("diffusion_models")
    }
    for kind in (each for each in GGUF_FOLDERS if each in folder_paths.folder_names_and_paths):
        for root in folder_paths.get_folder_paths(kind):
            names, _ = folder_paths.recursive_search(root, excluded_dir_names=[".git"])
            for name in folder_paths.filter_files_extensions(names, [".gguf"]):
                paths.setdefault(name, os.path.join(root, name))
    for name in folder_paths.get_filename_list(CHECKPOINTS):
        if name.lower().endswith(UNPICKLED):
            paths.setdefault(name, folder_paths.get_full_path(CHECKPOINTS, name))
    return paths | {name: folder for name, folder in _transformers().items() if name not in paths}


def _transformers() -> dict[str, str]:
    """Return name -> path of the folders of diffusers, and of further transformers in them."""
    folders = diffusers_folders()
    return folders | {
        os.path.join(name, further): os.path.join(folder, further)
        for name, folder in folders.items()
        for further in FURTHER_TRANSFORMERS
        if os.path.isfile(os.path.join(folder, further, "config.json"))
    }


def _path_of(name: str) -> str | None:
    """Return what ``model_paths`` has for a name, without looking at other files: a walk through all folders
    takes a second on a network disk, and a run asks some ten times."""
    listed_endings = folder_paths.folder_names_and_paths["diffusion_models"][1]
    in_gguf = ((kind, [".gguf"]) for kind in GGUF_FOLDERS)
    for kind, endings in (("diffusion_models", listed_endings), *in_gguf):
        if folder_paths.filter_files_extensions([name], endings):
            if path := folder_paths.get_full_path(kind, name):
                return path
    path = folder_paths.get_full_path(CHECKPOINTS, name) if name.lower().endswith(UNPICKLED) else None
    return path or _folder_of(name) or _transformers().get(name)


def _folder_of(name: str) -> str | None:
    """Return the folder of diffusers of that name, where it lies right below a root."""
    if os.path.basename(name) != name:
        return None
    folders = (os.path.join(root, name) for root in folder_paths.get_folder_paths("diffusers"))
    is_one = (each for each in folders if any(os.path.isfile(os.path.join(each, file)) for file in HOLD))
    return next(is_one, None)


def model_choice_of(inputs: dict) -> ModelChoice | None:
    """Return what the inputs of a Load Parallel DiT load; None where no folder has its model_name."""
    name = inputs.get("model_name")
    path = _path_of(name) if isinstance(name, str) else None
    if path is None or not os.path.exists(path):
        return None
    how = {name: inputs[name] for name in ("weight_dtype", "matmul") if name in inputs}
    return ModelChoice(os.path.abspath(path), **how)


def lora_size(name: str) -> LoraBytes:
    """Return the bytes that ranks hold of a file of models/loras next to quantized weights; 0 of no file."""
    path = folder_paths.get_full_path("loras", name)
    return LoraBytes() if path is None else _bytes_of(path, os.path.getsize(path), os.path.getmtime(path))


@lru_cache(MAX_LORAS)
def _bytes_of(path: str, size: int, _changed: float) -> LoraBytes:
    """Count what is held of a file; ``size`` of one that cannot be read: who loads it says why."""
    try:
        header = json.loads(comfy.utils.safetensors_header(path, max_size=MAX_HEADER_BYTES) or "{}")
        header.pop("__metadata__", None)
        held = file_bytes({key: tuple(map(int, each["shape"])) for key, each in header.items()})
    except BROKEN:
        return LoraBytes(size)
    return held if header else LoraBytes(size)


def model_folders() -> list[str]:
    """Return the folders below which a backend may load files: where ComfyUI keeps what the nodes of this
    pack name, and where LoRAs of its own loaders are put."""
    kinds = folder_paths.folder_names_and_paths.keys() & {*GGUF_FOLDERS, CHECKPOINTS, "diffusers", "loras"}
    return [*(root for kind in kinds for root in folder_paths.get_folder_paths(kind)), stock_loras.folder()]


def diffusers_folders() -> dict[str, str]:
    """Return name -> path of the folders of diffusers: pipelines, and transformers alone."""
    paths = {}
    for root in folder_paths.get_folder_paths("diffusers"):
        for folder, below, files in os.walk(root, followlinks=True):
            if not HOLD.isdisjoint(files):
                below.clear()  # the parts of a pipeline are no models of their own
                paths.setdefault(os.path.relpath(folder, root), folder)
    return paths
