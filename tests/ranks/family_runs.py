"""Rank program (launch.py): every family under the parallel methods of one world size, each against the
single process; rank 0 writes the errors as JSON.

main(FOLDER-OF-CHECKPOINTS, [ids of runs], OUT.json)
"""

import gc
import json
import os
from copy import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
import variants
from cropping import cropped
from diffusers.models.transformers.transformer_hidream_image import MoEGate
from families import golden, model_call
from ranks.compiled import compare
from ranks.family_cases import Run, runs
from safetensors.torch import load_file, save_file
from tiny import made_once, relative, write_checkpoint

from backend import engine as engine_module
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import open_checkpoint
from backend.models import FAMILIES
from backend.models.common import ltx2_connectors
from backend.parallel import compiled_blocks, mesh, tensor_parallel
from backend.parallel.attention import ulysses_ring
from backend.parallel.sequence import SequenceLengths, TokenShards, patches
from backend.protocol import Sample
from backend.sampling import request as request_module
from backend.sampling.step_loop import Callbacks

TRANSFORMERS = [
    getattr(diffusers, family.transformer) for family in FAMILIES.values()
]  # imported before ranks are forked

STEPS, MASKED = 2, 5
#: Most rows of latent pixels and tokens of text of a request: no ComfyUI is compared here. Text of a fixed
#: length is longer.
SIDE, TEXT, FIXED = 8, 20, 80
#: Samples of a model call: a batch that no two groups of ranks share evenly, and how many of them are called
#: where there is one group.
CALLED, ALONE = 3, 2

#: Degrees whose ranks send heads, or sum products, in two halves, as they do at real sizes.
IN_HALVES = (dict(ulysses_degree=2), dict(tensor_parallel_degree=2))

#: By how much the tokens differ that routers of experts are given on unlike ranks.
UNLIKE = 1e-3


def samples_called(run_: Run) -> int:
    """How many samples of a batch the model is called with."""
    if not run_.is_called:
        return 0
    return CALLED if run_.config.cfg_degree > 1 else ALONE


def request(case: str, config: ParallelConfig):
    """The first steps of a family's golden case or of a variant; FAMILY+mask hides the prompt's last tokens,
    FAMILY+one leaves its first one, FAMILY+image is called without one."""
    family, _, change = case.partition("+")
    sample = (
        variants.request(case, case)
        if case in variants.VARIANTS
        else golden(f"{family}__euler_simple", case)[0]
    )
    tensors = shortened({**sample.tensors, "sigmas": sample.tensors["sigmas"][: STEPS + 1]})
    for branch in ("positive", "negative") if change == "one" else ():
        tensors[f"{branch}.c_crossattn"] = tensors[f"{branch}.c_crossattn"][:, :1]
    for branch in ("positive", "negative") if change == "mask" else ():
        tensors[f"{branch}.attention_mask"] = torch.ones(
            tensors[f"{branch}.c_crossattn"].shape[:2], dtype=torch.long
        )
        tensors[f"{branch}.attention_mask"][:, -MASKED:] = 0
    return replace(
        sample,
        num_pipeline_patch=config.num_pipeline_patch,
        warmup_steps=config.warmup_steps,
        tensors=tensors,
    )


def shortened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a request with fewer tokens; text of a fixed length stays as it is."""
    return {
        # the end, since Flux.2's text begins with padding
        name: value[:, -TEXT:] if name.endswith("c_crossattn") and value.shape[1] > FIXED else value
        for name, value in cropped(tensors, SIDE).items()
    }


def write(folder: str, case: str):
    """The checkpoint of a case, where no rank has written it yet."""
    name = case.partition("+")[0]
    path = Path(folder, f"{name}.safetensors")
    if not path.exists():
        variants.write(path, name) if name in variants.VARIANTS else write_checkpoint(path, name)


@cache
def opened(path: str) -> Checkpoint:
    return open_checkpoint(path)


def open_once(path: str, *unused) -> Checkpoint:
    """A checkpoint whose headers are read and checked for its first load alone."""
    checkpoint = copy(opened(path))
    vars(checkpoint).pop("transformer")  # which a load fills
    return checkpoint


def load(engine: Engine, family: str, folder: str):
    with mock.patch.object(engine_module, "open_checkpoint", open_once):
        engine.load(family, f"{folder}/{family.partition('+')[0]}.safetensors", "default")


def run(engine: Engine, family: str, count: int, samples: bool = True):
    sample = request(family, engine.config)
    if not samples:
        return None, called(engine, family, sample, count)
    engine.check_sample(sample)
    latents, _ = engine.sample(sample, Callbacks())
    # latents cropped of their padding are views, which gloo does not broadcast
    return latents.contiguous(), called(engine, family, sample, count)


def called(engine: Engine, name: str, sample: Sample, count: int):
    """One call of the model with the first ``count`` samples of the batch."""
    if not count:
        return None
    call = model_call(sample, engine.models[name].family.name, CALLED)
    call = replace(
        call,
        tensors={
            name: value[:count] if value.ndim and value.shape[0] == CALLED else value
            for name, value in call.tensors.items()
        },
    )
    if name.endswith("+image"):
        del call.tensors["cond.c_crossattn"]
    engine.check_forward(call)
    output, _ = engine.forward(call)
    return output.contiguous()


def in_float8(engine: Engine, sample: Sample) -> torch.Tensor:
    """The latent of a request with float8 on the wire."""
    engine.check_sample(sample)
    return engine.sample(sample, Callbacks())[0].contiguous()


def reference(engine: Engine, family: str, folder: str) -> dict[str, torch.Tensor]:
    """What the single process makes of a case; computed once for all world sizes."""

    def compute(path: Path):
        load_alone(engine, family, folder)
        samples, output = run(engine, family, CALLED)
        assert samples is not None and output is not None  # one process samples, and is called
        save_file({"samples": samples, "output": output}, path)

    return load_file(made_once(Path(folder, f"{family}.reference"), compute))


def stale_reference(engine: Engine, family: str, folder: str, count: int, sp_size: int) -> torch.Tensor:
    """What the single process makes of a case in ``count`` patches of a pipeline whose stages are groups of
    ``sp_size`` ranks, with what is fresh and what is stale there; computed once for all world sizes."""
    config = ParallelConfig(num_pipeline_patch=count)

    def of_groups(sequence: SequenceLengths, count: int, **of_one_rank) -> list[TokenShards]:
        return patches(sequence, count, sp_size=sp_size)

    def compute(path: Path):
        load_alone(engine, family, folder)
        engine.rearrange(config, mesh.single())
        with mock.patch.object(request_module, "patches", of_groups):
            samples, _ = engine.sample(request(family, config), Callbacks())
        engine.rearrange(ParallelConfig(), mesh.single())
        save_file({"samples": samples.contiguous()}, path)

    return load_file(made_once(Path(folder, f"{family}.{count}.{sp_size}"), compute))["samples"]


def load_alone(engine: Engine, family: str, folder: str):
    """Have ``engine`` hold the model of a case, and no other."""
    if family not in engine.models:
        for other in list(engine.models):
            engine.unload(other)
        write(folder, family)
        load(engine, family, folder)


class References:
    """What one rank computes in a process of its own, of the cases that it judges."""

    def __init__(self, cases: list[str], chosen: list[Run], folder: str):
        engine = Engine(ParallelConfig(), mesh.single())
        self.exact, self.stale = {}, {}
        for case in cases:
            self.exact[case] = reference(engine, case, folder)
            for key in {run_.patches for run_ in chosen if run_.case == case and run_.is_simulated}:
                self.stale[case, key] = stale_reference(engine, case, folder, *key)


def traces(run_: Run, groups: mesh.Mesh, turn: int) -> bool:
    """Does this rank trace compiled blocks? Of those of a pipeline's stage one does, in turn: the latent says
    that ranks with a compiler and without agree."""
    of_stage = mesh.layout(run_.config).select(2, groups.pp.rank).flatten().tolist()
    return run_.all_trace or groups.rank == of_stage[turn % len(of_stage)]


def disturb_routers(engine: Engine):
    """Have all but the first of ranks that cut experts choose a few of them otherwise, as unlike GPUs do."""
    exact = MoEGate.forward

    def forward(self, tokens):
        noise = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0))
        return exact(self, tokens if engine.mesh.tp.is_first else tokens + UNLIKE * noise)

    MoEGate.forward = forward


def measured(engine: Engine, run_: Run, samples, output, references: References) -> dict:
    """What a run is judged by, against what the single process computed."""
    count = samples_called(run_)
    wanted = references.exact[run_.case]
    stale = references.stale[run_.case, run_.patches] if run_.is_simulated else None
    return dict(
        id=run_.id,
        bytes_read=engine.models[run_.case].report.bytes_read,
        relative=relative(samples, wanted["samples"]) if run_.samples else 0.0,
        simulated=None if stale is None else relative(samples, stale),
        called=relative(output, wanted["output"][:count]) if count else 0.0,
    )


def main(folder: str, selected: list[str], out: str):
    compiled_blocks.BACKEND = "eager"  # what is traced, without minutes of a C++ compiler
    ltx2_connectors.MIN_TOKENS = 0  # 128 tokens of a prompt, not 1024: no ComfyUI is compared here
    engine_module.gc = SimpleNamespace(collect=partial(gc.collect, 1))  # not through all that was traced
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    chosen = [each for each in runs() if each.ranks == world and each.id in set(selected)]
    cases = list(dict.fromkeys(each.case for each in chosen))
    references = References(cases[rank::world], chosen, folder)
    configs = dict.fromkeys(each.config for each in chosen)
    meshes = {config: mesh.build(config, "cpu") for config in configs}
    engine, found, previous = None, [], None
    usual = ulysses_ring.TILES_OF_A_CHUNK, tensor_parallel.MIN_TOKENS_TO_HALVE
    for run_ in chosen:
        case, config = run_.case, run_.config
        least = (1, 1) if dict(run_.degrees) in IN_HALVES else usual
        ulysses_ring.TILES_OF_A_CHUNK, tensor_parallel.MIN_TOKENS_TO_HALVE = least
        if engine is None:
            engine = Engine(config, meshes[config])
            disturb_routers(engine)
        if previous and previous.case != case:
            engine.unload(previous.case)
        engine.rearrange(config, meshes[config])
        if case not in engine.models:
            load(engine, case, folder)
        count = samples_called(run_)
        samples, output = run(engine, case, count, run_.samples)
        compiled = rounded = None
        if samples is not None:
            if run_.is_rounded:
                rounded = in_float8(engine, replace(request(case, config), wire="fp8"))
            if run_.is_compiled:
                compiled = compare(
                    engine, request(case, config), samples, traces(run_, engine.mesh, cases.index(case))
                )
            dist.broadcast(samples, 0)  # ranks share the work of the references
            if rounded is not None:
                dist.broadcast(rounded, 0)
        if count:
            assert output is not None  # it was called
            if rank != 0:  # rank 0 has all samples
                output = output.new_empty(count, *output.shape[1:])
            dist.broadcast(output, 0)
        if cases.index(case) % world == rank:
            row = measured(engine, run_, samples, output, references)
            before = previous.label if previous and previous.case == case else ""
            error = None if rounded is None else relative(rounded, samples)
            found.append(row | {"before": before, "compiled": compiled, "rounded": error})
        previous = run_
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        Path(out).write_text(json.dumps([row for of_rank in everyone for row in of_rank]))
    dist.barrier()
    dist.destroy_process_group()
