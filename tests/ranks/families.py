"""Rank program (launch.py): every family under the parallel methods of one world size, each against the
single process; rank 0 writes the errors as JSON.

main(FOLDER-OF-CHECKPOINTS, "CASE CASE ...", OUT.json)
"""

import gc
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import diffusers
import torch
import torch.distributed as dist
import variants
from families import LATENT_FORMATS, golden, model_call
from safetensors.torch import load_file
from tiny import relative, save_whole, write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.models import FAMILIES
from backend.parallel import mesh
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks

TRANSFORMERS = [
    getattr(diffusers, family.transformer) for family in FAMILIES.values()
]  # imported before ranks are forked
gc.freeze()  # what is imported stays: no collection looks through it again

STEPS, MASKED = 2, 5
#: Rows of a model call: a batch that no two groups of ranks share evenly, and how many of them are called
#: where there is one group.
CALLED, ALONE = 3, 2
#: Attention heads of the tiny checkpoints that have fewer than four.
HEADS = {"kandinsky5-image": 2}
#: Other ways to cut matrices: one call of the model each.
SCHEMES = {2: ("row", "column"), 4: ("2d",)}
CONFIGURATIONS = {
    2: [
        dict(ulysses_degree=2),
        dict(cfg_degree=2),
        dict(ring_degree=2),
        dict(tensor_parallel_degree=2),
        dict(pipefusion_degree=2, num_pipeline_patch=1),
        dict(pipefusion_degree=2, num_pipeline_patch=3),
    ],
    4: [
        dict(tensor_parallel_degree=2, ulysses_degree=2),
        dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=1),
        dict(pipefusion_degree=2, ulysses_degree=2, num_pipeline_patch=2),
        dict(cfg_degree=2, pipefusion_degree=2, num_pipeline_patch=2),
    ],
}


def runs(case: str, config: ParallelConfig) -> bool:
    """A variant's weights are cut as its family's are, which is shown there; every scheme but megatron cuts
    any number of heads."""
    if config.tensor_parallel_degree > 1 and case not in LATENT_FORMATS:
        return False
    return (
        config.split_scheme != "megatron"
        or config.tensor_parallel_degree * config.ulysses_degree <= HEADS.get(case, 4)
    )


def rows_called(config: ParallelConfig) -> int:
    """None where a pipeline differs from another in its patches alone: for a call it is drained."""
    if config.cfg_degree > 1:
        return CALLED
    return 0 if config.num_pipeline_patch > 1 else ALONE


def request(case: str, config: ParallelConfig):
    """The first steps of a family's golden case or of a variant; FAMILY+mask hides the prompt's last rows."""
    family, _, mask = case.partition("+")
    sample = (
        variants.request(case, case)
        if case in variants.VARIANTS
        else golden(f"{family}__euler_simple", case)[0]
    )
    tensors = {**sample.tensors, "sigmas": sample.tensors["sigmas"][: STEPS + 1]}
    for branch in ("positive", "negative") if mask else ():
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


def write(folder: str, case: str):
    """The checkpoint of a case, where no rank has written it yet."""
    name = case.partition("+")[0]
    path = Path(folder, f"{name}.safetensors")
    if not path.exists():
        variants.write(path, name) if name in variants.VARIANTS else write_checkpoint(path, name)


def load(engine: Engine, family: str, folder: str):
    engine.load(family, f"{folder}/{family.partition('+')[0]}.safetensors", "default")


def run(engine: Engine, family: str, rows: int):
    sample = request(family, engine.config)
    if engine.config.split_scheme != "megatron":
        return None, called(engine, family, sample, rows)
    engine.check_sample(sample)
    samples, _ = engine.sample(sample, Callbacks())
    return samples.contiguous(), called(
        engine, family, sample, rows
    )  # latents cropped of their padding are views, which gloo does not broadcast


def called(engine: Engine, name: str, sample: Sample, rows: int):
    """One call of the model with the first ``rows`` of the batch."""
    if not rows:
        return None
    call = model_call(sample, engine.models[name].family.name, CALLED)
    call = replace(
        call,
        tensors={
            name: value[:rows] if value.ndim and value.shape[0] == CALLED else value
            for name, value in call.tensors.items()
        },
    )
    engine.check_forward(call)
    output, _ = engine.forward(call)
    return output.contiguous()


def reference(engine: Engine, family: str, folder: str) -> list[torch.Tensor]:
    """What the single process makes of a case; computed once for all world sizes."""
    path = Path(folder, f"{family}.reference")
    if not path.exists():
        write(folder, family)
        load(engine, family, folder)
        save_whole(dict(zip(("samples", "output"), run(engine, family, CALLED))), path)
        engine.unload(family)
    kept = load_file(path)
    return [kept["samples"], kept["output"]]


def main(folder: str, families: str, out: str):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    single, cases = Engine(ParallelConfig(), mesh.single()), families.split()
    references = {family: reference(single, family, folder) for family in cases[rank::world]}
    schemes = [dict(tensor_parallel_degree=world, split_scheme=scheme) for scheme in SCHEMES[world]]
    meshes = [
        (config, mesh.build(config, "cpu"))
        for config in (ParallelConfig(**degrees) for degrees in [*CONFIGURATIONS[world], *schemes])
    ]
    engine, rows = Engine(*meshes[0]), []
    for i, family in enumerate(cases):
        for config, groups in meshes:
            if not runs(family, config):
                continue
            megatron = config.split_scheme == "megatron"
            started = time.perf_counter()
            engine.rearrange(config, groups)
            if family not in engine.models:
                load(engine, family, folder)
            samples, output = run(engine, family, count := rows_called(config))
            if megatron:
                dist.broadcast(samples, 0)  # ranks share the work of the references
            if count:
                output = (
                    output if rank == 0 else output.new_empty(count, *output.shape[1:])
                )  # rank 0 has all rows
                dist.broadcast(output, 0)
            if i % world == rank:
                wanted = references[family]
                rows.append(
                    dict(
                        family=family,
                        config=config.product,
                        scheme=config.split_scheme,
                        stale=config.pipefusion_degree > 1 and config.num_pipeline_patch > 1,
                        bytes_read=engine.models[family].bytes_read,
                        relative=relative(samples, wanted[0]) if megatron else 0.0,
                        called=relative(output, wanted[1][:count]) if count else 0.0,
                        seconds=time.perf_counter() - started,
                    )
                )
        engine.unload(family)
    everyone = [None] * world
    dist.all_gather_object(everyone, rows)
    if rank == 0:
        Path(out).write_text(json.dumps(sum(everyone, [])))
    dist.barrier()
    dist.destroy_process_group()
