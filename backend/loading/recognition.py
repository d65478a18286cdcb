"""Recognises the transformer of a file or folder by its headers, and opens its checkpoint."""

import re
from collections.abc import Mapping
from itertools import product
from operator import itemgetter
from pathlib import Path

from ..errors import UnsupportedError, quoted, reason, some
from ..models import FAMILIES, family_of_class
from ..models.key_layout import PREFIXES, Layout, Shapes, renamed
from .autodetect import fallback
from .checkpoint import Checkpoint
from .files.allowed_folders import ANYWHERE, Folders
from .files.folder_config import pipeline_configs, transformer_class, with_defaults
from .files.gguf_files import GGUFFile
from .files.regular_files import is_pipeline, read_json
from .files.safetensors_files import TensorFiles, Weights, weight_paths
from .parameter_sources import from_diffusers, numbered
from .quantized import QuantizedFiles
from .unsupported_models import check_format, check_supported, check_unread


def open_checkpoint(
    path: str, allowed: Folders = ANYWHERE, autodetected: Mapping | None = None
) -> Checkpoint:
    """Recognise the file or folder at ``path``, reading headers only; a folder's index may name links to what
    is ``allowed``. ``autodetected``: as another rank's Checkpoint has it. Raises UnsupportedError."""
    where = Path(path)
    if not where.exists():
        raise UnsupportedError(f"there is no model at {path}; refresh the page and choose model_name again.")
    if where.is_dir():
        checkpoint = _open_folder(where, allowed, autodetected)
    else:
        files = GGUFFile(where) if where.suffix == ".gguf" else QuantizedFiles(TensorFiles([where]))
        checkpoint = recognise(where.name, files)
    check_complete(checkpoint)
    return checkpoint


def check_complete(checkpoint: Checkpoint):
    """Refuse an unsupported variant, an incomplete file and unread tensors. Raises UnsupportedError."""
    for name, (value, what) in checkpoint.family.build.only.items():
        stated = checkpoint.config.get(name, value)
        if (tuple(stated) if isinstance(stated, list) else stated or None) != (value or None):
            raise UnsupportedError(
                f"{checkpoint.name} is {what} (its {name} is {quoted(stated)}), a variant of "
                f"{checkpoint.family.name} that is not supported; use another model of this family."
            )
    _ = checkpoint.sources, checkpoint.dtype
    check_unread(checkpoint.name, checkpoint.family, _unread(checkpoint))


def _unread(checkpoint: Checkpoint) -> dict[str, str]:
    """Return tensors that neither a family nor diffusers' class reads, the layout's name -> the file's."""
    own = checkpoint.keys or {key: key for key in checkpoint.files.shapes}
    patterns = checkpoint.transformer_class._keys_to_ignore_on_load_unexpected or ()
    ignored = [re.compile(pattern) for pattern in patterns]
    return {
        ours: key
        for ours, key in own.items()
        if key not in checkpoint.read_keys and not any(pattern.search(ours) for pattern in ignored)
    }


def _open_folder(folder: Path, allowed: Folders, autodetected: Mapping | None) -> Checkpoint:
    inner = folder / "transformer" if is_pipeline(folder) else folder
    if not (inner / "config.json").is_file():
        raise UnsupportedError(
            f"the folder {inner} has no config.json; choose a diffusers pipeline's or transformer's folder."
        )
    config = read_json(inner / "config.json")
    cls = transformer_class(inner, config)
    latent_format = config.pop("latent_format", None)
    config = with_defaults(cls, config)
    # a further transformer of a pipeline is chosen by its own folder
    pipeline = pipeline_configs(folder.parent if is_pipeline(folder.parent) else folder)
    family = family_of_class(cls.__name__)
    companion = family.layout.companion if family else None
    parts = [inner]
    if companion and (folder / companion.folder / "config.json").is_file():
        parts.append(folder / companion.folder)
        config |= companion.config(read_json(parts[1] / "config.json"))
    files = QuantizedFiles(TensorFiles([path for part in parts for path in weight_paths(part, allowed)]))
    check_format(folder.name, files.shapes)
    if family is None:
        # before blocks of the configuration's sizes are run: those of the files, or it is refused
        _ = Checkpoint(name=folder.name, family=fallback.unknown(cls), config=config, files=files).sources
        family, autodetected = fallback.family(cls, config, pipeline.get("scheduler"), autodetected)
    names = {**(companion.names if companion else {}), **family.layout.moved(config)}
    keys = renamed(names, {key: key for key in files.shapes})
    config |= family.build.pipeline(pipeline)
    family = family.of(config)
    return Checkpoint(
        name=folder.name,
        family=family,
        config=config,
        files=files,
        keys=keys,
        latent_format=latent_format,
        pipeline=pipeline,
        autodetected=autodetected,
    )


def recognise(name: str, files: Weights) -> Checkpoint:
    """Recognise a single file's transformer by its tensors' names and shapes. Raises UnsupportedError."""
    check_supported(name, files.shapes)
    for family in FAMILIES.values():
        keys = family.layout.keys(files.shapes)
        if keys is not None:
            shapes = {ours: files.shapes[theirs] for ours, theirs in keys.items()}
            config = _config(family.layout, shapes, name, files)
            return Checkpoint(
                name=name, family=family.of(config), config=config, files=files, keys=keys, single_file=True
            )
    checkpoint = _with_diffusers_names(name, files)
    if checkpoint is not None:
        return checkpoint
    raise UnsupportedError(
        f"{name} is no transformer of a supported family ({', '.join(FAMILIES)}): its tensors begin "
        f"with {some(files.shapes, 3)}. A text encoder or VAE does not belong here."
    )


def _config(layout: Layout, shapes: Shapes, name: str, files: Weights) -> dict:
    """Return the configuration by a file's shapes, header and name; later ones overrule earlier ones."""
    return layout.config(shapes) | layout.metadata(files.metadata) | layout.named(name)


def _with_diffusers_names(name: str, files: Weights) -> Checkpoint | None:
    """Open a single file whose keys are the diffusers class's own; None where they are no family's.

    The configuration is derived from the shapes. Of several families whose names are there (LTX-Video's are
    among LTX-2's) it is the one with most of the file's tensors. Raises UnsupportedError where a family's
    names are there but no configuration of it has these shapes.
    """
    candidates = []
    why = None
    bare = []
    for prefix in PREFIXES:
        keys = {key.removeprefix(prefix): key for key in files.shapes if key.startswith(prefix)}
        stored = {own: files.shapes[key] for own, key in keys.items()}
        bare.append((keys, stored, numbered(keys)))
    for family, (keys, stored, blocks) in product(FAMILIES.values(), bare):
        layout = family.layout
        shapes = from_diffusers(layout, stored, blocks)
        if any(key not in shapes for key in layout.signature) or any(key in shapes for key in layout.absent):
            continue
        try:
            config = _config(layout, shapes, name, files)
            own = keys | renamed(layout.moved(config), keys)
            checkpoint = Checkpoint(name=name, family=family.of(config), config=config, files=files, keys=own)
            candidates.append((len(checkpoint.sources), checkpoint))
        except (UnsupportedError, KeyError, IndexError, ValueError) as error:
            why = why or (family.transformer, reason(error))
    if why and not candidates:
        raise UnsupportedError(
            f"{name} has the names of diffusers' {why[0]}, but its shapes do not tell the configuration "
            f"({why[1]}); use the diffusers folder with its config.json, or a file in ComfyUI's layout."
        )
    return max(candidates, key=itemgetter(0))[1] if candidates else None
