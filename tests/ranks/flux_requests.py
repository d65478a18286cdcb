"""The requests of ranks/flux_cases.py: golden cases of a tiny Flux, and others made of them."""

from dataclasses import dataclass, replace

import torch
from tiny import batch_request, golden_request

#: Most steps of a request; steps of one with stale keys and values, of which at most two are of warm-up; of
#: one that every step shows as well as another.
STEPS, STALE_STEPS, FEW = 6, 4, 2
#: Positive and negative prompts of different lengths, one of them shorter than any group.
SHORT_NEGATIVE = "negative of 1 row"
#: A solver that reads the negative prediction by itself, which comes from another rank under CFG, and noise.
CFG_PP = "euler_ancestral_cfg_pp"
#: Several prompts: one that begins late, one for a part of the image, a negative one that ends early; also
#: under a solver that calls the model twice a step.
MIXED, MIXED_HEUN = "mixed prompts", "mixed prompts, heun"
#: A batch that no number of replicas here divides.
UNEVEN_BATCH = "batch of 5"
#: The same, with other prompts for the last two samples: of 2 replicas one has samples of one prompt, the
#: other one of two.
OWN_PROMPTS = "batch of 5, own prompts"
#: A batch of which 2 replicas have equal parts, so that describe() can be held to what is counted.
EVEN_BATCH = "batch of 2"
#: With LoRAs of every kind in the weights.
LORA = "LoRA"


@dataclass(frozen=True)
class Case:
    """A golden case, or one of those above, over so many of its steps, longer ones."""

    name: str
    steps: int = STEPS


def request_of(case: Case):
    """The request of a case."""
    made = MADE.get(case.name, lambda: golden_request(case.name)[0])
    return shortened(made(), case.steps)


def shortened(sample, steps: int):
    """The request over at most ``steps`` steps, longer ones."""
    sigmas = sample.tensors["sigmas"]
    steps = min(steps, len(sigmas) - 1)
    return replace(
        sample,
        tensors={
            **sample.tensors,
            "sigmas": sigmas[torch.linspace(0, len(sigmas) - 1, steps + 1).round().long()],
        },
    )


def short_negative():
    sample, _ = golden_request("euler_simple")
    return replace(
        sample,
        tensors={**sample.tensors, "negative.c_crossattn": sample.tensors["negative.c_crossattn"][:, :1]},
    )


def mixed_prompts(solver: str):
    """Prompts of different lengths, in an order in which a new one comes between known ones: before the third
    of STALE_STEPS; the negative one ends with that step."""
    sample = replace(golden_request("heun_simple")[0], sampler=solver)
    tensors, sigmas = dict(sample.tensors), shortened(sample, STALE_STEPS).tensors["sigmas"]
    for name, tokens in (("positive2", 9), ("positive3", 12)):
        tensors |= {
            f"{name}.c_crossattn": -0.7 * tensors["positive.c_crossattn"][:, :tokens],
            f"{name}.y": tensors["negative.y"],
            f"{name}.guidance": tensors["positive.guidance"],
        }
    tensors["weight.positive3"] = (torch.arange(16) < 7).float().expand(1, 1, 16, 16)
    return replace(
        sample,
        tensors=tensors,
        prompts={
            "positive2": {"from": sigmas[2].item(), "strength": 0.5},
            "negative": {"until": sigmas[3].item()},
        },
    )


def own_prompts():
    """Three samples of one prompt, and two of a prompt each, which modulation is computed from."""
    sample = batch_request(5)
    factors = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0])[:, None]
    pooled = {f"{side}.y": sample.tensors[f"{side}.y"][:1] * factors for side in ("positive", "negative")}
    return replace(sample, tensors=sample.tensors | pooled)


#: Name of a case that is no golden one -> its request.
MADE = {
    UNEVEN_BATCH: lambda: batch_request(5),
    OWN_PROMPTS: own_prompts,
    EVEN_BATCH: lambda: batch_request(2, "size20x12"),
    LORA: lambda: batch_request(2),
    SHORT_NEGATIVE: short_negative,
    MIXED: lambda: mixed_prompts("euler"),
    MIXED_HEUN: lambda: mixed_prompts("heun"),
    CFG_PP: lambda: replace(golden_request("euler_simple")[0], sampler=CFG_PP),
}
