"""Configurations whose ranks have different shares of the work. Data alone."""

from dataclasses import replace
from pathlib import Path

from backend.config import ParallelConfig

#: The variant of a run with stale keys and values.
STALE = "stale, uneven shares"
#: World size -> the shares.
SHARES = {2: "70,30", 4: "40,30,20,10"}
#: World size -> every exact method, and hybrids of two.
DEGREES = {
    2: [
        dict(ulysses_degree=2),
        dict(ring_degree=2),
        dict(tensor_parallel_degree=2),
        dict(tensor_parallel_degree=2, split_scheme="column"),
        dict(cfg_degree=2),
        dict(data_parallel_degree=2),
        dict(ulysses_degree=2, shard_weights=True),
        dict(pipefusion_degree=2),
    ],
    4: [
        dict(ulysses_degree=4),
        dict(ring_degree=4),
        dict(ring_degree=2, ulysses_degree=2),
        dict(tensor_parallel_degree=4),
        dict(tensor_parallel_degree=4, split_scheme="2d"),
        dict(data_parallel_degree=4),
        dict(pipefusion_degree=4),
        dict(ulysses_degree=4, shard_weights=True),
        dict(cfg_degree=2, ulysses_degree=2),
        dict(cfg_degree=2, pipefusion_degree=2),
        dict(pipefusion_degree=2, ulysses_degree=2),
        dict(pipefusion_degree=2, tensor_parallel_degree=2),
        dict(ulysses_degree=2, tensor_parallel_degree=2),
        dict(data_parallel_degree=2, ring_degree=2),
    ],
}
#: Those that the fast tier runs.
FAST = {
    2: (dict(ulysses_degree=2), dict(tensor_parallel_degree=2), dict(pipefusion_degree=2)),
    4: (dict(ring_degree=2, ulysses_degree=2), dict(tensor_parallel_degree=4), dict(pipefusion_degree=4)),
}
#: A Flux whose heads and blocks go round in 40:30:20:10, for the requests of the tiny one.
WIDE = dict(num_layers=4, num_single_layers=6, num_attention_heads=10, attention_head_dim=16)


def configurations(world: int) -> list[ParallelConfig]:
    """Every configuration of so many ranks."""
    return [replace(ParallelConfig(shares=SHARES[world]), **degrees) for degrees in DEGREES.get(world, ())]


def is_fast(config: ParallelConfig) -> bool:
    """Does the fast tier run it?"""
    world = config.world_size
    return config in [replace(ParallelConfig(shares=SHARES[world]), **degrees) for degrees in FAST[world]]


def write_wide(folder: Path, like: str) -> Path:
    """The wide model as a diffusers folder, with the other sizes of the checkpoint ``like``."""
    import torch
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
    from safetensors.torch import save_file

    from backend.loading.recognition import open_checkpoint

    config = {**open_checkpoint(like).config, **WIDE, "axes_dims_rope": (4, 6, 6)}
    with torch.device("meta"):
        model = FluxTransformer2DModel(**config)
    model.save_config(folder)
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, shaped in model.state_dict().items():
        weight = torch.randn(shaped.shape, generator=random)
        scale = 1.0 if weight.ndim == 2 else 0.1
        weights[name] = scale * weight / weight.shape[-1] ** 0.5 + float("norm_" in name and weight.ndim == 1)
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    return folder
