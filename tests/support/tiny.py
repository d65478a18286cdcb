"""Tiny checkpoints and the golden cases as requests; for the tests' own process and the rank programs."""

import errno
import fcntl
import importlib.util
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import open_checkpoint
from backend.protocol import Sample
from backend.protocol.solver_names import PERCENTS

GOLDEN = Path(__file__).parents[1] / "golden"
#: Blocks of either kind of shallow_flux(): one for each of two stages.
BLOCKS = 2
#: Environment variable of a session's folder of checkpoints (tests/conftest.py).
SHARED = "PARALLEL_DIT_TEST_CHECKPOINTS"
#: ComfyUI's latent format of Flux: model = (vae - shift) * scale.
SCALE, SHIFT = 0.3611, 0.1159
# : FAMILY__CASE -> distance of one process from the golden latent, in its standard deviations
# (scripts/golden_distances.py).
DISTANCES = json.loads((GOLDEN.parent / "golden_distances.json").read_text())
FLUX_CASES = sorted(path.stem.split("__")[1] for path in GOLDEN.glob("flux-dev__*.safetensors"))


@lru_cache
def weights_module():
    spec = importlib.util.spec_from_file_location("golden_weights", GOLDEN / "weights.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def facts(family: str) -> dict:
    """FAMILY.json: comfy_class, unet_config, shapes."""
    return json.loads((GOLDEN / f"{family}.json").read_text())


def shallow_flux(single: int = BLOCKS) -> dict[str, list[int]]:
    """Key -> shape of the tiny Flux with few blocks, so many ``single`` ones: loading it takes a third of the
    time."""
    count = {"double": BLOCKS, "single": single}

    def is_here(key: str) -> bool:
        block = re.match(r"(double|single)_blocks\.(\d+)\.", key)
        return block is None or int(block[2]) < count[block[1]]

    return {key: shape for key, shape in facts("flux-dev")["shapes"].items() if is_here(key)}


def opened_in(folder: Path, write: Callable[[Path, str], Path]) -> Callable[[str], Checkpoint]:
    """Return a function: name -> the checkpoint that ``write`` makes of it, opened once. Nobody may load its
    weights."""

    @cache
    def opened(name: str) -> Checkpoint:
        return open_checkpoint(str(write(folder / f"{name}.safetensors", name)))

    return opened


def write_checkpoint(
    path: Path, family: str = "flux-dev", prefix: str = "", drop: tuple[str, ...] = ()
) -> Path:
    """A single file in ComfyUI's own key layout; ``drop`` leaves keys out. Written whole or not at all."""
    if path.exists():
        return path

    def state() -> dict[str, torch.Tensor]:
        return weights_module().state_dict(facts(family)["shapes"])

    if not prefix and not drop:
        return shared(path, family, state)
    return save_whole({prefix + key: value for key, value in state().items() if key not in drop}, path)


def write_shallow_flux(path: Path) -> Path:
    """The checkpoint of shallow_flux()."""
    return shared(path, "flux-shallow", lambda: weights_module().state_dict(shallow_flux()))


def shared(path: Path, name: str, tensors: Callable[[], dict[str, torch.Tensor]]) -> Path:
    """``path`` as a hard link to the session's only safetensors file of that ``name``."""
    return shared_file(path, f"{name}.safetensors", lambda file: save_file(tensors(), file))


def shared_file(path: Path, name: str, write: Callable[[Path], object]) -> Path:
    """``path`` as a hard link to the session's only file of that ``name``, which ``write`` writes: random
    weights of gigabytes are made once for all tests and ranks. Nobody writes into it. Outside a session it is
    a file of its own."""
    if SHARED not in os.environ:
        return made_whole(path, write)
    file = made_once(Path(os.environ[SHARED], name), write)
    part = of_this_thread(path)
    try:
        os.link(file, part)  # which, unlike a rename, fails where another rank was faster
    except OSError as error:
        if error.errno != errno.EXDEV:  # the session's folder is on another disk
            raise
        shutil.copyfile(file, part)
    part.rename(path)
    part.unlink(missing_ok=True)  # a rename of one link of a file to another does nothing
    return path


def made_once(path: Path, write: Callable[[Path], object]) -> Path:
    """The file of ``path``, made by the first of all threads and processes that ask for it."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            made_whole(path, write).chmod(0o444)
    return path


def made_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """A file that no other process sees half written."""
    part = of_this_thread(path)
    write(part)
    return part.rename(path)


def of_this_thread(path: Path) -> Path:
    """A name next to ``path`` that no other thread or process uses, of the same suffix."""
    return path.with_stem(f"{path.stem}.{os.getpid()}.{threading.get_ident()}")


def random_weights(shapes: dict[str, list[int]], family: str) -> dict[str, torch.Tensor]:
    """The random weights of ``shapes``: a weight is its name's and its shape's, so those of a golden family
    are read from its file where the session has it, which takes a quarter of the time."""
    file, known = Path(os.environ.get(SHARED, os.devnull), f"{family}.safetensors"), {}
    if file.exists():
        with safe_open(file, "pt") as weights:
            same = [
                key
                for key in set(weights.keys()) & set(shapes)
                if weights.get_slice(key).get_shape() == list(shapes[key])
            ]
            known = {key: weights.get_tensor(key) for key in same}
    others = {key: shape for key, shape in shapes.items() if key not in known}
    return known | weights_module().state_dict(others)


def save_whole(tensors: dict[str, torch.Tensor], path: Path) -> Path:
    """A safetensors file that no other process sees half written."""
    return made_whole(path, lambda part: save_file(tensors, part))


def diffusers_state(checkpoint) -> dict[str, torch.Tensor]:
    """The loaded parameters of a checkpoint under the names of the diffusers class."""
    tensors = {}
    moved = checkpoint.family.layout.moved(checkpoint.config)
    for name, value in checkpoint.transformer.state_dict().items():
        here = next((prefix for prefix in moved if name.startswith(prefix)), "")
        tensors[moved.get(here, "") + name.removeprefix(here)] = value.contiguous()
    return tensors


def as_folder(file: Path, **entries) -> Path:
    """The weights of a single file as a diffusers folder next to it, whose configuration has other
    ``entries``.
    """
    checkpoint = open_checkpoint(str(file))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    return save_folder(checkpoint, file.with_name("transformer"), **entries)


def save_folder(checkpoint, folder: Path, **entries) -> Path:
    """A loaded checkpoint as a diffusers folder, whose configuration has other ``entries``."""
    folder.mkdir()
    save_file(diffusers_state(checkpoint), folder / "diffusion_pytorch_model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"_class_name": checkpoint.family.transformer, **checkpoint.config, **entries})
    )
    return folder


def to_model_space(latent: torch.Tensor) -> torch.Tensor:
    """What ComfyUI's process_in does for Flux; an empty latent stays empty."""
    return (latent - SHIFT) * SCALE if latent.any() else latent


def to_vae_units(samples: torch.Tensor) -> torch.Tensor:
    return samples / SCALE + SHIFT


def flux_percent_sigmas(shift: float = 1.15) -> torch.Tensor:
    """ComfyUI's ModelSamplingFlux.percent_to_sigma at solver_names.PERCENTS."""
    a = math.exp(shift)
    return torch.tensor([a / (a + 1 / (1 - percent) - 1) for percent in PERCENTS], dtype=torch.float64)


def golden_request(case: str, model: str = "tiny", family: str = "flux-dev") -> tuple[Sample, torch.Tensor]:
    """The request of a golden case, and the LATENT that ComfyUI returned for it (VAE units)."""
    path = GOLDEN / f"{family}__{case}.safetensors"
    stored = load_file(path)
    with safe_open(path, "pt") as file:
        args = json.loads(file.metadata()["args"])
    last = len(stored["sigmas"]) - 1 if args["last_step"] is None else args["last_step"]
    tensors = {
        "noise": stored["noise"],
        "latent": to_model_space(stored["latent"]),
        "sigmas": stored["sigmas"][args["start_step"] or 0 : last + 1],
    }
    tensors["percent_sigmas"] = flux_percent_sigmas()
    if "noise_mask" in stored:
        tensors["denoise_mask"] = stored["noise_mask"]
    for branch in ("positive", "negative")[: 1 if args["cfg"] == 1.0 else 2]:
        tensors[f"{branch}.c_crossattn"] = stored[f"{branch}.cross_attn"]
        tensors[f"{branch}.y"] = stored[f"{branch}.pooled_output"]
        tensors[f"{branch}.guidance"] = stored[f"{branch}.guidance"].reshape(1)
    return Sample(model, args["sampler"], args["cfg"], args["seed"], tensors=tensors), stored["samples"]


def batch_request(batch: int, case: str = "euler_simple") -> Sample:
    """A golden case's prompts over a batch of other noises, with a stochastic solver."""
    sample, _ = golden_request(case)
    noise = torch.randn(
        batch, *sample.tensors["noise"].shape[1:], generator=torch.Generator().manual_seed(batch)
    )
    return replace(
        sample,
        sampler="euler_ancestral",
        tensors={**sample.tensors, "noise": noise, "latent": torch.zeros_like(noise)},
    )


def error_in_std(samples: torch.Tensor, golden: torch.Tensor) -> float:
    """Largest difference in units of the golden latent's standard deviation."""
    return ((samples - golden) / golden.std()).abs().max().item()


def is_known_distance(name: str, error: float) -> bool:
    """Whether the golden case is as near as golden_distances.json says; a machine that rounds in another
    order may be ten times as far away.
    """
    assert name in DISTANCES, f"scripts/golden_distances.py has not measured {name} yet"
    return error <= DISTANCES[name] * 10


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
