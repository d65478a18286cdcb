"""What a step of ParallelModel costs beside the model: transport.py runs it.

The client's wall time of one call (both prompts of a Flux latent of 1024 px, 512 rows of text) less the engine's own seconds, on a backend launched
as ComfyUI's nodes launch it. Transfer, dispatch to the other ranks and the checks are in it. ComfyUI's own work around the model is not.
"""

import tempfile
import time

import common
import torch
from parallel_dit.backend.config import ParallelConfig
from parallel_dit.backend.protocol import ModelCall
from parallel_dit.nodes import backends
from parallel_dit.nodes.kept import KeptArguments

#: Most milliseconds of a call that the engine does not see, with the prompts kept by the ranks.
GOAL = 3.0
PREFIX = "model call"
#: Flux's widths at the socket; a body that takes no time.
TINY = dict(num_layers=1, num_single_layers=1, num_attention_heads=2, joint_attention_dim=4096)


def call(model: str) -> ModelCall:
    generator = torch.Generator().manual_seed(0)
    randn = lambda *shape: torch.randn(shape, generator=generator)
    return ModelCall(model, tensors={
        "x": randn(2, 16, 128, 128), "time": torch.full((2,), 0.5), "cond.c_crossattn": randn(2, 512, TINY["joint_attention_dim"]), "cond.y": randn(2, common.FLUX["pooled_projection_dim"])})


def overheads(config: ParallelConfig, model: str, count: int) -> dict[str, list[float]]:
    """Milliseconds around each call that the engine does not count as its own, with the prompts sent every time and with the ranks keeping them."""
    backend, kept = backends.backend_for(config), KeptArguments()
    message = call(backend.load(model).model)
    found = {"prompts sent": [], "prompts kept": []}
    for name, shortened in (("prompts sent", lambda: message), ("prompts kept", lambda: kept.shortened(message))):
        for _ in range(count + 2):
            began = time.perf_counter()
            result = backend.sample(shortened())
            found[name].append(1000 * (time.perf_counter() - began - result.stats["seconds"]))
    return {name: values[2:] for name, values in found.items()}


def measure(count: int, device: str) -> dict[str, list[float]]:
    configs = {"1 rank": ParallelConfig(device=device), "2 ranks, cfg": ParallelConfig(device=device, cfg_degree=2)}
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        common.save_model(folder, device, **TINY)
        try:
            return {f"{PREFIX}, {name}, {kind}": values for name, config in configs.items() for kind, values in overheads(config, folder, count).items()}
        finally:
            backends.close_all()
