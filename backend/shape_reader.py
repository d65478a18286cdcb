"""Writes what the planner has to know of a transformer: python -m backend.shape_reader PATH --device cuda
--weight-dtype default --out FILE. A process of its own, since it imports diffusers and ComfyUI's may not.

The file gets {"shape": ...}, or {"refused": sentence} where loading would refuse the model.
"""

import argparse
import json
from pathlib import Path

import torch

from .config import ParallelConfig
from .engine import Engine
from .errors import UnsupportedError
from .parallel import mesh
from .rank_plan.shape_of import shape_of


def read(path: str, weight_dtype: str, device: str) -> dict:
    """Return the shape of the transformer at ``path`` for JSON. Raises UnsupportedError."""
    engine = Engine(ParallelConfig(), mesh.single(device))
    checkpoint = engine.check_load(path, weight_dtype)
    with torch.inference_mode():
        return shape_of(checkpoint, engine.weight_dtype(checkpoint, weight_dtype)).as_dict()


def main():
    """Read one transformer's headers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--weight-dtype", default="default")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    try:
        found = {"shape": read(options.path, options.weight_dtype, options.device)}
    except UnsupportedError as error:
        found = {"refused": str(error)}
    Path(options.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
