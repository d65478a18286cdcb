"""Which layers of a transformer are cached, and what they are given: installs a LayerCache."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...models.family import Family
from ...models.patterns import matches
from ..block_streams import block_list
from ..embedded_shapes import ShapeLayer
from ..mesh import Mesh
from ..pipeline_stage import StageDone
from ..stage_split import Stages
from ..staged_block import StagedBlock, positional_names
from .modulation_cache import CachedLayer, LayerCache, layer_features


def cache_layers(
    transformer: nn.Module,
    blocks: Sequence[str],
    family: Family,
    offload_device: torch.device,
    dtype: torch.dtype,
    stages: Stages,
    mesh: Mesh,
) -> LayerCache:
    """Put a CachedLayer in front of what the family names, in this rank's ``blocks`` and before the blocks.
    ``stages``: which modulation layers, of ``dtype``, others hold. All ranks have one order of layers."""
    widths: Counter[int] = Counter()
    for name, stage in stages.owners.items():
        widths[stage] += layer_features(transformer.get_submodule(name))
    cache = LayerCache(offload_device, dtype, mesh)
    layers: dict[str, CachedLayer] = {}
    for name, kind in _wanted(transformer, blocks, family, mesh.pp.is_first):
        shared = not family.cache.modulation_per_sample
        made = ShapeLayer if kind == "shape" else CachedLayer
        layers[name] = made(transformer.get_submodule(name), kind, cache.current, shared)
        transformer.set_submodule(name, layers[name])
    cache.layers = list(layers.values())
    cache.width = max(
        widths.values(), default=sum(layer_features(cached.layer) for cached in cache.modulations)
    )
    if stages.holders != stages.owners:
        _place_hosted(cache, transformer, stages, layers)
    return cache


def _wanted(
    transformer: nn.Module, blocks: Sequence[str], family: Family, is_first_stage: bool
) -> list[tuple[str, str]]:
    """Return (name, kind) of every layer to cache. Stages after the first are sent image tokens and
    references; of what their own embedders return they use the shape."""
    wanted = []
    for block in blocks:
        wanted.append((f"{block}.", "modulation", family.cache.modulation))
        wanted.append((f"{block}.", "prompt", family.cache.prompt_layers))
    wanted.append(("", "prompt", family.cache.prompt_modules))
    wanted.append(("", "step", family.cache.step_modules))
    if not is_first_stage:
        wanted.append(("", "shape", family.cache.image_modules))
    return [
        (prefix + name, kind)
        for prefix, kind, patterns in wanted
        for name, _ in transformer.get_submodule(prefix.removesuffix(".")).named_modules()
        if matches(name, patterns)
    ]


def _place_hosted(cache: LayerCache, transformer: nn.Module, stages: Stages, layers: dict[str, CachedLayer]):
    """Note which layers this stage holds for others, and which others hold for it."""
    pp = cache.mesh.pp
    for stage in range(pp.size):
        hosted = [name for name in stages.hosted(pp.rank) if stages.owners[name] == stage]
        elsewhere = [name for name in stages.hosted(stage) if stages.owners[name] == pp.rank]
        cache.hosted.append([transformer.get_submodule(name) for name in hosted])
        cache.hosted_elsewhere.append([layers[name] for name in elsewhere])


def first_block_argument(transformer: nn.Module, family: Family, arguments: dict, name: str) -> Tensor:
    """Return what the transformer makes of ``arguments`` before its blocks and hands to them as ``name``."""
    first = block_list(transformer, next(iter(family.blocks.lists)))[0]
    names = first.names if isinstance(first, StagedBlock) else positional_names(first)
    captured = {}

    def capture(module, args, kwargs):
        captured.update(dict(zip(names, args)) | kwargs)
        raise StageDone

    handle = first.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        transformer(**arguments, return_dict=False)
    except StageDone:
        return captured[name]
    finally:
        handle.remove()
    raise AssertionError("the transformer never reached its first block")
