"""Every tensor of every family's requests, broken in every way: it is refused in a sentence before any
collective, or it runs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cropping import cropped
from families import LATENT_FORMATS, golden
from tiny import write_checkpoint
from variants import VARIANTS, request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks
from backend.sampling.validation import check_sample

#: Most rows of latent pixels: what is refused depends on ranks of tensors, not on their sizes.
SIDE = 8
#: What is wrong -> the tensor with it, None where it cannot be.
BROKEN = {
    "a dimension less": lambda x: x[0] if x.ndim else None,
    "a dimension more": lambda x: x[None],
    "a last dimension more": lambda x: x[..., None],
    "narrower": lambda x: x[..., :-1] if x.ndim else None,
    "wider": lambda x: F.pad(x, (0, 1)) if x.ndim else None,
    "shorter": lambda x: x[:, :-1] if x.ndim > 2 else None,
    "longer": lambda x: F.pad(x, (0, 0, 0, 1)) if x.ndim == 3 else None,
    "empty": lambda x: x[:, :0] if x.ndim > 1 else x[:0] if x.ndim else None,
    "another batch": lambda x: torch.cat([x] * 3) if x.ndim else None,
    "of integers": lambda x: x.long() if x.is_floating_point() else None,
    "of floats": lambda x: x.float() if not x.is_floating_point() else None,
    "of booleans": lambda x: x.bool(),
    "complex": lambda x: x.to(torch.complex64),
    "not a number": lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else None,
}
#: Not wrong: a longer schedule, a prompt or a reference of another length.
RIGHT = {
    ("sigmas", "wider"),
    ("sigmas", "another batch"),
    *(
        (name, what)
        for name in ("positive.c_crossattn", "positive.clip_fea", "positive.txt_byt5")
        for what in ("shorter", "longer")
    ),
}
#: Variants whose requests have arguments that the golden families' have not: those alone are broken.
FURTHER = (
    "flux-kontext",
    "flux-fill",
    "flux2-edit",
    "flux3-edit",
    "ltx2-i2v",
    "qwen-image-edit",
    "wan21-i2v",
    "wan22-ti2v",
    "wan21-fun-control",
    "wan22-fun-camera",
    "wan21-phantom",
    "wan22-bernini",
    "hunyuan-video-i2v-v2",
    "hunyuan-video15-i2v",
    "ltxv-i2v",
    "ltx25-i2v",
    "minimax-h3-guides",
    "cogvideox-1.5-i2v",
)


def changes(tensors: dict, keys) -> dict[tuple[str, str], dict]:
    """(name, what is wrong) -> the tensors that are then sent in place of the request's own."""
    found = {
        (key, what): {key: change(tensors[key])}
        for key in keys
        for what, change in BROKEN.items()
        if (key, what) not in RIGHT
    }
    noise = tensors["noise"]
    forms = {
        "with a time axis": noise.unsqueeze(2),
        "of two frames": torch.stack([noise, noise], 2),
        "without a time axis": noise[:, :, 0],
    }
    found |= {("noise", what): {"noise": other, "latent": other} for what, other in forms.items()}
    return {case: change for case, change in found.items() if None not in change.values()}


@pytest.mark.parametrize(
    "name", [*(family for family in LATENT_FORMATS if family != "minimax-h3-curves"), *FURTHER]
)
def test_a_broken_tensor_is_refused_or_runs(name, tmp_path):
    path, variant = tmp_path / f"{name}.safetensors", VARIANTS.get(name)
    sample = request(name) if variant else golden(f"{name}__euler_simple")[0]
    small = cropped(sample.tensors, SIDE)
    tensors = {key: value for key, value in small.items() if not key.startswith("negative.")}
    valid = replace(sample, cfg=1.0, tensors=tensors | {"sigmas": tensors["sigmas"][:2]})
    checkpoint, engine = (
        open_checkpoint(str(write(path, name) if variant else write_checkpoint(path, name))),
        None,
    )
    wrong = []
    for case, change in changes(
        valid.tensors, [f"positive.{key}" for key in variant.arguments] if variant else tensors
    ).items():
        broken = replace(valid, tensors=valid.tensors | change)
        try:
            check_sample(broken, ParallelConfig(), checkpoint.family, checkpoint.config, torch.float32, "cpu")
        except UnsupportedError:
            continue
        except Exception as error:
            wrong.append((*case, "no sentence", error))
            continue
        if engine is None:
            engine = Engine(ParallelConfig(), mesh.single())
            engine.load("tiny", str(path), "default")
        try:
            samples, _ = engine.sample(broken, Callbacks())
            assert samples.shape == broken.tensors["noise"].shape and samples.isfinite().all()
        except Exception as error:
            wrong.append((*case, "fails", error))
    assert not wrong


def test_a_check_that_fails_is_a_refusal(tmp_path):
    """Rank 0 alone looks at a request: what no check foresaw must not end it."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / "sd3.safetensors", "sd3")), "default")
    weights = engine.models["tiny"].weights
    changes = {"conditioning.refusal": lambda config, grid, cond: [][len(grid.counts)]}
    weights.checkpoint = replace(weights.checkpoint, family=weights.checkpoint.family.changed(changes))
    with pytest.raises(
        UnsupportedError,
        match="the request could not be checked .IndexError: list index out of range.* nothing was run",
    ):
        engine.check_sample(golden("sd3__euler_simple")[0])
