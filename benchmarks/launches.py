"""What the host does for a device in a steady micro-step: how often it waits, how many operations it starts.

    python benchmarks/launches.py [--json] [--only FAMILY ...] [--waits] [--write]

Needs no GPU: meta tensors stand for one (meta_device.py). Every family with a golden latent runs as one rank
of every method, in bf16, at its golden size, and quantized models (packed_models.py) of a few methods; of a
pipeline the first, a middle and the last stage, of which the largest number counts. FURTHER methods are
counted of the first family of each signature, or of a few families. A micro-step is one CFG
branch of one patch: the model's call, and of the first stage the solvers' step. Files of GGUF need the
package gguf, and are left out without it. Printed for one of the last
step: waits (reads of device values and copies between host and device), operations on the device, operations
on host tensors, and microseconds of the host outside of operations. --write stores the counts that a test
holds.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "benchmarks"), str(ROOT / "tests/support")]
import packed_models
import torch
from counted_methods import FAMILIES, FURTHER, IN_HALVES, METHODS, PACKED, in_halves, methods_of
from families import golden
from headers import HeaderFiles, fold
from meta_device import META, meta_device
from operation_count import Clock, Count
from tiny import facts, golden_request

from backend.config import ParallelConfig
from backend.loading.checkpoint import Checkpoint
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.load_report import LoadReport
from backend.loading.quantized import QuantizedFiles
from backend.loading.recognition import recognise
from backend.parallel import tensor_parallel
from backend.parallel.mesh import Axis, Edges, Mesh, layout
from backend.parallel.modulation.cached_layers import cache_layers
from backend.parallel.pipeline_stage import Stage
from backend.parallel.stage_split import Stages
from backend.protocol import Sample
from backend.sampling.model_runner import LoadedModel, running
from backend.sampling.request import build
from backend.sampling.runs import with_downloads
from backend.sampling.step_loop import Callbacks, Denoiser

#: Steps of a request, and of one whose second step is like any later one: nothing is stale in it, and no text
#: was in the first one alone.
STEPS, STEPS_WITHOUT_PATCHES = 3, 2
STORED = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class Launches:
    """One line: of a micro-step, but for waits, which are of a whole step."""

    family: str
    method: str
    waits: int
    device_ops: float
    cpu_ops: float
    host_us: float


def checkpoint_of(family: str) -> Checkpoint:
    """Recognise the golden family's checkpoint by its shapes."""
    if family in PACKED:
        return packed_models.checkpoint_of(family)
    return replace(_recognised(family))  # without a transformer, of which each rank takes its own apart


@cache
def _recognised(family: str) -> Checkpoint:
    return with_shapes(family, facts(family)["shapes"])


def with_shapes(family: str, shapes: Mapping[str, Any]) -> Checkpoint:
    """Recognise a checkpoint of a family by the shapes of its tensors."""
    found = {key: value[0] if isinstance(value[0], list) else value for key, value in shapes.items() if value}
    tensors = {key: ("BF16", list(shape)) for key, shape in found.items()}
    header = {"tensors": fold(tensors), "metadata": {}, "data": {}}
    return recognise(family, QuantizedFiles(cast(TensorFiles, HeaderFiles(family, header))))


def mesh_of(config: ParallelConfig, rank: int) -> Mesh:
    """Return the place of ``rank``, with names for groups."""
    ranks = layout(config)
    here = (ranks == rank).nonzero()[0].tolist()
    axes = {}
    for dim, name in enumerate(config.degrees):
        line: list[Any] = list(here)
        line[dim] = slice(None)
        axes[name] = axis_of(name, ranks[tuple(line)].flatten().tolist(), rank)
    sp = axes["ring"] if axes["ring"].size > 1 else axes["ulysses"]
    if axes["ring"].size > 1 and axes["ulysses"].size > 1:
        sp = axis_of("sp", ranks[(*here[:3], slice(None), slice(None), here[5])].flatten().tolist(), rank)
    alone = Axis(group=None, rank=0, size=1, ranks=(rank,))
    # ranks that hold the same weights, which FSDP divides: over replicas, rings and Ulysses
    same = ranks[:, here[1], here[2], :, :, here[5]].flatten().tolist()
    weights = axis_of("weights", same, rank).group if config.shard_weights else None
    grid = {"tp_inputs": alone, "tp_outputs": alone, "weights": weights, "control": None}
    return Mesh(META, rank, config.world_size, **axes, sp=sp, edges=edges_of(axes["pp"]), **grid)


def axis_of(name: str, ranks: list[int], rank: int) -> Axis:
    """Return the place of ``rank`` in a group with a name."""
    group = f"{name}:{','.join(map(str, ranks))}" if len(ranks) > 1 else None
    return Axis(group=cast(Any, group), rank=ranks.index(rank), size=len(ranks), ranks=tuple(ranks))


def edges_of(pp: Axis) -> Edges:
    """Return names for the groups between stages."""
    if pp.size == 1:
        return Edges()
    names = [f"edge:{a},{b}" for a, b in zip(pp.ranks, (*pp.ranks[1:], pp.ranks[0]))]
    before = None if pp.is_first else names[pp.rank - 1]
    after = None if pp.is_last else names[pp.rank]
    return Edges(*cast(Any, (before, after, names[-1] if pp.is_first or pp.is_last else None)))


def load(
    checkpoint: Checkpoint, config: ParallelConfig, mesh: Mesh, stages: Stages | None = None
) -> LoadedModel:
    """Return a rank's model without weights. Without ``stages``, a pipeline of more stages than there are
    blocks repeats some."""
    transformer = checkpoint.transformer
    family = checkpoint.family
    if mesh.tp.size > 1:
        cuts = checkpoint.cut_plan(config).shards(mesh)
        tensor_parallel.apply(transformer, cuts, family, config.split_scheme, mesh.tp)
    for name, parameter in transformer.named_parameters():
        parameter.data = parameter.data.to(family.build.dtype_of(name, torch.bfloat16))
    for module in transformer.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(META)
    count = checkpoint.block_count
    first = mesh.pp.rank * count // mesh.pp.size
    blocks = range(first, max(first + 1, (mesh.pp.rank + 1) * count // mesh.pp.size))
    if stages:
        blocks = stages.blocks[mesh.pp.rank]
    names = [name for index, name in enumerate(checkpoint.block_names) if index in blocks]
    hosts = stages or cast(Any, SimpleNamespace(owners={}, holders={}))
    cache = cache_layers(
        transformer, names, family, offload_device=META, dtype=torch.bfloat16, stages=hosts, mesh=mesh
    )
    stage = None
    if config.world_size > 1 or family.cache.static_text:
        stage = Stage(transformer, family, mesh, blocks)
    report = LoadReport(
        rank=mesh.rank,
        stage=mesh.pp.rank,
        blocks=(blocks.start, blocks.stop),
        bytes_read=0,
        file_bytes=0,
        weight_bytes=0,
        peak_bytes=0,
        seconds=0.0,
    )
    weights = cast(Any, SimpleNamespace(checkpoint=checkpoint))
    return LoadedModel(
        transformer=transformer,
        dtype=torch.bfloat16,
        stage=stage,
        report=report,
        sharded=False,
        cache=cache,
        weights=weights,
        choices={},
    )


def request_of(family: str, batch: int = 1, steps: int = STEPS) -> Sample:
    """Return the family's golden request in ``steps`` of Euler; Flux has one of a ``batch`` of 2."""
    if family in PACKED:
        return packed_models.request_for(family, steps)
    case = "euler_simple" if batch == 1 else f"batch{batch}"
    found = golden_request(case) if family == "flux-dev" else golden(f"{family}__{case}")
    sigmas = torch.linspace(found[0].tensors["sigmas"][0].item(), 0, steps + 1)
    return replace(found[0], sampler="euler", tensors={**found[0].tensors, "sigmas": sigmas})


class LastStep(Denoiser):
    """The step loop, which counts in its last step, or times it."""

    mode: Count | Clock
    seconds = 0.0

    def _evaluate(self, index):
        mode = self.mode
        before = self.runner.calls
        if isinstance(mode, Count):
            mode.active = index == len(self.plan) - 1
            super()._evaluate(index)
            mode.active = False
        else:
            started = time.perf_counter() - mode.seconds
            super()._evaluate(index)
            self.seconds = time.perf_counter() - mode.seconds - started
        self.calls = self.runner.calls - before


def run(
    family: str,
    config: ParallelConfig,
    rank: int,
    mode: Count | Clock,
    callbacks: Callbacks | None = None,
    steps: int = STEPS,
) -> LastStep:
    """Run the family's request as one rank; return the loop whose last step ``mode`` has seen."""
    checkpoint = checkpoint_of(family)
    mesh = mesh_of(config, rank)
    is_packed = family in PACKED
    with meta_device(mode if isinstance(mode, Count) else Count()), torch.inference_mode():
        model = packed_models.load(family, config, mesh) if is_packed else load(checkpoint, config, mesh)
        model.cache.offload()
        sample = request_of(family, steps=steps)
        request = build(sample, config, model.checkpoint, model.dtype, META)
        on_meta = packed_models.running_on_meta(family, model) if is_packed else nullcontext()
        with on_meta, running(model, request) as runner:
            loop = LastStep(mesh, request, runner, with_downloads(callbacks or Callbacks(), request))
            loop.mode = mode
            with mode:
                loop.run()
    return loop


def steps_until_steady(family: str, config: ParallelConfig) -> int:
    """Return how many steps a request has whose last one is like any later one."""
    is_later = config.pipefusion_degree > 1 or checkpoint_of(family).family.cache.static_text
    return STEPS if is_later else STEPS_WITHOUT_PATCHES


def measure(family: str, method: str, timing: bool = True) -> tuple[Launches, dict[str, int]]:
    """Return the counts of a family under a method, and what waited where."""
    with in_halves() if method in IN_HALVES else nullcontext():
        return _measured(family, method, timing)


def _measured(family: str, method: str, timing: bool) -> tuple[Launches, dict[str, int]]:
    degrees, ranks = (METHODS | FURTHER)[method]
    config = replace(ParallelConfig(), **cast(Any, degrees)).validate()
    waits: dict[str, int] = {}
    device = host = microseconds = 0.0
    steps = steps_until_steady(family, config)
    for rank in ranks:
        count = Count()
        loop = run(family, config, rank, count, steps=steps)
        for what, times in count.waits.items():
            waits[what] = max(times, waits.get(what, 0))
        device = max(device, count.device.total() / loop.calls)
        host = max(host, count.host.total() / loop.calls)
        if timing:
            timed = run(family, config, rank, Clock())
            microseconds = max(microseconds, timed.seconds / timed.calls * 1e6)
    total = sum(waits.values())
    return Launches(
        family=family,
        method=method,
        waits=total,
        device_ops=round(device, 1),
        cpu_ops=round(host, 1),
        host_us=round(microseconds),
    ), waits


def stored() -> dict[str, dict[str, list[float]]]:
    """Family -> method -> [device operations, host operations, waits] as last written."""
    return json.loads(STORED.read_text())


def write(lines: list[Launches]):
    """Store the counts, a line for each family."""
    found = stored() if STORED.exists() else {}
    for line in lines:
        found.setdefault(line.family, {})[line.method] = [line.device_ops, line.cpu_ops, line.waits]
    text = ",\n".join(f"{json.dumps(family)}: {json.dumps(row)}" for family, row in sorted(found.items()))
    STORED.write_text("{\n" + text + "\n}\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    every = (*FAMILIES, *packed_models.readable())
    parser.add_argument("--only", nargs="*", default=every, help="golden families, quantized models")
    every = (*METHODS, *FURTHER)
    parser.add_argument("--methods", nargs="*", default=every, help="; ".join(every))
    parser.add_argument("--waits", action="store_true", help="say what waits, and in which function")
    parser.add_argument("--write", action="store_true", help=f"store the counts in {STORED.name}")
    parser.add_argument("--quick", action="store_true", help="no times")
    options = parser.parse_args()
    lines = []
    for family in options.only:
        if options.write and lines:
            write(lines)
        for method in (each for each in options.methods if each in methods_of(family)):
            line, waits = measure(family, method, not options.quick)
            lines.append(line)
            if not options.json:
                print("{:18} {:12} {:5} {:8} {:8} {:8}".format(*asdict(line).values()), flush=True)
            for what, times in waits.items() if options.waits else ():
                print(f"    {times} x {what}")
    if options.json:
        print(json.dumps([asdict(line) for line in lines], indent=1))
    if options.write:
        write(lines)


if __name__ == "__main__":
    main()
