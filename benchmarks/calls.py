"""What a step of ParallelModel costs besides the model: transport.py runs it.

The client's wall time of one call (both prompts of a Flux latent of 1024 px, 512 text tokens) less the
engine's own seconds, on a backend launched as ComfyUI's nodes launch it, with the prompts sent every time and
with the ranks caching them. Transfer, broadcast to the other ranks and the checks are in it. ComfyUI's own
work around the model is not. And the whole call, prompts cached, less a forward of the same transformer in
this process, the one after the other.
The transformer has no blocks: its ends take a few milliseconds, in which a difference of one can be seen.
"""

import tempfile
import time

import common
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from backend.client import pool
from backend.client.argument_cache import ArgumentCache
from backend.config import ParallelConfig
from backend.models.latent_tokens import TokenGrid
from backend.protocol import ModelCall

#: Most milliseconds of a call that the engine does not see, with the prompts cached by the ranks, next to the
#: transfer of the latent and the output.
GOAL = 3.0
PREFIX = "model call"
#: Flux's widths at the socket, and no blocks.
TINY = dict(num_layers=0, num_single_layers=0, num_attention_heads=2, joint_attention_dim=4096)
SHAPE = (2, 16, 128, 128)
#: transport.py's name of such a latent, there and back.
TRANSFER = "Flux, 1024 px, two samples"


def call(model: str) -> ModelCall:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    return ModelCall(
        model,
        tensors={
            "x": randn(*SHAPE),
            "time": torch.full((2,), 0.5),
            "cond.c_crossattn": randn(2, 512, TINY["joint_attention_dim"]),
            "cond.y": randn(2, common.FLUX["pooled_projection_dim"]),
        },
    )


@torch.inference_mode()
def overheads(config: ParallelConfig, model: str, count: int) -> dict[str, list[float]]:
    """Milliseconds of each call."""
    pool.allow(model)
    backend = pool.backend_for(config)
    cached = ArgumentCache()
    forward = plain(model) if config.device == "cpu" else None
    message = call(backend.load(model).model)
    of_call = {"prompts sent": [], "prompts cached": [], "less a forward": []}
    for _ in range(count + 2):
        for name, shortened in (
            ("prompts sent", lambda: message),
            ("prompts cached", lambda: cached.shortened(message)),
        ):
            began = time.perf_counter()
            result = backend.sample(shortened(), meanwhile=cached.holds)
            took = time.perf_counter() - began
            assert result is not None  # nothing cancels it
            of_call[name].append(1000 * (took - result.stats["seconds"]))
        if forward:
            began = time.perf_counter()
            forward()
            of_call["less a forward"].append(1000 * (took - (time.perf_counter() - began)))
    return {name: values[2:] for name, values in of_call.items() if values}


def plain(model: str):
    """A forward of the transformer at ``model``, by itself, on the CPU in float32, with the inputs of
    ``call`` in the form that it takes."""
    transformer = FluxTransformer2DModel.from_pretrained(model, torch_dtype=torch.float32).eval()
    tensors = call(model).tensors
    grid = TokenGrid(SHAPE[1:], (1, 2, 2))
    tokens = grid.to_tokens(tensors["x"])
    positions = torch.zeros(grid.tokens, 3)
    prompt = tensors["cond.c_crossattn"]
    return lambda: transformer(
        hidden_states=tokens,
        encoder_hidden_states=prompt,
        pooled_projections=tensors["cond.y"],
        timestep=tensors["time"],
        img_ids=positions,
        txt_ids=torch.zeros(prompt.shape[1], 3),
    )


def measure(count: int, device: str) -> dict[str, list[float]]:
    configs = {
        "1 rank": ParallelConfig(device=device),
        "2 ranks, cfg": ParallelConfig(device=device, cfg_degree=2),
    }
    with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
        common.save_model(folder, device, **TINY)
        try:
            return {
                f"{PREFIX}, {name}, {kind}": values
                for name, config in configs.items()
                for kind, values in overheads(config, folder, count).items()
            }
        finally:
            pool.close_all()
