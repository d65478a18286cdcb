"""The files in which LoRAs of ComfyUI's own loaders are handed to the ranks: what is in them, when they are
written and when they are removed."""

import os
import subprocess
import sys
from pathlib import Path

import pack
import pytest
import torch
from comfy_modules import comfy_modules
from loras import MODULES, lora
from pairs import ksampler
from parallel_dit.backend.protocol import RefusedError
from parallel_dit.nodes.host import stock_loras
from safetensors import SafetensorError
from safetensors.torch import load_file
from stock_lora_models import flux, with_loras  # noqa: F401  # a fixture

with comfy_modules():
    import comfy.lora
    import comfy.lora_convert
    import comfy.sd
    import comfy.weight_adapter


def test_the_newest_files_stay(tmp_path, monkeypatch):
    """Temporary files may lie in memory: a day of other LoRAs would fill it."""
    monkeypatch.setattr(stock_loras, "folder", lambda: str(tmp_path))
    monkeypatch.setattr(stock_loras, "MAX_BYTES", 5_000)
    paths = []
    for age, value in enumerate((0.0, 1.0, 2.0)):
        paths.append(Path(stock_loras._saved({"a": torch.full((1000,), value)})))
        os.utime(paths[-1], (age, age))
    assert [path.exists() for path in paths] == [False, True, True]
    again = Path(stock_loras._saved({"a": torch.full((1000,), 1.0)}))
    assert again == paths[1] and again.stat().st_atime > 2
    assert again.stat().st_mtime == 1  # ranks take it for the file that they hold
    stock_loras._saved({"a": torch.full((1000,), 3.0)})
    assert paths[1].exists() and not paths[2].exists() and not list(tmp_path.glob("*.part"))


def patches_of(file: dict, flux) -> dict:
    """What Load LoRA gives to ``add_patches``."""
    keys = comfy.lora.model_lora_keys_unet(flux.ours.model, {})
    return comfy.lora.load_lora(comfy.lora_convert.convert_lora(dict(file)), keys)


def written(file: dict, flux) -> dict:
    info = flux.dit.loaded.info
    return load_file(stock_loras.write(patches_of(file, flux), info["weights"], info["parts"]))


@pytest.mark.parametrize("spelling", MODULES)
def test_tensors_stay_as_they_are_stored(flux, spelling):
    """No wider type where there is an alpha, and no zeros for the rows of other parameters."""
    file = {key: value.bfloat16() for key, value in lora(MODULES[spelling], spelling)[0].items()}
    found = written(file, flux)
    factors = {key: value for key, value in found.items() if not key.endswith(".alpha")}
    stored = [value for key, value in file.items() if not key.endswith(".alpha")]
    assert {value.dtype for value in factors.values()} == {torch.bfloat16}
    assert sorted(value.sum().item() for value in factors.values()) == sorted(v.sum().item() for v in stored)
    assert sum(value.nbytes for value in factors.values()) == sum(value.nbytes for value in stored)


@pytest.mark.parametrize("rows", [(64, 40), (128, 64), (0, 128)], ids=str)
def test_rows_that_a_weight_has_not_are_refused(rows, monkeypatch, tmp_path):
    """ComfyUI gives keys and values of Lumina 2 the places that they had if they were as many as queries."""
    monkeypatch.setattr(stock_loras, "folder", lambda: str(tmp_path))

    def patch(up: int) -> comfy.weight_adapter.LoRAAdapter:
        weights = (torch.ones(up, 2), torch.ones(2, 64), None, None, None, None)
        return comfy.weight_adapter.LoRAAdapter(set(), weights)

    name, shapes, edges = "a.attention.qkv.weight", {"a.attention.qkv.weight": [128, 64]}, [0, 64, 96, 128]
    first, count = rows
    queries = {(f"diffusion_model.{name}", (0, 0, 64)): patch(64)}
    assert stock_loras.write(queries, shapes, {name: edges})
    keys = {(f"diffusion_model.{name}", (0, first, count)): patch(32)}
    says = f"gets a LoRA of 32 rows for its rows {first} to {first + count} of 128, which .* Parallel LoRA"
    with pytest.raises(RefusedError, match=says):
        stock_loras.write(queries | keys, shapes, {name: edges})


def test_rows_that_are_no_whole_parameter_are_of_one_product(flux):
    """As of Flux.2, whose single blocks have queries and all else in one parameter."""
    file = lora(MODULES["diffusers"], "diffusers")[0]
    info, patches = flux.dit.loaded.info, patches_of(file, flux)
    apart = load_file(stock_loras.write(patches, info["weights"], info["parts"]))
    found = load_file(stock_loras.write(patches, info["weights"]))

    def added(module: str, file: dict = found) -> torch.Tensor:
        module = f"diffusion_model.{module}"
        scale = file[f"{module}.alpha"] / 3 if f"{module}.alpha" in file else 1.0
        return scale * file[f"{module}.lora_up.weight"] @ file[f"{module}.lora_down.weight"]

    assert len(found) == 4 and len(apart) == 9
    whole = added("double_blocks.0.img_attn.qkv")
    for i, rows in ((1, "256_512"), (2, "512_768")):
        part = added(f"double_blocks.0.img_attn.qkv.rows_{rows}", apart)
        torch.testing.assert_close(whole[256 * i : 256 * (i + 1)], part)
    assert not whole[:256].any()


def test_another_strength_reads_nothing(flux, monkeypatch):
    """While the loader's node holds its tensors; other ones are read, and a file that has gone."""
    digests, digest = [], stock_loras.hashlib.sha256
    monkeypatch.setattr(stock_loras.hashlib, "sha256", lambda *a: digests.append(a) or digest(*a))
    file, _ = lora(MODULES["diffusers"], "diffusers", seed=21)
    first = with_loras(flux.ours, file, strength=0.8)
    count = len(digests)
    second = with_loras(flux.ours, file, strength=0.3)
    assert first.dit.loras[0][0] == second.dit.loras[0][0] and first.dit.loras != second.dit.loras
    assert len(digests) == count > 0
    copied = with_loras(flux.ours, {key: value.clone() for key, value in file.items()})
    assert copied.dit.loras == first.dit.loras and len(digests) > count
    count = len(digests)
    Path(first.dit.loras[0][0]).unlink()
    assert Path(first.dit.loras[0][0]).exists() and len(digests) > count
    del first, second, copied, file
    other = with_loras(flux.ours, lora(MODULES["kohya"], "kohya", seed=22)[0])
    assert len(other.dit.loras) == 1 and all(
        each() is not None for held, _ in stock_loras._written.values() for each in held
    )


def test_files_of_one_model_stay_however_large_they_are(flux, monkeypatch):
    """Ranks read all that a MODEL names, each time that its stack changes."""
    monkeypatch.setattr(stock_loras, "MAX_BYTES", 1)
    files = [lora(MODULES[spelling], spelling, seed=9)[0] for spelling in MODULES]
    model = with_loras(flux.ours, *files)
    sample = ksampler(flux, steps=1)
    wanted = sample(model)
    folder = Path(stock_loras.folder())
    assert len(list(folder.iterdir())) == 3
    for path in folder.iterdir():
        path.unlink()
    assert torch.equal(sample(model), wanted) and len(list(folder.iterdir())) == 3
    with_loras(flux.ours, lora(MODULES["comfyui"], "comfyui", seed=11)[0])
    assert len(list(folder.iterdir())) == 1


def test_a_file_is_whole_or_not_there(monkeypatch, tmp_path):
    monkeypatch.setattr(stock_loras, "folder", lambda: str(tmp_path))

    def full(tensors, path):
        Path(path).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    shapes = {"a.weight": [4, 4]}
    patches = {"diffusion_model.a.weight": ("diff", (torch.ones(4, 4),))}
    with monkeypatch.context() as patched, pytest.raises(RefusedError, match="No space left.*TMPDIR"):
        patched.setattr(stock_loras, "save_file", full)
        stock_loras.write(patches, shapes)
    assert load_file(stock_loras.write(patches, shapes)).keys() == {"diffusion_model.a.diff"}


#: Writes a file as one ComfyUI does, empties the temporary folder as another one does, and prints the folder.
AFTER_ANOTHER = """
import os, shutil, sys
import pack, torch
from comfy_modules import comfy_modules

with comfy_modules():
    import folder_paths
    from parallel_dit.nodes.host import model_files, stock_loras
folder_paths.set_temp_directory(sys.argv[1])
patch = ("diff", (torch.ones(4, 4),))
path = stock_loras.write({"diffusion_model.a.weight": patch}, {"a.weight": [4, 4]})
shutil.rmtree(sys.argv[1], ignore_errors=True)
assert os.path.exists(path)
assert os.stat(stock_loras.folder()).st_mode & 0o777 == 0o700
assert stock_loras.folder() in model_files.model_folders()
print(stock_loras.folder())
"""


def test_a_patch_of_a_tensor_alone_is_a_difference(monkeypatch, tmp_path):
    """As ComfyUI takes it. Of others no tensor is printed."""
    monkeypatch.setattr(stock_loras, "folder", lambda: str(tmp_path))
    shapes = {"a.weight": [4, 4]}
    path = stock_loras.write({"diffusion_model.a.weight": (torch.ones(4, 4),)}, shapes)
    assert load_file(path)["diffusion_model.a.diff"].equal(torch.ones(4, 4))
    for patch, kind in (((torch.ones(4, 4), {}), "of no name"), (("set", (torch.ones(4, 4),)), "set")):
        with pytest.raises(RefusedError, match=f"a patch of the kind {kind}, which"):
            stock_loras.write({"diffusion_model.a.weight": patch}, shapes)


def test_the_folder_is_one_processs_alone(tmp_path):
    """A second ComfyUI leaves it, and nothing stays of it."""
    command = [sys.executable, "-c", AFTER_ANOTHER, str(tmp_path / "temp")]
    places = [str(Path(file).parent) for file in (__file__, pack.__file__)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "TMPDIR": str(tmp_path)}
    folders = [subprocess.check_output(command, env=environment, text=True).split()[-1] for _ in range(2)]
    assert len(set(folders)) == 2 and not any(Path(folder).exists() for folder in folders)
