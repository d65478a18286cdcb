"""What blocks compute in where weights are in bf16: nothing in doubles, at which consumers' GPUs are slow,
and no norm in two types, for which there is no fused kernel."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps

import pytest
import torch
from cropping import cropped
from families import LATENT_FORMATS, golden
from tiny import relative, write_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.parallel.block_streams import block_list
from backend.sampling.model_runner import LoadedModel
from backend.sampling.step_loop import Callbacks

#: Most rows of latent pixels: no ComfyUI is compared here.
SIDE = 8
DOUBLES = (torch.float64, torch.complex128)
#: Of the fast tier: those whose norms and rotary tables were otherwise, and one of another precision.
FAST = ("krea2", "lumina2", "flux-dev")
#: Families whose tiny weights make more of the rounding, and how much at most.
SHARPEST, SHARP = ("flux-dev", "hunyuan-video"), 0.12


class Doubles(TorchDispatchMode):
    """Names the operators that make doubles within a block."""

    def __init__(self):
        super().__init__()
        self.depth = self.calls = 0
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
            self.calls += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self.depth -= 1

        vars(block)["forward"] = watched


def step(family: str, folder, precision: str, watch: Callable[[LoadedModel], None] = lambda model: None):
    """The latent after one step."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(folder / f"{family}.safetensors", family)), precision)
    watch(engine.models["tiny"])
    sample, _ = golden(f"{family}__euler_simple")
    tensors = cropped({**sample.tensors, "sigmas": sample.tensors["sigmas"][:2]}, SIDE)
    return engine.sample(replace(sample, tensors=tensors), Callbacks())[0]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in FAST else pytest.mark.full) for name in LATENT_FORMATS]
)
def test_blocks_in_half_precision(family, tmp_path, monkeypatch):
    """A step in bf16, what files are in and GPUs compute in, is near the same in float32."""
    exact, doubles = step(family, tmp_path, "fp32"), Doubles()
    norm, mixed = torch.rms_norm, []

    def rms_norm(x, shape, weight=None, eps=None):
        mixed.append(weight is not None and weight.dtype != x.dtype)
        return norm(x, shape, weight, eps)

    def watch(model: LoadedModel):
        for name in model.family.blocks.lists:
            for block in block_list(model.transformer, name):
                doubles.watch(block)

    monkeypatch.setattr(torch, "rms_norm", rms_norm)
    with doubles:
        latent = step(family, tmp_path, "bf16", watch)
    assert doubles.calls > 0 and not doubles.found and not any(mixed)
    assert relative(latent, exact) < (SHARP if family in SHARPEST else 0.03)
