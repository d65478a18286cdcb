"""Rank program (launch.py): a shallow Flux in ConvRot or nvfp4 that multiplies natively, on two ranks against
the single process; rank 0 writes distances of one call of the model as JSON.

main(FOLDER-OF-CHECKPOINTS, [labels of CONFIGS], OUT.json)
"""

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from families import golden, model_call

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import comm, mesh, tensor_parallel
from backend.parallel.tensor_parallel import ShardedLinear
from backend.quantization import native_trial
from backend.quantization.packed_weight import PackedWeight
from backend.serving.broadcast import ControlChannel

#: Formats, whose files are FORMAT.safetensors; the nvfp4 file has no scales of inputs.
INT8, NVFP4 = "int8_tensorwise", "nvfp4"
ULYSSES, RING = ParallelConfig(ulysses_degree=2), ParallelConfig(ring_degree=2)
ROW = ParallelConfig(tensor_parallel_degree=2, split_scheme="row")


@dataclass(frozen=True)
class Case:
    """How two ranks share the work; and whether they agree on the largest values of their inputs."""

    config: ParallelConfig
    format: str = INT8
    is_agreed: bool = True


#: Id -> case.
CONFIGS = {
    "megatron": Case(ParallelConfig(tensor_parallel_degree=2)),
    "row": Case(ROW),
    "row, scales of each rank's own": Case(ROW, is_agreed=False),
    "ulysses": Case(ULYSSES),
    "ulysses, shard_weights": Case(ParallelConfig(ulysses_degree=2, shard_weights=True)),
    "nvfp4, row": Case(ROW, NVFP4),
    "nvfp4, ulysses": Case(ULYSSES, NVFP4),
    "nvfp4, ulysses, scales of each rank's own": Case(ULYSSES, NVFP4, is_agreed=False),
    "nvfp4, ring": Case(RING, NVFP4),
}
#: As "row", where the kernels of rank 1 alone fail.
REFUSED = "row, one rank refuses"

#: Latents that the model is called with: how far a flipped rounding spreads is each one's own.
LATENTS = 5


def outputs(
    path: str, config: ParallelConfig, groups: mesh.Mesh, matmul: str, refused: dict | None = None
) -> list[torch.Tensor]:
    """What the model returns of each latent; ``refused``: of which products."""
    engine = Engine(config, groups)
    engine.refused = refused or {}
    engine.load("tiny", path, "default", matmul)
    weights = [m for m in engine.models["tiny"].transformer.modules() if isinstance(m, PackedWeight)]
    assert weights and all((each.choice.kernel is not None) == (matmul == "native") for each in weights)
    cut = [m for m in engine.models["tiny"].transformer.modules() if isinstance(m, ShardedLinear)]
    assert bool(cut) == (config.tensor_parallel_degree > 1)
    request = model_call(golden("flux-dev__size20x12")[0], "flux", 1)
    engine.check_forward(request)
    found = []
    for seed in range(LATENTS):
        noise = torch.randn(request.tensors["x"].shape, generator=torch.Generator().manual_seed(seed))
        found.append(engine.forward(replace(request, tensors={**request.tensors, "x": noise}))[0])
    return found


def rms(several: list[torch.Tensor], others: list[torch.Tensor]) -> list[float]:
    """The root mean square of a - b, in standard deviations of b."""
    return [((a - b).square().mean().sqrt() / b.std()).item() for a, b in zip(several, others, strict=True)]


def refused(path: str, rank: int, weight_only: list[torch.Tensor]) -> dict:
    """What all ranks say of the kernels that fail on rank 1, and how far they then are from one process that
    is ``weight_only``: those that go on natively would wait for it."""
    config = ROW
    groups = mesh.build(config, "cpu")
    control = ControlChannel(groups.control)
    engine = Engine(config, groups)
    products = engine.products(engine.check_load(path, "default"), "auto")
    fails = mock.patch("comfy_kitchen.mm_int8", side_effect=RuntimeError("not supported"))
    with fails if rank == 1 else nullcontext():
        found, failures = native_trial.agree(products, groups.device, control.all_gather_object)
    assert not any(failures)
    results = outputs(path, config, groups, "auto", found)
    said = control.all_gather_object([[*product, why] for product, why in found.items()])
    mesh.close(groups)
    return {"said": said, "distances": rms(results, weight_only) if rank == 0 else []}


def main(folder: str, selected: list[str], out: str):
    # as at real sizes: products that need no largest values of other ranks are summed in halves
    tensor_parallel.MIN_TOKENS_TO_HALVE = 1
    rank = int(os.environ["RANK"])
    files = {form: str(Path(folder) / f"{form}.safetensors") for form in (INT8, NVFP4)}
    cases = {label: CONFIGS.get(label, Case(ROW)) for label in selected}
    single = {}
    if rank == 0:
        for form in {case.format for case in cases.values()}:
            for matmul in ("native", "weight only"):
                single[form, matmul] = outputs(files[form], ParallelConfig(), mesh.single(), matmul)
    found = {}
    agreed = comm.all_reduce_max
    for label, case in cases.items():
        if label == REFUSED:
            found[label] = refused(files[INT8], rank, single.get((INT8, "weight only"), []))
            continue
        comm.all_reduce_max = agreed if case.is_agreed else lambda x, axis, mechanism: x
        groups = mesh.build(case.config, "cpu")
        results = outputs(files[case.format], case.config, groups, "native")
        mesh.close(groups)
        if rank == 0:
            native = single[case.format, "native"]
            quantization = rms(native, single[case.format, "weight only"])
            errors = rms(results, native)
            shares = [error / changed for error, changed in zip(errors, quantization, strict=True)]
            found[label] = {"shares": shares, "quantization": min(quantization)}
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
