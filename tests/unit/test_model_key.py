"""A file that changes while ranks read it, or between two loads, is noticed."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import RAN_OUT, UnsupportedError
from backend.loading.files.regular_files import file_state
from backend.loading.load_report import by_rank
from backend.loading.lora.lora_keys import lora_stack, stack_digest
from backend.loading.model_key import check_same, content_key, model_key
from backend.parallel import mesh
from backend.protocol import Load
from backend.rank.admission import Admission, FatalOutOfMemory, InsufficientMemory
from backend.rank.worker import Worker


class TwoRanks:
    """In the control channel's place: the other rank says the same."""

    rank = 0

    def all_gather_object(self, value):
        return [value, value]

    def all_gather_numbers(self, numbers):
        return [numbers, numbers]


def worker() -> Worker:
    made = Worker.__new__(Worker)
    made.mesh, made.control, made.reports = mesh.single(), TwoRanks(), {}
    made.machines = [0]
    made.engine = Engine(ParallelConfig(), made.mesh)
    made.admission = Admission(ParallelConfig(), cast(Any, made.control), made.engine.memory)
    return made


@pytest.mark.parametrize("change", ["grows", "is touched", "is exchanged"])
def test_a_file_that_changes_while_it_is_read_is_refused_on_every_rank(tmp_path, monkeypatch, change):
    path = write_checkpoint(tmp_path / "model.safetensors", prefix="model.diffusion_model.")
    rank, load = worker(), Engine.load

    def load_and_change(engine, *arguments):
        load(engine, *arguments)
        if change == "grows":
            os.truncate(path, path.stat().st_size + 1)
        elif change == "is touched":
            path.touch()
        else:
            new = path.with_suffix(".new")
            new.write_bytes(path.read_bytes())
            os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
            new.rename(path)

    monkeypatch.setattr(Engine, "load", load_and_change)
    reasons = rank.load(Load(str(path)))
    assert reasons == [
        "ranks 0, 1: 'model.safetensors' was changed while it was read; load it again when it is complete"
    ]
    assert not rank.engine.models


def test_a_load_that_has_no_room_reads_nothing(tmp_path, monkeypatch):
    """Every rank refuses it in one round, to which it says for which ranks the client can make room."""
    path = str(write_checkpoint(tmp_path / "model.safetensors"))
    rank, planned, rounds = worker(), cast(Any, "what rank 0 has planned"), []

    def check(*given, **named):
        rounds.append((given, named))
        raise InsufficientMemory("rank 1 lacks memory", {1: 7})

    monkeypatch.setattr(rank.admission, "check", check)
    monkeypatch.setattr(rank.engine, "load", lambda *_: pytest.fail("it is read"))
    with pytest.raises(InsufficientMemory, match="rank 1 lacks memory"):
        rank.load(Load(path, can_make_room=[1]), planned=planned)
    assert rounds == [((planned,), {"can_make_room": [1]})] and not rank.engine.models


def test_memory_that_runs_out_in_a_load_is_what_ranks_lack(tmp_path, monkeypatch):
    """So that other models leave for it, as where it was seen before."""
    path = write_checkpoint(tmp_path / "model.safetensors")
    rank = worker()
    planned = rank.admission.plan_load(rank.engine.check_load(str(path), "default").checkpoint, torch.float32)
    monkeypatch.setattr(rank.admission, "check", lambda *_, **__: None)

    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(rank.engine, "load", fails)
    with pytest.raises(
        InsufficientMemory, match="could not be loaded .ranks 0, 1: CUDA out of memory"
    ) as refused:
        rank.load(Load(str(path)), planned=replace(planned, needs=planned.needs * 2))
    assert refused.value.lacking == dict.fromkeys((0, 1), planned.needs[0].likely) and not rank.engine.models
    monkeypatch.setattr(rank.engine, "load", lambda *_: 1 / 0)
    assert rank.load(Load(str(path)), planned=planned) == ["ranks 0, 1: division by zero"]


def test_a_load_that_fails_without_a_word_is_no_success(tmp_path, monkeypatch):
    """As Python's own MemoryError does, and an assert."""
    path = write_checkpoint(tmp_path / "model.safetensors")
    rank = worker()

    def fails(*_):
        raise AssertionError

    monkeypatch.setattr(rank.engine, "load", fails)
    assert rank.load(Load(str(path))) == ["ranks 0, 1: AssertionError"] and not rank.engine.models
    monkeypatch.setattr(torch, "ones", fails)  # the device computes nothing any more
    with pytest.raises(RuntimeError, match="the GPU was lost while the model was loaded: AssertionError"):
        rank.load(Load(str(path)))


def test_memory_that_runs_out_between_two_arrangements_is_said_as_such(monkeypatch):
    """So that auto goes on with a plan that needs less; NCCL has words of its own for it."""
    rank = worker()
    rank.device = torch.device("cpu")

    def build(*_):
        raise RuntimeError("NCCL error: Failed to CUDA calloc 8388608 bytes")

    monkeypatch.setattr(mesh, "build", build)
    with pytest.raises(FatalOutOfMemory, match=f"rank 0 {RAN_OUT} while .* calloc 8388608"):
        rank.arrange(ParallelConfig(ulysses_degree=2))


def test_all_ranks_use_the_key_of_rank_0(tmp_path):
    """On another machine the same file has another inode."""
    path = write_checkpoint(tmp_path / "model.safetensors")
    rank = worker()
    rank.control.all_gather_object = lambda value: ["key of rank 0" if isinstance(value, str) else value] * 2
    assert rank.load(Load(str(path))) == [] and list(rank.engine.models) == ["key of rank 0"]


def test_all_ranks_name_loras_as_rank_0(tmp_path):
    """A LoRA that was copied to another machine has another time there. One of other content is refused."""
    path = str(write_checkpoint(tmp_path / "model.safetensors"))
    loras = [tmp_path / machine / "l.safetensors" for machine in ("0", "1")]
    for number, file in enumerate(loras):
        file.parent.mkdir()
        file.write_bytes(b"the same")
        os.utime(file, (number, number))
    asked = [Load(path, loras=[[str(file), 0.5]]) for file in loras]
    digest, own = (stack_digest(lora_stack(each.loras)) for each in asked)
    rank = worker()
    rank.machines = [0, 1]
    assert rank.load(Load(path)) == []
    [key] = rank.engine.models
    told: list = [digest, [content_key(str(loras[0]))]]

    def gathered(value):
        return [value if isinstance(value, str) else told, value]

    rank.control.all_gather_object = gathered
    assert digest != own and rank.load(asked[1]) == []
    assert list(rank.engine.models) == [key, f"{key}+{digest}"]
    told[1] = ["another"]
    assert rank.load(asked[1]) == [
        "rank 1: 'l.safetensors' is not there, or is another file than on rank 0's machine; copy it there"
    ]


def test_a_folder_whose_weights_change_is_another_model(tmp_path):
    (tmp_path / "transformer").mkdir()
    weights = tmp_path / "transformer" / "weights.safetensors"
    weights.write_bytes(b"one")
    before = model_key(Load(str(tmp_path)))
    (tmp_path / "README.md").write_text("no weights")
    assert model_key(Load(str(tmp_path))) == before
    (tmp_path / "others" / "a model").mkdir(parents=True)
    (tmp_path / "others" / "a model" / "weights.safetensors").write_bytes(b"of another model")
    assert model_key(Load(str(tmp_path))) == before
    weights.write_bytes(b"two, in place")
    assert model_key(Load(str(tmp_path))) != before


def test_reasons_name_their_ranks():
    assert by_rank(["", "full", "", "full", "gone"]) == ["ranks 1, 3: full", "rank 4: gone"]


@pytest.mark.parametrize("name", ["m.safetensors", "m/part.safetensors"])
def test_a_link_and_a_file_of_two_machines_are_the_same(tmp_path, name):
    """As in a folder of Hugging Face's cache, whose files are links to blobs that their digests name."""
    (tmp_path / "blob").write_bytes(b"header 1")
    for machine in ("a", "b"):
        (tmp_path / machine / name).parent.mkdir(parents=True)
    (tmp_path / "a" / name).symlink_to(tmp_path / "blob")
    (tmp_path / "b" / name).write_bytes(b"header 1")
    keys = [content_key(str(tmp_path / each / name.partition("/")[0])) for each in ("a", "b")]
    assert keys[0] and keys[0] == keys[1]
    if "/" in name:  # a folder's files are found by their names
        (tmp_path / "b" / name).rename(tmp_path / "b/m/other.safetensors")
        assert content_key(str(tmp_path / "b/m")) != keys[0]


def test_files_of_two_machines_are_compared_by_size_and_header(tmp_path):
    """Not by inode or time, which differ; a file that is not there is for the loader to refuse."""
    first = tmp_path / "a" / "m.safetensors"
    for file, data in ((first, b"header 1"), (tmp_path / "b/m.safetensors", b"header 1")):
        file.parent.mkdir()
        file.write_bytes(data)
    key = content_key(str(first))
    assert key == content_key(str(tmp_path / "b/m.safetensors"))
    check_same(str(first), key, key)
    check_same("/nowhere", content_key("/nowhere"), key)
    for other in (b"header 2", b"header 1 longer"):
        (tmp_path / "b/m.safetensors").write_bytes(other)
        with pytest.raises(UnsupportedError, match="m.safetensors' is another file on this rank's machine"):
            check_same(str(first), content_key(str(tmp_path / "b/m.safetensors")), key)


def test_what_is_no_file_has_no_state(tmp_path):
    file = tmp_path / "lora.safetensors"
    file.write_bytes(b"abc")
    os.utime(file, ns=(0, 7))
    assert file_state(file) == (3, 7)
    assert [file_state(Path(each)) for each in (tmp_path, tmp_path / "gone", "a\0b")] == [(), (), ()]
