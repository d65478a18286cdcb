"""What the drop-down of Load Parallel DiT lists, on a stand-in for ComfyUI's folders."""

import sys

import pytest
from without_comfy import on_stand_ins

KINDS = ("diffusion_models", "checkpoints", "diffusers", "loras")


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

        stand_ins = {
            "folder_names_and_paths": dict.fromkeys(KINDS),
            "get_folder_paths": lambda kind: [str(tmp_path / kind)],
            "get_filename_list": listed,
            "get_full_path": lambda kind, name: str(tmp_path / kind / name),
            "recursive_search": lambda root, excluded_dir_names: ([], {}),
            "filter_files_extensions": lambda names, extensions: names,
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


def test_ranks_may_load_checkpoints(models):
    folder, module = models
    module.stock_loras.folder = lambda: "loras of ComfyUI"
    assert str(folder / "checkpoints") in module.model_folders()
    (folder / "checkpoints/a.safetensors").touch()
    assert module.wanted_of({"model_name": "a.safetensors"})[0] == str(folder / "checkpoints/a.safetensors")
