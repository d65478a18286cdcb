"""What the sampler nodes are given besides latent and seed: schedules, shifts, and mixes of prompts."""

import torch
from comfy_modules import comfy_modules

with comfy_modules():
    from comfy_extras import nodes_custom_sampler as custom

from sampler_pairs import STEPS

SCHEDULES = {
    "basic": lambda model: custom.BasicScheduler.execute(model, "beta", STEPS, 1.0),
    "part of one": lambda model: custom.BasicScheduler.execute(model, "simple", STEPS, 0.4),
    "karras": lambda model: custom.KarrasScheduler.execute(STEPS, 0.95, 0.02, 7.0),
    "exponential": lambda model: custom.ExponentialScheduler.execute(STEPS, 0.95, 0.02),
    "beta sampling": lambda model: custom.BetaSamplingScheduler.execute(model, STEPS, 0.6, 0.6),
    "first half": lambda model: (
        custom.SplitSigmas.execute(custom.BasicScheduler.execute(model, "simple", 6, 1.0)[0], 3)[0],
    ),
    # from 0 ComfyUI would start at 1e-4, where float32 leaves little of a solver's slope
    "backwards": lambda model: custom.SetFirstSigma.execute(
        custom.FlipSigmas.execute(custom.BasicScheduler.execute(model, "simple", 3, 0.4)[0])[0], 0.02
    ),
    "one level": lambda model: (torch.tensor([0.7]),),
    "nothing": lambda model: (torch.tensor([]),),
}


SHIFTS = {
    # width and height do not matter where both ends are the same
    "flux-dev": (
        "ModelSamplingFlux",
        2.0,
        {"max_shift": 2.0, "base_shift": 2.0, "width": 1024, "height": 1024},
    ),
    "ltxv": ("ModelSamplingFlux", 1.5, {"max_shift": 1.5, "base_shift": 1.5, "width": 1024, "height": 1024}),
    "wan21-t2v": ("ModelSamplingSD3", 5.0, {"shift": 5.0}),
    "sd3": ("ModelSamplingSD3", 1.5, {"shift": 1.5}),
    "qwen-image": ("ModelSamplingAuraFlow", 3.1, {"shift": 3.1}),
    "z-image-turbo": ("ModelSamplingAuraFlow", 6.0, {"shift": 6.0}),
    "chroma": ("ModelSamplingAuraFlow", 1.0, {"shift": 1.0}),
}


def prompt(pair, scale, **values):
    ((cross, told),) = pair.positive
    return [[cross * scale, {**told, **values}]]


def half(shape, axis, upper):
    mask = torch.zeros(shape)
    mask.narrow(axis, 0 if upper else shape[axis] // 2, shape[axis] // 2).fill_(1.0)
    return mask


SIZE = {"flux-dev": (1, 128, 128), "wan21-t2v": (1, 64, 64), "pixart-sigma": (1, 64, 64)}
MIXES = {
    "combined": lambda p, size: (p.positive + prompt(p, -0.7), p.negative),
    "three of different strength": lambda p, size: (
        prompt(p, 1.0, strength=0.3) + prompt(p, -0.7, strength=1.0) + prompt(p, 0.2, strength=2.0),
        p.negative,
    ),
    "one after the other": lambda p, size: (
        prompt(p, 1.0, start_percent=0.0, end_percent=0.4)
        + prompt(p, -0.7, start_percent=0.4, end_percent=1.0),
        p.negative,
    ),
    "scheduled text encoders": lambda p, size: (
        prompt(p, 1.0, clip_start_percent=0.0, clip_end_percent=0.4)
        + prompt(p, -0.7, clip_start_percent=0.4, clip_end_percent=1.0, end_percent=0.9),
        p.negative,
    ),
    "negative for the first part": lambda p, size: (
        p.positive,
        prompt(p, -1.0, start_percent=0.0, end_percent=0.5),
    ),
    "nothing for a while": lambda p, size: (prompt(p, 1.0, start_percent=0.3, end_percent=0.7), p.negative),
    "regions": lambda p, size: (
        prompt(p, 1.0, mask=half(size, 1, True), mask_strength=1.0)
        + prompt(p, -0.7, mask=half(size, 1, False), mask_strength=0.6),
        p.negative,
    ),
    "region on a ground": lambda p, size: (
        p.positive + prompt(p, -0.7, mask=half(size, 2, True), mask_strength=2.0, end_percent=0.6),
        p.negative,
    ),
    "region alone": lambda p, size: (prompt(p, 1.0, mask=half(size, 2, True)), p.negative),
    "soft regions of both sides": lambda p, size: (
        p.positive,
        prompt(p, 0.5, mask=torch.linspace(0, 1, size[1])[None, :, None].expand(size))
        + prompt(p, -0.5, strength=0.5),
    ),
}
