"""Noise levels of frames and of tokens, which masks give: modulation is there once a level."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoSingleTransformerBlock
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from families import golden
from live_memory import LiveMemory
from moved_bytes import MovedBytes
from tiny import facts
from tolerance import assert_same_bits, assert_ulps
from variant_parts import randn
from variants import VARIANTS, described, request, write

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import dry_run
import launches
import meta_device
from operation_count import Count
from released_sizes import DryFiles, request_of

from backend.config import ParallelConfig
from backend.loading.recognition import open_checkpoint, recognise
from backend.models.common.ltx2_blocks import Levels, LTX2Block
from backend.models.hunyuan_video import SingleBlock
from backend.models.ltxv import VideoBlock

#: Variant -> diffusers' class.
CLASSES = {"wan22-ti2v": diffusers.WanTransformer3DModel, "ltxv-i2v": diffusers.LTXVideoTransformer3DModel}
#: Frames and sides of a latent whose tokens are many more than a model of these has features.
LATENT = (9, 32, 32)
MASK = "denoise_mask"


def mask_of(batch: int, channels: int, *size: int) -> torch.Tensor:
    """Two given frames, one of them in part, which differ between samples."""
    mask = torch.ones(batch, channels, *size)
    mask[:, :, 0] = 0
    mask[-1:, :, 1] = 0.25
    return mask


def soft_mask_of(batch: int, channels: int, *size: int) -> torch.Tensor:
    """A value for each token, or, as Wan has a level a frame, for each frame, in steps that float32 sums."""
    values = torch.randint(1024, (batch, 1, *size), generator=torch.Generator().manual_seed(0))
    return (values / 1024).expand(batch, channels, *size)


@torch.inference_mode()
@pytest.mark.parametrize("soft", [False, True], ids=["given", "soft"])
@pytest.mark.parametrize("sigma", [torch.tensor(0.7), torch.tensor([0.7, 0.3])], ids=["a level", "levels"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_mask_gives_what_a_timestep_for_each_token_does(name, sigma, soft, tmp_path):
    """To diffusers' own model, for two samples with masks of their own; the second call has no mask."""
    checkpoint = open_checkpoint(str(write(tmp_path / f"{name}.safetensors", name)))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    family, config = checkpoint.family, checkpoint.config
    latent = randn(2, *request(name).tensors["noise"].shape[1:])
    grid = family.latent.grid(config, latent.shape[1:], [])
    prompt = golden(f"{VARIANTS[name].family}__euler_simple")[0].tensors["positive.c_crossattn"]
    cond = {"c_crossattn": prompt.expand(2, -1, -1)}
    mask = mask_of(*latent.shape)
    if soft:
        sides = latent.shape[3:] if name == "ltxv-i2v" else (1, 1)
        mask = soft_mask_of(*latent.shape[:3], *sides).expand(latent.shape)
    tokens = grid.to_tokens(mask)[..., 0] * sigma.expand(2)[:, None] * 1000
    plain = CLASSES[name].from_config(config).eval()
    plain.load_state_dict(checkpoint.transformer.state_dict())
    for given, timestep in ((cond | {MASK: mask}, tokens), (cond, sigma.expand(2) * 1000)):
        x = family.io.of_latent(latent, grid) if family.io.takes_tokens else latent
        arguments = family.io.arguments(config, grid, x, sigma, given)
        found = checkpoint.transformer(**arguments, return_dict=False)[0]
        arguments = {
            key: value for key, value in arguments.items() if key not in ("level_of_token", "further")
        }
        want = plain(**arguments | {"timestep": timestep}, return_dict=False)[0]
        assert_ulps(found, want, 4 * checkpoint.block_count)
        assert checkpoint.transformer.call.modulation is None


@torch.inference_mode()
def test_ltx2_holds_no_levels_between_calls(tmp_path):
    """Those of a soft mask are as many as tokens."""
    checkpoint = open_checkpoint(str(write(tmp_path / "ltx2-i2v.safetensors", "ltx2-i2v")))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    sample, family = request("ltx2-i2v"), checkpoint.family
    shape = tuple(sample.tensors["noise"].shape[1:])
    grid = family.latent.grid(checkpoint.config, shape, sample.latent_shapes, [])
    names = [name for name in sample.tensors if name.startswith("positive.")]
    cond = {name.partition(".")[2]: sample.tensors[name] for name in names}
    tokens = family.io.of_latent(sample.tensors["noise"][:1], grid)
    arguments = family.io.arguments(checkpoint.config, grid, tokens, torch.tensor(0.7), cond)
    levels = [each for each in checkpoint.transformer.modules() if isinstance(each, Levels)]
    seen: list[Any] = []
    outputs: Any = checkpoint.transformer.outputs
    outputs.register_forward_pre_hook(lambda *_: seen.extend(each.embedding for each in levels))
    checkpoint.transformer(**arguments, return_dict=False)
    assert any(each is not None for each in seen)
    assert all(each.modulation is None and each.embedding is None for each in levels)


def checkpoint_of(name: str):
    """A variant, or a family, of meta tensors."""
    shapes = (described(name) if name in VARIANTS else facts(name))["shapes"]
    tensors = {key: ("BF16", list(shape)) for key, shape in shapes.items()}
    return recognise(name, cast(Any, DryFiles(name, tensors, {}, {})))


def peak(monkeypatch, name: str, method: str, masked: bool) -> int:
    """The most bytes besides weights on the last of two ranks."""

    def requested(family: str, checkpoint, steps: int):
        sample = request_of(family, checkpoint, steps, (LATENT,))
        channels = checkpoint.family.latent.channels(checkpoint.config)
        given = {MASK: mask_of(1, channels, *LATENT)}
        tensors = sample.tensors | {f"positive.{key}": value for key, value in given.items()} | given
        return replace(sample, tensors=tensors) if masked else sample

    monkeypatch.setattr(dry_run, "request_of", requested)
    monkeypatch.setattr(dry_run, "checkpoint_of", lambda family: checkpoint_of(name))
    return dry_run.run(VARIANTS[name].family, method, 2, 1).peak


@pytest.mark.parametrize("method", ["ulysses", "pipefusion"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_mask_adds_hardly_anything_to_what_ranks_hold(name, method, monkeypatch):
    """The masks of latent and prompt, and a number for each token: plans count requests without one."""
    monkeypatch.setattr(meta_device, "_unique", lambda x, **named: (x.flatten()[:2], x.long()))
    without, masked = (peak(monkeypatch, name, method, each) for each in (False, True))
    mask = mask_of(1, 1, *LATENT).nbytes * request(name).tensors["noise"].shape[1]
    assert masked <= without + 4 * mask


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "whole"])
@pytest.mark.parametrize("degrees", [{"ulysses_degree": 2}, {"pipefusion_degree": 2}], ids=str)
@pytest.mark.parametrize("name", [*CLASSES, "ltx2-i2v", "ltx25-i2v"])
def test_the_last_layer_sees_the_tokens_of_its_forward(monkeypatch, name, degrees, masked):
    """With a mask as without one: each token has the last modulation of its level."""
    sample = request(name)
    tensors = {key: value for key, value in sample.tensors.items() if masked or MASK not in key}
    tensors = {key: value for key, value in tensors.items() if masked or "keyframe" not in key}
    sigmas = torch.linspace(sample.tensors["sigmas"][0].item(), 0, launches.STEPS + 1)
    sample = replace(sample, sampler="euler", tensors=tensors | {"sigmas": sigmas})
    seen, load = [], launches.load

    def watched(*args):
        model = load(*args)
        layer = model.transformer.get_submodule(model.family.blocks.output_layer)
        layer.register_forward_pre_hook(see)
        return model

    def see(layer, args):
        inputs = args[0] if isinstance(args[0], tuple) else args[:1]  # of several latents
        seen.append(sum(each.shape[1] for each in inputs))

    shapes = described(name)["shapes"]
    monkeypatch.setattr(launches, "load", watched)
    monkeypatch.setattr(launches, "request_of", lambda family, steps: sample)
    monkeypatch.setattr(launches, "checkpoint_of", lambda family: launches.with_shapes(name, shapes))
    config = replace(ParallelConfig(), **degrees)
    whole = launches.run(VARIANTS[name].family, config, 1, Count()).request.grid.tokens
    if config.ulysses_degree > 1:  # of two prompts, each the second half
        assert seen[-2:] == 2 * [whole - whole // 2]
    else:  # of two prompts in two patches
        assert max(seen[-4:]) < whole and sum(seen[-4:]) == 2 * whole


class Read(torch.nn.Module):
    """In the place of attention and MLP: moves nothing."""

    def forward(self, x, *_, **__):
        return x


@torch.inference_mode()
def test_a_shard_adds_for_its_own_tokens_alone_under_a_soft_mask():
    """It takes its own of all ranks' levels, once a part; the bits are those of its own levels alone."""
    torch.manual_seed(0)
    own, width = 512, 64
    block: Any = LTXVideoTransformerBlock(width, 4, 16, width).bfloat16()
    block.__class__ = VideoBlock
    for name in ("attn1", "attn2", "ff"):
        setattr(block, name, Read())
    x = torch.randn(1, own, width).bfloat16()
    of_all = torch.randn(8 * own, 6, width).bfloat16()
    numbers = torch.arange(own, 2 * own)[None]
    found = []
    for modulation, level_of_token in ((of_all, numbers), (of_all[own : 2 * own], numbers - own)):
        block.levels = SimpleNamespace(modulation=modulation)
        with MovedBytes() as moved:
            found.append((block(x, x, level_of_token[..., None]), moved.bytes))
    assert_same_bits(found[0][0], found[1][0])
    assert found[0][1] <= found[1][1] + 6 * 7 * x.nbytes


@torch.inference_mode()
def test_a_shard_of_ltx2_adds_for_its_own_tokens_alone_under_a_soft_mask():
    torch.manual_seed(0)
    own, width = 512, 64
    table = torch.randn(6, width)
    of_all = torch.randn(8 * own, 6 * width).bfloat16()
    numbers = torch.arange(own, 2 * own)[None]
    found = []
    for levels in ((of_all, numbers), (of_all[own : 2 * own], numbers - own)):
        with MovedBytes() as moved:
            found.append((torch.stack(LTX2Block.get_mod_params(table, levels, 1)), moved.bytes))
    assert_same_bits(found[0][0], found[1][0])
    assert found[0][1] <= found[1][1] + 7 / 8 * of_all.nbytes


@torch.inference_mode()
def test_a_given_first_frame_adds_hardly_anything_to_a_block():
    """HunyuanVideo's blocks of one stream: shift, scale and gate of tokens are made where they are used."""
    block = HunyuanVideoSingleTransformerBlock(4, 32).to("meta")
    block.__class__ = SingleBlock
    image, text, embedding = (torch.empty(1, *size, 128, device="meta") for size in ((4096,), (64,), ()))
    peaks = []
    for frame in ((), (embedding, (0, 1024))):
        with LiveMemory() as memory:
            block(image, text, embedding, None, None, *frame)
        peaks.append(memory.peak)
    assert peaks[1] <= peaks[0] + 0.1 * image.nbytes
