"""Rank program: transformers without a family file under every method of two ranks, each against the single process; rank 0 writes the errors as JSON.

torchrun ... tests/ranks/fallback.py FOLDER-OF-FOLDERS "CLASS CLASS ..." OUT.json
"""

import json
import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
import torch
import torch.distributed as dist

from backend import mesh
from backend.config import ParallelConfig
from backend.denoise import Callbacks
from backend.engine import Engine
from fallback_models import request
from tiny import relative

CONFIGURATIONS = [dict(cfg_degree=2), dict(ulysses_degree=2), dict(ring_degree=2), dict(tensor_parallel_degree=2, split_scheme="row"),
                  dict(pipefusion_degree=2, num_pipeline_patch=1), dict(pipefusion_degree=2, num_pipeline_patch=3)]


def run(engine: Engine, name: str, folder: str):
    engine.load(name, f"{folder}/{name}", "fp32")
    sample = request(name, num_pipeline_patch=engine.config.num_pipeline_patch)
    engine.check_sample(sample)
    samples, _ = engine.sample(sample, Callbacks())
    engine.unload(name)
    return samples


def main(folder: str, names: str, out: str):
    torch.set_num_threads(1)
    references = {name: run(Engine(ParallelConfig(), mesh.single()), name, folder) for name in names.split()}
    rows = []
    for degrees in CONFIGURATIONS:
        config = ParallelConfig(**degrees)
        engine = Engine(config, mesh.build(config, "cpu"))
        rows += [dict(name=name, config=config.product, stale=config.pipefusion_degree > 1 and config.num_pipeline_patch > 1, relative=relative(run(engine, name, folder), reference))
                 for name, reference in references.items()]
    if int(os.environ["RANK"]) == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
