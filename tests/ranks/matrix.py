"""Rank program (launch.py): many configurations of one world size, each against the single process; rank 0
writes the errors as JSON.

main(CHECKPOINT, OUT.json)
"""

import gc
import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
from families import golden, model_call
from tiny import FLUX_CASES, batch_request, error_in_std, golden_request, relative, to_vae_units
from torch.distributed.tensor import DTensor

from backend.config import ParallelConfig
from backend.engine import Engine, describe
from backend.loading.checkpoint import Checkpoint
from backend.loading.lora_keys import lora_stack
from backend.parallel import fsdp, mesh, modulation_cache
from backend.sampling.step_loop import Callbacks

gc.freeze()  # what is imported stays: no collection looks through it again
AXES = (
    "cfg_degree",
    "pipefusion_degree",
    "ulysses_degree",
    "ring_degree",
    "data_parallel_degree",
    "tensor_parallel_degree",
)
#: Steps of a golden case; of one with stale keys and values, of which at most two are of warm-up; of one that
#: every step shows as well as another.
STEPS, STALE_STEPS, FEW = 6, 4, 2

#: Golden cases that differ from others in their solver alone.
NEW_SOLVERS = {
    "deis_normal",
    "dpmpp_2m_sde_karras",
    "ipndm_simple",
    "lms_simple",
    "res_multistep_sgm_uniform",
}
#: Positive and negative prompts of different lengths, one of them shorter than any group.
SHORT_NEGATIVE = "negative of 1 row"
#: A solver that reads the negative prediction by itself, which comes from another rank under CFG.
CFG_PP = "euler_cfg_pp"
#: Every solver, and a mask, with stale keys and values.
STALE_SOLVERS = "stale, every solver"
#: Several prompts: one that begins late, one for a part of the picture, a negative one that ends early; also
#: under a solver that calls the model twice a step.
MIXED, MIXED_HEUN = "mixed prompts", "mixed prompts, heun"
#: A batch that no number of replicas here divides.
UNEVEN_BATCH = "batch of 5"
#: A batch of which 2 replicas have equal parts, so that describe() can be held to what is counted.
EVEN_BATCH = "batch of 2"
#: Cases of 60 image rows, of which bytes are counted, and variants that describe() does not speak of.
COUNTED, UNDESCRIBED = {"size20x12", EVEN_BATCH}, {"all warm-up"}
#: What is no traffic, among the bytes that are counted.
KEPT = "modulation ahead"
#: With LoRAs of every kind in the weights.
LORA = "LoRA"
#: Rows of the model calls: fewer than there are groups of ranks, as many, and a number that they do not share
#: evenly.
CALLS = {f"call of {rows} rows": rows for rows in (1, 2, 5)}
#: Combinations of 8 ranks: (cfg, pipefusion, ulysses, ring, data, tensor).
OF_EIGHT = (
    (1, 2, 2, 2, 1, 1),
    (1, 4, 1, 2, 1, 1),
    (1, 2, 4, 1, 1, 1),
    (2, 4, 1, 1, 1, 1),
    (2, 2, 2, 1, 1, 1),
    (2, 1, 2, 2, 1, 1),
    (1, 1, 4, 2, 1, 1),
    (1, 2, 2, 1, 1, 2),
    (1, 2, 1, 2, 1, 2),
    (2, 1, 2, 1, 1, 2),
    (2, 2, 1, 1, 2, 1),
    (1, 1, 2, 2, 2, 1),
    (1, 2, 1, 1, 2, 2),
)


def configurations(world: int) -> list[ParallelConfig]:
    """Every combination of degrees that fills ``world`` ranks (those OF_EIGHT), and the other ways to hold
    weights."""
    if world == 8:
        found = [ParallelConfig(**dict(zip(AXES, degrees))) for degrees in OF_EIGHT]
        found += [
            ParallelConfig(tensor_parallel_degree=4, split_scheme="2d", **{axis: 2})
            for axis in ("cfg_degree", "ulysses_degree", "pipefusion_degree")
        ]
        return in_order(found)
    sizes = [
        [
            d
            for d in range(1, world + 1)
            if world % d == 0
            and (axis != "cfg_degree" or d <= 2)
            and (axis != "tensor_parallel_degree" or 8 % d == 0)
        ]
        for axis in AXES
    ]
    products = [ParallelConfig(**dict(zip(AXES, degrees))) for degrees in itertools.product(*sizes)]
    found = [config for config in products if config.world_size == world]
    schemes = [
        ParallelConfig(tensor_parallel_degree=world, split_scheme=scheme)
        for scheme in ("row", "column", "2d")
    ]
    sharded = [
        replace(config, shard_weights=True)
        for config in found
        if config.pipefusion_degree == config.tensor_parallel_degree == 1
        and config.sp_degree * config.data_parallel_degree > 1
    ]
    return in_order(found) + schemes + sharded


def in_order(configs: list[ParallelConfig]) -> list[ParallelConfig]:
    """Those of the same weights behind each other."""
    return sorted(
        configs,
        key=lambda config: (
            config.split_scheme,
            config.tensor_parallel_degree,
            config.pipefusion_degree,
            config.sp_degree,
        ),
    )


def variants(config: ParallelConfig) -> list[tuple[str, ParallelConfig]]:
    """The ways to run a configuration: exactly, and with stale keys and values where it has a pipeline."""
    if config.pipefusion_degree == 1:
        return [("exact", config)]
    found = [
        ("one patch", replace(config, num_pipeline_patch=1)),
        (
            "stale, uneven patches",
            replace(
                config,
                num_pipeline_patch=config.pipefusion_degree + 1,
                stale_kv="extrapolate",
                warmup_steps=2,
            ),
        ),
    ]
    if config.world_size == 2 or config.sp_degree > 1:
        found += [("all warm-up", replace(config, warmup_steps=STEPS)), ("stale", config)]
    return found + [(STALE_SOLVERS, config)] * (config.world_size == 2)


@dataclass(frozen=True)
class Case:
    """A golden case, or one of those above, over all of its steps or over fewer and longer ones."""

    name: str
    steps: int | None = None


def cases(world: int, config: ParallelConfig, variant: str) -> list[Case]:
    """What to run: all golden cases on two ranks of CFG and USP; elsewhere, where the code is the same, one
    golden case, and few steps of what is special there."""
    few = FEW if config.pipefusion_degree == 1 else STALE_STEPS
    if config.data_parallel_degree > 1:
        return [Case(UNEVEN_BATCH, few)] + [Case(EVEN_BATCH, few)] * (config.data_parallel_degree == 2)
    if variant == STALE_SOLVERS:
        return [*map(Case, FLUX_CASES), Case(CFG_PP, STALE_STEPS)]
    plain = config.split_scheme == "megatron" and not config.shard_weights
    if world == 2 and variant == "exact" and plain and config.tensor_parallel_degree == 1:
        golden = (
            FLUX_CASES
            if config.ulysses_degree == 2
            else [case for case in FLUX_CASES if case not in NEW_SOLVERS]
        )
        return [
            *map(Case, golden),
            Case(CFG_PP, STALE_STEPS),
            Case(SHORT_NEGATIVE, FEW),
            Case(MIXED_HEUN, STALE_STEPS),
        ]
    in_turn = (
        variant == "exact" and config.cfg_degree == 1
    )  # prompts are computed one after the other, as in one process
    golden = plain and variant in ("exact", "one patch")
    found = [Case("size20x12", None if golden and not in_turn else few)] + [
        Case("euler_ancestral_simple")
    ] * (golden and in_turn)
    if world in (3, 8):  # what prompts need is shown on 2 and 4
        return found
    if not variant.startswith("stale") and (config.sp_degree > 1 or not in_turn):
        found.append(Case(SHORT_NEGATIVE, FEW))
    return found if in_turn else [*found, Case(MIXED, STALE_STEPS)]


def request_of(case: Case):
    """The request of a case, and the golden latent where there is one."""
    if case.name in MADE:
        return shortened(MADE[case.name](), case.steps), None
    sample, golden = golden_request(case.name)
    return (sample, golden) if case.steps is None else (shortened(sample, case.steps), None)


def shortened(sample, steps: int):
    """The request over fewer, longer steps."""
    sigmas = sample.tensors["sigmas"]
    return replace(
        sample,
        tensors={
            **sample.tensors,
            "sigmas": sigmas[torch.linspace(0, len(sigmas) - 1, steps + 1).round().long()],
        },
    )


def short_negative():
    sample, _ = golden_request("euler_simple")
    return replace(
        sample,
        tensors={**sample.tensors, "negative.c_crossattn": sample.tensors["negative.c_crossattn"][:, :1]},
    )


def mixed_prompts(solver: str):
    """Prompts of different lengths, in an order in which a new one comes between known ones: before the third
    of STALE_STEPS; the negative one ends with that step."""
    sample = replace(golden_request("heun_simple")[0], sampler=solver)
    tensors, sigmas = dict(sample.tensors), shortened(sample, STALE_STEPS).tensors["sigmas"]
    for name, rows in (("positive2", 9), ("positive3", 12)):
        tensors |= {
            f"{name}.c_crossattn": -0.7 * tensors["positive.c_crossattn"][:, :rows],
            f"{name}.y": tensors["negative.y"],
            f"{name}.guidance": tensors["positive.guidance"],
        }
    tensors["weight.positive3"] = (torch.arange(16) < 7).float().expand(1, 1, 16, 16)
    return replace(
        sample,
        tensors=tensors,
        prompts={
            "positive2": {"from": sigmas[2].item(), "strength": 0.5},
            "negative": {"until": sigmas[3].item()},
        },
    )


#: Name of a case that is no golden one -> its request.
MADE = {
    UNEVEN_BATCH: lambda: batch_request(5),
    EVEN_BATCH: lambda: batch_request(2, "size20x12"),
    LORA: lambda: batch_request(2),
    SHORT_NEGATIVE: short_negative,
    MIXED: lambda: mixed_prompts("euler"),
    MIXED_HEUN: lambda: mixed_prompts("heun"),
    CFG_PP: lambda: replace(golden_request("euler_simple")[0], sampler=CFG_PP),
}


def has_lora_case(world: int, config: ParallelConfig) -> bool:
    """Every way to cut weights, once."""
    return world == 2 or (
        config.tensor_parallel_degree > 1 and (config.pipefusion_degree > 1 or config.split_scheme == "2d")
    )


def run_lora(engine: Engine, config: ParallelConfig, checkpoint: str) -> tuple[torch.Tensor, bool]:
    """The latent with LoRAs, and whether this rank's weights are what they were once they are gone."""
    model = engine.models["tiny"].transformer

    def held():
        return [
            (p.to_local() if isinstance(p, DTensor) else p).clone()
            for p in model.parameters()
            if not p.is_meta
        ]

    fsdp.reshard(model)
    before = held()
    (samples, _), _ = run(
        engine,
        config,
        Case(LORA, FEW),
        engine.name("tiny", lora_stack([[str(Path(checkpoint).with_name("lora.safetensors")), 0.8]])),
    )
    engine.ready("tiny")
    return samples, all(a.equal(b) for a, b in zip(before, held(), strict=True))


def lora_row(engine: Engine, config: ParallelConfig, checkpoint: str, reference) -> list[dict]:
    """A row of the table for the LoRAs, on rank 0."""
    samples, restored = run_lora(engine, replace(config, num_pipeline_patch=1), checkpoint)
    everyone = of_all_ranks(restored)
    return (
        [
            {
                "config": config.product,
                "scheme": config.split_scheme,
                "sharded": config.shard_weights,
                "variant": LORA,
                "case": LORA,
                "relative": relative(samples, reference(Case(LORA, FEW))),
                "golden": 0.0,
                "described": None,
                "bytes_read": engine.models["tiny"].bytes_read,
                "restored": all(everyone),
            }
        ]
        if reference
        else []
    )


def together(checkpoint: str, rank: int) -> list[dict]:
    """Ways to hold weights that meet in one model: scaled fp8 with LoRAs, sharded, and in stages with the
    modulation in host memory, which are asked for it at every step."""
    modulation_cache.AHEAD = 1
    path, rows = str(Path(checkpoint).with_name("fp8.safetensors")), []
    reference = SingleProcess(path) if rank == 0 else None
    for config in (
        ParallelConfig(ulysses_degree=2, shard_weights=True),
        ParallelConfig(pipefusion_degree=2, offload_modulation=True),
    ):
        engine = Engine(config, mesh.build(config, "cpu"))
        engine.load("tiny", path, "default")
        rows += [row | {"file": "fp8", "kept": False} for row in lora_row(engine, config, path, reference)]
        mesh.close(engine.mesh)
    return rows


def asked(config: ParallelConfig, case: Case, model: str = "tiny"):
    """The request of a case with a configuration's patches."""
    return replace(
        request_of(case)[0],
        model=model,
        num_pipeline_patch=config.num_pipeline_patch,
        warmup_steps=config.warmup_steps,
        stale_kv=config.stale_kv,
    )


def run(engine: Engine, config: ParallelConfig, case: Case, model: str = "tiny"):
    sample, golden, last = asked(config, case, model), request_of(case)[1], []
    engine.check_sample(sample)
    samples, stats = engine.sample(replace(sample, denoised=True), Callbacks(on_denoised=last.append))
    return (samples, {**stats, "denoised": last[0]}), golden


def call(engine: Engine, case: str):
    request = model_call(golden("flux-dev__size20x12")[0], "flux", CALLS[case])
    engine.check_forward(request)
    return engine.forward(request)


def called(engine: Engine, config: ParallelConfig, reference) -> list[dict]:
    """Rows of the table for the model calls, which have no variants."""
    found = []
    for case in CALLS if engine.config.world_size == 2 else list(CALLS)[-1:]:
        output, _ = call(engine, case)
        if reference:
            found.append(
                {
                    "config": config.product,
                    "scheme": config.split_scheme,
                    "sharded": config.shard_weights,
                    "variant": "model call",
                    "case": case,
                    "relative": relative(output, reference(case)),
                    "golden": 0.0,
                    "described": None,
                    "bytes_read": engine.models["tiny"].bytes_read,
                }
            )
    return found


def described(config: ParallelConfig, checkpoint: Checkpoint, steps: int, batch: int) -> list[dict[str, int]]:
    """What describe() says that every rank sends in ``steps`` of 60 image and 12 text rows, and keeps of
    modulation."""
    plans = describe(config, checkpoint, 60, 12, batch, calls=steps)
    replicas = (
        config.data_parallel_degree
    )  # tell each other their results and last predictions, of (16, 20, 12) a sample, once a request
    once = {"outputs": 2 * (replicas - 1) * batch // replicas * 16 * 20 * 12 * 4} if replicas > 1 else {}
    return [
        dict(
            Counter({mechanism: steps * size for mechanism, size in plan.bytes_per_step.items()})
            + Counter(once)
        )
        | {KEPT: plan.modulation_bytes}
        for plan in plans
    ]


def of_all_ranks(value) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


class SingleProcess:
    """What one rank computes, once a case: the reference of all configurations."""

    def __init__(self, checkpoint: str):
        self.engine = Engine(ParallelConfig(), mesh.single())
        self.engine.load("tiny", checkpoint, "default")
        self.checkpoint, self.opened = checkpoint, self.engine.check_load(checkpoint, "default")
        self.results = {}

    def __call__(self, case: Case | str) -> torch.Tensor:
        if case not in self.results:
            self.results[case] = self._compute(case)
        return self.results[case]

    def _compute(self, case: Case | str) -> torch.Tensor:
        if case in CALLS:
            return call(self.engine, case)[0]
        return (
            run_lora(self.engine, self.engine.config, self.checkpoint)[0]
            if case.name == LORA
            else run(self.engine, self.engine.config, case)[0][0]
        )

    @cached_property
    def pipeline(self) -> Engine:
        """This process computing patches in a pipeline's order, with what is fresh and what is stale
        there."""
        engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
        engine.load("tiny", self.checkpoint, "default")
        return engine

    def stale(self, config: ParallelConfig, case: Case) -> torch.Tensor:
        """The latent of a case under the staleness of ``config``'s pipeline."""
        key = (case, config.patches, config.warmup_steps, config.stale_kv)
        if key not in self.results:
            self.results[key] = self.pipeline.sample(
                asked(replace(config, num_pipeline_patch=config.patches), case), Callbacks()
            )[0]
        return self.results[key]


def arranged(engine: Engine | None, config: ParallelConfig, checkpoint: str) -> tuple[Engine, bool]:
    """The engine of a configuration: a new one, or ``engine`` changed into it; and whether the weights
    stayed."""
    groups = mesh.build(config, "cpu")
    if engine is None:
        engine = Engine(config, groups)
    else:
        old = engine.mesh
        engine.rearrange(config, groups)
        mesh.close(old)
    kept = "tiny" in engine.models
    if not kept:
        engine.load("tiny", checkpoint, "default")
    return engine, kept


def main(checkpoint: str, out: str):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reference = SingleProcess(checkpoint) if rank == 0 else None
    rows, engine = [], None
    for config in configurations(world):
        engine, kept = arranged(engine if world > 2 else None, config, checkpoint)
        for name, variant in variants(config):
            for case in cases(world, config, name):
                if config.cfg_degree == 2 and "negative.y" not in request_of(case)[0].tensors:
                    continue
                (samples, stats), golden = run(engine, variant, case)
                counted = case.name in COUNTED and name not in UNDESCRIBED
                sent = (
                    of_all_ranks(stats["bytes_sent"] | {KEPT: engine.models["tiny"].cache.most_bytes})
                    if counted
                    else None
                )
                if rank == 0:
                    rows.append(
                        {
                            "config": config.product,
                            "scheme": config.split_scheme,
                            "sharded": config.shard_weights,
                            "variant": name,
                            "case": case.name,
                            "relative": relative(samples, reference(case)),
                            "simulated": relative(samples, reference.stale(variant, case))
                            if name.startswith("stale")
                            else None,
                            "denoised": relative(stats["denoised"], samples),
                            "golden": 0.0 if golden is None else error_in_std(to_vae_units(samples), golden),
                            "sent": sent,
                            "described": described(
                                variant, reference.opened, case.steps or STEPS, len(samples)
                            )
                            if counted
                            else None,
                            "bytes_read": engine.models["tiny"].bytes_read,
                        }
                    )
        if has_lora_case(world, config):
            rows += lora_row(engine, config, checkpoint, reference)
        rows += called(engine, config, reference)
        for row in rows:
            row.setdefault("kept", kept)  # of this configuration's
        if world == 2:
            mesh.close(engine.mesh)  # its groups' threads would pile up
    rows += together(checkpoint, rank) if world == 2 else []
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
