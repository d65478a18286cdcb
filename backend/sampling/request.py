"""One sampling request as tensors on this rank's device, and its random numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..models.family import Family
from ..models.latent_tokens import NestedGrid, TokenGrid
from ..parallel.sequence import Sequence, Span, patches
from ..protocol import Sample
from ..protocol.solver_names import PERCENTS
from .guidance import GUIDANCE, Prompt, guidance_of, names
from .noise import FreshNoise
from .prediction import PREDICTIONS, Prediction
from .solver_registry import Problem


@dataclass(frozen=True)
class Request:
    """One checked sampling request.

    noise, latent: (B, N, F) tokens in float32. mask: the same shape (1 = denoise) or None. prompts: name ->
    how it counts. conditioning: name -> model arguments. percent_sigmas: fraction of sampling -> the model's
    noise level, at solver_names.PERCENTS; empty where the client sent none. reference_tokens: name -> tokens
    after the latent's in the image stream. patches: PipeFusion's M. warmup_steps: synchronous steps before
    stale keys and values are used. carry: as in models.family.Nested. patch0_tokens: of joint text and of
    references, for the balance of the patches. sp_size: ranks that shard a patch. batch, items: size of the
    whole batch, and the samples of it that this replica (data parallel) denoises; tensors hold those alone.

    times: (B,), the noise as the client gives it to the model, and given: (B, C, [T,] H, W), the latent as it
    is given to the model (ModelCall; noise and latent then have a shape and no values); None where they
    follow from the noise level and x."""

    solver: str
    prediction: Prediction
    cfg: float
    seed: int
    sigmas: Tensor
    noise: Tensor
    latent: Tensor
    mask: Tensor | None
    grid: TokenGrid | NestedGrid
    prompts: dict[str, Prompt]
    conditioning: dict[str, dict[str, Tensor]]
    reference_tokens: dict[str, int]
    patches: int
    warmup_steps: int
    stale_kv: str
    kernel: str
    from_pure_noise: bool
    clean_inpaint: bool
    percent_sigmas: dict[float, float]
    batch: int
    items: slice
    patch0_tokens: int
    sp_size: int = 1
    carry: Callable[[Tensor], list[tuple[Tensor, Tensor, Tensor]]] | None = None
    times: Tensor | None = None
    given: Tensor | None = None

    @property
    def guidance(self) -> tuple[str, ...]:
        """The sides of guidance that are evaluated."""
        found = {prompt.guidance for prompt in self.prompts.values()}
        return tuple(guidance for guidance in GUIDANCE if guidance in found)

    def prompts_at(self, sigma: Tensor) -> tuple[str, ...]:
        """Name the prompts that count at a noise level."""
        return tuple(name for name, prompt in self.prompts.items() if prompt.counts_at(sigma))

    @property
    def patch_spans(self) -> list[Span]:
        """The image tokens of every patch, balanced over the joint sequence."""
        return [
            tokens.image
            for tokens in patches(
                Sequence(self.patch0_tokens, self.grid.tokens, "first"), self.patches, sp_size=self.sp_size
            )
        ]

    def arguments(self, branch: str, items: slice) -> dict[str, Tensor]:
        """Return the model arguments of a branch for some samples of this replica's batch."""
        batch = self.noise.shape[0]
        return {
            name: value[items] if value.ndim and value.shape[0] == batch else value
            for name, value in self.conditioning[branch].items()
        }

    def model_input(self, x: Tensor, sigma: Tensor, items: slice) -> Tensor:
        """Return the latents (b, C, [T,] H, W) that the model is given for some samples of x (B, N, F) at
        noise level ``sigma``."""
        if self.given is not None:
            return self.given[items]
        x = self.prediction.model_input(x[items], sigma)
        return self.grid.to_latent(x if self.carry is None else x * self._carried(0, sigma, x))

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor, span: Span) -> Tensor:
        """Return the prediction for x (B, n, F), the tokens of ``span``, from the model's output for them."""
        if self.carry is not None:
            own, factor = (self._carried(i, sigma, x)[span.lo : span.hi] for i in (1, 2))
            output = own * x + factor * output
        return self.prediction.denoised(x, sigma, output)

    def _carried(self, which, sigma, like):
        assert self.carry is not None and isinstance(self.grid, NestedGrid), "nested latents alone have it"
        return self.grid.per_token([factors[which] for factors in self.carry(sigma)]).to(like)

    def start(self) -> Tensor:
        """Return the solver's first x, (B, N, F)."""
        return self.prediction.add_noise(self.sigmas[0], self.noise, self.latent, self.from_pure_noise)


def request_config(sample: Sample, config: ParallelConfig) -> ParallelConfig:
    """Return the backend's configuration with the settings that travel with the request."""
    return replace(
        config,
        num_pipeline_patch=sample.num_pipeline_patch,
        warmup_steps=sample.warmup_steps,
        stale_kv=sample.stale_kv,
        attention=sample.attention,
    )


def build(
    sample: Sample,
    config: ParallelConfig,
    family: Family,
    model_config: dict,
    dtype: torch.dtype,
    device: torch.device,
    replica: int = 0,
) -> Request:
    """Build the request of a checked message on ``device``, for one data-parallel ``replica``; conditioning
    in the model's ``dtype``."""
    config = request_config(sample, config)
    shape = sample.tensors["noise"].shape
    mine = Span(0, shape[0]).shard(replica, config.data_parallel_degree)
    items = slice(mine.lo, mine.hi)
    grid = family.latent.grid(model_config, shape[1:], sample.latent_shapes)

    def tensor(name):
        return sample.tensors[name].to(device, torch.float32)

    def tokens(name):
        return grid.to_tokens(tensor(name).expand(shape)[items])

    mask = tokens("denoise_mask") if "denoise_mask" in sample.tensors else None
    conditioning = {
        name: _conditioning(sample, name, shape[0], items, device, dtype, family) for name in names(sample)
    }
    reference_tokens = {
        name: family.conditioning.context_tokens(model_config, grid, cond)
        for name, cond in conditioning.items()
    }
    text = {
        name: family.conditioning.text_tokens(cond) if family.blocks.text_position else 0
        for name, cond in conditioning.items()
    }
    return Request(
        solver=sample.sampler,
        prediction=PREDICTIONS[family.noise.prediction],
        cfg=float(sample.cfg),
        seed=sample.seed,
        sigmas=tensor("sigmas"),
        noise=tokens("noise"),
        latent=tokens("latent"),
        mask=mask,
        grid=grid,
        batch=shape[0],
        items=items,
        prompts={name: _prompt(sample, name, tokens) for name in names(sample)},
        conditioning=conditioning,
        reference_tokens=reference_tokens,
        patch0_tokens=max(text[name] + reference_tokens[name] for name in conditioning),
        patches=config.patches,
        sp_size=config.sp_degree,
        warmup_steps=config.warmup_steps,
        stale_kv=config.stale_kv,
        kernel=sample.attention,
        from_pure_noise=family.noise.schedule is None
        or family.noise.schedule(model_config).is_highest(sample.tensors["sigmas"][0].item()),
        clean_inpaint=family.noise.clean_inpaint,
        percent_sigmas=dict(zip(PERCENTS, sample.tensors["percent_sigmas"].tolist()))
        if "percent_sigmas" in sample.tensors
        else {},
        carry=family.latent.nested and family.latent.nested.carry,
    )


def _prompt(sample, name, tokens) -> Prompt:
    settings = sample.prompts.get(name, {})
    weight = f"weight.{name}"
    limits = {
        field: float(settings[key])
        for field, key in (("highest", "from"), ("lowest", "until"))
        if key in settings
    }
    return Prompt(
        guidance_of(name),
        tokens(weight) if weight in sample.tensors else float(settings.get("strength", 1.0)),
        **limits,
    )


def _conditioning(sample, branch, batch, items, device, dtype, family):
    prefix = branch + "."
    found = {
        name.removeprefix(prefix): value for name, value in sample.tensors.items() if name.startswith(prefix)
    }
    cast = {name: family.conditioning.cast(name, value, device, dtype) for name, value in found.items()}
    whole = {
        name: value.expand(batch, *value.shape[1:]) if value.ndim and value.shape[0] == 1 else value
        for name, value in cast.items()
    }
    return {
        name: value[items] if value.ndim and value.shape[0] == batch else value
        for name, value in whole.items()
    }


class Inpaint:
    """Holds the latent where the mask is 0, as ComfyUI's KSamplerX0Inpaint does at every model
    call."""

    def __init__(self, request: Request):
        self.request = request
        self.noise = request.noise
        if request.mask is not None and request.solver == "ddim":
            # ComfyUI's ddim masks with noise of its own
            generator = torch.Generator("cpu").manual_seed((request.seed + 1) % (1 << 64))
            noise = torch.randn(request.batch, *request.grid.shape, generator=generator)
            self.noise = request.grid.to_tokens(noise)[request.items].to(request.noise)

    def model_input(self, x: Tensor, sigma: Tensor, span: Span) -> Tensor:
        """Return x with the masked latent at noise level ``sigma``; x (B, n, F) are the tokens of
        ``span``."""
        if self.request.mask is None:
            return x
        mask = self._tokens(self.request.mask, span)
        if self.request.clean_inpaint:
            return x * mask + self._tokens(self.request.latent, span) * (1.0 - mask)
        kept_part = self.request.prediction.add_noise(
            sigma, self._tokens(self.noise, span), self._tokens(self.request.latent, span), False
        )
        return x * mask + kept_part * (1.0 - mask)

    def denoised(self, denoised: Tensor, span: Span) -> Tensor:
        """Return the prediction with the latent where the mask is 0."""
        if self.request.mask is None:
            return denoised
        mask = self._tokens(self.request.mask, span)
        return denoised * mask + self._tokens(self.request.latent, span) * (1.0 - mask)

    @staticmethod
    def _tokens(x: Tensor, span: Span) -> Tensor:
        return x[:, span.lo : span.hi]


def problem(request: Request, noise: FreshNoise, span: Span) -> Problem:
    """Return the solver's problem for the tokens of ``span``."""
    tokens = slice(span.lo, span.hi)
    return Problem(
        request.sigmas.cpu(),
        request.prediction,
        lambda index: noise.draw(index)[request.items, tokens],
        lambda a, b: noise.brownian(a, b)[request.items, tokens],
        request.percent_sigmas.__getitem__,
    )
