"""Solvers on problems whose answer is known: order of convergence, distribution, and the same bits whatever
the patches.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import facts, golden_request, write_shallow_flux
from toy import BATCH, GRID, Toy, fresh_noise, problem, solve

from backend.config import ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import open_checkpoint
from backend.models import FAMILIES
from backend.models.latent_tokens import TokenGrid
from backend.parallel.sequence import Span
from backend.protocol import Sample
from backend.protocol.solver_names import HALF_LOG_SNR, NEEDS_NEGATIVE, PERCENTS, SOLVERS
from backend.sampling.noise import CACHED, FreshNoise
from backend.sampling.prediction import EPS, FLOW, V
from backend.sampling.request import Inpaint, build
from backend.sampling.request import problem as request_problem
from backend.sampling.solver_registry import SOLVER_FUNCTIONS, evaluations, solver_input
from backend.sampling.validation import RequestTarget, check_sample

PREDICTIONS = {"flow": FLOW, "eps": EPS, "v": V}
#: What solvers see of a prediction: whether it is FLOW. V differs from EPS in ``denoised`` alone.
KINDS = ("flow", "eps")
MEAN, STD = 0.5, 0.4
STOCHASTIC = {
    "euler_ancestral",
    "euler_ancestral_cfg_pp",
    "dpm_2_ancestral",
    "dpmpp_2s_ancestral",
    "dpmpp_sde",
    "dpmpp_2m_sde",
    "dpmpp_3m_sde",
    "ddpm",
    "lcm",
    "er_sde",
    "seeds_2",
    "seeds_3",
    "sa_solver",
}
# : Global order of the deterministic solvers; multistep methods start with lower orders, which bounds them to
# 2.
ORDERS = {
    "euler": 1,
    "euler_cfg_pp": 1,
    "ddim": 1,
    "gradient_estimation": 1,
    "heun": 2,
    "dpm_2": 2,
    "dpmpp_2m": 2,
    "res_multistep": 2,
    "lms": 2,
    "ipndm": 2,
    "ipndm_v": 2,
    "deis": 2,
    "uni_pc": 2,
    "uni_pc_bh2": 2,
}


def percent_to_sigma(prediction):
    return lambda percent: 1 - percent if prediction is FLOW else 14.6 * 0.03 ** (percent * 1.6)


def schedule(prediction, steps: int, to_zero: bool = True) -> torch.Tensor:
    """Noise levels from the first one, 1 or 14.6, evenly in sigma or in its logarithm."""
    if prediction is FLOW:
        return torch.linspace(1, 0, steps + 1) if to_zero else torch.linspace(1, 0.1, steps + 1)
    sigmas = torch.logspace(math.log10(14.6), -1, steps + 1)
    return torch.cat([sigmas[:-1], torch.zeros(1)]) if to_zero else sigmas


def nonlinear(prediction) -> Toy:
    return Toy(
        prediction,
        lambda x, sigma: torch.sin(x) + sigma * 0.1,
        lambda x, sigma: torch.cos(x),
        percent_to_sigma(prediction),
    )


def gaussian(prediction) -> Toy:
    """The ideal model of data that is normal with MEAN and STD: for it the probability flow has a formula
    (``exact``).
    """

    def model(scaled, sigma):
        x = scaled if prediction is FLOW else scaled * (sigma**2 + 1) ** 0.5
        alpha = 1 - sigma if prediction is FLOW else 1.0
        denoised = MEAN + alpha * STD**2 / (alpha**2 * STD**2 + sigma**2) * (x - alpha * MEAN)
        velocity = (x / (sigma**2 + 1) - denoised) * (sigma**2 + 1) ** 0.5 / sigma
        return velocity if prediction is V else (x - denoised) / sigma

    return Toy(prediction, model, model, percent_to_sigma(prediction), cfg=1.0)


def marginal(prediction, sigma):
    """(mean, standard deviation) of x at noise level ``sigma``."""
    alpha = 1 - sigma if prediction is FLOW else 1.0
    return alpha * MEAN, (alpha**2 * STD**2 + sigma**2) ** 0.5


def tokens(seed: int = 1) -> torch.Tensor:
    return GRID.to_tokens(torch.randn(BATCH, *GRID.shape, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("to_zero", (True, False), ids=("to zero", "ends early"))
def test_patches_give_the_same_bits(solver, kind, to_zero):
    """One solver for each uneven patch, stepped in turn as PipeFusion does, against one for all rows."""
    toy, sigmas = nonlinear(PREDICTIONS[kind]), schedule(PREDICTIONS[kind], 6, to_zero)
    x, noise = tokens() * sigmas[0], fresh_noise(5, sigmas)
    whole = solve(solver, toy, x, sigmas, fresh_noise(5, sigmas))
    assert torch.isfinite(whole).all()

    cuts = [slice(0, 1), slice(1, 6), slice(6, GRID.tokens)]
    solver_states = [SOLVER_FUNCTIONS[solver](x[:, rows], problem(toy, sigmas, noise, rows)) for rows in cuts]
    requests, ends = [next(solver_state) for solver_state in solver_states], [None] * len(cuts)
    while None in ends:
        for i, solver_state in enumerate(solver_states):
            try:
                requests[i] = solver_state.send(solver_input(solver, *toy.denoised(*requests[i][:2])))
            except StopIteration as end:
                ends[i] = end.value
    assert torch.equal(torch.cat(ends, dim=1), whole)
    assert len(noise.drawn) <= CACHED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", (1, 2, 5))
def test_model_calls_are_known_before(solver, kind, steps):
    """Stages without a latent follow ``evaluations``: the same noise levels, bit for bit, in order."""
    toy, sigmas, log = nonlinear(PREDICTIONS[kind]), schedule(PREDICTIONS[kind], steps), []
    noise = fresh_noise(5, sigmas)
    solve(solver, toy, tokens() * sigmas[0], sigmas, noise, log=log)
    plan = [(call.sigma.item(), call.step) for call in evaluations(solver, problem(toy, sigmas, noise))]
    assert plan == log
    assert sorted({step for _, step in plan}) == list(range(steps)) or (
        solver.startswith("uni_pc") and steps == 1
    )
    assert [step for _, step in plan] == sorted(step for _, step in plan)


@pytest.mark.parametrize("kind", PREDICTIONS)
@pytest.mark.parametrize("solver", ORDERS)
def test_order_of_convergence(solver, kind):
    """Halving the steps' length divides the error by 2 to the solver's order."""
    prediction = PREDICTIONS[kind]
    toy, errors = gaussian(prediction), []
    for steps in (32, 64):
        sigmas = (
            torch.linspace(0.9, 0.2, steps + 1)
            if prediction is FLOW
            else torch.logspace(0.5, -0.5, steps + 1)
        )
        (mean, std), (mean_end, std_end) = marginal(prediction, sigmas[0]), marginal(prediction, sigmas[-1])
        z = tokens()
        x = solve(solver, toy, mean + std * z, sigmas, fresh_noise(5, sigmas))
        errors.append((x - mean_end - std_end * z).abs().max().item())
    assert errors[0] < 0.03
    assert math.log2(errors[0] / errors[1]) > ORDERS[solver] - 0.3


#: ComfyUI's ddpm is variance-preserving arithmetic for a flow model too, which is no sampler of it.
SAMPLERS = [
    (solver, kind)
    for solver in sorted(STOCHASTIC - {"lcm"})
    for kind in KINDS
    if solver != "ddpm" or PREDICTIONS[kind] is not FLOW
]


@pytest.mark.parametrize("solver, kind", SAMPLERS)
def test_stochastic_solvers_keep_the_distribution(solver, kind):
    """With the ideal model of normal data x has the right mean and spread at the end (lcm jumps to the
    prediction, which is narrower).
    """
    prediction = PREDICTIONS[kind]
    sigmas = schedule(prediction, 150, to_zero=False)
    grid = TokenGrid((4, 48, 48), (1, 2, 2))
    noise = FreshNoise(5, 1, grid, torch.device("cpu"), sigmas)
    (mean, std), (mean_end, std_end) = marginal(prediction, sigmas[0]), marginal(prediction, sigmas[-1])
    z = torch.randn(1, grid.tokens, 16, generator=torch.Generator().manual_seed(1))
    x = solve(solver, gaussian(prediction), mean + std * z, sigmas, noise)
    assert abs(x.mean() - mean_end) < 0.03 * std_end
    assert abs(x.std() / std_end - 1) < 0.03


def test_every_name_is_known():
    assert set(SOLVER_FUNCTIONS) == set(SOLVERS) and len(SOLVERS) == len(set(SOLVERS))
    assert (NEEDS_NEGATIVE | HALF_LOG_SNR | STOCHASTIC | set(ORDERS)) == set(SOLVERS)


def test_brownian_path_adds_up():
    """The increments of two halves of an interval are the whole one's, whatever was asked before."""
    sigmas = torch.linspace(1, 0, 5)
    a, b, c = (torch.tensor(s) for s in (0.75, 0.625, 0.5))
    forward, backward = fresh_noise(3, sigmas), fresh_noise(3, sigmas)
    first, second, both = (
        forward.brownian(*ends) * (ends[0] - ends[1]).sqrt() for ends in ((a, b), (b, c), (a, c))
    )
    assert torch.allclose(first + second, both, atol=1e-6)
    assert torch.equal(backward.brownian(a, c), forward.brownian(a, c))
    assert abs(forward.brownian(a, b).std() - 1) < 0.15


def refused(**change) -> str:
    shape, config = (1, 16, 8, 8), FAMILIES["flux"].layout.config(facts("flux-dev")["shapes"])
    tensors = {
        "noise": torch.zeros(shape),
        "latent": torch.zeros(shape),
        "sigmas": torch.tensor([1.0, 0.5, 0.0]),
        "positive.c_crossattn": torch.zeros(1, 4, 64),
        "positive.y": torch.zeros(1, 32),
        "positive.guidance": torch.full((1,), 3.5),
        **change.pop("tensors", {}),
    }
    try:
        check_sample(
            Sample("m", change["sampler"], 1.0, 1, tensors=tensors),
            ParallelConfig(),
            RequestTarget(Checkpoint("m", FAMILIES["flux"], config, SimpleNamespace()), torch.float32, "cpu"),
        )
    except UnsupportedError as reason:
        return str(reason)
    return ""


def test_what_a_solver_lacks_is_named():
    """The negative prompt, or the model's noise levels: refused before a rank works, never replaced by a
    guess.
    """
    for solver in NEEDS_NEGATIVE:
        assert "negative" in refused(sampler=solver)
    for solver in HALF_LOG_SNR:
        assert "percent_sigmas" in refused(sampler=solver)
        assert not refused(sampler=solver, tensors={"percent_sigmas": torch.tensor([0.99, 0.8, 0.2])})
    assert "shape" in refused(sampler="sa_solver", tensors={"percent_sigmas": torch.zeros(len(PERCENTS) + 1)})
    assert not refused(sampler="dpmpp_sde", tensors={"sigmas": torch.tensor([0.9, 0.5, 0.0])})


@pytest.mark.parametrize(
    "solver, sigmas, says",
    [
        ("euler", (1.0, 1.0), "ends at the noise level 1,"),
        ("euler", (0.3, 1.0), "ends at the noise level 1,"),
        ("euler", (1.0, 0.5, 0.0, 0.0), "whose step 3 goes from 0 to 0"),
        (
            "dpmpp_2m",
            (1.0, 1.0, 0.5, 0.0),
            "dpmpp_2m divides by zero on this schedule, whose step 1 goes from 1 to 1",
        ),
        ("lms", (1.0, 0.5, 0.5, 0.2, 0.0), "step 2 goes from 0.5 to 0.5"),
    ],
)
def test_schedules_that_paint_nothing_are_refused(solver, sigmas, says):
    def given(*sigmas):
        return {"sigmas": torch.tensor(sigmas)}

    assert says in refused(sampler=solver, tensors=given(*sigmas))
    assert not refused(sampler=solver, tensors=given(1.0, 0.5, 0.2)) and not refused(
        sampler="euler", tensors=given(1.0, 1.0, 0.5, 0.0)
    )


@pytest.mark.parametrize("seed", [5, 2**63, 2**64 - 1])
@pytest.mark.parametrize("device, more", [("cpu", 1), ("cuda", 0)])
def test_the_seed_of_noise_is_one_more_on_the_cpu(seed, device, more, monkeypatch):
    """As of ComfyUI's default_noise_sampler; after the last seed comes the first."""
    seeds = []

    def generator(where):
        return SimpleNamespace(manual_seed=lambda given: seeds.append((where.type, given)))

    monkeypatch.setattr(torch, "Generator", generator)
    FreshNoise(seed, 1, GRID, torch.device(device), torch.linspace(1, 0, 5))
    assert seeds == [(device, (seed + more) % 2**64)]


def test_samples_of_a_batch_have_noise_of_their_own():
    """Every draw is that of the whole batch's latent, as ComfyUI's generator makes it."""
    noise = fresh_noise(5, torch.linspace(1, 0, 5))
    generator = torch.Generator().manual_seed(5 + 1)
    for index in range(2):
        whole = torch.randn(BATCH, *GRID.shape, generator=generator)
        assert noise.draw(index).equal(GRID.to_tokens(whole))


def masked_batch(tmp_path):
    """Make requests of two samples with masks of their own: (replica, **degrees) -> its Request."""
    checkpoint = open_checkpoint(str(write_shallow_flux(tmp_path / "flux.safetensors")))
    sample, _ = golden_request("inpaint")
    double = {name: torch.cat([sample.tensors[name]] * 2) for name in ("noise", "latent")}
    mask = sample.tensors["denoise_mask"]
    double["denoise_mask"] = torch.stack([mask, 1 - mask]).view(2, *mask.shape[1:])
    sample = replace(sample, sampler="ddim", tensors=sample.tensors | double)

    def built(replica: int, **degrees):
        about = (checkpoint, torch.float32, torch.device("cpu"), replica)
        return build(sample, ParallelConfig(**degrees), *about)

    return built


def test_a_masked_batch_is_divided_over_replicas(tmp_path):
    """Each has the masks, and the noise that ddim masks with, of its own samples."""
    built = masked_batch(tmp_path)
    whole = built(0)
    assert not whole.mask[0].equal(whole.mask[1])
    for replica in range(2):
        own = built(replica, data_parallel_degree=2)
        assert own.mask.equal(whole.mask[replica : replica + 1])
        assert Inpaint(own).noise.equal(Inpaint(whole).noise[replica : replica + 1])


def test_fresh_noise_is_divided_over_replicas(tmp_path):
    """Each has that of its own samples: drawn, and of the Brownian path."""
    built = masked_batch(tmp_path)
    sigmas, span = built(0).sigmas, Span(0, built(0).grid.tokens)

    def noises(request) -> list[torch.Tensor]:
        fresh = FreshNoise(5, 2, request.grid, torch.device("cpu"), sigmas)
        of_request = request_problem(request, fresh, span)
        return [of_request.noise(0), of_request.brownian(sigmas[0], sigmas[1])]

    for replica in range(2):
        of_replica = noises(built(replica, data_parallel_degree=2))
        for whole, own in zip(noises(built(0)), of_replica, strict=True):
            assert own.equal(whole[replica : replica + 1])
