"""A transformer on disk: which family, which configuration, and how a rank reads its part."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import cast

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn

from ..config import ParallelConfig
from ..errors import UnsupportedError, quoted, reason, some
from ..models import FAMILIES, family_of_class
from ..models.family import Family
from ..models.key_layout import PREFIXES, renamed
from ..parallel import block_cost, stage_split
from ..parallel.stage_split import Stages
from ..parallel.tensor_parallel import Shard
from .allowed_folders import ANYWHERE, Folders
from .autodetect import fallback, inputs
from .config_limits import build, check_config
from .folder_config import is_pipeline, pipeline_configs, transformer_class, with_defaults
from .gguf_files import GGUFFile
from .known_models import check_format, check_known, check_unread
from .parameter_sources import Source, from_diffusers, numbered, read_shard, read_whole, sources
from .quantized import ScaledFiles
from .regular_files import read_json
from .safetensors_files import TensorFiles, Weights, weight_paths


@dataclass
class Checkpoint:
    """A checkpoint whose headers were read and found complete. config: arguments of the diffusers class;
    keys: the layout's keys -> the file's, where they differ; pipeline: configurations next to a diffusers
    folder's transformer, "scheduler" and "vae"."""

    name: str
    family: Family
    config: dict
    files: Weights
    keys: Mapping[str, str] = field(default_factory=dict)
    single_file: bool = False
    latent_format: str | None = None
    pipeline: dict = field(default_factory=dict)

    @property
    def generic(self) -> dict | None:
        """Facts for clients on a transformer that no family file describes; None where one does."""
        if self.family.name in FAMILIES:
            return None
        video = inputs.is_video(getattr(diffusers, self.family.transformer))
        return {
            "prediction": self.family.noise.prediction,
            "latent_channels": self.family.latent.channels(self.config),
            "latent_dimensions": 3 if video else 2,
            "conditioning": list(self.family.conditioning.accepted),
            "whole_only": self.family.blocks.whole_only,
            "pipeline": self.pipeline,
        }

    @cached_property
    def empty(self) -> nn.Module:
        """The transformer without weights (buffers are real). Raises UnsupportedError."""
        cls = getattr(diffusers, self.family.transformer)
        patch_module = self.family.build.patch_module
        check_config(self.name, cls.__name__, self.config, self.files.shapes)
        parts = self.family.layout.most_parameters if self.single_file else 1
        with init_empty_weights(include_buffers=False):
            transformer = build(self.name, cls, self.config, len(self.files.shapes) * parts)
            if patch_module:
                patch_module(transformer, self.config)
        return transformer.eval().requires_grad_(False)

    @property
    def block_names(self) -> list[str]:
        """Names of all blocks in pipeline order."""
        return [
            f"{name}.{i}"
            for name in self.family.blocks.lists
            for i in range(len(cast(nn.ModuleList, self.empty.get_submodule(name))))
        ]

    @property
    def block_count(self) -> int:
        return len(self.block_names)

    @property
    def block_costs(self) -> list[float]:
        """Work of every block (parallel/block_cost.py)."""
        return [*block_cost.block_costs(self.empty, self.family, self.config)]

    def modulation(self, block: str) -> list[str]:
        """Name the modulation layers (family.cache.modulation) of a block."""
        return [
            f"{block}.{name}"
            for name, _ in self.empty.get_submodule(block).named_modules()
            if any(fnmatchcase(name, pattern) for pattern in self.family.cache.modulation)
        ]

    def stages(self, config: ParallelConfig) -> Stages:
        """Split the blocks over pipeline stages, as the configuration lists them or by work and weights."""

        def size(name):
            return sum(parameter.numel() for parameter in self.empty.get_submodule(name).parameters())

        degree = config.pipefusion_degree
        layers = [
            {name: size(name) for name in self.modulation(block)} if degree > 1 else {}
            for block in self.block_names
        ]
        weights = [size(block) - sum(own.values()) for block, own in zip(self.block_names, layers)]
        return stage_split.plan(self.block_costs, weights, layers, degree, config.stage_counts)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole parameters and stored tables."""
        return {name: tuple(value.shape) for name, value in self.empty.state_dict().items()}

    @cached_property
    def sources(self) -> dict[str, Source]:
        """Parameter -> where it is read from. Raises UnsupportedError where the file lacks some."""
        shapes = self.shapes
        found = {name: Source(name) for name in shapes}
        if self.single_file:
            found = sources(self.family.layout, shapes)
        found = {name: source for name, source in found.items() if self._key(source) in self.files.shapes}
        # tables that are buffers can be computed
        missing = [name for name, _ in self.empty.named_parameters() if name not in found]
        if missing:
            raise UnsupportedError(
                f"{self.name} lacks {len(missing)} of {len(shapes)} tensors that {self.family.name} needs, "
                f"first {some(missing)}; the file is incomplete or of another variant."
            )
        for name, source in found.items():
            self._check_shape(name, source, shapes[name])
        return found

    def _key(self, source: Source) -> str:
        return self.keys.get(source.key, source.key)

    def _check_shape(self, name, source, want):
        have = self.files.shapes[self._key(source)]
        if source.shape is not None and math.prod(have) == math.prod(want):
            return
        rows = have[0] if source.hi is None else min(source.hi, have[0]) - source.lo
        if (rows, *have[1:]) != want:
            raise UnsupportedError(
                f"{self.name}: {quoted(name)} has shape {(rows, *have[1:])} in the file but "
                f"{self.family.name} with this configuration needs {want}; the file is of another variant."
            )

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype of most of the file's values; bf16 for fp8, which is computed in it."""
        values: Counter[torch.dtype] = Counter()
        for key in {self._key(source) for source in self.sources.values()}:
            values[self.files.dtype(key)] += math.prod(self.files.shapes[key])
        common = values.most_common(1)[0][0]
        return torch.bfloat16 if common.itemsize == 1 else common

    def load(
        self,
        blocks: range,
        dtype: torch.dtype,
        device: torch.device,
        shards: Mapping[str, Shard] = {},
        held: Mapping[str, bool] = {},
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> int:
        """Fill ``empty`` with the weights of ``blocks`` and of the shared layers; return the bytes read.

        ``shards``: module -> the piece of its weight that this rank keeps and reads. ``held``: modules that
        are loaded, or not, whichever block they are in. ``on_progress`` is given how many bytes of how many
        are loaded, as the files hold them.
        """
        absent = tuple(name + "." for i, name in enumerate(self.block_names) if i not in blocks)
        modules = {name: name.rpartition(".")[0] for name in self.sources}
        wanted = [name for name in modules if held.get(modules[name], not name.startswith(absent))]
        read_before = self.files.bytes_read
        weights = {}
        empty = self.empty.state_dict()
        done = 0
        total = sum(empty[name].numel() for name in wanted)
        value_bytes = self.files.size / max(1, sum(map(math.prod, self.shapes.values())))
        for name in wanted:
            own_dtype = torch.float32 if self.family.build.is_float32(name) else dtype
            weights[name] = self.read(name, own_dtype, device, shards.get(modules[name]))
            done += weights[name].numel()
            on_progress(round(done * value_bytes), round(total * value_bytes))
        self.empty.load_state_dict(weights, strict=False, assign=True)
        for buffer in self.empty.buffers():
            buffer.data = buffer.data.to(device)
        return self.files.bytes_read - read_before

    def read(
        self, name: str, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
    ) -> torch.Tensor:
        """Read a parameter, or the piece of it that ``shard`` keeps."""
        source = self.sources[name]
        key = self._key(source)
        if shard is None:
            return read_whole(self.files, key, source, dtype, device)
        return read_shard(self.files, key, source, shard, self.shapes[name][0], dtype, device)


def open_checkpoint(path: str, allowed: Folders = ANYWHERE) -> Checkpoint:
    """Recognise the file or folder at ``path``, reading headers only; a folder's index may name links to what
    is ``allowed``. Raises UnsupportedError."""
    where = Path(path)
    if not where.exists():
        raise UnsupportedError(f"there is no model at {path}; refresh the page and choose model_name again.")
    checkpoint = _open_folder(where, allowed) if where.is_dir() else _open_single_file(where)
    check_complete(checkpoint)
    return checkpoint


def check_complete(checkpoint: Checkpoint):
    """Refuse an unsupported variant, an incomplete or quantized file, and tensors that nothing would read
    now, on one rank. Raises UnsupportedError."""
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
    """Return tensors that nothing reads, the layout's name -> the file's, but for those that diffusers' class
    itself leaves out."""
    read = {checkpoint.keys.get(source.key, source.key) for source in checkpoint.sources.values()}
    own = checkpoint.keys or {key: key for key in checkpoint.files.shapes}
    cls = getattr(diffusers, checkpoint.family.transformer)
    ignored = [re.compile(pattern) for pattern in cls._keys_to_ignore_on_load_unexpected or ()]
    return {
        ours: key
        for ours, key in own.items()
        if key not in read and not any(pattern.search(ours) for pattern in ignored)
    }


def _open_folder(folder: Path, allowed: Folders) -> Checkpoint:
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
    files = ScaledFiles(TensorFiles([path for part in parts for path in weight_paths(part, allowed)]))
    check_format(folder.name, files.shapes)
    if family is None:
        # before blocks of the configuration's sizes are run: those of the files, or it is refused
        _ = Checkpoint(folder.name, fallback.unknown(cls), config, files).sources
        family = fallback.family(cls, config, pipeline.get("scheduler"))
    names = {**(companion.names if companion else {}), **family.layout.moved(config)}
    keys = renamed(names, {key: key for key in files.shapes})
    config |= family.build.pipeline(pipeline)
    family = family.of(config)
    return Checkpoint(folder.name, family, config, files, keys, False, latent_format, pipeline)


def _open_single_file(path: Path) -> Checkpoint:
    files = GGUFFile(path) if path.suffix == ".gguf" else ScaledFiles(TensorFiles([path]))
    return recognise(path.name, files)


def recognise(name: str, files: Weights) -> Checkpoint:
    """Recognise a single file's transformer by its tensors' names and shapes. Raises UnsupportedError."""
    check_known(name, files.shapes)
    for family in FAMILIES.values():
        keys = family.layout.keys(files.shapes)
        if keys is not None:
            shapes = {ours: files.shapes[theirs] for ours, theirs in keys.items()}
            config = family.layout.config(shapes) | family.layout.metadata(files.metadata)
            return Checkpoint(name, family.of(config), config, files, keys, single_file=True)
    checkpoint = _with_diffusers_names(name, files)
    if checkpoint is not None:
        return checkpoint
    for family in FAMILIES.values():
        variant = family.layout.unsupported(files.shapes)
        if variant:
            what = f"{name} is {variant}, a variant of {family.name} that is not supported"
            raise UnsupportedError(f"{what}; sample it with KSampler.")
    raise UnsupportedError(
        f"{name} is no transformer of a supported family ({', '.join(FAMILIES)}): its tensors begin "
        f"with {some(files.shapes, 3)}. A text encoder or VAE does not belong here."
    )


def _with_diffusers_names(name: str, files: Weights) -> Checkpoint | None:
    """Open a single file whose keys are the diffusers class's own; None where they are no family's.

    The configuration is derived from the shapes. Of several families whose names are there (LTX-Video's are
    among LTX-2's) it is the one with most of the file's tensors. Raises UnsupportedError where a family's
    names are there but no configuration of it has these shapes.
    """
    found = []
    why = None
    bare = {
        prefix: {key.removeprefix(prefix): key for key in files.shapes if key.startswith(prefix)}
        for prefix in PREFIXES
    }
    stored = {p: {own: files.shapes[key] for own, key in keys.items()} for p, keys in bare.items()}
    blocks = {prefix: numbered(keys) for prefix, keys in bare.items()}
    for family, prefix in product(FAMILIES.values(), PREFIXES):
        keys = bare[prefix]
        shapes = from_diffusers(family.layout, stored[prefix], blocks[prefix])
        if any(key not in shapes for key in family.layout.signature) or any(
            key in shapes for key in (*family.layout.absent, *family.layout.variants)
        ):
            continue
        try:
            config = family.layout.config(shapes) | family.layout.metadata(files.metadata)
            own = keys | renamed(family.layout.moved(config), keys)
            checkpoint = Checkpoint(name, family.of(config), config, files, own)
            found.append((len(checkpoint.sources), checkpoint))
        except (UnsupportedError, KeyError, IndexError, ValueError) as error:
            why = why or (family.transformer, reason(error))
    if why and not found:
        raise UnsupportedError(
            f"{name} has the names of diffusers' {why[0]}, but its shapes do not tell the configuration "
            f"({why[1]}); use the diffusers folder with its config.json, or a file in ComfyUI's layout."
        )
    return max(found, key=lambda candidate: candidate[0])[1] if found else None
