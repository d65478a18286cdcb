"""Every tensor of every family's requests, broken in every way: it is refused in a sentence before any
collective, or it runs, as bad_tensors.json says of each case. After a change of what is refused, with
PARALLEL_DIT_TEST_WRITE=1 in the environment, the file is written anew; read its difference.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

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
from backend.models.common import ltx2_connectors
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks
from backend.sampling.validation import RequestTarget, check_sample

#: Family or variant -> tensor -> what runs though it is broken so; all other cases are refused.
TABLE = Path(__file__).with_name("bad_tensors.json")
WRITES = os.environ.get("PARALLEL_DIT_TEST_WRITE") == "1"
#: Most rows of latent pixels: what is refused depends on ranks of tensors, not on their sizes.
SIDE = 8
#: Least tokens of a connected prompt, in place of the thousand that cost two thirds of a run of LTX-2.
PROMPT = 1
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


NAMES = [*(family for family in LATENT_FORMATS if family != "minimax-h3-curves"), *FURTHER]


def broken_requests(name: str, sample):
    """Yield each case, (name of a tensor, what is wrong), with its request, from a valid one of two steps."""
    variant = VARIANTS.get(name)
    small = cropped(sample.tensors, SIDE)
    tensors = {key: value for key, value in small.items() if not key.startswith("negative.")}
    valid = replace(sample, cfg=1.0, tensors=tensors | {"sigmas": tensors["sigmas"][:2]})
    keys = [f"positive.{key}" for key in variant.arguments] if variant else tensors
    for case, change in changes(valid.tensors, keys).items():
        yield case, replace(valid, tensors=valid.tensors | change)


def is_refused(broken, checkpoint) -> bool:
    """Return whether the check refuses a request. What else it raises has no sentence."""
    try:
        check_sample(
            broken,
            ParallelConfig(),
            RequestTarget(checkpoint, torch.float32, "cpu"),
        )
    except UnsupportedError:
        return True
    return False


def expected(name: str, running: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what the table says of a family's cases, or write into it which are ``running``."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if WRITES:
        table[name] = running
        text = json.dumps({each: table[each] for each in NAMES if each in table}, indent=1)
        TABLE.write_text(text + "\n")
    return table[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_tensor_is_refused_or_runs(name, tmp_path, monkeypatch):
    """What runs and what does not stays so, unless somebody means it."""
    monkeypatch.setattr(ltx2_connectors, "MIN_TOKENS", PROMPT)
    path = tmp_path / f"{name}.safetensors"
    sample = request(name) if name in VARIANTS else golden(f"{name}__euler_simple")[0]
    checkpoint = open_checkpoint(str(write(path, name) if name in VARIANTS else write_checkpoint(path, name)))
    engine, running, wrong = None, {}, []
    for (tensor, what), broken in broken_requests(name, sample):
        try:
            if is_refused(broken, checkpoint):
                continue
            running.setdefault(tensor, []).append(what)
            if engine is None:
                engine = Engine(ParallelConfig(), mesh.single())
                engine.load("tiny", str(path), "default")
            samples, _ = engine.sample(broken, Callbacks())
            assert samples.shape == broken.tensors["noise"].shape and samples.isfinite().all()
        except Exception as error:
            wrong.append((tensor, what, error))
    assert not wrong
    assert running == expected(name, running)


def test_the_table_has_every_family():
    assert [*json.loads(TABLE.read_text())] == NAMES


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
