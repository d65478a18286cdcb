"""Time and bytes with which each rank loads its part of a checkpoint: one rank, pipeline stages,
tensor-parallel ranks; and the time in which parked weights come back.

    python benchmarks/load.py [--ranks 2] [--cold] [--quick]

On the CPU weights are mapped, not copied, so a load ends here when every page of them has been touched. Files
are in the system's cache unless --cold asks it to forget them before each load. Bytes are counted where
tensors are read.
"""

import gc
import os
from pathlib import Path

import common
import report

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh

#: Elements of the smallest page (4 KiB) of the widest dtype.
PAGE = 512
#: Name of the scenario of bring_back.
PARKED = "1 rank, parked"


def forget(model: str):
    """Ask the system to drop the checkpoint's files from its cache; what another process maps stays."""
    for path in Path(model).glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def load(engine: Engine, model: str, device: str) -> tuple[float, int]:
    """Seconds until every weight is there, and the bytes read."""

    def action():
        engine.load("model", model, "default")
        weights = [
            weight
            for weight in engine.models["model"].transformer.parameters()
            if weight.device.type != "meta"
        ]
        for weight in weights:
            weight.reshape(-1)[::PAGE].sum()

    seconds, _ = common.timed(action, device)
    read = engine.models["model"].report.bytes_read
    engine.unload("model")
    gc.collect()
    return seconds, read


def bring_back(engine: Engine, model: str, device: str) -> tuple[float, int]:
    """Seconds until weights that were parked in host memory are on the device again, and no bytes read. On
    the CPU nothing is parked: one copy of the weights stands for it."""
    engine.load("model", model, "default")
    loaded = engine.models["model"]

    def copy():
        for module in loaded.modules:
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.clone())

    if device != "cpu":
        engine.park(loaded, {engine.mesh.rank})
    action = copy if device == "cpu" else lambda: loaded.unpark(engine.mesh.device)
    seconds, _ = common.timed(action, device)
    engine.unload("model")
    gc.collect()
    return seconds, 0


def scenario(engine: Engine | None, model: str, options, action=load):
    """A function that loads on the ranks with an engine: (seconds, bytes) of every rank."""

    def run():
        if options.cold:
            forget(model)
        common.meet()
        found = action(engine, model, options.device) if engine else (0.0, 0)
        return common.of_all_ranks(*found)

    return run


def rows_of(results: dict[str, list], ranks: int) -> list[dict]:
    """One row for each scenario and rank that loads."""
    whole, rows = results["1 rank"][0][0][1], []
    for name, rounds in results.items():
        sharers = 1 if name in ("1 rank", PARKED) else ranks
        for rank in range(sharers):
            read = rounds[0][rank][1]
            rows.append(
                {
                    "scenario": name,
                    "rank": rank,
                    "seconds": common.spread([loads[rank][0] for loads in rounds]),
                    "bytes": read,
                    "of_fair_share": read * sharers / whole,
                }
            )
    return rows


def show(rows: list[dict], **facts):
    report.table(
        ["", "rank", "seconds", "MB read", "x checkpoint / ranks"],
        [
            [
                r["scenario"],
                str(r["rank"]),
                report.shown(r["seconds"], 3),
                f"{r['bytes'] / 1e6:.1f}",
                f"{r['of_fair_share']:.3f}",
            ]
            for r in rows
        ],
    )
    report.write(
        "load",
        "Loading a checkpoint",
        "seconds",
        [report.Bar(f"{r['scenario']}, rank {r['rank']}", **r["seconds"]) for r in rows],
        rows=rows,
        **facts,
    )


def main():
    parser = common.parser(__doc__, rounds=5)
    parser.add_argument(
        "--model", help="a checkpoint of a supported family (default: 177M random parameters)"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--cold", action="store_true", help="have the files forgotten by the system's cache before each load"
    )
    options = common.parse(parser)
    if not common.spawned():
        common.spawn(__file__, ranks=options.ranks, device=options.device, model=options.model)
    model = os.environ[common.MODEL_VARIABLE]

    def make(config):
        return Engine(config, mesh.build(config, options.device))

    engines = {
        f"{options.ranks} stages": make(ParallelConfig(pipefusion_degree=options.ranks)),
        f"{options.ranks} tp ranks": make(ParallelConfig(tensor_parallel_degree=options.ranks)),
    }
    engines = {
        "1 rank": Engine(ParallelConfig(), mesh.single(options.device))
        if os.environ["RANK"] == "0"
        else None,
        **engines,
    }
    scenarios = {name: scenario(engine, model, options) for name, engine in engines.items()}
    scenarios[PARKED] = scenario(engines["1 rank"], model, options, bring_back)
    for run in scenarios.values():
        run()
    results, busy = common.interleave(scenarios, options.rounds, options.patience)
    if os.environ["RANK"] == "0":
        show(rows_of(results, options.ranks), rounds=results, busy_percent=busy, options=vars(options))
    common.leave()


if __name__ == "__main__":
    main()
