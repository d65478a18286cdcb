"""How large a request is, counted from its message: what its memory follows from."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..loading.checkpoint import Checkpoint
from ..models.family import Family
from ..planner.machine import samples_at_once
from ..protocol import ModelCall, Sample
from ..quantization.kernels import MatmulChoice
from ..sampling.guidance import branch_of, names
from ..sampling.request import arguments_of, grid_of, request_config
from .describe import RankPlan, describe


@dataclass(frozen=True)
class RequestSize:
    """A request as rank_plan counts it. image_tokens: of the latent and of references; text_tokens: of the
    longest prompt; batch, prompts: of all replicas and both CFG branches; calls: of the model with each
    prompt; latents: name and tokens of nested ones, as they follow each other; controls: control inputs
    (Conditioning.controls) of the prompt with most of them; image_features: Conditioning.image_features of
    the prompt with most of them, None for as many as is usual."""

    image_tokens: int
    text_tokens: int
    batch: int
    prompts: int
    calls: int
    latents: tuple[tuple[str, int], ...] = ()
    controls: int = 1
    image_features: int | None = None

    def plans(
        self,
        config: ParallelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        bits: int = 0,
        choices: Mapping[str, MatmulChoice] | None = None,
    ) -> list[RankPlan]:
        """Plan every rank; ``bits`` and ``choices`` as in describe. Raises ConfigError and
        UnsupportedError."""
        size = (self.image_tokens, self.text_tokens, self.batch, max(self.prompts, config.cfg_degree))
        settings = {"dtype": dtype, "calls": self.calls, "bits": bits, "choices": choices}
        settings |= {"latents": self.latents, "controls": self.controls}
        settings |= {"image_features": self.image_features}
        return describe(config, checkpoint, *size, **settings)


def planned_config(message: Sample | ModelCall, config: ParallelConfig) -> ParallelConfig:
    """Return the backend's configuration with the settings of a request; under a call PipeFusion is drained
    and reads no stale keys and values."""
    return (
        request_config(message, config)
        if isinstance(message, Sample)
        else replace(config, num_pipeline_patch=1)
    )


def size_of(
    message: Sample | ModelCall, config: ParallelConfig, family: Family, model_config: dict
) -> RequestSize:
    """Return the size of a checked request; of a call with all its tensors."""
    if isinstance(message, Sample):
        return _size_of_sample(message, config, family, model_config)
    return _size_of_call(message, config, family, model_config)


def _size_of_sample(
    sample: Sample, config: ParallelConfig, family: Family, model_config: dict
) -> RequestSize:
    shape = sample.tensors["noise"].shape
    grid = grid_of(sample, family, model_config)
    prompts = [arguments_of(name, sample.tensors) for name in names(sample)]
    text = max(_text_tokens(family, given) for given in prompts)
    references = max(family.conditioning.context_tokens(model_config, grid, given) for given in prompts)
    calls = len(sample.tensors["sigmas"]) - 1
    count = len(prompts)
    if config.cfg_degree > 1:  # as many as the side with most of them has, on each side
        count = config.cfg_degree * max(Counter(map(branch_of, names(sample))).values())
    latents = family.latent.named(grid)
    controls = max(map(family.conditioning.controls, prompts))
    features = max(family.conditioning.image_features(model_config, given) for given in prompts)
    return RequestSize(
        image_tokens=grid.tokens + references,
        text_tokens=text,
        batch=shape[0],
        prompts=count,
        calls=calls,
        latents=latents,
        controls=controls,
        image_features=features,
    )


def _size_of_call(call: ModelCall, config: ParallelConfig, family: Family, model_config: dict) -> RequestSize:
    """Count the samples that go through the model together on each replica; of those before them nothing
    stays cached."""
    x = call.tensors["x"]
    channels = x.shape[1] if family.latent.nested else family.latent.channels(model_config)
    given = arguments_of("cond", call.tensors)
    grid = family.latent.grid(model_config, (channels, *x.shape[2:]), call.latent_shapes, [given])
    references = family.conditioning.context_tokens(model_config, grid, given)
    replicas = config.data_parallel_degree * config.cfg_degree
    tokens = grid.tokens + references
    batch = min(-(-x.shape[0] // replicas), samples_at_once(tokens))
    prompts = config.cfg_degree  # one on each side: its samples know of no CFG branches
    samples = batch * config.data_parallel_degree
    latents = family.latent.named(grid)
    text = _text_tokens(family, given)
    controls = family.conditioning.controls(given)
    features = family.conditioning.image_features(model_config, given)
    return RequestSize(
        image_tokens=tokens,
        text_tokens=text,
        batch=samples,
        prompts=prompts,
        calls=1,
        latents=latents,
        controls=controls,
        image_features=features,
    )


def _text_tokens(family: Family, given: dict[str, Tensor]) -> int:
    """Count the tokens of a prompt that blocks read, in the image's sequence or next to it."""
    if family.blocks.text_position:
        return family.conditioning.count_text_tokens(given)
    text = given.get("c_crossattn")
    return text.shape[1] if text is not None and text.ndim == 3 else 0
