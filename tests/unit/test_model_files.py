"""What the drop-down of Load Parallel DiT lists, on a stand-in for ComfyUI's folders."""

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from without_comfy import on_stand_ins

from backend.quantization.lora_bytes import LoraBytes

KINDS = ("diffusion_models", "checkpoints", "diffusers", "loras")
ENDINGS = {".safetensors", ".sft", ".ckpt", ".pt"}


def ending_in(names, endings):
    return [name for name in names if Path(name).suffix.lower() in endings]


@pytest.fixture
def models(tmp_path):
    """models/, and the module nodes/host/model_files.py, which finds its folders."""
    with on_stand_ins("host.model_files") as module:
        folders = sys.modules["folder_paths"]

        def listed(kind):
            return sorted(
                str(path.relative_to(tmp_path / kind))
                for path in (tmp_path / kind).rglob("*")
                if path.is_file()
            )

        def full_path(kind, name):
            path = tmp_path / kind / name
            return str(path) if path.is_file() else None

        stand_ins = {
            "folder_names_and_paths": dict.fromkeys(KINDS, ([], ENDINGS)),
            "get_folder_paths": lambda kind: [str(tmp_path / kind)],
            "get_filename_list": lambda kind: ending_in(listed(kind), ENDINGS),
            "get_full_path": full_path,
            "recursive_search": lambda root, excluded_dir_names: (listed(Path(root).name), {}),
            "filter_files_extensions": ending_in,
        }
        folders.__dict__.update(stand_ins)
        for kind in KINDS:
            (tmp_path / kind).mkdir()
        yield tmp_path, module


def test_checkpoints_are_listed_after_diffusion_models(models):
    """Without pickles, and each name once: an all-in-one file that is linked into both is one."""
    folder, module = models
    for path in (
        *("diffusion_models/z.safetensors", "diffusion_models/both.safetensors"),
        *("checkpoints/a.safetensors", "checkpoints/both.safetensors", "checkpoints/some/b.SFT"),
        *("checkpoints/old.ckpt", "checkpoints/old.pt", "checkpoints/notes.txt"),
    ):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).touch()
    found = module.model_paths()
    assert list(found) == ["both.safetensors", "z.safetensors", "a.safetensors", "some/b.SFT"]
    assert found["both.safetensors"] == str(folder / "diffusion_models/both.safetensors")
    assert found["some/b.SFT"] == str(folder / "checkpoints/some/b.SFT")


def test_a_name_has_the_path_of_the_list(models, monkeypatch):
    """Of every kind, without a walk through the folders of files."""
    folder, module = models
    for path in (
        *("diffusion_models/z.safetensors", "diffusion_models/both.gguf", "diffusion_models/notes.txt"),
        *("checkpoints/both.gguf", "checkpoints/a.SFT", "checkpoints/z.safetensors", "checkpoints/old.ckpt"),
        *("diffusers/pipeline/model_index.json", "diffusers/pipeline/transformer_2/config.json"),
    ):
        (folder / path).parent.mkdir(exist_ok=True, parents=True)
        (folder / path).touch()
    expected = {name: str(Path(path).absolute()) for name, path in module.model_paths().items()}
    assert len(expected) == 5
    monkeypatch.setattr(module, "model_paths", None)
    for name in ("recursive_search", "get_filename_list"):
        monkeypatch.setattr(module.folder_paths, name, None)
    found = {name: module.model_choice_of({"model_name": name})[0] for name in expected}
    assert found == expected
    unlisted = ("notes.txt", "old.ckpt", "absent.gguf", "pipeline/model_index.json", 7)
    assert not any(module.model_choice_of({"model_name": name}) for name in unlisted)


def test_of_one_gguf_file_in_two_folders_the_first_counts(models, monkeypatch):
    """For any hash seed: many folders stand for the two that may have it, as a set of two is in order by
    chance."""
    folder, module = models
    kinds = [*module.GGUF_FOLDERS, *(f"gguf_{i}" for i in range(20))]
    monkeypatch.setattr(module, "GGUF_FOLDERS", type(module.GGUF_FOLDERS)(kinds))
    for kind in kinds:
        module.folder_paths.folder_names_and_paths[kind] = ([], ENDINGS)
        (folder / kind).mkdir(exist_ok=True)
        (folder / kind / "both.gguf").touch()
    for kind in kinds:
        first = str(folder / kind / "both.gguf")
        assert module.model_paths()["both.gguf"] == first
        assert module.model_choice_of({"model_name": "both.gguf"}).path == first
        (folder / kind / "both.gguf").unlink()


def test_ranks_may_load_checkpoints(models):
    folder, module = models
    module.stock_loras.folder = lambda: "loras of ComfyUI"
    assert str(folder / "checkpoints") in module.model_folders()
    (folder / "checkpoints/a.safetensors").touch()
    assert module.model_choice_of({"model_name": "a.safetensors"})[0] == str(
        folder / "checkpoints/a.safetensors"
    )


def safetensors_header(path, max_size=100 * 1024 * 1024):
    """As ComfyUI's."""
    data = Path(path).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    return None if size > max_size else data[8 : 8 + size]


@pytest.mark.parametrize(
    "kind", ["no name", "no shape", "infinite", "lists in lists", "long", "no safetensors"]
)
def test_a_lora_whose_header_is_odd_counts_whole(models, kind, monkeypatch):
    """The ranks refuse it, and say why; nothing fails before, nor is much of it read."""
    folder, module = models
    tensor = {"m.lora_up.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    tensor |= {"no name": {"up": {}}, "no shape": {"m.diff": {"shape": 4}}}.get(kind, {})
    header = b"[" * 100_000 if kind == "lists in lists" else json.dumps(tensor).encode()
    if kind == "infinite":
        header = header.replace(b"[4]", b"[1e999]")
    if kind == "long":
        header += b" " * module.MAX_HEADER_BYTES
    monkeypatch.setattr(module.comfy.utils, "safetensors_header", safetensors_header, raising=False)
    data = struct.pack("<Q", len(header)) + header + bytes(16)
    (folder / "loras" / "lora.safetensors").write_bytes(b"none" if kind == "no safetensors" else data)
    size = (folder / "loras" / "lora.safetensors").stat().st_size
    assert module.lora_size("lora.safetensors") == LoraBytes(size)
    assert module.lora_size("another.safetensors") == LoraBytes()


def test_a_lora_counts_as_ranks_hold_it(models, monkeypatch):
    """Two bytes for a number of any width; once for each state of a file."""
    folder, module = models
    monkeypatch.setattr(module.comfy.utils, "safetensors_header", safetensors_header, raising=False)
    path = folder / "loras" / "lora.safetensors"
    tensors = {"m.lora_up.weight": torch.zeros(64, 4), "m.lora_down.weight": torch.zeros(4, 32)}
    save_file(tensors, path)
    assert module.lora_size("lora.safetensors") == LoraBytes(2 * 4 * (64 + 32))
    text = {f"lora_te1_{name}": tensor for name, tensor in tensors.items()}
    save_file(text, folder / "loras" / "text.safetensors")
    assert module.lora_size("text.safetensors") == LoraBytes()
    monkeypatch.setattr(module.comfy.utils, "safetensors_header", None)
    assert module.lora_size("lora.safetensors") == LoraBytes(2 * 4 * (64 + 32))
