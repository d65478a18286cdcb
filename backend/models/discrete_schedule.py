"""Noise levels of discrete timesteps, as ComfyUI computes them (ModelSamplingDiscrete)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import UnsupportedError, quoted

#: Terminal alpha of a schedule of zero terminal SNR: not zero, so that sigma is finite.
LAST_ALPHA = 4.8973451890853435e-08

#: diffusers' name of a schedule of betas -> ComfyUI's.
BETA_SCHEDULES = {"scaled_linear": "linear", "linear": "sqrt_linear"}
#: diffusers' name of a prediction -> a name of prediction.PREDICTIONS.
PREDICTIONS = {"epsilon": "eps", "v_prediction": "v", "flow_prediction": "flow"}
#: Most timesteps of a schedule; published ones have 1000.
MAX_TIMESTEPS = 16_384


@dataclass(frozen=True)
class DiscreteSchedule:
    """betas rise from ``start`` to ``end``, linearly in their square root ("linear") or in themselves
    ("sqrt_linear")."""

    start: float
    end: float
    kind: str = "linear"
    zero_terminal_snr: bool = False
    steps: int = 1000

    @cached_property
    def sigmas(self) -> Tensor:
        """(steps,) float32, rising."""
        if self.kind == "linear":
            betas = torch.linspace(self.start**0.5, self.end**0.5, self.steps, dtype=torch.float64) ** 2
        else:
            betas = torch.linspace(self.start, self.end, self.steps, dtype=torch.float64)
        alphas = torch.cumprod(1.0 - betas, dim=0)
        sigmas = ((1 - alphas) / alphas) ** 0.5
        return (self._rescaled(sigmas) if self.zero_terminal_snr else sigmas).float()

    @staticmethod
    def _rescaled(sigmas):
        roots = (1 / (sigmas * sigmas + 1)).sqrt()
        first = roots[0].clone()
        last = roots[-1].clone()
        alphas = ((roots - last) * first / (first - last)) ** 2
        alphas[-1] = LAST_ALPHA
        return ((1 - alphas) / alphas) ** 0.5

    def timestep(self, sigma: Tensor) -> Tensor:
        """Return the timestep whose noise level is nearest to ``sigma`` (0-d) on a logarithmic scale."""
        return (sigma.log().cpu() - self.sigmas.log()).abs().argmin().to(sigma.device)

    def is_highest(self, sigma: float) -> bool:
        """Return whether sampling that starts at ``sigma`` starts from pure noise."""
        highest = self.sigmas[-1].item()
        return sigma > highest or math.isclose(sigma, highest, rel_tol=1e-5)


def prediction(scheduler: Mapping | None) -> str:
    """Return what a model with a pipeline's scheduler_config.json predicts; UnsupportedError for others."""
    if not scheduler or "FlowMatch" in str(scheduler.get("_class_name", "")):
        return "flow"
    stated = scheduler.get("prediction_type", "epsilon")
    if stated not in PREDICTIONS:
        what = f"the pipeline's scheduler predicts {quoted(stated)}"
        raise UnsupportedError(f"{what}; epsilon, v_prediction and flow are supported.")
    return PREDICTIONS[stated]


def of_scheduler(scheduler: Mapping | None) -> DiscreteSchedule | None:
    """Return the schedule of a pipeline's scheduler_config.json; None for flow models and without one.

    Raises UnsupportedError for a schedule that is not known.
    """
    if scheduler is None or prediction(scheduler) == "flow":
        return None
    curve = scheduler.get("beta_schedule", "linear")
    if curve not in BETA_SCHEDULES:
        what = f"the pipeline's scheduler has the beta_schedule {quoted(curve)}"
        raise UnsupportedError(f"{what}; {', '.join(BETA_SCHEDULES)} are supported.")
    start = scheduler.get("beta_start", 0.0001)
    end = scheduler.get("beta_end", 0.02)
    steps = scheduler.get("num_train_timesteps", 1000)
    numbers = all(isinstance(value, (int, float)) for value in (start, end))
    if not (numbers and 0 < start <= end < 1 and isinstance(steps, int) and 1 < steps <= MAX_TIMESTEPS):
        what = f"betas from {quoted(start)} to {quoted(end)} in {quoted(steps)} timesteps"
        raise UnsupportedError(
            f"the pipeline's scheduler has {what}; betas rise between 0 and 1 in {MAX_TIMESTEPS:,} timesteps "
            f"at most: download the folder again."
        )
    is_rescaled = bool(scheduler.get("rescale_betas_zero_snr"))
    return DiscreteSchedule(
        start=start, end=end, kind=BETA_SCHEDULES[curve], zero_terminal_snr=is_rescaled, steps=steps
    )
