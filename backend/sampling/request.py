"""One sampling request as tensors on this rank's device, and its random numbers."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..config import ParallelConfig
from ..loading.checkpoint import Checkpoint
from ..models.family import STEP_END, ModelIO
from ..models.latent_tokens import NestedGrid, TokenGrid
from ..parallel.sequence import SequenceLengths, Span, patches
from ..protocol import Sample
from ..protocol.solver_names import PERCENTS
from ..shares import shard_sizes
from .guidance import CFG_BRANCHES, Prompt, branch_of
from .model_inputs import ModelInputs, inputs_of, run_config
from .noise import FreshNoise, next_seed
from .prediction import PREDICTIONS, Prediction
from .solver_registry import Problem
from .solvers.unipc import LAST_SIGMA

#: Solvers that end at LAST_SIGMA where the schedule ends at 0.
UNIPC = ("uni_pc", "uni_pc_bh2")


@dataclass(frozen=True)
class Request:
    """One checked sampling request.

    config: the backend's, with the settings that travel with the request. sigmas: on the host. noise, latent:
    (B, N, F) tokens in float32. mask: the same shape (1 = denoise) or None. prompts: name -> how it counts.
    conditioning: name -> model arguments. percent_sigmas: fraction of sampling -> the model's noise level, at
    solver_names.PERCENTS; empty where the client sent none. reference_tokens: name -> tokens after the
    latent's in the image stream. rescale: as in models.family.Nested. patch0_tokens: of joint text and of
    references, for the balance of the patches. batch, own_samples: size of the whole batch, and the samples
    of it that this replica (data parallel) denoises; tensors hold those alone.

    times: (B,), the noise as the client gives it to the model, and given: (B, C, [T,] H, W), the latent as it
    is given to the model (ModelCall; noise and latent then have a shape and no values); None where they
    follow from the noise level and x. has_step_end: the model is told where a step ends."""

    config: ParallelConfig
    prediction: Prediction
    sigmas: Tensor
    noise: Tensor
    latent: Tensor
    grid: TokenGrid | NestedGrid
    prompts: dict[str, Prompt]
    conditioning: dict[str, dict[str, Tensor]]
    reference_tokens: dict[str, int]
    batch: int
    own_samples: slice
    solver: str = ""
    cfg: float = 1.0
    seed: int = 0
    mask: Tensor | None = None
    from_pure_noise: bool = False
    clean_inpaint: bool = False
    percent_sigmas: dict[float, float] = field(default_factory=dict)
    patch0_tokens: int = 0
    rescale: Callable[[Tensor], list[tuple[Tensor, Tensor, Tensor]]] | None = None
    times: Tensor | None = None
    given: Tensor | None = None
    has_step_end: bool = False

    @property
    def branches(self) -> tuple[str, ...]:
        found = {prompt.branch for prompt in self.prompts.values()}
        return tuple(name for name in CFG_BRANCHES if name in found)

    def prompts_at(self, sigma: Tensor) -> tuple[str, ...]:
        """Return the names of the prompts that count at ``sigma`` (0-d)."""
        return tuple(name for name, prompt in self.prompts.items() if prompt.counts_at(sigma))

    @property
    def most_samples(self) -> int:
        """Count the samples of the replica that has most: the same number on all of them."""
        shares = self.config.shares_of("dp")
        return max(shard_sizes(self.batch, count=self.config.data_parallel_degree, shares=shares))

    @property
    def patch_spans(self) -> list[Span]:
        """The image tokens of every patch, balanced over the joint sequence."""
        whole = SequenceLengths(text=self.patch0_tokens, image=self.grid.tokens, text_position="first")
        return [patch.image for patch in patches(whole, self.config.patches, sp_size=self.config.sp_degree)]

    def arguments(self, prompt: str, samples: slice) -> dict[str, Tensor]:
        """Return the model's arguments of ``prompt``, for these samples of the batch."""
        return _arguments_of_samples(self.conditioning[prompt], samples, self.noise.shape[0])

    def step_end(self, sigma: Tensor) -> Tensor | None:
        """Return where the step that begins at ``sigma`` (0-d, CPU) ends (1,); None where the model is not
        told, and at levels within a step, as in ComfyUI."""
        if not self.has_step_end:
            return None
        begins = (self.sigmas[:-1] == sigma).nonzero()
        if not len(begins):
            return None
        ends = self.sigmas[1:].clone()
        if self.solver in UNIPC and ends[-1] == 0:  # ComfyUI's overwrites it, also in what models read
            ends[-1] = LAST_SIGMA
        return ends[begins[0]]

    def model_input(self, x: Tensor, sigma: Tensor, samples: slice, io: ModelIO) -> Tensor:
        """Return what ``io.arguments`` is given for some samples of x (B, N, F) at ``sigma``."""
        if self.given is not None:
            return self.given[samples]
        x = self.prediction.model_input(x[samples], sigma)
        return io.of_tokens(x if self.rescale is None else x * self._rescaling(0, sigma, x), self.grid)

    def denoised(self, x: Tensor, sigma: Tensor, output: Tensor, span: Span) -> Tensor:
        """Return the prediction for x (B, n, F), the tokens of ``span``, from the model's output for them."""
        if self.rescale is not None:
            own, factor = (self._rescaling(i, sigma, x)[span.indices] for i in (1, 2))
            output = own * x + factor * output
        return self.prediction.denoised(x, sigma, output)

    def _rescaling(self, which, sigma, like):
        assert self.rescale is not None and isinstance(self.grid, NestedGrid), "nested latents alone have it"
        return self.grid.per_token([factors[which] for factors in self.rescale(sigma)], like)

    def start(self) -> Tensor:
        """Return the solver's first x (B, N, F)."""
        return self.prediction.add_noise(self.sigmas[0], self.noise, self.latent, self.from_pure_noise)


def build(
    sample: Sample,
    config: ParallelConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    replica: int = 0,
    inputs: ModelInputs | None = None,
) -> Request:
    """Build a checked request for one ``replica`` (dp); ``dtype``: the model's; ``inputs``: by the check."""
    family = checkpoint.family
    inputs = inputs or inputs_of(sample, checkpoint)
    grid = inputs.grid
    shape = inputs.latent.shape
    own = Span(0, shape[0]).shard(replica, config.data_parallel_degree, config.shares_of("dp"))

    def tokens(name):
        return grid.to_tokens(sample.tensors[name].to(device, torch.float32).expand(shape)[own.indices])

    conditioning = {}
    reference_tokens = {}
    patch0_tokens = 0
    for name, given in inputs.prompts.items():
        conditioning[name] = arguments = _conditioning(given, shape[0], own.indices, family, dtype, device)
        text = family.conditioning.count_text_tokens(arguments) if family.blocks.text_position else 0
        reference_tokens[name] = family.conditioning.context_tokens(checkpoint.config, grid, arguments)
        patch0_tokens = max(patch0_tokens, text + reference_tokens[name])
    return Request(
        config=run_config(sample, config),
        prediction=PREDICTIONS[family.noise.prediction],
        sigmas=sample.tensors["sigmas"].float(),
        noise=tokens("noise"),
        latent=tokens("latent"),
        grid=grid,
        prompts={name: _prompt(sample, name, tokens) for name in conditioning},
        conditioning=conditioning,
        reference_tokens=reference_tokens,
        batch=shape[0],
        own_samples=own.indices,
        solver=sample.sampler,
        cfg=float(sample.cfg),
        seed=sample.seed,
        mask=tokens("denoise_mask") if "denoise_mask" in sample.tensors else None,
        from_pure_noise=_from_pure_noise(checkpoint, sample.tensors["sigmas"][0].item()),
        clean_inpaint=family.noise.clean_inpaint,
        percent_sigmas=dict(zip(PERCENTS, sample.tensors.get("percent_sigmas", torch.zeros(0)).tolist())),
        patch0_tokens=patch0_tokens,
        rescale=family.latent.nested and family.latent.nested.rescale,
        has_step_end=STEP_END in family.conditioning.accepted,
    )


def _from_pure_noise(checkpoint: Checkpoint, sigma: float) -> bool:
    schedule = checkpoint.family.noise.schedule
    return schedule is None or schedule(checkpoint.config).is_highest(sigma)


def _prompt(sample, name, tokens) -> Prompt:
    settings = sample.prompts.get(name, {})
    weight = f"weight.{name}"
    strength = tokens(weight) if weight in sample.tensors else float(settings.get("strength", 1.0))
    highest = float(settings.get("from", "inf"))
    lowest = float(settings.get("until", "-inf"))
    return Prompt(branch=branch_of(name), weight=strength, highest=highest, lowest=lowest)


def _conditioning(given, batch, samples, family, dtype, device) -> dict[str, Tensor]:
    """Return the model arguments of a prompt for some samples; what is of one sample is for all."""
    found = {}
    for key, value in given.items():
        cast = family.conditioning.cast(key, value, device, dtype)
        found[key] = cast.expand(batch, *cast.shape[1:]) if cast.ndim and cast.shape[0] == 1 else cast
    return _arguments_of_samples(found, samples, batch)


def _arguments_of_samples(arguments: dict[str, Tensor], samples: slice, batch: int) -> dict[str, Tensor]:
    """Return model arguments of some samples of a batch; those of no batch are for all."""
    return {
        name: value[samples] if value.ndim and value.shape[0] == batch else value
        for name, value in arguments.items()
    }


class Inpaint:
    """Holds the latent where the mask is 0 at every model call, as ComfyUI's KSamplerX0Inpaint."""

    def __init__(self, request: Request):
        self.request = request
        self.noise = request.noise
        if request.mask is not None and request.solver == "ddim":
            # ComfyUI's ddim masks with noise of its own
            generator = torch.Generator("cpu").manual_seed(next_seed(request.seed))
            noise = torch.randn(request.batch, *request.grid.shape, generator=generator)
            self.noise = request.grid.to_tokens(noise)[request.own_samples].to(request.noise)

    def model_input(self, x: Tensor, sigma: Tensor, span: Span) -> Tensor:
        """Return x (B, n, F), the tokens of ``span``, with the masked latent at noise level ``sigma``."""
        request = self.request
        if request.mask is None or request.clean_inpaint:
            return self.denoised(x, span)
        tokens = span.indices
        mask = request.mask[:, tokens]
        noised = request.prediction.add_noise(sigma, self.noise[:, tokens], request.latent[:, tokens], False)
        return x * mask + noised * (1.0 - mask)

    def denoised(self, denoised: Tensor, span: Span) -> Tensor:
        """Return the prediction with the latent where the mask is 0."""
        if self.request.mask is None:
            return denoised
        mask = self.request.mask[:, span.indices]
        return denoised * mask + self.request.latent[:, span.indices] * (1.0 - mask)


def problem(request: Request, noise: FreshNoise, span: Span) -> Problem:
    """Return what a solver is given for the image tokens of ``span``; its noise is (samples, tokens, F)."""
    tokens = span.indices
    return Problem(
        sigmas=request.sigmas,
        prediction=request.prediction,
        noise=lambda index: noise.draw(index)[request.own_samples, tokens],
        brownian=lambda a, b: noise.brownian(a, b)[request.own_samples, tokens],
        percent_to_sigma=request.percent_sigmas.__getitem__,
    )
