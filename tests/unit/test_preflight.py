"""What a model's headers refuse before ranks are started."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import write_checkpoint

from backend.client import cache_files, preflight
from backend.config import ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.allowed_folders import ANYWHERE
from backend.loading.recognition import open_checkpoint
from backend.planner.model_shape import ModelShape
from backend.preflight import check_before_start, read_shape
from backend.protocol import BackendError, RefusedError
from backend.rank_plan import describe
from backend.rank_plan import shape_of as measured
from backend.rank_plan.shape_of import shape_of

#: Configurations that the tiny Flux (8 heads, 12 blocks) cannot run -> what the refusal names.
CANNOT = {
    "pipefusion_degree": (13, "has 12 blocks"),
    "ulysses_degree": (9, "has 8 attention heads"),
    "tensor_parallel_degree": (3, "does not divide the 8 attention heads"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "flux-tiny.safetensors"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("field", CANNOT)
def test_degrees_that_do_not_fit_are_refused(model, field):
    degree, words = CANNOT[field]
    with pytest.raises(UnsupportedError, match=words):
        check_before_start(ParallelConfig(**{field: degree}), model)


@pytest.mark.parametrize("config", [{}, {"pipefusion_degree": 4}, {"tensor_parallel_degree": 2}])
def test_what_fits_is_accepted(model, config):
    check_before_start(ParallelConfig(**config), model, memory=[1 << 40] * 4)


@pytest.mark.parametrize("change", [{"weight_dtype": "fp8"}, {"matmul": "native"}])
def test_settings_of_the_loader_are_checked(model, change):
    with pytest.raises(UnsupportedError, match=next(iter(change))):
        check_before_start(ParallelConfig(), model, **change)


def test_weights_that_no_gpu_holds_are_refused(model):
    """By the bytes that ``describe`` counts: one less is refused, as many are accepted."""
    config = ParallelConfig(pipefusion_degree=2, device="cuda")
    plans = describe(config, open_checkpoint(model), dtype=torch.float32)
    needed = [plan.weight_bytes + plan.scratch_bytes + plan.gathered_bytes for plan in plans]
    check_before_start(config, model, "fp32", device="cuda", capability=(8, 0), memory=needed)
    short = [needed[0], needed[1] - 1]
    with pytest.raises(UnsupportedError, match="on rank 1, whose GPU has .* raise pipefusion_degree"):
        check_before_start(config, model, "fp32", device="cuda", capability=(8, 0), memory=short)


@pytest.mark.parametrize(
    "degrees, remedy, refused",
    [
        ({}, "use more GPUs", ["shard_weights", "pipefusion_degree"]),
        ({"pipefusion_degree": 2}, "raise pipefusion_degree", ["shard_weights"]),
        ({"tensor_parallel_degree": 2}, "raise pipefusion_degree", ["shard_weights"]),
        ({"cfg_degree": 2}, "raise pipefusion_degree", ["shard_weights"]),
        ({"ulysses_degree": 2, "offload_modulation": True}, "raise pipefusion_degree", ["shard_weights"]),
        ({"ulysses_degree": 2}, "switch shard_weights on", []),
        ({"ulysses_degree": 2, "shard_weights": True}, "shard over more GPUs", ["pipefusion_degree"]),
    ],
)
def test_a_remedy_is_one_that_the_configuration_takes(model, degrees, remedy, refused):
    config = ParallelConfig(device="cuda", **degrees)
    with pytest.raises(UnsupportedError, match=remedy) as failure:
        check_before_start(config, model, device="cuda", capability=(8, 0), memory=[1] * config.world_size)
    assert not any(word in str(failure.value) for word in refused)


def test_who_waits_for_anothers_question_can_be_interrupted(model):
    """Its file may lie on a disk that does not answer."""

    def interrupt():
        raise KeyboardInterrupt

    with preflight._lock, pytest.raises(KeyboardInterrupt):
        preflight._ask({}, ParallelConfig(), interrupt)
    assert not preflight._lock.locked()


def test_ranks_on_the_cpu_share_its_memory(model):
    config = ParallelConfig(ulysses_degree=2, device="cpu")
    needed = sum(plan.weight_bytes for plan in describe(config, open_checkpoint(model), dtype=torch.float32))
    check_before_start(config, model, memory=[needed])
    with pytest.raises(UnsupportedError, match="on 2 ranks together"):
        check_before_start(config, model, memory=[needed - 1])


def test_a_process_answers_several_questions(model):
    """One is accepted, and not asked again; the shape is told; one is refused; once the process has ended,
    another answers."""
    config = ParallelConfig(device="cpu")
    question = (model, "default", "auto", [model.rpartition("/")[0]])
    preflight.check_headers(config, *question)
    asked = []
    preflight.check_headers(config, *question, asked.append)
    assert not asked
    first = preflight._reader
    shape = ModelShape.from_dict(preflight.read_shape(*question[:3], "cpu", [0]))
    assert shape == shape_of(open_checkpoint(model), torch.float32) and preflight._reader is first
    with pytest.raises(RefusedError, match="weight_dtype"):
        preflight.read_shape(model, "fp8", "auto", "cpu", [0])
    deep = replace(config, pipefusion_degree=13)
    with pytest.raises(RefusedError, match="has 12 blocks"):
        preflight.check_headers(deep, *question)
    assert preflight._reader is first and first is not None
    first.process.kill()
    first.process.wait()
    with pytest.raises(RefusedError, match="has 12 blocks"):
        preflight.check_headers(deep, *question)
    assert preflight._reader is not first


@pytest.mark.parametrize("why", [None, "the package yunchang cannot be used"])
def test_a_shape_says_whether_there_are_rings(model, monkeypatch, why):
    """Of the Python that reads it, the ranks'; ComfyUI's may have other packages."""
    monkeypatch.setattr(measured, "ring_unavailable", lambda: why)
    shape = ModelShape.from_dict(read_shape(model, "default", "auto", "cpu", None, ANYWHERE))
    assert shape.rings == (why is None)


def test_what_is_printed_while_python_starts_is_no_answer(model, monkeypatch, tmp_path):
    """As by a sitecustomize of the machine, with and without the end of a line."""
    noise = "import sys\nprint('patched')\nsys.stdout.write('by my site: ')\nsys.stdout.flush()\n"
    (tmp_path / "sitecustomize.py").write_text(noise)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(preflight, "_reader", None)
    folder = model.rpartition("/")[0]
    preflight.check_headers(ParallelConfig(device="cpu"), model, "default", "auto", [folder])
    assert preflight._reader is not None


def test_another_process_does_not_ask_again(model, monkeypatch):
    """Unless the file, the pack or a package is another one; a refusal is not kept."""
    monkeypatch.setattr(preflight, "_ask", lambda question, config, check: asked.append(question))
    question = (ParallelConfig(device="cpu"), model, "bf16", "auto", ["/x"])
    changed = {"IMPORTED": "another", "stamp": lambda path: ("newer",), "packages_changed": lambda: 7}
    changed["installed"] = lambda name: "newer"
    for changes in ({}, *({name: value} for name, value in changed.items())):
        asked: list[dict] = []
        for name, value in changes.items():
            monkeypatch.setattr(preflight, name, value)
        for _ in range(3):
            preflight.check_headers(*question)
            monkeypatch.setattr(cache_files, "_unwritten", {})  # of this process
        assert len(asked) == 1

    def refuse(question, config, check):
        asked.append(question)
        raise RefusedError("of another family")

    monkeypatch.setattr(preflight, "_ask", refuse)
    for _ in range(2):
        with pytest.raises(RefusedError):
            preflight.check_headers(*question[:2], "fp16", *question[3:])
    assert len(asked) == 3


def test_a_process_that_fails_is_an_error_of_its_own(model, monkeypatch):
    monkeypatch.setattr(preflight, "_reader", None)
    monkeypatch.setattr(preflight, "sanitized_environment", lambda *_: {"PYTHONHOME": "/nowhere"})
    with pytest.raises(BackendError, match="could not be read, .*: .+"):
        preflight.check_headers(ParallelConfig(device="cpu"), model, "bf16", "auto", [])


def test_a_process_that_could_not_be_started_is_started_again(model, monkeypatch):
    """The one before it had ended, so its pipe is closed."""
    folders = [str(Path(model).parent)]
    preflight.check_headers(ParallelConfig(device="cpu"), model, "bf16", "auto", folders)
    assert preflight._reader is not None
    preflight._reader.process.kill()
    preflight._reader.process.wait()
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "require_same_pack", lambda: (_ for _ in ()).throw(BackendError("restart")))
        for weight_dtype in ("fp16", "fp32"):
            with pytest.raises(BackendError, match="restart"):
                preflight.check_headers(ParallelConfig(device="cpu"), model, weight_dtype, "auto", folders)
    preflight.check_headers(ParallelConfig(device="cpu"), model, "fp16", "auto", folders)


def test_a_question_is_json(monkeypatch, tmp_path):
    """Nothing of the configuration is left out, and no GPU is asked for where ranks run on the CPU."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    asked = []
    monkeypatch.setattr(preflight, "_ask", lambda question, config, check: asked.append(question))
    preflight.check_headers(ParallelConfig(ulysses_degree=2, device="cpu"), str(path), "bf16", "auto", ["/x"])
    (question,) = asked
    assert json.loads(json.dumps(question)) == question
    assert question["config"]["ulysses_degree"] == 2 and question["device"] == "cpu"
    assert question["capability"] is None and question["folders"] == ["/x"]
