"""A real backend of two ranks behind the nodes' own client: requests, refusals, models, LoRAs."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bad_requests import REFUSED
from families import model_call
from live_backend import (  # noqa: F401  # fixtures
    CONFIG,
    backend,
    checkpoint,
    free_at_the_end,
    request_for,
    with_tensors,
)
from loras import write_mixed
from safetensors.torch import load_file, save_file
from tiny import error_in_std, golden_request, shallow_flux, to_vae_units, write_checkpoint

from backend import config, protocol
from backend.client import pool
from backend.client.auto.model_choice import ModelChoice
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.rank_plan import RequestSize, describe
from backend.serving.broadcast import FIRST


def test_golden_latent_through_the_socket(backend, folder):
    whole = ModelChoice(str(write_checkpoint(folder / "whole.safetensors")))
    sample, golden = golden_request("euler_simple", backend.load(*whole).model)
    request = replace(sample, num_pipeline_patch=1, preview_seconds=1e-9)
    steps, shapes = [], set()

    def on_progress(progress):
        steps.append((progress.step, progress.total))
        shapes.update(tuple(x.shape) for x in progress.tensors.values())

    result = backend.sample(request, on_progress)
    assert error_in_std(to_vae_units(result.tensors["samples"]), golden) <= 1e-4
    assert steps == [(i, 6) for i in range(1, 7)]
    assert shapes == {(1, 16, 16, 16)}
    backend.unload(whole)


def test_a_fork_that_ends_leaves_the_ranks_alone(backend, checkpoint):
    """It has our handlers of the exit, too, and runs them where it ends as programs do."""
    launched = pool.launched().process
    pid = os.fork()
    if not pid:
        try:
            launched._close_at_exit()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    request, expected = request_for(backend, checkpoint)
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4


def test_status_has_the_model_and_the_memory_of_every_rank(backend, checkpoint):
    request, _ = request_for(backend, checkpoint)
    backend.sample(request)
    report = backend.client.request(protocol.Status())
    assert report.models[request.model] == checkpoint and report.answered["Sample"] >= 1
    weights = [rank["weight_bytes"] for rank in report.ranks]
    assert all(0 < each < Path(checkpoint).stat().st_size for each in weights)
    assert [rank["pid"] for rank in report.ranks] == backend.welcome.pids
    assert report.running == "" and report.waiting == 0


def test_scales_of_nan_are_refused_before_any_rank_reads(backend, checkpoint, folder):
    state = load_file(checkpoint)
    values, scale = state["img_in.weight"].to(torch.float8_e4m3fn), torch.full((1,), torch.nan)
    save_file({**state, "img_in.weight": values, "img_in.weight_scale": scale}, folder / "scales.safetensors")
    with pytest.raises(
        protocol.RefusedError, match="scales.safetensors: the scale 'img_in.weight_scale' holds"
    ):
        backend.load(str(folder / "scales.safetensors"))
    request, expected = request_for(backend, checkpoint)
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4


def test_a_model_of_nan_is_refused_by_name(backend, checkpoint, folder):
    """At the end of the request, so that no rank waits for another; the next one is exact."""
    state = load_file(checkpoint)
    broken = folder / "broken.safetensors"
    save_file({**state, "img_in.weight": torch.full_like(state["img_in.weight"], torch.nan)}, broken)
    request, expected = request_for(backend, checkpoint)
    model = backend.load(str(broken)).model
    steps = []
    what = "broken.safetensors has computed NaN or infinity in every value, in float32: .*download it again"
    with pytest.raises(protocol.RefusedError, match=what):
        backend.sample(replace(request, model=model), lambda progress: steps.append(progress.step))
    assert steps == [1, 2, 3, 4, 5, 6]
    with pytest.raises(protocol.RefusedError, match=what):
        backend.sample(model_call(replace(request, model=model), "flux", 1))
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4


def test_stale_pipeline_through_the_socket(backend, checkpoint):
    request, expected = request_for(backend, checkpoint, num_pipeline_patch=4)
    error = error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected)
    assert 1e-4 < error < 1


def test_previews_of_a_stale_pipeline_show_one_step_each(backend, checkpoint):
    """The x0 after step k, whole, is what the same steps lead to where the schedule ends there: no rows of
    step k - 1 or k + 1 are in it."""
    request, _ = request_for(backend, checkpoint, num_pipeline_patch=4, preview_seconds=1e-9)
    previews, sigmas = {}, request.tensors["sigmas"]
    backend.sample(request, lambda p: previews.update({p.step: p.tensors["x0"]} if p.tensors else {}))
    assert len(previews) >= 2
    for step, x0 in previews.items():
        ended = backend.sample(
            with_tensors(
                replace(request, preview_seconds=0.0), sigmas=torch.cat([sigmas[:step], torch.zeros(1)])
            )
        )
        assert (ended.tensors["samples"] - x0).norm() / x0.norm() < 1e-5, step


def test_largest_seed(backend, checkpoint):
    request, expected = request_for(backend, checkpoint, seed=(1 << 64) - 1)
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4
    stochastic = backend.sample(replace(request, sampler="euler_ancestral")).tensors["samples"]
    assert torch.isfinite(stochastic).all()


def test_load_reports_every_rank_and_is_done_once(backend, folder):
    """Progress to its end, what each rank read and holds, and nothing of it again for the same file, whatever
    settings come with the requests."""
    copy = write_checkpoint(folder / "another.safetensors")
    seen, again = [], []
    loaded = backend.load(
        str(copy), on_progress=lambda progress: seen.append((progress.step, progress.total))
    )
    assert seen[-1][0] == seen[-1][1] and seen == sorted(seen)
    assert 0.4 < seen[-1][1] / copy.stat().st_size < 0.6  # bytes of the file; the other stage reads the rest
    ranks = loaded.info["ranks"]
    assert [(rank["rank"], rank["stage"]) for rank in ranks] == [(0, 0), (1, 1)] and ranks[0]["blocks"][
        1
    ] == ranks[1]["blocks"][0]
    size = copy.stat().st_size
    assert all(
        rank["file_bytes"] == size
        and rank["weight_bytes"] == rank["bytes_read"] <= 0.55 * size
        and rank["peak_bytes"] > rank["weight_bytes"]
        for rank in ranks
    )
    assert "read" in ranks[1]["text"] and "\n" not in ranks[1]["text"]
    assert backend.load(str(copy), on_progress=again.append).info["ranks"] == ranks and not again
    changed = ParallelConfig(
        pipefusion_degree=2,
        num_pipeline_patch=4,
        warmup_steps=3,
        stale_kv="extrapolate",
        attention="sdpa",
        device="cpu",
    )
    assert pool.backend_for(changed) is backend
    backend.unload(ModelChoice(str(copy)))


def opened(backend, path: Path) -> list[int]:
    """How often each rank has a file mapped or open."""
    found = []
    for pid in backend.welcome.pids:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        links = [os.path.realpath(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        found.append(sum(line.endswith(str(path)) for line in maps) + links.count(str(path)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("by_other_degrees", [False, True], ids=["unload", "other degrees"])
def test_ranks_let_the_files_of_a_freed_model_go(backend, checkpoint, folder, by_other_degrees):
    """Those that a plan was made of too: address space and descriptors are limited, and so is the disk."""
    copy = (folder / f"freed{by_other_degrees:d}.safetensors").resolve()
    copy.write_bytes(Path(checkpoint).read_bytes())
    request, _ = request_for(backend, str(copy))
    backend.sample(request)
    assert min(opened(backend, copy)) > 0
    assert backend.client.request(protocol.Status()).models[request.model] == str(copy)
    if by_other_degrees:
        pool.backend_for(ParallelConfig(tensor_parallel_degree=2, device="cpu"))
    else:
        backend.unload(ModelChoice(str(copy)))
    deadline = time.monotonic() + 60  # rank 0 answers for itself
    while any(opened(backend, copy)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert opened(backend, copy) == [0, 0]
    assert request.model not in backend.client.request(protocol.Status()).models


def test_a_message_with_a_long_header_reaches_every_rank(backend, checkpoint):
    call = model_call(golden_request("euler_simple", backend.load(checkpoint).model)[0], "flux", 2)
    long = replace(call, client="me", forget=[f"argument {i}" for i in range(1000)])
    assert len(json.dumps(long.forget)) > FIRST
    found = [backend.sample(each).tensors["output"] for each in (call, long, call)]
    assert all(torch.equal(output, found[0]) for output in found) and found[0].std() > 0.01


def test_a_description_is_of_the_settings_that_were_asked_for(backend, checkpoint):
    """And not of those with which the ranks were started; what is no latent of the model is refused."""
    model = backend.load(checkpoint).model
    for patches, stale in ((1, "reuse"), (5, "extrapolate")):
        told = backend.describe(protocol.Describe(model, [16, 64, 48], 100, 1, patches, stale))
        config = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=patches, stale_kv=stale)
        size = RequestSize(768, 100, prompts=1)
        plans = describe(config, open_checkpoint(checkpoint), size, torch.float32)
        assert told.ranks == json.loads(json.dumps([p.as_dict() for p in plans]))
        assert len(told.ranks[0]["patches"]) == patches
    several = protocol.Describe(model, [16, 64, 48], 100, 1, batch=3, references=[[1, 32, 48], [1, 2, 3]])
    size = RequestSize(768 + 384 + 2, 100, batch=3, prompts=1)
    plans = describe(ParallelConfig(pipefusion_degree=2), open_checkpoint(checkpoint), size, torch.float32)
    assert backend.describe(several).ranks == json.loads(json.dumps([p.as_dict() for p in plans]))
    call = protocol.Describe(model, [16, 64, 48], 100, 2, num_pipeline_patch=5, batch=3, drained=True)
    size = RequestSize(768, 100, batch=6, prompts=1, calls=1, drained=True)  # as size_of counts a ModelCall
    config = ParallelConfig(pipefusion_degree=2, num_pipeline_patch=1)
    plans = describe(config, open_checkpoint(checkpoint), size, torch.float32)
    assert backend.describe(call).ranks == json.loads(json.dumps([p.as_dict() for p in plans]))
    asked = protocol.Describe(model, [16, 64, 48], 100, 1)
    for changes in (
        {"latent": [4, 64, 48]},
        {"latent": [16, "a", 48]},
        {"latent": []},
        {"prompts": 3},
        {"model": "other"},
        {"num_pipeline_patch": 10000},
        {"num_pipeline_patch": -1},
    ):
        with pytest.raises(protocol.RefusedError):
            backend.describe(replace(asked, **changes))


@pytest.mark.parametrize("change, says", REFUSED.values(), ids=REFUSED)
def test_bad_request_is_refused_in_one_sentence_and_the_backend_stays(backend, checkpoint, change, says):
    request, _ = request_for(backend, checkpoint)
    pids = backend.welcome.pids
    with pytest.raises(protocol.RefusedError, match=says) as error:
        backend.sample(change(request))
    assert "\n" not in str(error.value)
    assert pool.backend_for(CONFIG).welcome.pids == pids


def bad_files(folder: Path, good: Path) -> dict[str, tuple[Path, str]]:
    """File or folder -> what its refusal says."""
    data = good.read_bytes()
    (folder / "truncated.safetensors").write_bytes(data[: len(data) // 2])
    (folder / "text.safetensors").write_text("not a model " * 100)
    (folder / "pickle.ckpt").write_bytes(b"\x80\x04")
    (folder / "empty-folder").mkdir()
    golden = Path(__file__).parents[1] / "golden"
    (folder / "latents.safetensors").symlink_to(golden / "flux-dev__euler_simple.safetensors")
    write_checkpoint(
        folder / "incomplete.safetensors", drop=("single_blocks.3.linear1.weight", "txt_in.bias")
    )
    return {
        "missing": (folder / "nothing.safetensors", "there is no model"),
        "truncated": (folder / "truncated.safetensors", "truncated"),
        "text": (folder / "text.safetensors", "no safetensors file"),
        "pickle": (folder / "pickle.ckpt", "not a .safetensors file"),
        "other family": (
            folder / "latents.safetensors",
            "no transformer of a supported family",
        ),
        "missing keys": (folder / "incomplete.safetensors", "lacks 5 of"),
        "empty folder": (folder / "empty-folder", "no config.json"),
    }


def test_bad_files_are_refused_and_the_backend_stays(backend, checkpoint, folder):
    for name, (path, says) in bad_files(folder, Path(checkpoint)).items():
        with pytest.raises(protocol.RefusedError, match=says) as error:
            backend.load(str(path))
        assert "\n" not in str(error.value), name
    request, expected = request_for(backend, checkpoint)
    assert error_in_std(to_vae_units(backend.sample(request).tensors["samples"]), expected) <= 1e-4


def test_loras_come_and_go_and_the_weights_stay(backend, checkpoint, folder):
    """A model with LoRAs next to the one without, sampled in turn; one that does not fit is refused."""
    path = str(write_mixed(folder / "lora.safetensors", shallow_flux()))
    plain, expected = request_for(backend, checkpoint)
    with_lora = replace(plain, model=backend.load(checkpoint, loras=[(path, 0.8)]).model)
    weaker = replace(plain, model=backend.load(checkpoint, loras=[(path, 0.4)]).model)
    first, *between, last = (
        backend.sample(request).tensors["samples"] for request in (with_lora, weaker, plain, with_lora)
    )
    assert error_in_std(to_vae_units(between[1]), expected) <= 1e-4
    assert first.equal(last) and all(error_in_std(one, first) > 1e-2 for one in between)
    save_file(
        {"img_in.lora_A.weight": torch.ones(2, 128), "img_in.lora_B.weight": torch.ones(256, 2)},
        folder / "control.safetensors",
    )
    for loras, says in (
        ([(str(folder / "control.safetensors"), 1.0)], "as a control LoRA does"),
        ([(path, "1")], "not a pair"),
        ([(str(folder / "nowhere"), 1.0)], "no LoRA at"),
    ):
        with pytest.raises(protocol.RefusedError, match=says):
            backend.load(checkpoint, loras=loras)
    Path(path).unlink()
    with pytest.raises(protocol.RefusedError, match="no LoRA at"):
        backend.sample(weaker)
    models = backend.client.request(protocol.Ping()).models
    assert plain.model in models and not {with_lora.model, weaker.model} & set(models)
    assert error_in_std(to_vae_units(backend.sample(plain).tensors["samples"]), expected) <= 1e-4


def test_more_stages_than_blocks_is_refused_at_load():
    engine = Engine(config.ParallelConfig(pipefusion_degree=16, device="cpu"), mesh.single())
    with pytest.raises(UnsupportedError, match="has 6 blocks"):
        engine.check_load(str(Path(__file__).parents[2] / "demo" / "shapes-flux"), "default")
