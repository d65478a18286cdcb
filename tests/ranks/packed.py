"""Rank program (launch.py): quantized files under every way to hold and cut weights, each against the single
process; rank 0 writes what it finds as JSON.

main(FOLDER-OF-FILES, [ids of runs], OUT.json)
"""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from cropping import cropped
from safetensors.torch import load_file, save_file
from tiny import batch_request, made_once, relative

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import fsdp, mesh, tensor_parallel
from backend.quantization.dequantize_once import dequantized_once
from backend.quantization.packed_weight import PackedWeight
from backend.sampling.step_loop import Callbacks

#: Format -> the file's name.
FILES = {
    "fp8": "fp8.safetensors",
    "int8": "int8.safetensors",
    "mxfp8": "mxfp8.safetensors",
    "nvfp4": "nvfp4.safetensors",
    "w4a4": "w4a4.safetensors",
    "w4a8": "w4a8.safetensors",
    "Q8_0": "Q8_0.gguf",
    "Q4_K": "Q4_K.gguf",
}
#: Of which tensor parallelism multiplies and sums one half of the tokens after the other.
HALVED = ("fp8", "mxfp8", "Q4_K")
#: Methods whose ranks hold parts of the weights, or all of them.
CONFIGS = {
    2: {
        "u2": ParallelConfig(ulysses_degree=2),
        "ring2": ParallelConfig(ring_degree=2),
        "cfg2": ParallelConfig(cfg_degree=2),
        "dp2": ParallelConfig(data_parallel_degree=2),
        "tp2": ParallelConfig(tensor_parallel_degree=2),
        "row": ParallelConfig(tensor_parallel_degree=2, split_scheme="row"),
        "column": ParallelConfig(tensor_parallel_degree=2, split_scheme="column"),
        "pp2": ParallelConfig(pipefusion_degree=2, num_pipeline_patch=1),
        "pp2 offload": ParallelConfig(pipefusion_degree=2, num_pipeline_patch=1, offload_modulation=True),
        "u2 fsdp": ParallelConfig(ulysses_degree=2, shard_weights=True),
        "dp2 fsdp": ParallelConfig(data_parallel_degree=2, shard_weights=True),
    },
    4: {
        "2d": ParallelConfig(tensor_parallel_degree=4, split_scheme="2d"),
        "tp4": ParallelConfig(tensor_parallel_degree=4),
        "tp2 pp2": ParallelConfig(tensor_parallel_degree=2, pipefusion_degree=2, num_pipeline_patch=1),
        "tp2 u2": ParallelConfig(tensor_parallel_degree=2, ulysses_degree=2),
        "cfg2 u2 fsdp": ParallelConfig(cfg_degree=2, ulysses_degree=2, shard_weights=True),
    },
}
#: Methods that hold and cut no matrix otherwise than another does: one format shows them.
LIKE_OTHERS = ("u2", "ring2", "cfg2", "dp2", "pp2 offload", "dp2 fsdp", "tp2 pp2", "tp2 u2", "cfg2 u2 fsdp")
#: Formats whose pieces four ranks have too: of the others products are those of two ranks, and pieces are
#: cut in one process (unit/test_rank_memory.py, unit/test_quantized.py).
IN_FOUR = ("int8", "nvfp4", "Q4_K")
#: The format that runs under every method, and in the fast tier under each of CUTS; the fast tier runs every
#: second one of the others under one of the first three.
FIRST = "int8"
CUTS = ("tp2", "u2 fsdp", "pp2", "row")
STEPS, STRENGTH = 1, 0.5
#: Bytes in which all weights may stay dequantized.
SPARE = 1 << 30
#: Most rows and columns of latent pixels: what is compared are ranks and one process.
SIDE = 8


@dataclass(frozen=True)
class Run:
    """A file under a configuration."""

    ranks: int
    method: str
    format: str

    @property
    def id(self) -> str:
        return f"{self.ranks}-{self.method}-{self.format}"

    @property
    def config(self) -> ParallelConfig:
        return CONFIGS[self.ranks][self.method]

    @property
    def is_fast(self) -> bool:
        if self.ranks > 2 or self.format == FIRST:
            return self.ranks == 2 and self.method in CUTS
        place = list(FILES).index(self.format)
        return place % 2 == 0 and self.method == CUTS[place // 2 % 3]


def runs() -> list[Run]:
    """Every format under every way to cut matrices, and one under every method."""
    return [
        Run(ranks, method, format)
        for ranks, configs in CONFIGS.items()
        for format in FILES
        for method in configs
        if format == FIRST or method not in LIKE_OTHERS
        if format in IN_FOUR or method != "tp4"
    ]


def sampled(engine: Engine, folder: Path) -> tuple[list[torch.Tensor], list[int]]:
    """The latents without LoRAs, with every kind of adapter, and without again, with weights that stay
    dequantized; and the bytes that LoRAs take on this rank, as counted and as held."""
    plain = batch_request(2)
    plain = replace(plain, tensors=cropped(plain.tensors, SIDE))
    stack = lora_stack([[str(folder / "lora.safetensors"), STRENGTH]])
    found, of_loras = [], []
    for name, spare in (("tiny", 0), (engine.add_lora_stack("tiny", stack), 0), ("tiny", SPARE)):
        sigmas = plain.tensors["sigmas"][: STEPS + 1]
        patches = engine.config.num_pipeline_patch
        sample = replace(
            plain, model=name, num_pipeline_patch=patches, tensors={**plain.tensors, "sigmas": sigmas}
        )
        engine.check_sample(sample)
        with dequantized_once(engine.models[name].dequantized_every_step, spare) as size:
            found.append(engine.sample(sample, Callbacks())[0].contiguous())
        assert bool(size) == bool(spare)
        if name != "tiny":
            of_loras = [engine.models[name].lora_bytes(stack), adapter_and_scale_bytes(engine)]
    return found, of_loras


def adapter_and_scale_bytes(engine: Engine) -> int:
    """Bytes of what quantized matrices have besides their stored values on this rank."""
    packed = engine.models["tiny"].weights.packed.values()
    found = [x for weight in packed for each in weight.adapters.values() for x in each.tensors]
    scales = [x for weight in packed for x in weight.scales]
    found += [x for x in (*scales, *(weight.whole for weight in packed)) if x is not None]
    return sum(x.nbytes for x in found)


def held(engine: Engine) -> dict[str, int]:
    """Bytes of quantized matrices on this rank, and what the report says that all weights take."""
    model = engine.models["tiny"]
    hosted = [module for layers in model.cache.hosted for module in layers]
    modules = [module for each in (model.transformer, *hosted) for module in each.modules()]
    packed = [module for module in dict.fromkeys(modules) if isinstance(module, PackedWeight)]
    fsdp.reshard(model.transformer)
    return {
        "packed": sum(fsdp.held_bytes(p) for weight in packed for p in weight.parameters()),
        "reported": model.report.weight_bytes,
    }


def reference(single: Engine, where: Path, format: str) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The latents of the single process, and what it holds; computed once for all world sizes."""

    def compute(path: Path):
        single.load("tiny", str(where / FILES[format]), "fp32", "weight only")
        latents = {f"latent {i}": latent for i, latent in enumerate(sampled(single, where)[0])}
        save_file(latents | {name: torch.tensor(size) for name, size in held(single).items()}, path)
        single.unload("tiny")

    reference = load_file(made_once(where / f"{format}.reference", compute))
    latents = [reference.pop(name) for name in sorted(reference) if name.startswith("latent")]
    return latents, {name: int(size) for name, size in reference.items()}


def measured(run: Run, latents: list[torch.Tensor], everyone: list, single: Engine, where: Path) -> dict:
    """What a run is judged by, on rank 0."""
    wanted, whole = reference(single, where, run.format)
    return {
        "id": run.id,
        "relative": [relative(a, b) for a, b in zip(latents, wanted, strict=True)],
        "same": latents[0].equal(latents[2]),
        "held": everyone,
        "whole": whole,
    }


def main(folder: str, selected: list[str], out: str):
    where = Path(folder)
    world = int(os.environ["WORLD_SIZE"])
    chosen = [run for run in runs() if run.ranks == world and run.id in set(selected)]
    usual = tensor_parallel.MIN_TOKENS_TO_HALVE
    single = Engine(ParallelConfig(), mesh.single())
    found, meshes = [], {}
    for run in chosen:
        # of so few tokens too, in half of the runs
        tensor_parallel.MIN_TOKENS_TO_HALVE = 1 if run.format in HALVED else usual
        if run.method not in meshes:  # of which each has threads
            meshes[run.method] = mesh.build(run.config, "cpu")
        engine = Engine(run.config, meshes[run.method])
        engine.load("tiny", str(where / FILES[run.format]), "fp32", "weight only")
        latents, of_loras = sampled(engine, where)
        everyone = [{}] * run.ranks
        dist.all_gather_object(everyone, held(engine) | {"loras": of_loras})
        if dist.get_rank() == 0:
            found.append(measured(run, latents, everyone, single, where))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
