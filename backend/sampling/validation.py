"""What a sampling request must satisfy, checked on rank 0 before any collective starts."""

import traceback
from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from ..config import ConfigError, ParallelConfig
from ..errors import UnsupportedError
from ..errors import reason as reason_of
from ..hardware.gpu_kernels import Capability
from ..loading.checkpoint import Checkpoint
from ..models.family import Family
from ..models.latent_tokens import NestedGrid, TokenGrid
from ..parallel.attention import kernel_choice, kernel_table
from ..parallel.attention.ring_library import ring_unavailable
from ..parallel.wire_bytes import FULL
from ..planner.config_changes import named_change
from ..protocol import Sample
from ..protocol.solver_names import BROWNIAN, NEEDS_NEGATIVE, PERCENTS
from ..runtime.torch_version import torch_version, unshardable
from ..shares import shard_sizes
from .guidance import branch_of, names
from .model_inputs import ModelInputs, inputs_of, run_config
from .prediction import FLOW, PREDICTIONS
from .solver_registry import SOLVER_FUNCTIONS, Problem, is_finite, needs_percent_sigmas
from .tensor_validation import FLOATS, check_arguments, check_latent, check_numbers

#: Numbers that float32 holds with room to spare.
MAX_NUMBER = 1e30
#: Guidance beyond this multiplies rounding errors alone (the nodes stop at 100).
MAX_CFG = 1e6
#: Steps, as many as ComfyUI's own nodes allow.
MAX_STEPS = 10_000


@contextmanager
def refusing(what: str):
    """Turn whatever a check raises into a refusal: a request that no check foresaw must not end the rank that
    looks at it. Raises UnsupportedError, ConfigError."""
    try:
        yield
    except (UnsupportedError, ConfigError):
        raise
    except Exception as error:
        traceback.print_exc()
        raise UnsupportedError(
            f"{what} could not be checked ({type(error).__name__}: {reason_of(error)}), "
            f"so nothing was run; look at the node, or the program, that made it."
        ) from error


@dataclass(frozen=True)
class RequestTarget:
    """A request's model and ranks. device: "cuda" or "cpu". capabilities: of the ranks' GPUs."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: str
    capabilities: Iterable[Capability] = ()


def check_sample(sample: Sample, config: ParallelConfig, target: RequestTarget) -> ModelInputs:
    """Return what a request gives the model. Raises UnsupportedError or ConfigError where it cannot run."""
    checkpoint = target.checkpoint
    family = checkpoint.family
    run = run_config(sample, config)
    prompts = names(sample)
    has_negative = any(branch_of(name) == "negative" for name in prompts)
    _check_settings(sample, config, run, has_negative)
    check_wire(run, family)
    check_kernel(run, target)
    _check_tensors(sample, checkpoint)
    config.check_batch(sample.tensors["noise"].shape[0])
    _check_solver(sample, family, has_negative)
    _check_prompts(sample, prompts)
    inputs = inputs_of(sample, checkpoint)
    for name, given in inputs.prompts.items():
        check_arguments(f"the {name} conditioning", given, inputs, checkpoint)
    check_patches(run, inputs.grid)
    return inputs


def _check_settings(sample, config, run, has_negative):
    if sample.sampler not in SOLVER_FUNCTIONS:
        raise UnsupportedError(
            f"the sampler {sample.sampler!r:.100} is not supported; choose one of "
            f"{', '.join(SOLVER_FUNCTIONS)}."
        )
    if not 0 <= sample.seed < 1 << 64:
        raise UnsupportedError(f"seed is {sample.seed}; choose one from 0 to {(1 << 64) - 1}.")
    if not abs(sample.cfg) <= MAX_CFG:
        raise UnsupportedError(f"cfg is {sample.cfg!s:.30}; use a number from {-MAX_CFG:g} to {MAX_CFG:g}.")
    run.validate()
    config.check_guidance(sample.cfg, has_negative)


def check_kernel(config: ParallelConfig, target: RequestTarget):
    """Refuse an attention kernel that cannot run a request of ``config`` here. Raises UnsupportedError."""
    if kernel_table.kernel_of(config.attention).call is None:
        return
    head_size = target.checkpoint.family.blocks.head_size(target.checkpoint.config)
    where = (target.device, target.dtype, head_size, target.capabilities)
    reason = kernel_choice.why_unavailable(config.attention, *where, kernel_table.merges(config))
    if reason:
        raise UnsupportedError(reason)


def check_wire(config: ParallelConfig, family: Family):
    """Refuse float8 on the wire for a model of which nothing would travel so. Raises UnsupportedError."""
    if config.wire != FULL and "linear" in family.blocks.attention:
        raise UnsupportedError(
            f"wire is {config.wire}, but {family.name} mixes tokens by linear attention, whose sums go in "
            f"full; set wire to full."
        )


def _check_tensors(sample, checkpoint):
    tensors = sample.tensors
    for name in ("noise", "latent", "sigmas"):
        if name not in tensors:
            raise UnsupportedError(f"the request has no tensor {name!r}; send it.")
        if tensors[name].dtype not in FLOATS:
            raise UnsupportedError(f"{name} is of {tensors[name].dtype}; send float32, float16 or bfloat16.")
    check_numbers(tensors)
    noise = tensors["noise"]
    sigmas = tensors["sigmas"]
    check_latent(tuple(noise.shape), sample.latent_shapes, checkpoint)
    if not noise.numel():
        raise UnsupportedError(
            f"the latent has shape {tuple(noise.shape)}, which holds nothing; make it larger."
        )
    if tensors["latent"].shape != noise.shape:
        raise UnsupportedError(
            f"noise has shape {tuple(noise.shape)} and latent {tuple(tensors['latent'].shape)}; they must "
            f"agree."
        )
    mask = tensors.get("denoise_mask", noise)
    sides = zip(mask.shape[::-1], noise.shape[::-1])
    if mask.ndim > noise.ndim or any(side not in (1, whole) for side, whole in sides):
        raise UnsupportedError(
            f"denoise_mask has shape {tuple(mask.shape)}, which does not spread to the latent's "
            f"{tuple(noise.shape)}; use a mask of the latent's size."
        )
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise UnsupportedError(
            f"the schedule has {sigmas.numel()} sigmas, which makes no step; use at least one step."
        )
    if len(sigmas) > MAX_STEPS + 1:
        raise UnsupportedError(f"the schedule has {len(sigmas) - 1} steps; use at most {MAX_STEPS}.")


def _check_solver(sample, family, has_negative):
    if sample.sampler in BROWNIAN and (sample.tensors["sigmas"].diff() > 0).any():
        raise UnsupportedError(
            f"the schedule rises, which the sampler {sample.sampler} cannot follow; use sigmas that fall, "
            f"or a sampler without _sde in its name."
        )
    if sample.sampler in NEEDS_NEGATIVE and not has_negative:
        raise UnsupportedError(
            f"the sampler {sample.sampler} uses the negative prompt at every cfg, 1.0 included, but the "
            f"request has none; send negative.* too."
        )
    percents = sample.tensors.get("percent_sigmas")
    if percents is None and needs_percent_sigmas(
        sample.sampler, family.noise.prediction == "flow", sample.tensors["sigmas"][0].item()
    ):
        raise UnsupportedError(
            f"the sampler {sample.sampler} needs the model's noise levels after {PERCENTS} of sampling; "
            f"send them as the tensor percent_sigmas."
        )
    if percents is not None and percents.shape != (len(PERCENTS),):
        raise UnsupportedError(
            f"percent_sigmas has shape {tuple(percents.shape)}, but it is one noise level for each of "
            f"{PERCENTS}; send {len(PERCENTS)} numbers."
        )
    _check_schedule(sample, PREDICTIONS[family.noise.prediction])


def _check_schedule(sample, prediction):
    """Refuse noise levels on which a solver divides by zero, as ComfyUI's does."""
    sigmas = sample.tensors["sigmas"].float()
    percents = sample.tensors.get("percent_sigmas", torch.zeros(0))
    still = (sigmas.diff() == 0) | (sigmas[:-1] == 0)
    if prediction is FLOW:
        still |= sigmas[1:] >= 1
    percent_to_sigma = dict(zip(PERCENTS, percents.tolist())).__getitem__
    problem = Problem(sigmas, prediction, _no_noise, _no_noise, percent_to_sigma)
    if not still.any() or is_finite(sample.sampler, problem):
        return
    if prediction is FLOW and sigmas[-1] >= 1:
        raise UnsupportedError(
            f"the schedule ends at the noise level {sigmas[-1]:g}, which leaves nothing of the image; "
            f"end it below 1."
        )
    at = int(still.nonzero()[0])
    raise UnsupportedError(
        f"the sampler {sample.sampler} divides by zero on this schedule, whose step {at + 1} goes from "
        f"{sigmas[at]:g} to {sigmas[at + 1]:g}; leave one of them out, or choose another sampler."
    )


def _no_noise(*_) -> torch.Tensor:
    raise AssertionError("a dry run has noise of its own")


def _check_prompts(sample, known):
    noise = sample.tensors["noise"]
    if not any(branch_of(name) == "positive" for name in known):
        raise UnsupportedError("the request has no positive prompt; send its model arguments as positive.*.")
    weights = [key for key in sample.tensors if key.startswith("weight.")]
    for name in [*sample.prompts, *(key.removeprefix("weight.") for key in weights)]:
        if name not in known:
            raise UnsupportedError(
                f"the request says how to mix {name!r:.100}, but has no such prompt; it has "
                f"{', '.join(known):.200}."
            )
    for name, settings in sample.prompts.items():
        numbers = isinstance(settings, dict) and all(
            isinstance(value, (int, float)) and abs(value) < MAX_NUMBER for value in settings.values()
        )
        if not numbers or set(settings) - {"strength", "from", "until"}:
            raise UnsupportedError(
                f"{name} is to be mixed by {settings!r:.200}; give the numbers strength, from and until."
            )
    for key in weights:
        try:
            sample.tensors[key].expand(noise.shape)
        except RuntimeError:
            raise UnsupportedError(
                f"{key} has the shape {tuple(sample.tensors[key].shape)}, which does not fit the latent's "
                f"{tuple(noise.shape)}; make the mask of the size of the image."
            ) from None


def check_degrees(checkpoint: Checkpoint, config: ParallelConfig):
    """Refuse a configuration whose ranks cannot run a checkpoint. Raises UnsupportedError."""
    check_family(checkpoint.family, config)
    heads = checkpoint.family.blocks.heads(checkpoint.config)
    check_blocks_and_heads(checkpoint.name, checkpoint.block_count, heads, config)
    held = (checkpoint.is_quantized, bool(checkpoint.family.build.float32))
    if config.shard_weights and (unsharded := unshardable(*held)):
        weights, least = unsharded
        change = named_change(config, partial(check_degrees, checkpoint), sharded=False)
        otherwise = f"set {change}, which divides them too" if change else "switch shard_weights off"
        raise UnsupportedError(
            f"shard_weights is on, but torch {torch_version()} cannot shard {weights} of {checkpoint.name}; "
            f"install torch {least} or later, or {otherwise}."
        )


def check_blocks_and_heads(name: str, blocks: int, heads: int, config: ParallelConfig):
    """Refuse degrees that do not fit a model of such blocks and heads. Raises UnsupportedError."""
    stages = config.pipefusion_degree
    counts = config.stage_counts
    tp = config.tensor_parallel_degree
    if stages > max(1, blocks):  # no blocks: a transformer that runs whole
        raise UnsupportedError(
            f"pipefusion_degree is {stages} but {name} has {blocks} blocks; every stage needs one, so set "
            f"pipefusion_degree to {blocks} or less."
        )
    if counts and sum(counts) != blocks:
        raise UnsupportedError(
            f"attn_layer_num_for_pp is {config.attn_layer_num_for_pp}, together {sum(counts)} blocks, but "
            f"{name} has {blocks}; make the numbers add up to {blocks}."
        )
    by_heads = tp > 1 and config.split_scheme == "megatron"
    uneven = config.shares_of("tp")
    if by_heads and uneven and heads < tp:
        raise UnsupportedError(
            f"tensor_parallel_degree is {tp} but {name} has {heads} attention heads, and every rank needs "
            f"one; use {heads} or less, or split_scheme row, column or 2d."
        )
    if by_heads and not uneven and heads % tp:
        raise UnsupportedError(
            f"tensor_parallel_degree is {tp}, which does not divide the {heads} attention heads of {name}; "
            f"use a divisor of {heads}, or split_scheme row, column or 2d."
        )
    if config.ring_degree > 1 and (reason := ring_unavailable()):
        raise UnsupportedError(reason)
    local = min(shard_sizes(heads, count=tp, shares=uneven)) if by_heads else heads
    if config.ulysses_degree > local:
        whose = f"each tensor-parallel rank of {name}" if local != heads else name
        raise UnsupportedError(
            f"ulysses_degree is {config.ulysses_degree} but {whose} has {local} attention heads; every "
            f"Ulysses rank needs one, so set ulysses_degree to {local} or less and use ring_degree for the "
            f"rest."
        )


def check_family(family: Family, config: ParallelConfig):
    """Refuse methods that a transformer without a family file cannot do. Raises UnsupportedError."""
    if not family.blocks.whole_only:
        return
    for degree in ("pipefusion_degree", "ulysses_degree", "ring_degree", "tensor_parallel_degree"):
        if getattr(config, degree) > 1:
            raise UnsupportedError(
                f"{degree} is {getattr(config, degree)}, but {family.name} runs with CFG and data "
                f"parallelism only: it has no family file, and {family.blocks.whole_only}. Set cfg_degree or "
                f"data_parallel_degree instead; docs/adding_a_model.md says how to add a family."
            )


def check_patches(config: ParallelConfig, grid: TokenGrid | NestedGrid):
    """Refuse more pieces than there are tokens. Raises UnsupportedError."""
    patches = config.patches
    if patches * config.sp_degree > grid.tokens:
        raise UnsupportedError(
            f"num_pipeline_patch {patches} x ulysses_degree {config.ulysses_degree} x ring_degree "
            f"{config.ring_degree} is more than the {grid.tokens} tokens of this latent; use fewer "
            f"patches, lower a degree or make the latent larger."
        )
