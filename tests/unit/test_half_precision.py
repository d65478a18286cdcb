"""What blocks compute in where weights are in bf16: nothing in doubles, at which consumers' GPUs are slow,
and no norm in two types, for which there is no fused kernel."""

from functools import wraps

import pytest
import torch
from families import CASES, golden
from tiny import write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.parallel.block_streams import block_list
from backend.sampling.step_loop import Callbacks

#: One golden case of each family.
FIRST = {name.split("__")[0]: name for name in reversed(CASES)}
DOUBLES = (torch.float64, torch.complex128)
#: Of the fast tier: those whose norms and rotary tables were otherwise.
FAST = ("krea2", "lumina2")


class Doubles(TorchDispatchMode):
    """Names the operators that make doubles within a block."""

    def __init__(self):
        super().__init__()
        self.depth = 0
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        made = [leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if self.depth and any(dtype in DOUBLES for dtype in made):
            self.found.add(str(func))
        return out

    def watch(self, block: torch.nn.Module):
        forward = block.forward

        @wraps(forward)
        def watched(*args, **kwargs):
            self.depth += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self.depth -= 1

        vars(block)["forward"] = watched


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in FIRST]
)
def test_blocks_in_half_precision(family, tmp_path, monkeypatch):
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "bf16")
    model, doubles = engine.models["tiny"], Doubles()
    for name in model.family.blocks.lists:
        for block in block_list(model.transformer, name):
            doubles.watch(block)
    norm, mixed = torch.rms_norm, []

    def rms_norm(x, shape, weight=None, eps=None):
        mixed.append(weight is not None and weight.dtype != x.dtype)
        return norm(x, shape, weight, eps)

    monkeypatch.setattr(torch, "rms_norm", rms_norm)
    sample, _ = golden(FIRST[family])
    sample.tensors["sigmas"] = sample.tensors["sigmas"][:2]
    with doubles:
        engine.sample(sample, Callbacks())
    assert not doubles.found and not any(mixed)
