"""What each of the two ranks of check_family.py does: every parallel method against one process."""

import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.autodetect.inputs import is_video
from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks

METHODS = [
    dict(cfg_degree=2),
    dict(data_parallel_degree=2),
    dict(ulysses_degree=2),
    dict(ring_degree=2),
    dict(tensor_parallel_degree=2),
    dict(tensor_parallel_degree=2, split_scheme="row"),
    dict(tensor_parallel_degree=2, split_scheme="column"),
    dict(pipefusion_degree=2, num_pipeline_patch=1),
    dict(pipefusion_degree=2, num_pipeline_patch=3),
]
#: Largest relative difference of exact methods (float32), and what stale keys and values may do to random
#: weights in a few steps.
EXACT, STALE = 1e-5, 0.25
#: Fields of Blocks that say how blocks are taken apart.
FACTS = ("lists", "image", "text", "returns", "text_position", "attention", "per_token")


def sides(text: str) -> list[int]:
    """The numbers of "16x64x64"."""
    return [int(side) for side in text.split("x")]


def request(checkpoint: Checkpoint, chosen, config: ParallelConfig) -> Sample:
    """Three Euler steps with two prompts, of as many samples as there are replicas."""
    family = checkpoint.family
    generator = torch.Generator().manual_seed(3)
    shapes = []
    if family.latent.nested:
        shapes = [sides(part) for part in chosen.latents.split(",")] if chosen.latents else []
        shape = [1, sum(map(math.prod, shapes))]
    else:
        frames = [chosen.frames] if is_video(checkpoint.transformer_class) else []
        shape = [family.latent.channels(checkpoint.config), *frames, *sides(chosen.size)]
    noise = torch.randn(2, *shape, generator=generator)
    if family.noise.schedule:
        sigmas = torch.cat([family.noise.schedule(checkpoint.config).sigmas[[-1, 700, 300]], torch.zeros(1)])
    else:
        sigmas = torch.tensor([1.0, 0.7, 0.4, 0.0])
    conditioning = load_file(chosen.conditioning) if chosen.conditioning else {}
    for branch in ("positive", "negative") if not conditioning else ():
        for name, width in family.conditioning.widths(checkpoint.config).items():
            tokens = [chosen.text] if name == "c_crossattn" else []
            conditioning[f"{branch}.{name}"] = torch.randn(1, *tokens, width, generator=generator)
        if "guidance" in family.conditioning.accepted:
            conditioning[f"{branch}.guidance"] = torch.tensor([3.5])
    return Sample(
        model="model",
        sampler="euler",
        cfg=3.0,
        seed=0,
        num_pipeline_patch=config.num_pipeline_patch,
        latent_shapes=shapes,
        tensors={"noise": noise, "latent": torch.zeros_like(noise), "sigmas": sigmas, **conditioning},
    )


def latent(model: str, chosen, config: ParallelConfig, place: mesh.Mesh) -> torch.Tensor:
    """What one way of running gives."""
    engine = Engine(config, place)
    engine.load("model", model, "fp32")
    sample = request(engine.models["model"].weights.checkpoint, chosen, config)
    engine.check_sample(sample)
    return engine.sample(sample, Callbacks())[0]


def compare(model: str, chosen, degrees: dict, reference: torch.Tensor) -> dict:
    """One method's difference, or why it does not run."""
    config = ParallelConfig(**degrees)
    row = {
        "model": Path(model).name,
        "method": ", ".join(f"{name} {value}" for name, value in degrees.items()),
    }
    try:
        difference = latent(model, chosen, config, mesh.build(config, "cpu")) - reference
    except UnsupportedError as reason:
        return row | {"refused": str(reason), "passed": True}
    error = (difference.norm() / reference.norm()).item()
    stale = config.has_stale_kv
    passed = 0 < error < STALE if stale else error < EXACT
    return row | {"error": error, "stale": stale, "passed": passed}


def facts(model: str) -> str:
    family = open_checkpoint(model).family
    return f"{model}: family {family.name}\n" + "\n".join(
        f"  {name}: {getattr(family.blocks, name)}" for name in FACTS
    )


def check(chosen) -> list[dict]:
    """All methods of all models; the same list on every rank."""
    torch.set_num_threads(1)
    rows = []
    for model in chosen.models:
        reference = latent(model, chosen, ParallelConfig(), mesh.single())
        if dist.get_rank() == 0:
            print(facts(model), flush=True)
        for degrees in METHODS:
            rows.append(compare(model, chosen, degrees, reference))
            if dist.get_rank() == 0:
                row = rows[-1]
                outcome = "ok  " if row["passed"] else "FAIL"
                result = row.get("refused") or format(row["error"], ".1e")
                stale = " (stale)" if row.get("stale") else ""
                print(f"  {outcome} {row['method']}: {result}{stale}", flush=True)
    return rows


def run(chosen, store: str):
    """Check all models on this rank, which meets the other one in the file ``store``, and end it."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=mesh.file_store(store), rank=rank, world_size=world_size)
    rows = check(chosen)
    leader = dist.get_rank() == 0
    if leader and chosen.json:
        chosen.json.write_text(json.dumps(rows))
    dist.barrier()
    sys.stdout.flush()
    # at once, as a rank of a backend ends (rank/start.py): destructors of process groups may abort
    os._exit(0 if all(row["passed"] for row in rows) or not leader else 1)
