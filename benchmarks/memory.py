"""Memory and time with which ranks load quantized files: bytes held over bytes stored, peak host memory, and
seconds against the same model in bf16.

    python benchmarks/memory.py [--width 1024] [--quick]

Makes a Flux-like file of random weights in every format, and loads each on one rank and on two under Ulysses,
tensor parallelism, PipeFusion and FSDP. Of quantized layers it compares what a rank holds with its share of
what the file stores (goal: 1.02). A load ends when every page of the weights has been touched. Peak host
memory is anonymous memory (RssAnon of /proc/self/status, sampled) above that before the load: files are
mapped, and their pages are shared by all ranks and can be dropped at any time. Blocks of Q4_K are 256 wide:
tensor parallelism cuts within them where half the width is no multiple of it, as under --quick.
"""

import argparse
import gc
import os
import sys
import tempfile
import threading
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import common
import report
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.hardware.device_memory import trim_heap
from backend.parallel import fsdp, mesh
from backend.quantization.packed_weight import PackedWeight

sys.path.insert(0, str(common.ROOT / "tests/support"))
from quantized import matrices, write_gguf, write_scaled

#: Quantized formats, of safetensors files and of GGUF; they are compared with bf16.
SCALED = ("float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4")
GGUF = ("Q8_0", "Q4_K")
BF16 = "bf16"
#: Name -> fields of ParallelConfig; all on two ranks but the first.
METHODS = {
    "one rank": {},
    "ulysses 2": {"ulysses_degree": 2},
    "tensor 2": {"tensor_parallel_degree": 2},
    "pipefusion 2": {"pipefusion_degree": 2},
    "FSDP 2": {"ulysses_degree": 2, "shard_weights": True},
}
DOUBLE, SINGLE, HEAD, CONTEXT, LATENT = 4, 10, 128, 768, 64
GOAL = 1.02
PAGE_BYTES = 4096
#: Seconds between two samples of the memory.
SAMPLING = 0.002


def shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Flux without guidance, under the names of its single files."""
    layers = {"img_in": (width, LATENT), "txt_in": (width, CONTEXT), "final_layer.linear": (LATENT, width)}
    layers["final_layer.adaLN_modulation.1"] = (2 * width, width)
    for name, inputs in (("time_in", 256), ("vector_in", CONTEXT)):
        layers |= {f"{name}.in_layer": (width, inputs), f"{name}.out_layer": (width, width)}
    norms = []
    for block in (f"double_blocks.{i}.{stream}" for i in range(DOUBLE) for stream in ("img", "txt")):
        layers |= {f"{block}_mod.lin": (6 * width, width), f"{block}_attn.qkv": (3 * width, width)}
        layers |= {f"{block}_attn.proj": (width, width), f"{block}_mlp.0": (4 * width, width)}
        layers[f"{block}_mlp.2"] = (width, 4 * width)
        norms.append(f"{block}_attn.norm")
    for block in (f"single_blocks.{i}" for i in range(SINGLE)):
        layers |= {f"{block}.linear1": (7 * width, width), f"{block}.linear2": (width, 5 * width)}
        layers[f"{block}.modulation.lin"] = (3 * width, width)
        norms.append(f"{block}.norm")
    of_tensors: dict[str, tuple[int, ...]] = {}
    for name, shape in layers.items():
        of_tensors |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return of_tensors | {f"{norm}.{kind}_norm.scale": (HEAD,) for norm in norms for kind in ("query", "key")}


def write_files(folder: Path, width: int):
    """Write the model in every format: FORMAT.safetensors or FORMAT.gguf."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    state = {
        key: 0.02 * torch.randn(shape, generator=generator).bfloat16() for key, shape in shapes(width).items()
    }
    save_file(state, folder / f"{BF16}.safetensors")
    for kind in SCALED:
        write_scaled(folder / f"{kind}.safetensors", state, kind)
    for kind in GGUF:
        write_gguf(folder / f"{kind}.gguf", state, (kind,))


def stored_bytes(path: Path, width: int) -> int:
    """Count what a file stores of quantized layers, as its header says: weights and their scales."""
    if path.stem == BF16:
        return 0
    keys = matrices({key: torch.empty(shape, device="meta") for key, shape in shapes(width).items()})
    if path.suffix == ".gguf":
        import gguf

        return sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors if tensor.name in keys)
    from safetensors import safe_open

    names = {key.removesuffix(".weight") for key in keys}
    leaves = ("weight", "weight_scale", "weight_scale_2")
    with safe_open(path, "pt") as file:
        where = [key for key in file.keys() if key.rpartition(".")[0] in names]
        tensors = [file.get_tensor(key) for key in where if key.rpartition(".")[2] in leaves]
    return sum(tensor.nbytes for tensor in tensors)


class HostPeak(threading.Thread):
    """Samples this process's anonymous memory from its start until ``stop``."""

    def __init__(self):
        super().__init__(daemon=True)
        self.before = self.most = anonymous_bytes()
        self._done = threading.Event()

    def run(self):
        while not self._done.wait(SAMPLING):
            self.most = max(self.most, anonymous_bytes())

    def stop(self) -> int:
        """End; return the most bytes above those at the start."""
        self._done.set()
        self.join()
        return max(self.most, anonymous_bytes()) - self.before


def anonymous_bytes() -> int:
    """Read RssAnon: memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


class Load(NamedTuple):
    """What a load took on one rank. quantized_bytes: of the quantized layers here, which stand for so many
    ``numbers``. All are 0 on a rank that the method leaves out, and floats, as ranks gather them."""

    seconds: float = 0.0
    host_bytes: float = 0.0
    weight_bytes: float = 0.0
    quantized_bytes: float = 0.0
    numbers: float = 0.0


def load(engine: Engine, path: Path, device: str) -> Load:
    """Load a file, and unload it."""

    def action():
        engine.load("model", str(path), "bf16")
        for parameter in engine.models["model"].transformer.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if own.device.type != "meta":
                own.contiguous().view(-1).view(torch.uint8)[::PAGE_BYTES].sum()

    gc.collect()
    trim_heap()  # what is free may not hide what the load needs
    peak = HostPeak()
    peak.start()
    seconds, _ = common.timed(action, device)
    most = peak.stop()
    model = engine.models["model"]
    packed = quantized_layers(model.transformer, chain.from_iterable(model.cache.hosted))
    held = sum(fsdp.held_bytes(parameter) for weight in packed for parameter in weight.parameters())
    numbers = sum(weight.shape.numel() for weight in packed)
    weight_bytes = model.report.weight_bytes
    del model, packed
    engine.unload("model")
    return Load(
        seconds=seconds, host_bytes=most, weight_bytes=weight_bytes, quantized_bytes=held, numbers=numbers
    )


def quantized_layers(transformer: nn.Module, hosted) -> list[PackedWeight]:
    """List the quantized weights on this rank, with those that it hosts for other stages."""
    modules = chain.from_iterable(root.modules() for root in (transformer, *hosted))
    return [module for module in modules if isinstance(module, PackedWeight)]


def scenario(engine: Engine | None, path: Path, device: str):
    """Return a function that loads on the ranks with an engine: what ``load`` says, of every rank."""

    def run():
        common.meet()
        return [
            Load(*each) for each in common.of_all_ranks(*(load(engine, path, device) if engine else Load()))
        ]

    return run


def rows_of(results: dict[str, list], paths: list[Path], width: int) -> list[dict]:
    """One row for each format and method: the worst of the ranks."""
    rows = []
    for method, fields in METHODS.items():
        ranks = ParallelConfig(**fields).world_size
        for path in paths:
            rounds = [loads[:ranks] for loads in results[f"{method}, {path.stem}"]]
            plain = [loads[:ranks] for loads in results[f"{method}, {BF16}"]]
            whole = results[f"one rank, {path.stem}"][0][0].numbers
            stored = stored_bytes(path, width)
            # FSDP's weights keep their whole shape
            divided = ranks if fields.get("shard_weights") else 1
            shares = [stored * rank.numbers / whole / divided for rank in rounds[0] if rank.numbers]
            held = [rank.quantized_bytes / share for rank, share in zip(rounds[0], shares)]
            slowest = [max(rank.seconds for rank in loads) for loads in rounds]
            rows.append(
                {
                    "scenario": f"{method}, {path.stem}",
                    "held_over_stored": max(held, default=None),
                    "weight_bytes": max(rank.weight_bytes for rank in rounds[0]),
                    "host_bytes": max(rank.host_bytes for loads in rounds for rank in loads),
                    "seconds": common.spread(slowest),
                    "over_bf16": common.ratios(
                        slowest, [max(rank.seconds for rank in loads) for loads in plain]
                    ),
                }
            )
    return rows


def show(rows: list[dict], **facts):
    report.table(
        ["", "held / stored", "MB of weights", "peak host MB", "seconds", "x bf16 load"],
        [
            [
                row["scenario"],
                "" if row["held_over_stored"] is None else f"{row['held_over_stored']:.4f}",
                f"{row['weight_bytes'] / 1e6:.1f}",
                f"{row['host_bytes'] / 1e6:.0f}",
                report.shown(row["seconds"], 3),
                report.shown(row["over_bf16"]),
            ]
            for row in rows
        ],
    )
    ratios = [row["held_over_stored"] for row in rows if row["held_over_stored"] is not None]
    print(f"held / stored at most {max(ratios):.4f}, goal {GOAL}: {report.outcome(max(ratios) <= GOAL)}")
    bars = [report.Bar(row["scenario"], *[row["weight_bytes"] / 1e6] * 3) for row in rows]
    report.write("memory", "Weights of the fullest rank", "MB", bars, rows=rows, **facts)


def options() -> argparse.Namespace:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument(
        "--width", type=int, default=1024, help="of a token, a multiple of 128 (1024: 310M parameters)"
    )
    chosen = common.parse(parser)
    if chosen.quick:
        chosen.width = min(chosen.width, 256)
    return chosen


def main():
    chosen = options()
    if not common.spawned():
        with tempfile.TemporaryDirectory(prefix="parallel-dit-benchmark-") as folder:
            write_files(Path(folder), chosen.width)
            common.spawn(__file__, ranks=2, device=chosen.device, model=folder)
    paths = sorted(Path(os.environ[common.MODEL_VARIABLE]).iterdir())
    engines: dict[str, Engine | None] = {}
    for method, fields in METHODS.items():
        config = ParallelConfig(**fields)
        if config.world_size > 1:
            engines[method] = Engine(config, mesh.build(config, chosen.device))
        else:
            alone = Engine(config, mesh.single(chosen.device))
            engines[method] = alone if os.environ["RANK"] == "0" else None
    scenarios = {
        f"{method}, {path.stem}": scenario(engine, path, chosen.device)
        for method, engine in engines.items()
        for path in paths
    }
    for run in scenarios.values():
        run()
    results, busy = common.interleave(scenarios, chosen.rounds, chosen.patience)
    if os.environ["RANK"] == "0":
        rows = rows_of(results, paths, chosen.width)
        show(rows, rounds=results, busy_percent=busy, options=vars(chosen))
    common.leave()


if __name__ == "__main__":
    main()
