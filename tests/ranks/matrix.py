"""Rank program (launch.py): many configurations of one world size, each against the single process; rank 0
writes the errors as JSON.

main(CHECKPOINT, [ids of runs], OUT.json)
"""

import itertools
import json
import os
from dataclasses import replace
from functools import cache, cached_property, partial
from operator import attrgetter
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from families import golden, model_call
from ranks import flux_cases
from ranks.compiled import compare
from ranks.described import described
from ranks.flux_cases import CALL, CALLS, CHUNKS, COUNTED, FP8, MODULATION_AHEAD, UNDESCRIBED, Run, runs
from ranks.flux_requests import FEW, LORA, Case, request_of
from ranks.share_cases import write_wide
from ranks.wire_cases import merged, rounding
from tiny import relative
from torch.distributed.tensor import DTensor

from backend import engine as engine_module
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import compiled_blocks, fsdp, mesh, tensor_parallel
from backend.parallel.attention import ulysses_ring
from backend.parallel.modulation import modulation_chunks
from backend.parallel.modulation.modulation_cache import COMPUTED
from backend.sampling.step_loop import Callbacks


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
    samples, _ = run(
        engine,
        config,
        Case(LORA, FEW),
        engine.add_lora_stack(
            "tiny", lora_stack([[str(Path(checkpoint).with_name("lora.safetensors")), 0.8]])
        ),
    )
    engine.fused("tiny")
    return samples, all(a.equal(b) for a, b in zip(before, held(), strict=True))


def asked(config: ParallelConfig, case: Case, model: str = "tiny"):
    """The request of a case with a configuration's patches."""
    return replace(
        request_of(case),
        model=model,
        num_pipeline_patch=config.num_pipeline_patch,
        warmup_steps=config.warmup_steps,
        stale_kv=config.stale_kv,
        wire=config.wire,
    )


def run(engine: Engine, config: ParallelConfig, case: Case, model: str = "tiny"):
    sample, last = asked(config, case, model), []
    engine.check_sample(sample)
    samples, stats = engine.sample(replace(sample, denoised=True), Callbacks(on_denoised=last.append))
    return samples, {**stats, "denoised": last[0]}


def call(engine: Engine, case: str):
    request = model_call(golden("flux-dev__size20x12")[0], "flux", CALLS[case])
    engine.check_forward(request)
    return engine.forward(request)


def of_all_ranks(value) -> list:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


class SingleProcess:
    """What one rank computes, once a case: the reference of all configurations."""

    def __init__(self, checkpoint: str):
        self.engine = Engine(ParallelConfig(), mesh.single())
        self.engine.load("tiny", checkpoint, "default")
        self.checkpoint, self.opened = checkpoint, self.engine.check_load(checkpoint, "default").checkpoint
        self.results = {}

    def __call__(self, case: Case | str) -> torch.Tensor:
        if case not in self.results:
            self.results[case] = self._compute(case)
        return self.results[case]

    def _compute(self, case: Case | str) -> torch.Tensor:
        if isinstance(case, str):
            return call(self.engine, case)[0]
        return (
            run_lora(self.engine, self.engine.config, self.checkpoint)[0]
            if case.name == LORA
            else run(self.engine, self.engine.config, case)[0]
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
            alone = replace(config, num_pipeline_patch=config.patches, wire="full")
            self.results[key] = self.pipeline.sample(asked(alone, case), Callbacks())[0]
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
    is_reused = "tiny" in engine.models
    if not is_reused:
        engine.load("tiny", checkpoint, "default")
    return engine, is_reused


def of_request(engine: Engine, each: Run, reference) -> dict | None:
    """What a request is judged by, on rank 0."""
    samples, stats = run(engine, each.varied, each.case)
    sent = described_ = None
    if each.case.name in COUNTED and each.variant not in UNDESCRIBED:
        sent = of_all_ranks(stats["bytes_sent"] | {MODULATION_AHEAD: engine.models["tiny"].cache.most_bytes})
    if reference is None:
        return None
    if sent is not None:
        described_ = described(each.varied, reference.opened, each.case.steps, len(samples))
    stale = each.variant.startswith("stale")
    return {
        "relative": relative(samples, reference(each.case)),
        "simulated": relative(samples, reference.stale(each.varied, each.case)) if stale else None,
        "denoised": relative(stats["denoised"], samples),
        "sent": sent,
        "described": described_,
    }


def in_chunks(engine: Engine, each: Run, reference) -> dict | None:
    """What modulation in chunks is judged by, on rank 0: how many each rank computes, too."""
    cache = engine.models["tiny"].cache
    ahead = cache.width * cache.dtype.itemsize * flux_cases.EMBEDDINGS * flux_cases.EVALUATIONS_AHEAD
    with mock.patch.object(modulation_chunks, "AHEAD", ahead):
        samples, _ = run(engine, each.varied, each.case)
    everyone = of_all_ranks(COMPUTED["modulation"] / len(cache.modulations))
    if reference is None:
        return None
    return {"relative": relative(samples, reference(each.case)), "chunks": everyone}


def of_loras(engine: Engine, each: Run, checkpoint: str, reference) -> dict | None:
    """What LoRAs in the weights are judged by, on rank 0."""
    samples, restored = run_lora(engine, each.varied, checkpoint)
    everyone = of_all_ranks(restored)
    if reference is None:
        return None
    return {"relative": relative(samples, reference(each.case)), "restored": all(everyone)}


def of_call(engine: Engine, each: Run, reference) -> dict | None:
    """What a call of the model is judged by, on rank 0."""
    output, _ = call(engine, each.case.name)
    return {"relative": relative(output, reference(each.case.name))} if reference else None


def together(chosen: list[Run], checkpoint: str, rank: int) -> list[dict]:
    """The runs on scaled fp8, whose modulation in host memory is asked for it at every step."""
    modulation_chunks.AHEAD = 1
    path, found = str(Path(checkpoint).with_name("fp8.safetensors")), []
    reference = SingleProcess(path) if rank == 0 else None
    for each in chosen:
        engine = Engine(each.config, mesh.build(each.config, "cpu"))
        engine.load("tiny", path, "default")
        row = of_loras(engine, each, path, reference)
        if row:
            bytes_read = engine.models["tiny"].report.bytes_read
            found.append(row | {"id": each.id, "bytes_read": bytes_read, "is_reused": False})
        mesh.close(engine.mesh)
    return found


def with_compiled(chosen: list[Run], checkpoint: str, rank: int) -> list[dict]:
    """The runs with compiled blocks after the same without; of ranks with the same blocks one traces."""
    compiled_blocks.BACKEND = "eager"  # what is traced, without minutes of a C++ compiler
    modulation_chunks.AHEAD = 1  # layers in host memory are asked at every step
    fp8, found = str(Path(checkpoint).with_name("fp8.safetensors")), []
    for each in chosen:
        engine, _ = arranged(None, each.config, checkpoint if each.variant == flux_cases.COMPILED else fp8)
        samples, _ = run(engine, each.varied, each.case)
        traces = rank == 0 or engine.mesh.pp.size > 1
        compiled = compare(engine, asked(each.varied, each.case), samples, traces)
        found += [{"id": each.id, "is_reused": False, "compiled": compiled}] if rank == 0 else []
        mesh.close(engine.mesh)
    return found


def with_shares(chosen: list[Run], path: str, rank: int) -> list[dict]:
    """The runs whose ranks have different shares, on the wide model."""
    reference = SingleProcess(path) if rank == 0 else None
    found = []
    for config, group in itertools.groupby(chosen, attrgetter("config")):
        engine, _ = arranged(None, config, path)
        for each in group:
            of = of_call if each.variant == CALL else of_request
            row = of(engine, each, reference)
            if row:
                found.append(row | {"id": each.id, "is_reused": False})
        mesh.close(engine.mesh)
    return found


def in_float64(config: ParallelConfig, groups: mesh.Mesh, checkpoint: str) -> Engine:
    """An engine whose sums differ from others' by 1e-15 at most: where float8 would round up and float8 of
    another order of summation down, latents of float32 differ by a percent."""
    engine = Engine(config, groups)
    with mock.patch.object(engine_module, "chosen_dtype", lambda *_: torch.float64):
        engine.load("tiny", checkpoint, "default")
    return engine


def with_float8(chosen: list[Run], checkpoint: str, rank: int) -> list[dict]:
    """The runs with float8 on the wire, against one process that rounds what ranks would send. One rank
    traces compiled blocks, as in ranks/family_runs.py, and under shares the other one."""
    compiled_blocks.BACKEND = "eager"  # what is traced, without minutes of a C++ compiler
    found, alone_on = [], cache(partial(in_float64, ParallelConfig(num_pipeline_patch=2), mesh.single()))
    unrounded = {}
    for config, group in itertools.groupby(chosen, attrgetter("config")):
        of_model = str(Path(checkpoint).with_name("wide")) if config.shares else checkpoint
        engine = in_float64(config, mesh.build(config, "cpu"), of_model)
        for each in group:
            samples, stats = run(engine, each.varied, each.case)
            sent = of_all_ranks(
                stats["bytes_sent"] | {MODULATION_AHEAD: engine.models["tiny"].cache.most_bytes}
            )
            compiled = None
            if flux_cases.is_compiled(each):
                traces = rank == (each.config.ring_degree > 1 or bool(each.config.shares))
                compiled = compare(engine, asked(each.varied, each.case), samples, traces)
            if rank:
                continue
            single = alone_on(of_model)
            alone = replace(each.varied, num_pipeline_patch=each.varied.patches, wire="full")
            request = asked(alone, each.case)
            key = (of_model, each.case, alone.num_pipeline_patch, alone.warmup_steps, alone.stale_kv)
            if key not in unrounded:  # all that the request takes of a configuration
                unrounded[key] = single.sample(request, Callbacks())[0]
            full = unrounded[key]
            with rounding(each.varied):
                rounded = single.sample(request, Callbacks())[0]
            opened = single.check_load(of_model, "default").checkpoint
            described_ = described(each.varied, opened, each.case.steps, len(samples), torch.float64)
            found.append(
                {
                    "id": each.id,
                    "is_reused": False,
                    "relative": relative(samples, full),
                    "simulated": relative(samples, rounded),
                    "compiled": compiled,
                    "sent": sent,
                    "described": described_,
                }
            )
        mesh.close(engine.mesh)
    return found


def main(checkpoint: str, selected: list[str], out: str):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reference = SingleProcess(checkpoint) if rank == 0 else None
    if world in (2, 4):  # halves of tiny tensors too; those of other world sizes stay whole
        ulysses_ring.TILES_OF_A_CHUNK = tensor_parallel.MIN_TOKENS_TO_HALVE = 1
    chosen = [each for each in runs() if each.ranks == world and each.id in set(selected)]
    on_fp8 = [each for each in chosen if each.variant == FP8]
    traced = [each for each in chosen if each.variant in (flux_cases.COMPILED, flux_cases.COMPILED_FP8)]
    chosen = [each for each in chosen if each not in traced]
    packed = [each for each in chosen if each.varied.wire != "full"]
    chosen = [each for each in chosen if each.varied.wire == "full"]
    shared = [each for each in chosen if each.config.shares]
    plain = (each for each in chosen if each.variant != FP8 and not each.config.shares)
    found, engine = [], None
    for config, group in itertools.groupby(plain, attrgetter("config")):
        engine, is_reused = arranged(engine if world > 2 else None, config, checkpoint)
        for each in group:
            if each.variant == CALL:
                row = of_call(engine, each, reference)
            elif each.variant == LORA:
                row = of_loras(engine, each, checkpoint, reference)
            elif each.variant == CHUNKS:
                row = in_chunks(engine, each, reference)
            else:
                row = of_request(engine, each, reference)
            if row:
                bytes_read = engine.models["tiny"].report.bytes_read
                found.append(row | {"id": each.id, "bytes_read": bytes_read, "is_reused": is_reused})
        if world == 2:
            mesh.close(engine.mesh)  # its groups' threads would pile up
    if on_fp8:
        found += together(on_fp8, checkpoint, rank)
    if traced:
        found += with_compiled(traced, checkpoint, rank)
    wide = Path(checkpoint).with_name("wide")
    if shared or any(each.config.shares for each in packed):
        if rank == 0:
            write_wide(wide, checkpoint)
        dist.barrier()
    if shared:
        found += with_shares(shared, str(wide), rank)
    if packed:
        with mock.patch.object(ulysses_ring, "merge_block", merged):
            found += with_float8(packed, checkpoint, rank)
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
