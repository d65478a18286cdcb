"""Files that no trainer should write: each is refused where it is named, and the ranks stay as they are."""

import re
from pathlib import Path

import pytest
import torch
from live_backend import CONFIG, backend, checkpoint, free_at_the_end, request_for  # noqa: F401  # fixtures
from odd_loras import COLUMNS, ODD, RANK, ROWS, STEM, write_good, write_odd
from safetensors.torch import load_file, save_file
from tiny import error_in_std, to_vae_units, write_checkpoint

from backend import protocol
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import mesh


@pytest.fixture(scope="module")
def flux(folder):
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(write_checkpoint(folder / "flux-tiny.safetensors")), "default")
    return engine


@pytest.mark.parametrize("name", ODD)
def test_one_engine_refuses(flux, tmp_path, name):
    path = write_odd(tmp_path / "odd.safetensors", name)
    with pytest.raises(UnsupportedError, match=ODD[name][1]) as error:
        flux.check_loras("m", lora_stack([[str(path), 1.0]]))
    assert "the LoRA odd.safetensors " in str(error.value) and "\n" not in str(error.value)


def test_two_ranks_refuse_and_stay(backend, checkpoint, tmp_path):
    pids = backend.welcome.pids
    plain, expected = request_for(backend, checkpoint)
    for number, name in enumerate(ODD):
        path = write_odd(tmp_path / f"odd{number}.safetensors", name)
        with pytest.raises(protocol.RefusedError, match=ODD[name][1]) as error:
            backend.load(checkpoint, loras=[(str(path), 1.0)])
        assert path.name in str(error.value), name
    assert backend.client.request(protocol.Ping()).models == [plain.model]
    good = backend.load(checkpoint, loras=[(str(write_good(tmp_path / "good.safetensors")), 1.0)])
    changed = backend.sample(protocol.Sample(**{**vars(plain), "model": good.model})).tensors["samples"]
    assert error_in_std(to_vae_units(changed), expected) > 1e-2  # it was added
    samples = backend.sample(plain).tensors["samples"]
    assert error_in_std(to_vae_units(samples), expected) <= 1e-4
    assert backend.welcome.pids == pids and all(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_file_that_turns_bad_is_refused_before_the_ranks_hear(backend, checkpoint, tmp_path):
    """Its name is known from a Load that found it good."""
    plain, expected = request_for(backend, checkpoint)
    path = write_good(tmp_path / "good.safetensors")
    loaded = backend.load(checkpoint, loras=[(str(path), 1.0)])
    assert loaded.info["notes"] == ["LoRA on 1 layer"]
    write_odd(path, "NaN in down")
    with pytest.raises(protocol.RefusedError, match="good.safetensors .*NaN or infinity"):
        backend.sample(protocol.Sample(**{**vars(plain), "model": loaded.model}))
    assert error_in_std(to_vae_units(backend.sample(plain).tensors["samples"]), expected) <= 1e-4


def test_values_are_read_once_for_a_file(flux, tmp_path, monkeypatch):
    """Alphas apart, of which the scale is made again."""
    read, whole = [], TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda self, key, *a, **k: read.append(key) or whole(self, key))
    path = write_good(tmp_path / "good.safetensors")
    stack = lora_stack([[str(path), 1.0]])
    flux.check_loras("m", stack)
    assert set(load_file(path)) == set(read)
    read.clear()
    flux.check_loras("m", stack)
    assert all(key.endswith(".alpha") for key in read)
    write_good(path, seed=1)
    path.touch()
    read.clear()
    flux.check_loras("m", lora_stack([[str(path), 1.0]]))
    assert set(load_file(path)) <= set(read)


@pytest.mark.parametrize(
    "tensors",
    [
        {"lora_up.weight": torch.ones(ROWS, RANK), "lora_down.weight": torch.ones(RANK, COLUMNS)},
        {"lora_up.weight": torch.ones(ROWS, 1, 1, 1), "lora_down.weight": torch.ones(1, COLUMNS, 1, 1)},
        {
            "lora_up.weight": torch.ones(ROWS, RANK).to(torch.float8_e5m2),
            "lora_down.weight": torch.ones(RANK, COLUMNS).half(),
            "alpha": torch.tensor([4]),
        },
        {"diff": torch.zeros(ROWS, COLUMNS), "alpha": torch.tensor(0.0)},
    ],
    ids=["plain", "as a convolution", "of two types", "that adds nothing"],
)
def test_what_is_only_unusual_is_taken(flux, tmp_path, tensors):
    path = tmp_path / "good.safetensors"
    save_file({f"{STEM}.{role}": value for role, value in tensors.items()}, path)
    assert flux.check_loras("m", lora_stack([[str(path), 1.0]])) == [""]


@pytest.mark.parametrize(
    "path, strength, says",
    [
        ("/nowhere\0/a.safetensors", 1.0, "is no path"),
        ("/" + "a" * 5000, 1.0, "not below a folder"),
        ("/\ud800", 1.0, "is no path"),
        ("/a", 1e300, "not a pair"),
        ("/a", 10**400, "not a pair"),
    ],
    ids=["NUL", "long", "surrogate", "strength", "huge strength"],
)
def test_paths_and_strengths_that_cannot_be(backend, checkpoint, path, strength, says):
    if strength == 10**400:
        with pytest.raises(UnsupportedError, match=says):
            lora_stack([[path, strength]])
        return
    with pytest.raises(protocol.RefusedError, match=says) as error:
        backend.load(checkpoint, loras=[(path, strength)])
    assert len(str(error.value)) < 700 and not re.search("a{600}", str(error.value))
