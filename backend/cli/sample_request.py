"""A request of the command ``sample``: an object of JSON, and the files that it names."""

import json
import math
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..client.auto.model_choice import ModelChoice
from ..config import ConfigError
from ..errors import quoted
from ..planner.machine import is_latent_shape
from ..protocol import framing

#: Keys of ComfyUI's CONDITIONING -> the names of the model arguments that ComfyUI makes of them.
CONDITIONING = {"cross_attn": "c_crossattn", "pooled_output": "y"}
SUFFIXES = (".latent", ".safetensors")
#: Kinds of entries -> how a message calls them.
IN_WORDS: dict[Any, str] = {str: "a text", int: "a whole number", float: "a number", list: "a list"}


@dataclass(frozen=True)
class SampleRequest:
    """One request of the command ``sample``. model: a file or a diffusers folder. positive, negative:
    safetensors files of model arguments, by ComfyUI's names. latent: the size of an empty one, [C, [T,] H,
    W], or a list of sizes where the model denoises several at once (video and audio), or a file to start
    from. out: the file to write. loras: [path, strength] of each. sigmas: noise levels, steps + 1, instead of
    those of ``steps``, ``shift`` and ``scheduler``. vae: the config.json whose scaling takes latents to the
    VAE's units and back. Paths are absolute."""

    model: str
    positive: str
    latent: Any
    out: str
    negative: str = ""
    steps: int = 20
    cfg: float = 1.0
    sampler: str = "euler"
    seed: int = 0
    batch: int = 1
    shift: float = 0.0
    sigmas: list = field(default_factory=list)
    scheduler: str = ""
    vae: str = ""
    loras: list = field(default_factory=list)
    weight_dtype: str = "default"
    matmul: str = "auto"

    @property
    def choice(self) -> ModelChoice:
        return ModelChoice(self.model, self.weight_dtype, self.matmul)

    @property
    def sizes(self) -> list[list[int]]:
        """[C, [T,] H, W] of each empty latent; none where a file has them."""
        if isinstance(self.latent, str):
            return []
        return self.latent if isinstance(self.latent[0], list) else [self.latent]

    def allowed_folders(self) -> list[str]:
        """Return from below which folders its model and LoRAs are read."""
        return [str(Path(path).parent) for path in (self.model, *(path for path, _ in self.loras))]


#: Entries that are paths, relative to the file of the request.
PATHS = ("model", "positive", "negative", "out", "scheduler", "vae")


def read_requests(text: str, folder: Path) -> list[SampleRequest]:
    """Return the requests of a JSON text, an object or a list of them, whose paths begin at ``folder``.
    ConfigError, which says what is wrong with which, for anything else."""
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the request is no JSON ({error}); see docs/headless.md.") from error
    entries = parsed if isinstance(parsed, list) else [parsed]
    if not entries:
        raise ConfigError("the list of requests is empty; name at least one.")
    return [_request(entry, f"request {i + 1}", folder) for i, entry in enumerate(entries)]


def _request(entry, name: str, folder: Path) -> SampleRequest:
    if not isinstance(entry, dict):
        raise ConfigError(f"{name} is {quoted(entry)}; a request is an object, {{...}}.")
    known = {each.name: each for each in fields(SampleRequest)}
    needed = [key for key, each in known.items() if each.default is each.default_factory is MISSING]
    missing = [key for key in needed if key not in entry]
    unknown = [key for key in entry if key not in known]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {quoted(unknown[0])}"
        others = ", ".join(key for key in known if key not in needed)
        raise ConfigError(f"{name} {what}; it has {', '.join(needed)}, and may have {others}.")
    values: dict[str, Any] = {
        key: _value(f"{name}'s {key}", value, known[key].type) for key, value in entry.items()
    }
    for key in PATHS:
        if values.get(key):
            values[key] = _path(values[key], folder)
    if isinstance(values["latent"], str):
        values["latent"] = _path(values["latent"], folder)
    values["loras"] = [_lora(f"{name}'s loras", lora, folder) for lora in values.get("loras", [])]
    request = SampleRequest(**values)
    _check(request, name)
    return request


def _value(name: str, value, kind) -> Any:
    """Return an entry in the type of its field. ConfigError for another one."""
    if kind is Any or (isinstance(value, kind) and not isinstance(value, bool)):
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    raise ConfigError(f"{name} is {quoted(value)}; it is {IN_WORDS[kind]}.")


def _path(value: str, folder: Path) -> str:
    return str((folder / Path(value).expanduser()).absolute())


def _lora(name: str, lora, folder: Path) -> list:
    is_pair = isinstance(lora, list) and len(lora) == 2 and isinstance(lora[0], str)
    if not is_pair or not isinstance(lora[1], (int, float)):
        raise ConfigError(f"{name} have {quoted(lora)}; write [file, strength].")
    return [_path(lora[0], folder), float(lora[1])]


def _check(request: SampleRequest, name: str):
    _check_latent(request, name)
    if request.steps < 1 or request.batch < 1 or request.shift < 0:
        values = f"{request.steps} steps, batch {request.batch}, shift {request.shift:g}"
        raise ConfigError(f"{name} has {values}; steps and batch are at least 1, shift at least 0.")
    if not 0 <= request.seed < 1 << 64:
        raise ConfigError(f"{name}'s seed is {request.seed}; it is from 0 to 2**64 - 1, as ComfyUI's.")
    size = 4 * request.batch * sum(map(math.prod, request.sizes))
    if size > framing.MAX_BODY:
        raise ConfigError(
            f"{name}'s latent has {size / 2**30:,.0f} GiB, more than a message may; make it smaller."
        )
    if request.cfg != 1.0 and not request.negative:
        raise ConfigError(f"{name} has cfg {request.cfg:g} and no negative; name one, or set cfg to 1.")
    if Path(request.out).suffix not in SUFFIXES:
        raise ConfigError(f"{name}'s out is {quoted(request.out)}; it ends with {' or '.join(SUFFIXES)}.")
    if not Path(request.out).parent.is_dir():
        raise ConfigError(f"{name}'s out is {quoted(request.out)}, in a folder that does not exist; make it.")


def _check_latent(request: SampleRequest, name: str):
    """Refuse what is neither a file nor sizes of latents, and several where only one can be."""
    latent = request.latent
    if isinstance(latent, str):
        return
    several = isinstance(latent, list) and bool(latent) and isinstance(latent[0], list)
    sizes = latent if several else [latent]
    if not all(is_latent_shape(size) for size in sizes):
        raise ConfigError(
            f"{name}'s latent is {quoted(latent)}; write the latent's size, [channels, height, width] or "
            f"[channels, frames, height, width], or a list of sizes, or name a file."
        )
    if several:
        check_several(request, name, len(sizes))


def check_several(request: SampleRequest, name: str, count: int):
    """Refuse ``count`` latents where only one can be. Raises ConfigError."""
    if request.vae:
        raise ConfigError(f"{name} has {count} latents and a vae, which is of one; leave vae out.")
    out = Path(request.out)
    if out.suffix == SUFFIXES[0]:
        raise ConfigError(
            f"{name} has {count} latents, and out is {quoted(out.name)}, which has one; end its name with "
            f"{SUFFIXES[1]}."
        )


def read_tensors(path: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. ConfigError, which names it, for another one."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{quoted(path)} cannot be read ({error}); name a safetensors file.") from error


def read_prompt(path: str, accepted: list[str]) -> dict[str, Tensor]:
    """Return the model arguments of a file by ComfyUI's names; lists are KEY.0, KEY.1, ... ConfigError for a
    name that the model does not take."""
    tensors = {CONDITIONING.get(name, name): tensor for name, tensor in read_tensors(path).items()}
    unknown = [name for name in tensors if name.split(".")[0] not in accepted]
    if unknown:
        takes = ", ".join(accepted)
        raise ConfigError(f"{quoted(path)} has {quoted(unknown[0])}; this model takes {takes}.")
    return tensors


def read_json(path: str, name: str) -> dict:
    """Return a diffusers configuration: a file, or NAME in a folder. ConfigError where there is none."""
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    try:
        parsed = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{quoted(str(file))} cannot be read ({error}); name diffusers' {name}.") from error
    if not isinstance(parsed, dict):
        raise ConfigError(f"{quoted(str(file))} holds no object; name diffusers' {name}.")
    return parsed
