"""Writes what the planner has to know of a transformer: python -m backend.shape_reader PATH --device cuda
--weight-dtype default --out FILE. A process of its own, since it imports diffusers and ComfyUI's may not.

The file gets {"shape": ...}, or {"refused": sentence} where loading would refuse the model.
"""

import argparse
import json
from pathlib import Path

import torch

from . import lean_imports  # noqa: F401  # before all that imports diffusers
from .errors import UnsupportedError
from .loading.compute_dtype import chosen_dtype
from .loading.recognition import open_checkpoint
from .loading.weight_loading import matrices
from .quantization.matmul import capability_of, choose_all
from .rank_plan.shape_of import shape_of
from .sampling.validation import refusing


@refusing("the model")
def read(path: str, weight_dtype: str, matmul: str, device: str) -> dict:
    """Return the shape of the transformer at ``path`` for JSON. Raises UnsupportedError."""
    where = torch.device(device)
    capability = capability_of(where)
    checkpoint = open_checkpoint(path)
    choices = choose_all(checkpoint.name, matrices(checkpoint, {}), matmul, where, capability)
    dtype = chosen_dtype(weight_dtype, checkpoint, where, capability)
    with torch.inference_mode():
        return shape_of(checkpoint, dtype, choices).as_dict()


def main():
    """Read one transformer's headers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    parser.add_argument("--weight-dtype", default="default")
    parser.add_argument("--matmul", default="auto")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    try:
        found = {"shape": read(options.path, options.weight_dtype, options.matmul, options.device)}
    except UnsupportedError as error:
        found = {"refused": str(error)}
    Path(options.out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
