"""A golden case's request for the shallow Flux, and what one process samples for it, in 40 % of the whole
one's time. Live backends are compared with that where no model is the subject."""

import tempfile
from functools import cache
from pathlib import Path

import torch
from tiny import golden_request, to_vae_units, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks


def shallow_request(case: str = "euler_simple", model: str = "tiny") -> tuple[Sample, torch.Tensor]:
    """The request of a golden case, and the latent that one process makes of it (VAE units)."""
    return golden_request(case, model)[0], latent_of_one_process(case)


@cache
def latent_of_one_process(case: str) -> torch.Tensor:
    """In VAE units."""
    engine = Engine(ParallelConfig(device="cpu"), mesh.single())
    with tempfile.TemporaryDirectory() as folder:
        engine.load("tiny", str(write_shallow_flux(Path(folder, "shallow.safetensors"))), "default")
        samples, _ = engine.sample(golden_request(case)[0], Callbacks())
        engine.unload("tiny")
    return to_vae_units(samples)
