"""Requests of scripts/doctor.py --full, made of others."""

from dataclasses import replace

import torch

from backend.protocol import Sample


def in_steps(sample: Sample, steps: int) -> Sample:
    """Return the request in so many steps of Euler."""
    first = sample.tensors["sigmas"][0].item()
    return replace(
        sample, sampler="euler", tensors=sample.tensors | {"sigmas": torch.linspace(first, 0, steps + 1)}
    )


def in_batch(sample: Sample, batch: int) -> Sample:
    """Return the request for ``batch`` latents of other noises; one for the request as it is."""
    if batch == 1:
        return sample
    shape = sample.tensors["noise"].shape[1:]
    noise = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
    return replace(sample, tensors={**sample.tensors, "noise": noise, "latent": torch.zeros_like(noise)})


def whole_requests(steps: tuple[int, int], alone: list[float], timed: list[float]) -> tuple[dict, str]:
    """Return how many times as fast a whole request is, by its number of steps, with what comes before,
    between and after the steady state: PipeFusion's warm-up, fill and drain, too; as a value of a finding and
    in words. Lists: as Run.timed."""
    if len(alone) != 4 or len(timed) != 4:
        return {}, ""
    few, many = min(alone[:2]) / min(timed[:2]), min(alone[2:]) / min(timed[2:])
    words = f" (whole requests of {steps[0]} steps {few:.2f} times, of {steps[1]} steps {many:.2f} times)"
    return {"whole_requests": {str(steps[0]): few, str(steps[1]): many}}, words
