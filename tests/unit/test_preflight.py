"""What a model's headers refuse before ranks are started."""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import write_checkpoint

from backend.client import cache_files
from backend.client.auto import preflight
from backend.client.auto.model_choice import ModelChoice
from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.files.allowed_folders import ANYWHERE
from backend.loading.recognition import open_checkpoint
from backend.planner.auto_config import config_of
from backend.planner.model_shape import ModelShape
from backend.preflight import check_before_start, read_shape
from backend.protocol import BackendError, RefusedError
from backend.rank_plan import RequestSize, describe
from backend.rank_plan import shape_of as measured
from backend.rank_plan.remedies import remedies
from backend.rank_plan.shape_of import shape_of
from backend.runtime import opaque_ops
from backend.sampling import validation

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
    plans = describe(config, open_checkpoint(model), RequestSize(), torch.float32)
    needed = [plan.weight_bytes + plan.scratch_bytes + plan.gathered_bytes for plan in plans]
    check_before_start(config, model, "fp32", device="cuda", capability=(8, 0), memory=needed)
    short = [needed[0], needed[1] - 1]
    with pytest.raises(UnsupportedError, match="on rank 1, whose GPU has .* fewer bits"):
        check_before_start(config, model, "fp32", device="cuda", capability=(8, 0), memory=short)


def applied(text: str) -> ParallelConfig:
    """What the inputs of Parallel Config say on two GPUs once the named settings are set, the others at their
    defaults."""
    fields: dict = {}
    for each in text.split(" with "):
        name, _, value = each.partition(" ")
        default = getattr(ParallelConfig, name)
        fields[name] = value == "on" if isinstance(default, bool) else type(default)(value)
    config = config_of(2, **fields)
    assert isinstance(config, ParallelConfig), "degrees are left to auto"
    return config.validate()


def named(failure: str) -> str:
    found = re.search("(?:they fit with|or set) (.+?), (?:or choose|which divides)", failure)
    assert found, failure
    return found[1]


@pytest.mark.parametrize(
    "degrees",
    [
        {"cfg_degree": 2},
        {"data_parallel_degree": 2},
        {"ulysses_degree": 2},
        {"ulysses_degree": 2, "offload_modulation": True},
    ],
    ids=str,
)
def test_a_remedy_is_one_that_the_configuration_takes(model, degrees):
    """On as many GPUs as there are, with the memory that the named settings need."""
    config = ParallelConfig(device="cuda", **degrees)
    memory = [int(0.65 * Path(model).stat().st_size)] * 2
    given = (model, "fp32", "auto", "cuda", (8, 0), memory)
    with pytest.raises(UnsupportedError, match="or choose a file of fewer bits") as failure:
        check_before_start(config, *given)
    after = applied(named(str(failure.value)))
    assert after.world_size == config.world_size
    check_before_start(replace(after, device="cuda"), *given)


@pytest.mark.parametrize(
    "degrees, remedy",
    [
        ({}, "use more GPUs \\(method auto, gpus empty"),
        ({"pipefusion_degree": 2}, "use more GPUs \\(method auto, every degree 1"),
        ({"tensor_parallel_degree": 2}, "use more GPUs \\(method auto, every degree 1"),
        ({"ulysses_degree": 2, "shard_weights": True}, "use more GPUs \\(method auto, every degree 1"),
    ],
)
def test_more_gpus_are_named_where_no_settings_fit(model, degrees, remedy):
    config = ParallelConfig(device="cuda", **degrees)
    with pytest.raises(UnsupportedError, match=remedy) as failure:
        check_before_start(config, model, device="cuda", capability=(8, 0), memory=[1] * config.world_size)
    assert not any(word in str(failure.value) for word in ("shard_weights", "pipefusion_degree"))


def test_sharding_is_not_named_where_this_torch_cannot(model, monkeypatch):
    """Neither among the settings that fit, nor as what is left as it is."""
    monkeypatch.setattr(validation, "unshardable", lambda *_: ("its weights", "99"))
    memory = [int(0.65 * Path(model).stat().st_size)] * 2
    given = (model, "fp32", "auto", "cuda", (8, 0), memory)
    both: list[dict] = [{"ulysses_degree": 2}, {"ulysses_degree": 2, "shard_weights": True}]
    for fields in both:
        with pytest.raises(UnsupportedError) as failure:
            check_before_start(ParallelConfig(device="cuda", **fields), *given)
        text = named(str(failure.value))
        assert "shard_weights on" not in text
        check_before_start(replace(applied(text), device="cuda"), *given)


@pytest.mark.parametrize(
    "plan",
    [
        {"ulysses_degree": 2},
        {"pipefusion_degree": 2},
        {"pipefusion_degree": 2, "stale_kv": "extrapolate"},
        {"cfg_degree": 2, "stale_kv": "reuse"},
    ],
    ids=str,
)
def test_a_remedy_holds_where_auto_has_chosen_the_degrees(plan):
    """Its plan is not in the inputs, which are at their defaults."""
    config = ParallelConfig(**plan)
    size = RequestSize()
    of_config = [each for each in remedies(config, size, quantized=True) if each.config != config]
    assert of_config
    for remedy in of_config:
        with suppress(ConfigError):  # which is not named
            after = replace(remedy.config.validate(), stale_kv="reuse")
            assert replace(applied(remedy.text), stale_kv="reuse") == after and after.world_size == 2


def test_who_waits_for_anothers_question_can_be_interrupted(model):
    """Its file may lie on a disk that does not answer."""

    def interrupt():
        raise KeyboardInterrupt

    with preflight._lock, pytest.raises(KeyboardInterrupt):
        preflight._ask({}, ParallelConfig(), interrupt)
    assert not preflight._lock.locked()


def test_ranks_on_the_cpu_share_its_memory(model):
    config = ParallelConfig(ulysses_degree=2, device="cpu")
    plans = describe(config, open_checkpoint(model), RequestSize(), torch.float32)
    needed = sum(plan.weight_bytes for plan in plans)
    check_before_start(config, model, memory=[needed])
    with pytest.raises(UnsupportedError, match="on 2 ranks together"):
        check_before_start(config, model, memory=[needed - 1])


def test_a_process_answers_several_questions(model):
    """One is accepted, and not asked again; the shape is told; one is refused; once the process has ended,
    another answers."""
    config = ParallelConfig(device="cpu")
    question = (ModelChoice(model), [model.rpartition("/")[0]])
    preflight.check_headers(config, *question)
    asked = []
    preflight.check_headers(config, *question, asked.append)
    assert not asked
    first = preflight._reader
    shape = ModelShape.from_dict(preflight.read_shape(ModelChoice(model), "cpu", [0]))
    assert shape == shape_of(open_checkpoint(model), torch.float32) and preflight._reader is first
    with pytest.raises(RefusedError, match="weight_dtype"):
        preflight.read_shape(ModelChoice(model, "fp8"), "cpu", [0])
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


@pytest.mark.parametrize("lacks", ["", "effects", "triton", "cc"])
def test_a_shape_says_whether_gpus_compile_blocks(model, monkeypatch, lacks):
    """With the torch, Triton and C compiler of the ranks' Python."""
    monkeypatch.setattr(opaque_ops, "_ordered", None if lacks == "effects" else "ordered")
    monkeypatch.setattr(opaque_ops, "find_spec", lambda name: None if lacks == name else name)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CC", "" if lacks == "cc" else "/usr/bin/cc")
    shape = ModelShape.from_dict(read_shape(model, "default", "auto", "cpu", None, ANYWHERE))
    assert shape.compiles == (not lacks)


def test_what_is_printed_while_python_starts_is_no_answer(model, monkeypatch, tmp_path):
    """As by a sitecustomize of the machine, with and without the end of a line."""
    noise = "import sys\nprint('patched')\nsys.stdout.write('by my site: ')\nsys.stdout.flush()\n"
    (tmp_path / "sitecustomize.py").write_text(noise)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(preflight, "_reader", None)
    folder = model.rpartition("/")[0]
    preflight.check_headers(ParallelConfig(device="cpu"), ModelChoice(model), [folder])
    assert preflight._reader is not None


def test_another_process_does_not_ask_again(model, monkeypatch):
    """Unless the file, the pack or a package is another one; a refusal is not cached."""
    monkeypatch.setattr(preflight, "_ask", lambda question, config, check: asked.append(question))
    config = ParallelConfig(device="cpu")
    changed = {"IMPORTED": "another", "stamp": lambda path: ("newer",), "packages_changed": lambda: 7}
    changed["installed"] = lambda name: "newer"
    for changes in ({}, *({name: value} for name, value in changed.items())):
        asked: list[dict] = []
        for name, value in changes.items():
            monkeypatch.setattr(preflight, name, value)
        for _ in range(3):
            preflight.check_headers(config, ModelChoice(model, "bf16"), ["/x"])
            monkeypatch.setattr(cache_files, "_unwritten", {})  # of this process
        assert len(asked) == 1

    def refuse(question, config, check):
        asked.append(question)
        raise RefusedError("of another family")

    monkeypatch.setattr(preflight, "_ask", refuse)
    for _ in range(2):
        with pytest.raises(RefusedError):
            preflight.check_headers(config, ModelChoice(model, "fp16"), ["/x"])
    assert len(asked) == 3


def test_the_last_answers_are_cached_in_one_file(model, monkeypatch, tmp_path):
    asked: list[str] = []
    monkeypatch.setattr(
        preflight, "_ask", lambda question, config, check: asked.append(question["weight_dtype"])
    )
    monkeypatch.setattr(preflight, "ACCEPTED", 2)
    config = ParallelConfig(device="cpu")
    for dtype in ("fp16", "bf16", "fp32", "bf16", "fp16"):
        preflight.check_headers(config, ModelChoice(model, dtype), ["/x"])
    assert asked == ["fp16", "bf16", "fp32", "fp16"]
    assert len(list(tmp_path.glob("cache/parallel-dit/accepted-*"))) == 1


def test_a_process_that_fails_is_an_error_of_its_own(model, monkeypatch):
    monkeypatch.setattr(preflight, "_reader", None)
    monkeypatch.setattr(preflight, "sanitized_environment", lambda *_: {"PYTHONHOME": "/nowhere"})
    with pytest.raises(BackendError, match="could not be read, .*: .+"):
        preflight.check_headers(ParallelConfig(device="cpu"), ModelChoice(model, "bf16"), [])


def test_a_process_that_could_not_be_started_is_started_again(model, monkeypatch):
    """The one before it had ended, so its pipe is closed."""
    folders = [str(Path(model).parent)]
    preflight.check_headers(ParallelConfig(device="cpu"), ModelChoice(model, "bf16"), folders)
    assert preflight._reader is not None
    preflight._reader.process.kill()
    preflight._reader.process.wait()
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "require_same_pack", lambda: (_ for _ in ()).throw(BackendError("restart")))
        for weight_dtype in ("fp16", "fp32"):
            with pytest.raises(BackendError, match="restart"):
                preflight.check_headers(
                    ParallelConfig(device="cpu"), ModelChoice(model, weight_dtype), folders
                )
    preflight.check_headers(ParallelConfig(device="cpu"), ModelChoice(model, "fp16"), folders)


def test_a_question_is_json(monkeypatch, tmp_path):
    """Nothing of the configuration is left out, and no GPU is asked for where ranks run on the CPU."""
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(1)}, path)
    asked = []
    monkeypatch.setattr(preflight, "_ask", lambda question, config, check: asked.append(question))
    choice = ModelChoice(str(path), "bf16")
    preflight.check_headers(ParallelConfig(ulysses_degree=2, device="cpu"), choice, ["/x"])
    (question,) = asked
    assert json.loads(json.dumps(question)) == question
    assert [question[name] for name in ("path", "weight_dtype", "matmul")] == [str(path), "bf16", "auto"]
    assert question["config"]["ulysses_degree"] == 2 and question["device"] == "cpu"
    assert question["capability"] is None and question["folders"] == ["/x"]
