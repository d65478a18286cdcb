"""The configurations of a diffusers folder: its transformer's class and arguments, its scheduler and VAE."""

import inspect
from pathlib import Path

import diffusers
import torch

from ...errors import UnsupportedError
from ...models import family_of_class
from .regular_files import read_json

#: norm_type of folders that say Transformer2DModel, a class that diffusers divided later -> their class now.
DIVIDED = {"ada_norm_single": "PixArtTransformer2DModel", "ada_norm_zero": "DiTTransformer2DModel"}


def transformer_class(folder: Path, config: dict) -> type:
    """Return the diffusers class that ``config`` (config.json of ``folder``) names. Raises UnsupportedError
    where it is no transformer of the installed diffusers."""
    name = config.get("_class_name")
    name = name if isinstance(name, str) and name.isidentifier() else ""
    if name == "Transformer2DModel":
        name = DIVIDED.get(str(config.get("norm_type")), name)
    cls = getattr(diffusers, name, None)
    is_model = isinstance(cls, type) and issubclass(cls, torch.nn.Module)
    if cls is None or not is_model or ("Transformer" not in name and family_of_class(name) is None):
        what = f"the folder {folder} holds a {name[:80] or 'model without a class name'}"
        raise UnsupportedError(
            f"{what}, which is no transformer of diffusers {diffusers.__version__}; choose a pipeline's "
            f"folder, or upgrade diffusers."
        )
    return cls


def with_defaults(cls: type, config: dict) -> dict:
    """Return ``config`` without private entries, and with the class's defaults, which older folders lack."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return defaults | {key: value for key, value in config.items() if not key.startswith("_")}


def pipeline_configs(folder: Path) -> dict[str, dict]:
    """Read the configurations next to the transformer's, "scheduler" and "vae", where they are there."""
    paths = {"scheduler": folder / "scheduler/scheduler_config.json", "vae": folder / "vae/config.json"}
    return {name: read_json(path) for name, path in paths.items() if path.is_file()}
