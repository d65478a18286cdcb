"""What each rank of a configuration would hold and send: python scripts/describe.py MODEL --pipefusion-degree
2 --ulysses-degree 2

MODEL is a safetensors or GGUF file or a diffusers folder; only its headers are read. Options are those of
ParallelConfig. --json prints {"ranks": [{"weight_bytes": ..., "kv_bytes": ..., ...}, ...]}: the fields of
RankPlan (backend/rank_plan/describe.py) for every rank. --compute-capability 12.0 plans for GPUs of that
capability: which quantized layers multiply natively there (docs/models.md), and the default type.
"""

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from backend.runtime import lean_imports  # noqa: F401  # before all that imports diffusers

# isort: split
from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.compute_dtype import default_dtype
from backend.loading.recognition import open_checkpoint
from backend.loading.weight_loading import matrices
from backend.quantization.kernels import AUTO
from backend.quantization.matmul import choose_all
from backend.rank_plan import RequestSize, describe
from backend.rank_plan.weights import tensor_mesh

CUDA = torch.device("cuda")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    usual = RequestSize()
    image_help = "image tokens of a request (%(default)s: Flux at 1024 x 1024)"
    parser.add_argument("--image-tokens", type=int, default=usual.image_tokens, help=image_help)
    parser.add_argument("--text-tokens", type=int, default=usual.text_tokens, help="text tokens of a request")
    parser.add_argument("--batch", type=int, default=usual.batch)
    prompts_help = "2 with a negative prompt"
    parser.add_argument("--prompts", type=int, choices=(1, 2), default=usual.prompts, help=prompts_help)
    parser.add_argument("--compute-capability", type=float, help="of the GPUs, such as 8.9")
    parser.add_argument("--json", action="store_true", help="print every number, as JSON")
    for field in fields(ParallelConfig):
        name = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)
    return parser.parse_args()


def main():
    chosen = options()
    config = ParallelConfig(**{field.name: getattr(chosen, field.name) for field in fields(ParallelConfig)})
    try:
        checkpoint = open_checkpoint(chosen.model)
        capability = chosen.compute_capability and divmod(round(10 * chosen.compute_capability), 10)
        dtype = default_dtype(checkpoint, CUDA, capability)  # None: with fast bfloat16
        found = {}  # as a backend chooses by default, with what is installed here
        if capability:
            cuts = checkpoint.cut_plan(config).shards(tensor_mesh(config, 0))
            found = choose_all(checkpoint.name, matrices(checkpoint, cuts), AUTO, CUDA, capability)
        plans = describe(
            config,
            checkpoint,
            RequestSize(chosen.image_tokens, chosen.text_tokens, chosen.batch, chosen.prompts),
            dtype,
            choices=found,
        )
    except (ConfigError, UnsupportedError) as error:
        sys.exit(str(error))
    if chosen.json:
        print(json.dumps({"ranks": [plan.as_dict() for plan in plans]}))
        return
    print(config.product)
    for plan in plans:
        print(plan)


if __name__ == "__main__":
    main()
