"""python -m backend.cli sample: latents of prompts' embeddings, without ComfyUI."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import families
import interpreters
import pytest
import tiny
import torch
from families import golden
from live_backend import CONFIG, backend, checkpoint, free_at_the_end, request_for  # noqa: F401  # fixtures
from page_examples import examples
from published import FLUX
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from backend.cli import __main__ as cli
from backend.cli import sample_tensors
from backend.cli.sample import run
from backend.cli.sample_request import read_requests
from backend.cli.sample_tensors import noise_levels, planned_request, sample_message, write_result
from backend.cli.settings import read_config, read_plan, read_settings
from backend.client import pool
from backend.config import ConfigError, ParallelConfig
from backend.models import FAMILIES
from backend.planner.auto_config import AutoConfig
from backend.protocol import Loaded, Result, Welcome
from demo import shapes

ROOT = Path(__file__).parents[2]
PATIENCE = 600
#: What a configuration without these entries sends.
DEFAULTS = {"num_pipeline_patch": 0, "warmup_steps": 1}


def shell(text: str, folder: Path, **environment) -> subprocess.CompletedProcess:
    """Run a page's example with this Python as ``python``."""
    (folder / "bin").mkdir(exist_ok=True)
    python = folder / "bin/python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = f"{folder}/bin:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PACK": str(ROOT), "PYTHONPATH": str(ROOT), **environment}
    run = ["bash", "-euc", text]
    return subprocess.run(run, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)


def test_the_page_example_makes_the_image(tmp_path):
    """Ranks that auto chooses are started, by another Python than the client's, and a prompt becomes its
    image. The client is a process that imports everything itself, as users start it."""
    python = interpreters.recording(tmp_path / "ranks-python", tmp_path / "log", forks=True)
    own = {"PARALLEL_DIT_PYTHON": str(python), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    found = shell(examples("headless.md")["sample"], tmp_path, **own)
    assert found.returncode == 0, found.stderr
    ran = (tmp_path / "log").read_text()
    assert "-m backend.preflight" in ran and "-m torch.distributed.run" in ran
    assert "-m backend.probe" in ran
    assert "backend.cli" not in ran  # that is the client's
    choice = next(line for line in found.stderr.splitlines() if line.startswith("auto: "))
    assert "same result as one rank" in choice and "per rank" in choice
    assert found.stdout.startswith(f"{tmp_path}/circle.safetensors: ")
    samples = load_file(tmp_path / "circle.safetensors")["samples"]
    image = shapes.decode(shapes.to_vae_units(samples))[0]
    assert shapes.check_image("a red circle left of a blue square on black", image)
    assert (tmp_path / "circle.png").stat().st_size > 500


def write_request(folder: Path, backend, checkpoint) -> torch.Tensor:
    """A golden case as a request of files, and its noise, which the command draws itself."""
    sample, _ = request_for(backend, checkpoint)
    request = {"model": checkpoint, "cfg": sample.cfg, "seed": 7}
    for side in {name.split(".")[0] for name in sample.tensors} & {"positive", "negative"}:
        own = {n.removeprefix(f"{side}."): t for n, t in sample.tensors.items() if n.startswith(f"{side}.")}
        save_file({"cross_attn": own.pop("c_crossattn"), **own}, folder / f"{side}.safetensors")
        request[side] = f"{side}.safetensors"
    size = list(sample.tensors["noise"].shape[1:])
    levels = sample.tensors["sigmas"].tolist()
    request |= {"latent": size, "sigmas": levels, "out": "o.latent"}
    (folder / "request.json").write_text(json.dumps(request))
    return torch.randn(1, *size, generator=torch.Generator().manual_seed(7))


def test_ranks_that_stay_give_the_latent_of_the_same_request(tmp_path, backend, checkpoint):
    """From a client that imports no transformers, which takes seconds."""
    noise = write_request(tmp_path, backend, checkpoint)
    (tmp_path / "token").write_text(backend.process._token)
    (tmp_path / "token").chmod(0o600)
    found = shell(
        examples("headless.md")["address"].replace("unix:$F/backend.sock", backend.process.address).rstrip()
        + """ --config '{"num_pipeline_patch": 2}'""",
        tmp_path,
        F=str(tmp_path),
        PYTHONPROFILEIMPORTTIME="1",
    )
    assert found.returncode == 0, found.stderr
    imported = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert "diffusers.models.attention" in imported and "transformers" not in imported
    sample, _ = request_for(backend, checkpoint)
    tensors = {**sample.tensors, "noise": noise}
    message = replace(sample, **DEFAULTS, seed=7, tensors=tensors)
    expected = backend.sample(message).tensors["samples"]
    written = load_file(tmp_path / "o.latent")
    assert "latent_format_version_0" in written  # else LoadLatent scales it, as an old file
    torch.testing.assert_close(written["latent_tensor"], expected, rtol=1e-5, atol=1e-5)


def test_one_that_fails_ends_no_other(tmp_path, backend, checkpoint, capsys, monkeypatch):
    """The second has other channels; and a model stays for a request that comes back to it."""
    write_request(tmp_path, backend, checkpoint)
    other = tmp_path / "other.safetensors"
    other.write_bytes(Path(checkpoint).read_bytes())
    right = json.loads((tmp_path / "request.json").read_text())
    wrong = right | {"latent": [right["latent"][0] + 1, *right["latent"][1:]], "out": "wrong.latent"}
    (tmp_path / "all.json").write_text(
        json.dumps(
            [right, wrong, right | {"model": str(other), "out": "2.latent"}, right | {"out": "3.latent"}]
        )
    )
    monkeypatch.setattr(pool, "close_all", lambda: None)  # others share the ranks
    pool.allow(tmp_path)
    loads = []
    usual = pool.Backend.load

    def load(self, *choice, **named):
        found = usual(self, *choice, **named)
        loads.append(len(self.models))
        return found

    monkeypatch.setattr(pool.Backend, "load", load)
    (tmp_path / "token").write_text(backend.process._token)
    (tmp_path / "token").chmod(0o600)
    there = ["--address", backend.process.address, "--token-file", str(tmp_path / "token")]
    assert cli.main(["sample", str(tmp_path / "all.json"), *there]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"{tmp_path}/wrong.latent: ") and "channels" in said.err
    assert len(said.err.splitlines()) == 1 and len(said.out.splitlines()) == 3
    assert loads == [1, 1, 2, 2]
    assert all((tmp_path / name).is_file() for name in ("o.latent", "2.latent", "3.latent"))
    assert not (tmp_path / "wrong.latent").exists()


def test_several_latents_are_comfyuis(tmp_path, backend):
    """LTX-2's video and audio, with noise that the command draws: ComfyUI's own latent."""
    name = "ltx2__euler_simple"
    sample, expected = golden(name)
    stored, shapes = families.load(name)
    for side in ("positive", "negative"):
        save_file(families.arguments("ltx2", stored, side), tmp_path / f"{side}.safetensors")
    model = tiny.write_checkpoint(tmp_path / "ltx2.safetensors", "ltx2")
    entries = {"cfg": sample.cfg, "seed": sample.seed, "sigmas": sample.tensors["sigmas"].tolist()}
    named = {"model": str(model), "positive": "positive.safetensors", "negative": "negative.safetensors"}
    wanted = request(tmp_path, latent=shapes, out="o.safetensors", **named, **entries)
    run(pool.backend_for(CONFIG), wanted, replace(CONFIG, num_pipeline_patch=1))
    written = load_file(tmp_path / "o.safetensors")
    assert [list(written[f"samples.{i}"].shape[1:]) for i in range(len(shapes))] == shapes
    packed = torch.cat([written[f"samples.{i}"].flatten(1)[:, None] for i in range(len(shapes))], dim=2)
    assert tiny.error_in_std(families.to_vae_units("ltx2", packed, shapes), expected) < 1e-4
    # what was written is a latent to start from
    again = request(tmp_path, latent="o.safetensors", out="o.safetensors")
    started = sample_message(replace(again, positive=wanted.positive), Loaded("m", "ltx2", LTX), {})
    assert started.latent_shapes == shapes and torch.equal(started.tensors["latent"], packed)


REQUEST = {"model": "/m", "positive": "p", "latent": [16, 8, 8], "out": "o.latent"}


@pytest.mark.parametrize(
    "change, said",
    [
        ({"model": None}, "request 1's model is None; it is a text"),
        ({"steps": 2.5}, "steps is 2.5; it is a whole number"),
        ({"steps": True}, "steps is True; it is a whole number"),
        ({"latent": [16, 0, 8]}, "write the latent's size"),
        ({"latent": [[16, 8, 8], [8]]}, "write the latent's size"),
        ({"latent": [[16, 8, 8], [8, 4, 4]]}, "2 latents, and out is"),
        ({"latent": [[16, 8, 8]], "vae": "v", "out": "o.safetensors"}, "a vae, which is of one"),
        ({"cfg": 3}, "cfg 3 and no negative"),
        ({"out": "o.png"}, "it ends with .latent or .safetensors"),
        ({"out": "none/o.latent"}, "in a folder that does not exist"),
        ({"prompt": "a cat"}, "has 'prompt'; it has model, positive, latent, out, and may have negative"),
        ({"loras": ["a"]}, "write [file, strength]"),
        ({"seed": -1}, "seed is -1; it is from 0"),
        ({"latent": [16, 10**6, 10**6]}, "GiB, more than a message may"),
        ({"steps": 0}, "steps and batch are at least 1"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(tmp_path, change, said):
    with pytest.raises(ConfigError) as refusal:
        read_requests(json.dumps({**REQUEST, **change}), tmp_path)
    assert said in str(refusal.value)


def test_other_mistakes(tmp_path, capsys):
    with pytest.raises(ConfigError, match="lacks model, positive, latent, out"):
        read_requests("{}", tmp_path)
    with pytest.raises(ConfigError, match="is empty"):
        read_requests("[]", tmp_path)
    with pytest.raises(ConfigError, match="'ulyses'; its entries are"):
        read_config('{"ulyses": 2}')
    assert cli.main(["sampel"]) == 2 and "sample" in capsys.readouterr().err
    assert cli.main(["sample", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_a_schedule_that_is_not_known_is_refused_in_a_sentence(tmp_path, monkeypatch, capsys):
    stated = {"beta_schedule": "squaredcos_cap_v2"}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(stated))
    asked = request(tmp_path, scheduler=".")
    monkeypatch.setattr("backend.cli.sample.main", lambda arguments: noise_levels(asked, "eps"))
    assert cli.main(["sample"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "beta_schedule 'squaredcos_cap_v2'" in line


#: What Loaded says of LTX-2, as far as a message needs it.
LTX = {"prediction": "flow", "conditioning": list(FAMILIES["ltx2"].conditioning.accepted)}


def test_the_configuration_is_the_nodes(tmp_path):
    """A number of ranks leaves the degrees to auto, a degree does not; ranks that run have theirs."""
    auto = read_plan('{"gpus": 2, "device": "cpu"}')
    assert isinstance(auto, AutoConfig) and auto.devices(0) == [0, 1]
    assert read_plan('{"cfg_degree": 2, "device": "cpu"}') == ParallelConfig(cfg_degree=2, device="cpu")
    with pytest.raises(ConfigError, match="'quick'; choose one of auto, fastest exact"):
        read_plan('{"method": "quick"}')
    one = Welcome(1, "cpu", ParallelConfig().degrees, [])
    assert read_settings('{"warmup_steps": 3}', one).warmup_steps == 3
    with pytest.raises(ConfigError, match="'gpus'; its entries are .*ranks at --address run already"):
        read_settings('{"gpus": "2"}', one)


def test_settings_of_a_request_are_held_to_the_degrees_of_the_ranks():
    """Those of one rank refuse what the page offers for a backend that runs."""
    stages = ParallelConfig(pipefusion_degree=2, ulysses_degree=2, attn_layer_num_for_pp="3,9")
    there = Welcome(4, "cpu", stages.degrees, [], settings=stages.of_ranks)
    found = read_settings('{"wire": "fp8", "num_pipeline_patch": 4}', there)
    assert found == replace(stages, wire="fp8", num_pipeline_patch=4)
    one = Welcome(1, "cpu", ParallelConfig().degrees, [])
    for refused in ('{"wire": "fp8"}', '{"num_pipeline_patch": 4}'):
        with pytest.raises(ConfigError, match="degree"):
            read_settings(refused, one)


@pytest.mark.parametrize("is_file", [False, True], ids=["size", "file"])
def test_the_planner_is_asked_for_the_request(tmp_path, is_file):
    save_file({"cross_attn": torch.zeros(1, 77, 4)}, tmp_path / "p")
    save_file({"samples": torch.zeros(1, 16, 3, 8, 12)}, tmp_path / "l")
    latent = "l" if is_file else [16, 3, 8, 12]
    wanted = request(tmp_path, latent=latent, batch=2, sigmas=[1.0, 0.5, 0.0])
    asked = planned_request(wanted, replace(FLUX, patch=(1, 2, 2)))
    assert (asked.image_tokens, asked.text_tokens, asked.steps) == (3 * 4 * 6, 77, 2)
    assert (asked.prompts, asked.batch) == (1, 2)


def request(folder: Path, **changes):
    return read_requests(json.dumps({**REQUEST, **changes}), folder)[0]


def test_noise_levels_are_those_of_diffusers_and_comfyui(tmp_path):
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 7, 7).tolist())
    flow = noise_levels(request(tmp_path, steps=7, shift=3.0), "flow")
    torch.testing.assert_close(flow, scheduler.sigmas.float())
    (tmp_path / "scheduler_config.json").write_text(json.dumps({"shift": 3.0}))
    assert noise_levels(request(tmp_path, steps=7, scheduler="."), "flow").equal(flow)
    with pytest.raises(ConfigError, match="name the scheduler_config.json"):
        noise_levels(request(tmp_path, steps=7), "eps")
    stated = {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02}
    (tmp_path / "scheduler_config.json").write_text(json.dumps(stated))
    levels = noise_levels(request(tmp_path, steps=4, scheduler="."), "eps")
    assert levels[-1] == 0 and len(levels) == 5 and (levels.diff() < 0).all()
    betas = torch.linspace(0.0001, 0.02, 1000, dtype=torch.float64)
    last = torch.cumprod(1 - betas, 0)[-1]
    torch.testing.assert_close(levels[0].double(), ((1 - last) / last).sqrt(), rtol=1e-5, atol=0)


def test_samples_of_a_batch_have_noise_of_their_own(tmp_path):
    save_file({"c_crossattn": torch.zeros(1, 1, 4)}, tmp_path / "p.safetensors")
    wanted = request(tmp_path, positive="p.safetensors", latent=[2, 4, 4], batch=2, seed=5)
    loaded = Loaded("m", "flux", {"prediction": "flow", "conditioning": ["c_crossattn"]})
    noise = sample_message(wanted, loaded, {}).tensors["noise"]
    assert noise.equal(torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(5)))


def test_a_vae_configuration_scales_by_channel(tmp_path):
    """By the mean where there is a shift too, as the node's latents (nodes/comfy_models/generic.py)."""
    config = {"latents_mean": [0.5, -1.0], "latents_std": [2.0, 4.0], "scaling_factor": 2.0}
    config |= {"shift_factor": 8.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    wanted = request(tmp_path, latent=[2, 1, 1], vae=".", out="o.safetensors")
    write_result(wanted, torch.ones(1, 2, 1, 1), {})
    assert load_file(tmp_path / "o.safetensors")["samples"].flatten().tolist() == [1.5, 1.0]
    with pytest.raises(ConfigError, match="scales 2 channels, but the latent has 3"):
        write_result(wanted, torch.ones(1, 3, 1, 1), {})


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    """As on a full disk."""

    def save_file(tensors, path, about):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(sample_tensors, "save_file", save_file)
    with pytest.raises(ConfigError, match="o.safetensors.* cannot be written .*No space left"):
        write_result(request(tmp_path, latent=[2, 1, 1], out="o.safetensors"), torch.ones(1, 2, 1, 1), {})
    assert not list(tmp_path.glob("o.safetensors*"))


@pytest.mark.parametrize("shape", [(5,), ()])
def test_a_prompt_that_is_no_sequence_is_refused_as_it_is_planned(tmp_path, shape):
    """In a way that other requests of the file outlive (cli/failures.py)."""
    save_file({"cross_attn": torch.zeros(shape)}, tmp_path / "p")
    with pytest.raises(ConfigError, match=r"p' holds a prompt of shape \["):
        planned_request(request(tmp_path), FLUX)


def test_settings_of_the_configuration_travel(tmp_path):
    """All that a Sample takes of a ParallelConfig."""
    save_file({"cross_attn": torch.zeros(1, 2, 4)}, tmp_path / "p")
    sent = []

    class Ranks:
        def load(self, path, weight_dtype, matmul, **named):
            return Loaded("m", "flux", {"prediction": "flow", "conditioning": ["c_crossattn"]})

        def sample(self, message, *callbacks):
            sent.append(message)
            return Result({"seconds": 1.0}, {"samples": message.tensors["noise"]})

    settings = {"compile": "blocks", "attention": "sdpa", "warmup_steps": 2, "stale_kv": "extrapolate"}
    # its own Ranks have no more than is called of a backend
    run(Ranks(), request(tmp_path), read_config(json.dumps(settings)))  # pyright: ignore[reportArgumentType]
    assert {name: getattr(sent[0], name) for name in settings} == settings


@pytest.mark.parametrize("change, said", [({}, "which has one"), ({"vae": "."}, "leave vae out")])
def test_a_file_of_several_latents_is_written_as_several(change, said, tmp_path):
    save_file({f"samples.{i}": torch.zeros(1, 2, 3, 4, 4) for i in range(2)}, tmp_path / "l.safetensors")
    with pytest.raises(ConfigError, match=f"'l.safetensors' has 2 latents.*{said}"):
        sample_message(request(tmp_path, latent="l.safetensors", **change), Loaded("m", "ltx2", LTX), {})
