"""A transformer on disk: which family, which configuration, and how a rank reads its part."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import cast

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.models import normalization
from diffusers.models.modeling_utils import ModelMixin, no_init_weights
from torch import nn

from ..config import ParallelConfig
from ..errors import UnsupportedError, some
from ..models import FAMILIES
from ..models.common import adaptive_norms, joint_blocks
from ..models.common.fewer_passes import RMSNorm, TorchRMSNorm
from ..models.common.replaced_classes import replace_classes
from ..models.family import Family
from ..models.key_layout import Shapes
from ..models.patterns import matches
from ..parallel import stage_split
from ..parallel.block_cost import AttentionCall, LayerTokens, attention_calls, block_costs, layer_tokens
from ..parallel.matrix_cuts import CutPlan, Shard, cut_plan
from ..parallel.stage_split import Stages
from . import weight_loading
from .autodetect import inputs
from .files.config_limits import build, check_config
from .files.safetensors_files import Weights
from .parameter_sources import Source, StoredParameter, from_diffusers, numbered, sources

#: diffusers' class -> ours, which computes the same (models/common/fewer_passes.py).
IN_FEWER_PASSES: dict[type[nn.Module], type[nn.Module]] = {
    normalization.RMSNorm: RMSNorm,
    nn.RMSNorm: TorchRMSNorm,
    **adaptive_norms.CLASSES,
    **joint_blocks.CLASSES,
}
#: Ends of the key of a table of positions, which takes seconds and gigabytes to compute.
STORED_TABLES = ("pos_embed", "pos_embedding")


@dataclass(eq=False)  # so that plans of it can be cached with it (rank_plan/weights.py)
class Checkpoint:
    """A checkpoint whose headers were read and found complete. config: arguments of the diffusers class;
    keys: the layout's keys -> the file's, where they differ; pipeline: "scheduler" and "vae" configurations
    of a folder. autodetected: facts on a class without a family file (autodetect/fallback.py)."""

    name: str
    family: Family
    config: dict
    files: Weights
    keys: Mapping[str, str] = field(default_factory=dict)
    single_file: bool = False
    latent_format: str | None = None
    pipeline: dict = field(default_factory=dict)
    autodetected: Mapping | None = None

    @property
    def transformer_class(self) -> type[ModelMixin]:
        return getattr(diffusers, self.family.transformer)

    @property
    def generic(self) -> dict | None:
        """Facts for clients on a transformer that no family file describes; None where one does."""
        if self.family.name in FAMILIES:
            return None
        video = inputs.is_video(self.transformer_class)
        schedule = self.family.noise.schedule
        return {
            "prediction": self.family.noise.prediction,
            "latent_channels": self.family.latent.channels(self.config),
            "latent_dimensions": 3 if video else 2,
            "conditioning": list(self.family.conditioning.accepted),
            "schedule": asdict(schedule(self.config)) if schedule else None,
            "pipeline": self.pipeline,
        }

    @cached_property
    def transformer(self) -> nn.Module:
        """Return the diffusers transformer: on the meta device until ``load`` fills it (buffers are real, but
        for those that the file stores). Raises UnsupportedError."""
        if any(key.endswith(STORED_TABLES) for key in self.files.shapes):
            with torch.device("meta"):
                transformer = self._build(include_buffers=True)
            shapes = {name: tuple(value.shape) for name, value in transformer.state_dict().items()}
            stored = self._found(shapes)
            if all(name in stored for name, _ in transformer.named_buffers()):
                return transformer
        return self._build(include_buffers=False)

    def _build(self, include_buffers: bool) -> nn.Module:
        cls = self.transformer_class
        patch_module = self.family.build.patch_module
        check_config(self.name, cls.__name__, self.config, self.files.shapes)
        parts = self.family.layout.most_parameters if self.single_file else 1
        with no_init_weights(), init_empty_weights(include_buffers):
            transformer = build(self.name, cls, self.config, len(self.files.shapes) * parts)
            if patch_module:
                patch_module(transformer, self.config)
            replace_classes(transformer, IN_FEWER_PASSES)
        return transformer.eval().requires_grad_(False)

    @cached_property
    def block_names(self) -> list[str]:
        """Names of all blocks in pipeline order."""
        return [
            f"{name}.{i}"
            for name in self.family.blocks.lists
            for i in range(len(cast(nn.ModuleList, self.transformer.get_submodule(name))))
        ]

    @property
    def block_count(self) -> int:
        return len(self.block_names)

    @property  # not cached: a load fills the modules
    def blocks(self) -> dict[str, nn.Module]:
        """Block -> its module in ``transformer``, in pipeline order."""
        return {name: self.transformer.get_submodule(name) for name in self.block_names}

    @cached_property
    def block_costs(self) -> list[float]:
        """Work of every block (parallel/block_cost.py)."""
        return [*block_costs(self.transformer, self.family, self.config)]

    @cached_property
    def block_sizes(self) -> dict[str, int]:
        """Block -> its whole parameters."""
        return {name: _size(module) for name, module in self.blocks.items()}

    @cached_property
    def layer_tokens(self) -> dict[str, LayerTokens]:
        """Layer of a block -> which tokens pass it."""
        return {
            f"{block}.{name}": tokens
            for block, module in self.blocks.items()
            for name, tokens in layer_tokens(module, block.rpartition(".")[0], self.family).items()
        }

    @cached_property
    def layer_blocks(self) -> dict[str, int]:
        """Layer of a block -> where its block is in pipeline order."""
        return {
            f"{block}.{name}": i
            for i, (block, module) in enumerate(self.blocks.items())
            for name, _ in module.named_modules()
        }

    @cached_property
    def attention_calls(self) -> list[list[AttentionCall]]:
        return [
            attention_calls(module, block.rpartition(".")[0], self.family, self.config)
            for block, module in self.blocks.items()
        ]

    @cached_property
    def modulation(self) -> dict[str, list[str]]:
        """Block -> its modulation layers (family.cache.modulation)."""
        patterns = self.family.cache.modulation
        return {
            block: [f"{block}.{name}" for name, _ in module.named_modules() if matches(name, patterns)]
            for block, module in self.blocks.items()
        }

    def stages(self, config: ParallelConfig) -> Stages:
        """Split the blocks over pipeline stages, as the configuration lists them or by work and weights."""
        degree = config.pipefusion_degree
        layers: list[dict[str, int]] = [{} for _ in self.block_names]
        if degree > 1:
            layers = [
                {name: _size(self.transformer.get_submodule(name)) for name in names}
                for names in self.modulation.values()
            ]
        weights = [size - sum(own.values()) for size, own in zip(self.block_sizes.values(), layers)]
        uneven = config.shares_of("pp")
        return stage_split.plan(self.block_costs, weights, layers, degree, config.stage_counts, uneven)

    def cut_plan(self, config: ParallelConfig) -> CutPlan:
        """Plan which piece of each matrix a tensor-parallel rank keeps. Raises UnsupportedError."""
        ranks = config.tensor_parallel_degree
        if ranks == 1:
            return CutPlan({})
        uneven = bool(config.shares_of("tp"))
        units = weight_loading.column_units(self)
        return cut_plan(self.transformer, self.family, config.split_scheme, ranks, units, uneven)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole parameters and stored tables."""
        return {name: tuple(value.shape) for name, value in self.transformer.state_dict().items()}

    @cached_property
    def comfy_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole parameters by ComfyUI's names; none of a transformer without a family file."""
        if self.family.name not in FAMILIES:
            return {}
        return from_diffusers(self.family.layout, self.shapes, numbered(self.shapes))

    @cached_property
    def parameters(self) -> dict[str, tuple[int | None, type[nn.Module]]]:
        """Whole parameter -> index of its block (None outside of blocks), and the class of its layer."""
        order = {block: i for i, block in enumerate(self.block_names)}
        found = {}
        for name, _ in self.transformer.named_parameters():
            block = weight_loading.block_of(name, order)
            layer = type(self.transformer.get_submodule(name.rpartition(".")[0]))
            found[name] = (None if block is None else order[block], layer)
        return found

    @cached_property
    def sources(self) -> dict[str, Source]:
        """Parameter -> where it is read from. Raises UnsupportedError where the file lacks some."""
        shapes = self.shapes
        sources = self._found(shapes)
        # tables that are buffers can be computed
        missing = [name for name in self.parameters if name not in sources]
        if missing:
            raise UnsupportedError(
                f"{self.name} lacks {len(missing)} of {len(shapes)} tensors that {self.family.name} needs, "
                f"first {some(missing)}; the file is incomplete or of another variant."
            )
        for name, source in sources.items():
            stored = StoredParameter(self.files, self.key(source), source, shapes[name])
            stored.check(self.name, self.family.name, name)
        return sources

    def _found(self, parameters: Shapes) -> dict[str, Source]:
        """Return those of ``parameters`` that the file has, and where."""
        layout = self.family.layout.as_in(self.keys) if self.single_file else None
        found = sources(layout, parameters) if layout else {name: Source(name) for name in parameters}
        return {name: source for name, source in found.items() if self.key(source) in self.files.shapes}

    def key(self, source: Source) -> str:
        """Return the file's name of a source's tensor."""
        return self.keys.get(source.key, source.key)

    @cached_property
    def read_keys(self) -> set[str]:
        """The file's names of the transformer's tensors: an all-in-one file has others next to them."""
        return {self.key(source) for source in self.sources.values()}

    @property
    def dtype(self) -> torch.dtype:
        """The floating dtype of most of the file's values; bf16 for fp8, which is computed in it."""
        values: Counter[torch.dtype] = Counter()
        for key in self.read_keys:
            values[self.files.dtype(key)] += math.prod(self.files.shapes[key])
        common = values.most_common(1)[0][0]
        return torch.bfloat16 if common.itemsize == 1 else common

    @property
    def is_quantized(self) -> bool:
        """Return whether some weights stay as the file stores them, in few bits."""
        return any(self.files.quantization(key) is not None for key in self.read_keys)

    load = weight_loading.load

    def stored(self, name: str) -> StoredParameter:
        """Return a parameter as the files have it."""
        source = self.sources[name]
        return StoredParameter(self.files, self.key(source), source, self.shapes[name])

    def read(
        self, name: str, dtype: torch.dtype, device: torch.device, shard: Shard | None = None
    ) -> torch.Tensor:
        """Read a parameter, or the piece of it that ``shard`` keeps."""
        return self.stored(name).read(dtype, device, shard)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
