"""The order in which Inductor runs the opaque operations of a block; no C++ compiler: it stops once that is
decided."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.scheduler as inductor
from families import golden
from quantized import ANY_MATRIX, write_scaled
from safetensors.torch import load_file
from tiny import write_checkpoint
from torch._inductor import ir

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import compiled_blocks, effect_order, mesh
from backend.sampling.step_loop import Callbacks


class Stop(Exception):
    """The order is known."""


def orders(family: str, folder) -> list[list[int]]:
    """For each graph of a family, all of whose linear layers are opaque, the places in the code of the
    operations that send, in the order in which they run."""
    path = write_checkpoint(folder / "plain.safetensors", family)
    quantized = write_scaled(folder / "quantized.safetensors", load_file(path), "float8_e4m3fn", ANY_MATRIX)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(quantized), "bf16", "weight only")
    sample = golden(f"{family}__euler_simple", "m")[0]
    sample = replace(sample, tensors={**sample.tensors, "sigmas": sample.tensors["sigmas"][:2]})
    found = []

    def stop(self):
        nodes = [each for node in self.nodes for each in node.get_nodes()]
        ours = [n for n in nodes if isinstance(n.node, ir.FallbackKernel)]
        ours = [n for n in ours if "parallel_dit" in str(n.node.op_overload)]
        found.append([int(node.get_name().removeprefix("op")) for node in ours])
        raise Stop

    torch._dynamo.reset()
    compiler = compiled_blocks.Compiler()
    with (
        mock.patch.object(compiled_blocks, "COMPILER", compiler),
        mock.patch.object(inductor.Scheduler, "compute_last_usage", stop),
    ):
        engine.sample(replace(sample, compile="blocks"), Callbacks())
    assert compiler.failed  # none was compiled to the end
    return found


@pytest.mark.parametrize("family", ["qwen-image", "sd3"])
def test_opaque_operations_run_in_the_order_of_the_code(family, tmp_path):
    found = orders(family, tmp_path)
    assert found and all(len(order) > 4 and order == sorted(order) for order in found)


def test_inductor_alone_moves_them(monkeypatch, tmp_path):
    """Once it does not, effect_order.py can go."""
    monkeypatch.setattr(effect_order, "_rename", lambda *_: None)
    assert any(order != sorted(order) for order in orders("qwen-image", tmp_path))
