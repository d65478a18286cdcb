"""Requests that a backend refuses: what is changed of a good one, and what the refusal says."""

from dataclasses import replace

import torch
from live_backend import with_tensors


def nan(x):
    return torch.where(torch.arange(x.numel()).reshape(x.shape) == 3, float("nan"), x)


REFUSED = {
    "solver": (lambda r: replace(r, sampler="no_such"), "not supported; choose one of euler"),
    "no steps": (
        lambda r: replace(r, tensors={**r.tensors, "sigmas": r.tensors["sigmas"][:1]}),
        "at least one step",
    ),
    "NaN": (lambda r: replace(r, tensors={**r.tensors, "noise": nan(r.tensors["noise"])}), "noise holds NaN"),
    "NaN in the prompt": (
        lambda r: replace(r, tensors={**r.tensors, "positive.y": nan(r.tensors["positive.y"])}),
        "positive.y holds NaN",
    ),
    "channels": (
        lambda r: replace(r, tensors={**r.tensors, "noise": r.tensors["noise"][:, :4]}),
        "wants 16 channels",
    ),
    "conditioning key": (
        lambda r: replace(r, tensors={**r.tensors, "positive.control": torch.ones(1)}),
        "'control', which flux does not support",
    ),
    "missing pooled": (
        lambda r: replace(r, tensors={k: v for k, v in r.tensors.items() if k != "positive.y"}),
        "has no 'y'",
    ),
    "other text encoder": (
        lambda r: replace(r, tensors={**r.tensors, "positive.c_crossattn": torch.ones(1, 7, 40)}),
        "encoded for another model",
    ),
    "other batch": (
        lambda r: replace(r, tensors={**r.tensors, "positive.c_crossattn": torch.ones(3, 7, 64)}),
        "batch 3",
    ),
    "more patches than tokens": (lambda r: replace(r, num_pipeline_patch=65), "more than the 64 tokens"),
    "no warm-up": (
        lambda r: replace(r, num_pipeline_patch=2, warmup_steps=0),
        "at least one synchronous step",
    ),
    "no positive prompt": (
        lambda r: replace(r, tensors={k: v for k, v in r.tensors.items() if not k.startswith("positive")}),
        "no positive prompt",
    ),
    "mixing of no prompt": (
        lambda r: replace(r, prompts={"positive2": {"strength": 1.0}}),
        "has no such prompt; it has positive",
    ),
    "mixing by a list": (
        lambda r: replace(r, prompts={"positive": [1.0]}),
        "give the numbers strength, from and until",
    ),
    "mixing by a number out of range": (
        lambda r: replace(r, prompts={"positive": {"strength": 1e300}}),
        "give the numbers strength, from and until",
    ),
    "mixing by what is unknown": (
        lambda r: replace(r, prompts={"positive": {"area": 1.0}}),
        "give the numbers strength, from and until",
    ),
    "weight of another size": (
        lambda r: replace(r, tensors={**r.tensors, "weight.positive": torch.ones(1, 1, 7, 7)}),
        "does not fit the latent's",
    ),
    "attention": (lambda r: replace(r, attention="flash-attn"), "CUDA GPUs only"),
    "seed below 0": (lambda r: replace(r, seed=-1), "seed is -1"),
    "seed over 64 bits": (lambda r: replace(r, seed=1 << 64), "seed is 18446744073709551616"),
    "rising schedule": (
        lambda r: replace(
            r, sampler="dpmpp_2m_sde", tensors={**r.tensors, "sigmas": r.tensors["sigmas"].flip(0)}
        ),
        "the schedule rises",
    ),
    "no pixels": (
        lambda r: with_tensors(r, noise=torch.ones(1, 16, 16, 0), latent=torch.ones(1, 16, 16, 0)),
        "holds nothing",
    ),
    "fp8": (lambda r: with_tensors(r, noise=r.tensors["noise"].to(torch.float8_e4m3fn)), "send float32"),
    "mask of another size": (lambda r: with_tensors(r, denoise_mask=torch.ones(3, 3)), "does not spread"),
    "mask of more dimensions": (
        lambda r: with_tensors(r, denoise_mask=torch.ones(1, 1, 1, 16, 16)),
        "does not spread",
    ),
    "prompt without dimensions": (
        lambda r: with_tensors(r, **{"positive.c_crossattn": torch.tensor(1.0)}),
        "batch, tokens, width",
    ),
    "prompt of tokens' numbers": (
        lambda r: with_tensors(r, **{"positive.c_crossattn": torch.ones(1, 7, 64).long()}),
        "floating-point",
    ),
    "pooled prompt of three dimensions": (
        lambda r: with_tensors(r, **{"negative.y": torch.ones(1, 1, 32)}),
        "batch, width",
    ),
    "empty guidance": (
        lambda r: with_tensors(r, **{"positive.guidance": torch.empty(0)}),
        "guidance has shape",
    ),
    "unknown model": (lambda r: replace(r, model="gone"), "not loaded"),
}
