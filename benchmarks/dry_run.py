"""A dry run of released models: the product's own code on meta tensors, as one rank of many.

    python benchmarks/dry_run.py [--only FAMILY ...] [--methods ulysses ring ...] [--write]

Needs no GPU and no weights. The header of a released file gives a transformer its configuration; Engine.load
places its blocks, cuts or shards its matrices and "reads" meta tensors; the step loop runs a few steps in
bf16 at a usual size, with one prompt, under CFG with two, and with one sample for each replica. Which methods
and hybrids run on how many ranks dry_run_methods.py says. Process groups are names (meta_device.py), FSDP2's
a fake one (meta_fsdp.py). Counted are bytes sent by mechanism and multiplications of the last step, and the
most bytes held in any. --write stores them; docs/scaling.md compares them with what describe() says of the
same rank (scripts/scaling_page.py).
"""

import argparse
import json
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "benchmarks"), str(ROOT / "tests/support")]
import launches
import torch
import torch.nn.functional as F
from dry_run_methods import METHODS, Method
from meta_device import META, meta_device
from meta_fsdp import Gathers, meta_fsdp
from meta_shapes import Mode
from operation_count import Count, tensors_in
from released_sizes import RELEASED, checkpoint_of, guided, request_of
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from backend.config import ConfigError, ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.parallel import comm
from backend.parallel.attention import attention_kernels
from backend.parallel.block_streams import block_list
from backend.parallel.mesh import Mesh
from backend.parallel.modulation.modulation_cache import CachedLayer
from backend.sampling.model_runner import LoadedModel, Runner, running
from backend.sampling.request import Request, build
from backend.sampling.step_loop import Callbacks, Denoiser

#: The first step computes what the prompt decides, and PipeFusion's is synchronous; the second one is steady.
STEPS = 2
STORED = Path(__file__).with_suffix(".json")
#: What is stored of a run, and what besides where weights are sharded.
COUNTED = ("sent", "macs", "weights", "kv", "peak")
GATHERED = "gathered"
aten = torch.ops.aten
#: Operators that inference mode does not take apart -> multiplications of a number of their output.
INNER = {
    aten.linear: lambda args: args[0].shape[-1],
    aten.matmul: lambda args: args[0].shape[-1],
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d), lambda args: args[1][0].numel()),
}


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step (steady state). sent: bytes by mechanism. macs: multiplications of matrix
    products and attention. weights, kv: bytes held. peak: the most bytes of everything but weights in any
    step. gathered: the most bytes of whole weights in any step, where the rank holds shards. waits: what
    waited for the device in the last step (a pipeline's first one with patches) -> how often."""

    family: str
    method: str
    ranks: int
    rank: int
    sent: dict[str, int]
    macs: int
    weights: int
    kv: int
    peak: int
    gathered: int
    waits: dict[str, int]


class Meter(Mode):
    """Adds up multiplications while ``active``, and the bytes of all storages that live, without what is
    ``held`` from the start and what ``gathers`` count. ``count`` is shown the operations meanwhile."""

    def __init__(self, held: Iterator[Tensor], gathers: Gathers, count: Count):
        super().__init__()
        self.gathers = gathers
        self.count = count
        self.active = False
        self.macs = 0
        self.live = self.peak = 0
        self._known: dict[int, Any] = {}
        for tensor in held:
            self._watch(tensor, 0)

    def _watch(self, tensor: Tensor, size: int):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != "meta" or key in self._known:
            return

        def freed(_):
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = self.count.watched(func, args, kwargs)
        for tensor in tensors_in(out):
            self._watch(tensor, 0 if self.gathers.is_under_way else tensor.untyped_storage().nbytes())
        if self.active:
            packet = func._overloadpacket
            if packet in INNER:
                self.macs += out.numel() * INNER[packet](args)
            elif packet in flop_registry:
                self.macs += flop_registry[packet](*args, **(kwargs or {}), out_val=out) // 2
        return out

    def attention(self, query: Tensor, key: Tensor, value: Tensor):
        """Count the two products of attention."""
        if self.active:
            batch, heads, queries, size = query.shape
            self.macs += batch * heads * queries * key.shape[2] * (size + value.shape[3])


@contextmanager
def counting_attention(meter: Meter) -> Iterator[None]:
    """Let the kernels' stand-ins of meta_device report to ``meter``."""
    attend = F.scaled_dot_product_attention
    with_sum = attention_kernels._lse_kernel

    def sdpa(query, key, value, *rest, **named):
        meter.attention(query, key, value)
        return attend(query, key, value, *rest, **named)

    def lse(kernel, query, key, value, mask, scale):
        meter.attention(query, key, value)
        return with_sum(kernel, query, key, value, mask, scale)

    with (
        patch.object(attention_kernels, "SDPA", sdpa),
        patch.object(F, "scaled_dot_product_attention", sdpa),
        patch.object(attention_kernels, "_lse_kernel", lse),
    ):
        yield


class SteadyStep(Denoiser):
    """The step loop, which counts in its last step."""

    meter: Meter
    sent: dict[str, int]

    def _evaluate(self, index):
        if index == len(self.plan) - 1:
            comm.SENT.clear()
            self.meter.active = self.meter.count.active = True
        super()._evaluate(index)
        if index:  # the outputs of this step are collected later, those of the one before were now
            self.sent = dict(comm.SENT)

    def run(self):
        """As Denoiser.run."""
        self.sent = {}
        x = super().run()
        self.sent = self.sent or dict(comm.SENT)
        return x


def loaded(family: str, config: ParallelConfig, mesh: Mesh) -> LoadedModel:
    """Load a released model as a rank of ``mesh``, by the product's own loading. Raises UnsupportedError."""
    engine = Engine(config, mesh)
    checkpoint = checkpoint_of(family)
    for module in checkpoint.transformer.modules():  # tables that no file stores
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(META)
    with patch("backend.engine.open_checkpoint", lambda *rest: checkpoint):
        engine.load("model", "released", "bf16")
    return engine.models["model"]


def run(family: str, method: str, ranks: int, rank: int, attention: str = "auto") -> DryRun:
    """Run as one rank, with that kernel. Raises ConfigError and UnsupportedError where the degree does not
    fit."""
    config = METHODS[method].config(ranks)
    count = Count()
    with meta_fsdp(config, rank) as gathers, meta_device(count):
        mesh = replace(launches.mesh_of(config, rank), weights=gathers.mesh)
        model = loaded(family, config, mesh)  # not in inference mode, whose tensors FSDP2 cannot shard
        with torch.inference_mode():
            request = built(family, METHODS[method], model, mesh, attention)
            held = list(tensors_of(model))
            meter = Meter(iter(held), gathers, count)
            with counting_attention(meter), running(model, request) as runner, meter:
                loop = SteadyStep(mesh, request, runner, Callbacks())
                loop.meter = meter
                loop.run()
                count.active = False
                kv = keys_and_values(model, runner)
    return DryRun(
        *(family, method, ranks, rank),
        sent={name: size for name, size in loop.sent.items() if size},
        macs=meter.macs,
        weights=model.report.weight_bytes if config.shard_weights else model.report.bytes_read,
        kv=kv,
        peak=meter.peak,
        gathered=gathers.peak,
        waits=dict(count.waits),
    )


def keys_and_values(model: LoadedModel, runner: Runner) -> int:
    """Return the bytes of K/V buffers, of static text's keys and values, and of prompts'."""
    static = model.stage.attention.static_text if model.stage else {}
    in_buffers = runner.buffers.bytes if runner.buffers else 0
    return in_buffers + sum(each.nbytes for each in static.values()) + prompt_bytes(model)


def prompt_bytes(model: LoadedModel) -> int:
    """Return the bytes of what blocks cache of prompts."""
    blocks = [block_list(model.transformer, name) for name in model.family.blocks.lists]
    every = chain.from_iterable(each.modules() for each in blocks)
    return sum(each.bytes for each in every if isinstance(each, CachedLayer) and each.kind == "prompt")


def built(family: str, method: Method, model: LoadedModel, mesh: Mesh, attention: str = "auto") -> Request:
    """Return a rank's part of the request of a usual size, with a prompt for each CFG rank and a sample for
    each replica."""
    config = method.config(mesh.world_size)
    sample = replace(request_of(family, model.weights.checkpoint, STEPS), attention=attention)
    if method.prompts > 1:
        sample = guided(sample)
    if method.batch > 1:
        latents = {
            name: sample.tensors[name].expand(method.batch, *sample.tensors[name].shape[1:])
            for name in ("noise", "latent")
        }
        sample = replace(sample, tensors=sample.tensors | latents)
    return build(sample, config, model.checkpoint, model.dtype, META, mesh.dp.rank)


def tensors_of(model: LoadedModel) -> Iterator[Tensor]:
    """Yield parameters, or this rank's shards of them, and buffers."""
    for module in model.modules:
        for parameter in module.parameters():
            yield parameter.to_local() if isinstance(parameter, DTensor) else parameter
        yield from module.buffers()


def runs(families: list[str], methods: list[str]) -> Iterator[tuple[str, str, int, int]]:
    """Yield (family, method, ranks, rank) of every dry run."""
    for family, name in product(families, methods):
        method = METHODS[name]
        if method.suits(family):
            yield from (
                (family, name, ranks, rank) for ranks in method.ranks for rank in method.places(ranks)
            )


def stored() -> dict[str, dict]:
    """FAMILY/METHOD/RANKS/RANK -> the fields of a DryRun that were counted, or why it cannot run."""
    return json.loads(STORED.read_text()) if STORED.exists() else {}


def counted(*which) -> dict | str:
    """Run one; return what is stored of it."""
    try:
        return to_store(run(*which))
    except (ConfigError, UnsupportedError) as error:
        return str(error)


def to_store(found: DryRun) -> dict:
    """Return the fields of a dry run that are stored."""
    besides = (GATHERED,) if METHODS[found.method].shards else ()
    return {name: getattr(found, name) for name in (*COUNTED, *besides)}


def write(counted_runs: dict[str, dict | str]):
    """Store runs, a line each, among those that are stored."""
    every = stored() | counted_runs
    lines = (f"{json.dumps(name)}: {json.dumps(every[name])}" for name in sorted(every))
    STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[*RELEASED], help="golden families")
    parser.add_argument("--methods", nargs="*", default=[*METHODS], help=", ".join(METHODS))
    parser.add_argument("--write", action="store_true", help=f"store the counts in {STORED.name}")
    chosen = parser.parse_args()
    for which in runs(chosen.only, chosen.methods):
        name = "/".join(map(str, which))
        counts = counted(*which)
        print(name, counts, flush=True)
        if chosen.write:
            write({name: counts})


if __name__ == "__main__":
    main()
