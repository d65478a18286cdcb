"""Requests that a family does not take: refused in one sentence before any rank works."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from families import golden
from tiny import opened_in, write_checkpoint

from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.protocol import ModelCall
from backend.sampling.model_call import check_call
from backend.sampling.validation import RequestTarget, check_sample


@pytest.fixture(scope="module")
def opened(folder):
    """Family -> its checkpoint, of which nobody loads the weights."""
    return opened_in(folder, write_checkpoint)


@pytest.mark.parametrize(
    "family, change, words",
    [
        ("sd3", {"noise": torch.zeros(1, 16, 66, 16)}, "33 x 8 tokens"),
        ("hunyuan-dit", {"positive.c_crossattn": torch.zeros(1, 70, 64)}, "at least 77 and 256; pad"),
        ("kandinsky5", {"positive.time_dim_replace": torch.zeros(1, 16, 1, 12, 12)}, "known frames"),
        ("kandinsky5", {"positive.c_crossattn": torch.zeros(1, 8200, 64)}, "8200 tokens, .* knows 8192"),
        ("kandinsky5", {"noise": torch.zeros(1, 16, 1030, 4, 4)}, "1030 x 2 x 2 tokens, .* knows 1024"),
        ("ltx2", {"positive.c_crossattn": torch.zeros(1, 12, 100)}, "width 100"),
        ("krea2", {"noise": torch.zeros(1, 16, 2, 16, 16)}, "2 frames"),
        (
            "ltx2",
            {"positive.c_crossattn": torch.zeros(12, 64)},
            "a floating-point tensor .batch, tokens, width. is needed",
        ),
        (
            "sd3",
            {"noise": torch.zeros(1, 16, 1, 16, 16)},
            "wants 16 channels in .batch, channels, height, width.",
        ),
        (
            "wan21-t2v",
            {"noise": torch.zeros(1, 16, 16, 16)},
            "wants 16 channels in .batch, channels, frames, height, width.",
        ),
        ("wan21-t2v", {"noise": torch.zeros(1, 16, 1, 2, 2052)}, "1 x 1 x 1026 tokens"),
        ("z-image-turbo", {"noise": torch.zeros(1, 16, 2, 2052)}, "1 x 1026 tokens"),
        ("z-image-turbo", {"positive.c_crossattn": torch.zeros(1, 4090, 64)}, "4096 tokens of text"),
    ],
)
def test_refusals_name_the_remedy(family, change, words, opened):
    checkpoint = opened(family)
    sample, _ = golden(f"{family}__euler_simple")
    tensors = {**sample.tensors, **change}
    tensors["latent"] = tensors["noise"]
    with pytest.raises(UnsupportedError, match=words):
        check_sample(
            replace(sample, tensors=tensors),
            ParallelConfig(),
            RequestTarget(checkpoint, torch.float32, "cpu"),
        )


def test_a_batch_smaller_than_the_replicas_is_refused_before_they_work(opened):
    checkpoint = opened("sd3")
    with pytest.raises(ConfigError, match="data_parallel_degree is 2 but the latent's batch is 1"):
        check_sample(
            golden("sd3__euler_simple")[0],
            ParallelConfig(data_parallel_degree=2),
            RequestTarget(checkpoint, torch.float32, "cpu"),
        )


@pytest.mark.parametrize(
    "family, shapes, words",
    [
        ("minimax-h3", [], "make them with the model's own"),
        ("minimax-h3", [[24, 3, 16, 16], [30, 2, 16]], "audio of 32 channels"),
        ("minimax-h3", [[24, 3, 16, 16], [32, True, 16]], "audio of 32 channels"),
        ("minimax-h3", [[24, 3, 16, 16], [32, 2, 16]], "does not hold latents of shapes"),
        ("minimax-h3", [[24, 3, 16, 16], [32, 1, 30]], "makes stereo"),
        ("sd3", [[16, 16, 16], [16, 16, 16]], "there are 2 latents"),
    ],
)
def test_latents_of_another_kind_are_refused(family, shapes, words, opened):
    checkpoint = opened(family)
    sample, _ = golden(f"{family}__euler_simple")
    with pytest.raises(UnsupportedError, match=words):
        check_sample(
            replace(sample, latent_shapes=shapes),
            ParallelConfig(),
            RequestTarget(checkpoint, torch.float32, "cpu"),
        )


@pytest.mark.parametrize(
    "family, time, words",
    [
        ("ltx2", [0.75, 0.25], r"timesteps \[0.75, 0.25\], where the latents of .* have one in common"),
        ("ltx2", [0.75, 0.75], None),
        ("sd3", [0.75, 0.25], None),
        ("sd3", [[0.75], [0.75]], r"timesteps of shape \(2, 1\), where .* one for each of the 2 samples"),
        ("sd3", [0.75], r"timesteps of shape \(1,\)"),
    ],
)
def test_timesteps_of_a_call(family, time, words, opened):
    """One for each sample; those of nested latents are run at one timestep together."""
    checkpoint = opened(family)
    sample, _ = golden(f"{family}__euler_simple")
    given = {name: value for name, value in sample.tensors.items() if name.startswith("positive.")}
    tensors = {name.replace("positive.", "cond."): value for name, value in given.items()}
    x = sample.tensors["noise"]
    tensors |= {"x": x.expand(2, *x.shape[1:]), "time": torch.tensor(time)}
    call = ModelCall("m", latent_shapes=sample.latent_shapes, tensors=tensors)
    with pytest.raises(UnsupportedError, match=words) if words else nullcontext():
        check_call(call, ParallelConfig(), RequestTarget(checkpoint, torch.float32, "cpu"))


@pytest.mark.parametrize(
    "shape, cond, words",
    [
        (
            (1, 15, 8, 8),
            {},
            "shape .1, 15, 8, 8. but sd3 wants 16 channels or more in .batch, channels, height, width",
        ),
        ((1, 16, 1, 8, 8), {}, "shape .1, 16, 1, 8, 8. but sd3 wants 16 channels"),
        ((16,), {}, "shape .16,. but sd3 wants 16 channels"),
        ((0, 16, 8, 8), {}, "shape .0, 16, 8, 8.; send a latent"),
        ((2, 16, 8, 8), {"y": (3, 2048)}, "the conditioning's y has batch 3 but the latent has 2"),
    ],
    ids=str,
)
def test_latents_and_batches_of_a_call(shape, cond, words, opened):
    """By the rules of a request; channels more than the latent's are an argument."""
    checkpoint = opened("sd3")
    sample, _ = golden("sd3__euler_simple")
    given = {name: value for name, value in sample.tensors.items() if name.startswith("positive.")}
    tensors = {name.replace("positive.", "cond."): value for name, value in given.items()}
    tensors |= {f"cond.{name}": torch.zeros(size) for name, size in cond.items()}
    call = ModelCall("m", tensors=tensors | {"x": torch.zeros(shape), "time": torch.ones(shape[0])})
    with pytest.raises(UnsupportedError, match=words):
        check_call(call, ParallelConfig(), RequestTarget(checkpoint, torch.float32, "cpu"))
