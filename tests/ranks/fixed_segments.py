"""Two stages whose allocators have growing segments, and then fixed ones: what they compute, and how many
receives are posted before the forward that they are for."""

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from ranks.flux_requests import STALE_STEPS, shortened
from tiny import golden_request, relative

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.hardware.device_memory import FIXED_SEGMENTS
from backend.parallel import mesh
from backend.parallel.comm import Pipe
from backend.sampling.step_loop import Callbacks


def main(checkpoint: str, out: str):
    config = ParallelConfig(pipefusion_degree=2)
    engine = Engine(config, mesh.build(config, "cpu"))
    engine.load("tiny", checkpoint, "default")
    sample = replace(shortened(golden_request("euler_simple")[0], STALE_STEPS), num_pipeline_patch=3)
    found = []
    post = Pipe.post
    for fixed in ("0", "1"):
        ahead = 0

        def posted(pipe, *args):
            nonlocal ahead
            post(pipe, *args)
            ahead += engine.models["tiny"].stage.current is None

        with mock.patch.dict(os.environ, {FIXED_SEGMENTS: fixed}), mock.patch.object(Pipe, "post", posted):
            samples, _ = engine.sample(sample, Callbacks())
        found.append((samples, ahead))
    rows: list = [None, None]
    dist.all_gather_object(rows, [ahead for _, ahead in found])
    if dist.get_rank() == 0:
        (growing, _), (fixed, _) = found
        Path(out).write_text(json.dumps({"ahead": rows[1], "relative": relative(fixed, growing)}))
    dist.barrier()
    dist.destroy_process_group()
