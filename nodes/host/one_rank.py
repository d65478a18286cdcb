"""How long a step takes on one rank of this machine, so that several can be compared with it. Every run on
one rank is noted in a file of ComfyUI's user folder; nothing is measured for its sake. Where there was none,
the planner's estimate stands in, by what it has measured before.

Auto chooses no plan by these seconds. They are of one plan: next to estimates of the others they would tell
how far estimates are off, and not which plan is faster. Estimates that are all scaled by them have the same
plan for the fastest (tests/unit/test_plan_order.py). And they may be of another GPU or torch, or of compiled
blocks: ``key`` has none of these."""

import hashlib
import json
import logging
from pathlib import Path

import folder_paths

from ...backend.client.auto import planning
from ...backend.planner.machine import RequestEstimate, sides_of
from ...backend.planner.model_shape import ModelShape
from ...backend.protocol import Sample
from ...backend.runtime.whole_files import replace_file
from .handle import ParallelDiT
from .request_estimate import request_estimate

#: Requests that are noted, the latest ones.
MAX_REQUESTS = 500
#: Names of a request's reference latents, of one prompt.
REFERENCES = ("positive.ref_latents.", "positive.context_latents.", "positive.time_dim_concat")
#: (key of a request, configuration) -> what ``projected_speedup`` estimates: the latent waits for it.
_projected: dict[tuple, float] = {}


def path() -> Path:
    """Return the file: digest of a request -> least seconds of a step."""
    return Path(folder_paths.get_user_directory()) / "parallel-dit" / "one_rank.json"


def key(dit: ParallelDiT, sample: Sample, device: str) -> str:
    """Return what tells requests apart whose steps take other times on one rank."""
    file = Path(dit.choice.path)
    size = file.stat().st_size if file.is_file() else 0
    shapes = {name: list(value.shape) for name, value in sorted(sample.tensors.items()) if name != "sigmas"}
    kind = (dit.choice.path, size, dit.loaded.info["dtype"], dit.choice.matmul, len(dit.loras), device)
    request = (sample.sampler, sample.attention, sample.latent_shapes, shapes)
    return hashlib.sha256(json.dumps([kind, request]).encode()).hexdigest()[:32]


def least_seconds(digest: str) -> float | None:
    """Return the least seconds of a step that one rank took; None where it has never run."""
    return _read().get(digest)


def projected_speedup(digest: str, dit: ParallelDiT, sample: Sample) -> float | None:
    """Estimate how many times as fast as one rank a request runs, where the planner knows machine and model
    from before and has not said it in its choice. ``digest``: its key, for which it is estimated once."""
    if dit.auto is not None:
        return None
    asked = (digest, dit.config)
    for oldest in list(_projected)[:-MAX_REQUESTS]:
        del _projected[oldest]
    if asked not in _projected:
        times = _projection(dit, sample)
        if times is None:  # perhaps known by the next run
            return None
        _projected[asked] = times
    return _projected[asked]


def _projection(dit: ParallelDiT, sample: Sample) -> float | None:
    def request(shape: ModelShape) -> RequestEstimate:
        noise = sample.tensors["noise"]
        size = sample.latent_shapes[0] if sample.latent_shapes else noise.shape[1:]
        references = [each for name, each in sample.tensors.items() if name.startswith(REFERENCES)]
        given = [sides_of(each.shape[1:]) for each in references]
        prompt = sample.tensors.get("positive.c_crossattn")
        text = 0 if prompt is None else prompt.shape[1]
        prompts = 2 if any(name.startswith("negative.") for name in sample.tensors) else 1
        steps = len(sample.tensors["sigmas"]) - 1
        about = RequestEstimate(text_tokens=text, steps=steps, prompts=prompts, batch=noise.shape[0])
        return request_estimate(shape, sides_of(size), given, about)

    return planning.projected(dit.config, dit.choice, request)


def note_seconds(digest: str, seconds: float):
    """Keep the seconds of a step on one rank, unless an earlier run was faster, or nothing can be written."""
    times = _read()
    times[digest] = min(seconds, times.pop(digest, seconds))
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(dict(list(times.items())[-MAX_REQUESTS:])))
    except OSError as error:  # a full disk must not cost the latent that was just computed
        logging.warning("parallel-dit: %s cannot be written (%s)", file, error)


def _read() -> dict[str, float]:
    try:
        found = json.loads(path().read_text())
    except (OSError, ValueError):  # none yet, or somebody has edited it
        return {}
    return found if isinstance(found, dict) else {}
