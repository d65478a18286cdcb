"""Faults of files: of a model and of LoRAs, before, while and after they are read (faults.py has those of the
ranks)."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from faults import Once, Outcome, Scene, measured
from loras import randn
from safetensors.torch import load_file, save_file

from backend import protocol

#: A layer of the tiny checkpoint that no block order lacks.
LAYER = "img_in"


def load(scene: Scene, path: Path) -> Outcome:
    """Load a file."""
    backend = scene.backend
    began = time.monotonic()
    return measured(lambda: backend.load(str(path)) and "none", lambda: began)


def truncated(scene: Scene) -> Outcome:
    """A download that broke off."""
    path = scene.folder / "truncated.safetensors"
    data = Path(scene.checkpoint).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return load(scene, path)


def of_nan(scene: Scene) -> Outcome:
    """Weights of NaN, seen in the result."""
    path = scene.folder / "nan.safetensors"
    state = load_file(scene.checkpoint)
    weight = f"{LAYER}.weight"
    save_file({**state, weight: torch.full_like(state[weight], torch.nan)}, path)
    request = protocol.Sample(**{**vars(scene.request()), "model": scene.backend.load(str(path)).model})
    began = time.monotonic()
    return measured(lambda: scene.backend.sample(request), lambda: began)


def missing(scene: Scene) -> Outcome:
    """A file that is gone."""
    return load(scene, scene.folder / "gone.safetensors")


def a_pipe(scene: Scene) -> Outcome:
    """A named pipe in a file's place, which nobody writes to."""
    path = scene.folder / "pipe.safetensors"
    if not path.exists():
        os.mkfifo(path)
    return load(scene, path)


def while_it_is_read(change: Callable[[Path], object]) -> Callable[[Scene], Outcome]:
    """Change the weights of a folder once its load has begun."""

    def make(scene: Scene) -> Outcome:
        backend = scene.backend
        weights = next(Path(scene.large_file()).glob("*.safetensors"))
        before = weights.read_bytes()
        hit = Once(lambda: change(weights))
        try:
            return measured(
                lambda: backend.load(scene.large_file(), "bf16", on_progress=hit) and "none", hit.began
            )
        finally:
            weights.write_bytes(before)

    return make


def overwrite(weights: Path):
    """Begin to copy another file over it."""
    with open(weights, "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


# ---------------------------------------------------------------------- LoRAs
def lora_file(scene: Scene, name: str, seed: int) -> Path:
    """Write a LoRA on the first layer; files of all seeds have one size."""
    path = scene.folder / name
    rows, columns = load_file(scene.checkpoint)[f"{LAYER}.weight"].shape
    factors = {
        "lora_up": 0.2 * randn(rows, 3, seed=seed),
        "lora_down": 0.2 * randn(3, columns, seed=seed + 1),
    }
    part = path.with_suffix(".part")
    save_file({f"diffusion_model.{LAYER}.{k}.weight": v for k, v in factors.items()}, part)
    path.write_bytes(part.read_bytes())  # in place, as a download into the same file
    part.unlink()
    return path


def with_lora(scene: Scene, path: Path) -> torch.Tensor:
    """Sample with a LoRA."""
    loaded = scene.backend.load(scene.checkpoint, loras=[(str(path), 1.0)])
    result = scene.backend.sample(scene.request_for(loaded.model, 6))
    assert result is not None
    return result.tensors["samples"]


def another_lora(scene: Scene) -> Outcome:
    """Another LoRA is written into the file of one that is in the weights: the next run has the new one."""
    before = with_lora(scene, lora_file(scene, "lora.safetensors", seed=1))
    wanted = with_lora(scene, lora_file(scene, "other.safetensors", seed=2))
    assert not torch.allclose(before, wanted)
    again = with_lora(scene, lora_file(scene, "lora.safetensors", seed=1))
    assert torch.equal(before, again), "a LoRA that was taken out has left something"
    path = lora_file(scene, "lora.safetensors", seed=2)
    began = time.monotonic()

    def run() -> str:
        return "none" if torch.equal(with_lora(scene, path), wanted) else "the latent has the old LoRA"

    return measured(run, lambda: began)


def bad_lora(change: Callable[[Path], object]) -> Callable[[Scene], Outcome]:
    """Change the file of a LoRA that is in the weights to what is no LoRA, and run once more."""

    def make(scene: Scene) -> Outcome:
        path = lora_file(scene, "lora.safetensors", seed=1)
        with_lora(scene, path)
        change(path)
        began = time.monotonic()
        return measured(lambda: with_lora(scene, path) is not None and "none", lambda: began)

    return make


def lora_gone_bad_after_its_load(scene: Scene) -> Outcome:
    """The file is cut short between the load that named it and the sample that needs it."""
    backend = scene.backend
    path = lora_file(scene, "late.safetensors", seed=3)
    model = backend.load(scene.checkpoint, loras=[(str(path), 0.5)]).model
    backend.sample(scene.request())  # takes other LoRAs out
    os.truncate(path, path.stat().st_size // 2)
    began = time.monotonic()
    return measured(lambda: backend.sample(scene.request_for(model, 6)), lambda: began)
