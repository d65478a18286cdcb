"""Every solver against ComfyUI's own function of that name, on a model that is a formula: the same latent for
the same seed."""

from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from toy import BATCH, GRID, Toy, fresh_noise, solve

from backend.protocol.solver_names import BROWNIAN, SOLVERS
from backend.sampling.prediction import EPS, FLOW, V
from backend.sampling.request import Inpaint
from backend.sampling.solver_registry import Problem, is_finite

with comfy_modules():
    import comfy.model_sampling as model_sampling
    import comfy.samplers

SEED = 7
#: Of a number in float32, relative.
LAST_DIGIT = 1.2e-7


class Flow(model_sampling.ModelSamplingFlux, model_sampling.CONST):
    """As Flux."""


class ShiftedFlow(model_sampling.ModelSamplingDiscreteFlow, model_sampling.CONST):
    """As SD3 and Wan."""


class Eps(model_sampling.ModelSamplingDiscrete, model_sampling.EPS):
    """As PixArt."""


class Velocity(model_sampling.ModelSamplingDiscrete, model_sampling.V_PREDICTION):
    """As HunyuanDiT."""


def _pull(centre):
    """A model output whose prediction stays near ``centre``, not linear in x."""
    return {
        FLOW: lambda x, sigma: (x - centre - 0.2 * torch.sin(2 * x) * (1 - sigma)) / (0.1 + 0.9 * sigma),
        EPS: lambda x, sigma: (
            (x - (centre + 0.2 * torch.sin(2 * x)) / (1 + sigma**2) ** 0.5) * (1 - 0.1 / (1 + sigma))
        ),
        V: lambda x, sigma: (x - centre + 0.2 * torch.sin(2 * x)) / (1 + 1 / (1 + sigma**2)) ** 0.5,
    }


POSITIVE, NEGATIVE = _pull(0.4), _pull(-0.3)
MODELS = {"flow": (FLOW, Flow), "shifted flow": (FLOW, ShiftedFlow), "eps": (EPS, Eps), "v": (V, Velocity)}


class Guided:
    """What ComfyUI's samplers call: stands for CFGGuider, BaseModel and ModelPatcher at once."""

    def __init__(self, toy: Toy, sampling):
        self.toy, self.model_sampling = toy, sampling
        self.inner_model = self.model_patcher = self.model = self
        self.cfg = toy.cfg

    def get_model_object(self, name):
        return getattr(self, name)

    def scale_latent_inpaint(self, sigma, noise, latent_image, **kwargs):
        return self.model_sampling.noise_scaling(sigma.reshape(-1, 1, 1, 1), noise, latent_image)

    def __call__(self, x, sigma, model_options=None, seed=None):
        outputs = (
            model(self.model_sampling.calculate_input(sigma, x), sigma[0])
            for model in (self.toy.positive, self.toy.negative)
        )
        positive, negative = (self.model_sampling.calculate_denoised(sigma, output, x) for output in outputs)
        guided = negative + (positive - negative) * self.toy.cfg
        for function in model_options.get("sampler_post_cfg_function", []):
            guided = function({"denoised": guided, "uncond_denoised": negative})
        return guided


def _schedule(sampling, steps: int, to_zero: bool):
    sigmas = comfy.samplers.calculate_sigmas(
        sampling, "simple" if steps < 5 else "karras", steps if to_zero else steps + 1
    )
    return sigmas if to_zero else sigmas[:-1]


def _differences(
    solver: str, kind: str, steps: int, to_zero: bool, masked: bool = False
) -> tuple[float, float]:
    """Largest difference from ComfyUI's latent, in standard deviations of it: of ours, and of ComfyUI's own
    from noise of another last digit, which UniPC's products of steps enlarge."""
    prediction, sampling = MODELS[kind][0], MODELS[kind][1]()
    toy = Toy(prediction, POSITIVE[prediction], NEGATIVE[prediction], sampling.percent_to_sigma)
    sigmas = _schedule(sampling, steps, to_zero)
    generator = torch.Generator().manual_seed(SEED)
    noise, latent = (torch.randn(BATCH, *GRID.shape, generator=generator) for _ in range(2))
    mask = torch.rand(noise.shape, generator=generator).round() if masked else None
    if not masked:
        latent = torch.zeros_like(latent)

    request = SimpleNamespace(
        noise=GRID.to_tokens(noise),
        latent=GRID.to_tokens(latent),
        mask=GRID.to_tokens(mask) if masked else None,
        solver=solver,
        seed=SEED,
        grid=GRID,
        prediction=prediction,
        batch=BATCH,
        own_samples=slice(None),
        clean_inpaint=False,
    )
    start = prediction.add_noise(sigmas[0], request.noise, request.latent, True)
    x = solve(solver, toy, start, sigmas, fresh_noise(SEED, sigmas), Inpaint(request))
    ours = prediction.finish(GRID.to_latent(x), sigmas[-1])

    theirs, moved = (
        comfy.samplers.sampler_object(solver).sample(
            Guided(toy, sampling),
            sigmas.clone(),
            {"seed": SEED, "model_options": {}},
            None,
            each.clone(),
            latent.clone(),
            mask,
            True,
        )
        for each in (noise, noise * (1 + LAST_DIGIT * noise.sign()))
    )
    assert torch.isfinite(theirs).all()
    return tuple(((each - theirs).abs().max() / theirs.std()).item() for each in (ours, moved))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to_zero", (True, False), ids=("to zero", "ends early"))
@pytest.mark.parametrize("steps", (2, 3, 7))
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_same_latent_as_comfyui(solver, kind, steps, to_zero, record_property):
    error, moved = _differences(solver, kind, steps, to_zero)
    record_property("error", error)
    assert error <= max(1e-5, min(1e-4, 2 * moved))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_same_latent_where_a_mask_keeps_a_part(solver, kind):
    error, moved = _differences(solver, kind, 5, True, masked=True)
    assert error <= max(1e-5, min(1e-4, 2 * moved))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("solver", SOLVERS)
def test_same_latent_in_one_step(solver):
    assert _differences(solver, "flow", 1, True)[0] <= 1e-5


#: Schedules that hardly fall.
STILL = {
    "ends at 1": (1.0, 1.0),
    "begins twice": (1.0, 1.0, 0.6, 0.3, 0.0),
    "stands": (1.0, 0.6, 0.6, 0.3, 0.0),
    "stands at 0": (1.0, 0.5, 0.0, 0.0),
    "rises": (0.5, 0.8, 1.0),
    "from 0": (0.0, 0.4, 0.8),
}

#: Those on which a Brownian tree answers: on others it searches for ever (ours is never asked, since they are
#: refused).
SDE_STILL = ("ends at 1", "stands", "stands at 0")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["flow", "eps"])
@pytest.mark.parametrize(
    "solver, schedule",
    [(solver, name) for solver in SOLVERS for name in STILL if solver not in BROWNIAN or name in SDE_STILL],
)
def test_a_schedule_is_refused_where_nothing_is_painted(solver, schedule, kind):
    """Never where ComfyUI's own function gets through, and then the latents are the same; some of ours get
    through where that divides by zero."""
    (prediction, sampling), sigmas = MODELS[kind], torch.tensor(STILL[schedule])
    toy = Toy(prediction, POSITIVE[prediction], NEGATIVE[prediction], sampling().percent_to_sigma)
    noise = torch.randn(BATCH, *GRID.shape, generator=torch.Generator().manual_seed(SEED))
    start = prediction.add_noise(
        sigmas[0], GRID.to_tokens(noise), torch.zeros_like(GRID.to_tokens(noise)), False
    )
    ours = painted(
        lambda: prediction.finish(
            GRID.to_latent(solve(solver, toy, start, sigmas, fresh_noise(SEED, sigmas))), sigmas[-1]
        )
    )
    theirs = painted(
        lambda: comfy.samplers.sampler_object(solver).sample(
            Guided(toy, sampling()),
            sigmas.clone(),
            {"seed": SEED, "model_options": {}},
            None,
            noise,
            torch.zeros_like(noise),
            None,
            False,
        )
    )
    passes = is_finite(solver, Problem(sigmas, prediction, None, None, toy.percent_to_sigma))
    assert passes == (ours is not None) or (
        solver == "res_multistep" and not passes
    )  # which puts the largest number in infinity's place, and gives that to the model
    assert theirs is None or (
        ours is not None and ((ours - theirs).abs().max() / theirs.std()).item() <= 1e-5
    )


def painted(sample):
    """The latent, or None where the solver divides by zero."""
    try:
        latent = sample()
    except (ZeroDivisionError, torch.linalg.LinAlgError):
        return None
    return latent if torch.isfinite(latent).all() else None
