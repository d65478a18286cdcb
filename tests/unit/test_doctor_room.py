"""Room on the disk for the files of scripts/doctor.py --full, and how long they stay there."""

import errno
import importlib.util
import os
import re
import shutil
from functools import cache
from types import SimpleNamespace

import doctor_findings
import doctor_flux_files
import doctor_lab
import doctor_models
import doctor_place
import doctor_quantized
import doctor_room
import doctor_runs
import doctor_sizes
import doctor_steps
import doctor_time
import pytest
import quantized
import released_sizes
import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from doctor_findings import OK, WARNING, NoRoomError
from doctor_next import advised
from doctor_sizes import SIZES
from doctor_stubs import StubLab, full_findings, machine, said

from backend.loading.recognition import open_checkpoint
from backend.protocol import BackendError

KINDS = ("bf16", *doctor_quantized.NATIVE, *doctor_quantized.OF_GGUF)


@pytest.fixture
def lab():
    found = doctor_lab.Lab("cpu", 2, 10.0)
    yield found
    found.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_takes_what_was_asked_for(lab, monkeypatch, kind):
    if kind.startswith("Q"):
        pytest.importorskip("gguf")
    asked = []
    monkeypatch.setattr(lab, "need_room", lambda size, what, held=0: asked.append(size))
    written = lab.quantized(kind).stat().st_size
    assert written < asked[0] < 2 * written
    lab.drop("quantized", kind)
    assert not list(lab.folder.glob(f"{kind}.*")) and lab.quantized(kind).exists()  # made anew
    assert len(asked) == 2


@pytest.mark.parametrize("family", ["wan21-t2v", "flux-dev"])
@pytest.mark.parametrize("kind", doctor_steps.KINDS)
def test_released_models_are_quantized(lab, monkeypatch, family, kind):
    """A file in ComfyUI's names, and as on GPUs a diffusers folder."""
    asked = []
    monkeypatch.setattr(lab, "need_room", lambda size, what, held=0: asked.append(size))
    if family == "flux-dev":
        monkeypatch.setattr(lab, "released", lambda family: (lab.flux(), None, ""))
    path = lab.released_quantized(family, kind)
    assert doctor_room.stored_bytes(path) < asked[-1]
    assert open_checkpoint(str(path)).is_quantized
    lab.drop("released", family, kind)
    assert not path.exists()


def test_the_flux_takes_what_was_asked_for(lab, monkeypatch):
    asked = []
    monkeypatch.setattr(lab, "need_room", lambda size, what, held=0: asked.append(size))
    files = list(lab.flux().glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) == pytest.approx(asked[0], rel=0.01)
    lab.drop("flux")
    assert not (lab.folder / "flux").exists()


def test_files_that_cannot_be_deleted_end_nothing(monkeypatch):
    """On NFS a file that a process maps stays under another name, and its folder with it."""
    lab = doctor_lab.Lab("cpu", 2, 10.0)
    lab._cache = {("quantized", "bf16"): lab.folder / "bf16.safetensors", ("flux",): lab.folder / "flux"}
    (lab.folder / "flux").mkdir()
    for file in ("bf16.safetensors", "flux/.nfs0001"):
        (lab.folder / file).write_text("")

    def busy(*args, **named):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patched:
        for name in ("unlink", "rmdir"):
            patched.setattr(os, name, busy)
        lab.drop("quantized", "bf16")
        lab.drop("flux")
        lab.close()
    assert not lab._cache and (lab.folder / "flux" / ".nfs0001").exists()
    shutil.rmtree(lab.folder)


def test_deleted_files_that_ranks_map_are_given_up_first(monkeypatch, lab):
    free, ended = [1 << 30], []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[-1]))
    monkeypatch.setattr(lab, "fresh", lambda: ended.append(free.append(4 << 30)))
    monkeypatch.setattr(doctor_room, "host_free", lambda swap: 64 << 30)
    lab.need_room(800_000_000, "the file of nvfp4")
    assert not ended
    lab.need_room(3 << 30, "the mid-size Flux")
    assert ended
    with pytest.raises(
        NoRoomError, match="4.3 GB are free in .*, and the mid-size Flux needs 5.6 GB.*TMPDIR"
    ):
        lab.need_room(5 << 30, "the mid-size Flux")


@pytest.mark.parametrize("in_memory", [False, True])
def test_host_memory_is_asked_for_by_file(monkeypatch, lab, in_memory):
    """A small one needs little; in a tmpfs the file takes memory, too."""
    gb = 10**9
    monkeypatch.setattr(doctor_room, "HOST", 1.1)
    monkeypatch.setattr(doctor_room, "lies_in_memory", lambda folder: in_memory)
    monkeypatch.setattr(doctor_room, "host_free", lambda swap: 2 * gb)
    lab.need_room(int(0.4 * gb), "a tiny model")
    with pytest.raises(NoRoomError, match="2.0 GB of host memory are free, and making a file needs"):
        lab.need_room(gb, "a file")
    with pytest.raises(NoRoomError):
        lab.need_room(int(0.4 * gb), "a copy", held=gb)
    monkeypatch.setattr(doctor_room, "host_free", lambda swap: int(2.2 * gb))
    if not in_memory:
        return lab.need_room(gb, "a file")
    with pytest.raises(NoRoomError, match="making a file needs 3.1 GB; close other programs"):
        lab.need_room(gb, "a file")


def test_a_machine_with_little_memory_has_no_problem_for_it(monkeypatch, lab):
    """As WSL with half of 16 GB."""
    monkeypatch.setattr(doctor_room, "host_free", lambda swap: 10**9)
    monkeypatch.setattr(doctor_room, "is_wsl", lambda: True)
    (found,) = doctor_findings.findings("speed", lambda: lab.flux())
    assert found.status == WARNING and found.text.startswith("not run: 1.0 GB of host memory are free")
    assert ".wslconfig" in found.text and "traceback" not in found.values
    assert advised(found).text == found.text
    ((status, text),) = said(machine(host_memory=7 * 10**9), "host")
    assert status == WARNING and ".wslconfig" in text


def test_a_folder_in_memory_is_known(monkeypatch, tmp_path):
    """By the file system of the mount that it lies in."""
    kinds = {"/": "ext4", str(tmp_path): "tmpfs", str(tmp_path / "disk"): "xfs"}
    mounts = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    monkeypatch.setattr(doctor_room.psutil, "disk_partitions", lambda all: mounts)
    assert doctor_room.lies_in_memory(tmp_path / "below")
    assert not doctor_room.lies_in_memory(tmp_path / "disk" / "below")
    assert not doctor_room.lies_in_memory(tmp_path.parent)


def test_checks_without_room_are_named_once_and_others_run():
    class Lab(StubLab):
        def flux(self):
            raise NoRoomError("2.0 GB are free in /tmp; set TMPDIR to a larger disk")

        def quantized(self, kind):
            return self.flux() if kind == "nvfp4" else super().quantized(kind)

        def released(self, family):
            return super().released(family) if family == "minimax-h3" else self.flux()

        def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
            return StubLab.run(self, config.__class__(), path, sample, dtype, "auto", loras)

        def step_seconds(self, config, path, request, **how):
            path = self.quantized(path.name) if "matmul" in how else path
            return super().step_seconds(config, path, request, **how)

    found = full_findings(Lab())
    left_out = [each.check for each in found if "set TMPDIR" in each.text]
    once = [name for name in doctor_runs.OF_FLUX if name != "shapes"]
    assert [name for name in left_out if name not in ("quantized", "shapes")] == once
    assert {each.status for each in found if "set TMPDIR" in each.text} == {WARNING}
    assert any("nvfp4, native: not run" in each.text for each in found)
    assert any("wan21-t2v: not run" in each.text for each in found)
    assert any(each.check == "shapes" and each.status == OK for each in found)


def in_form(monkeypatch, lab, is_short):
    """Have every check of a lab run in its shorter form, or in its whole one."""
    short = frozenset(doctor_time.SHORT_SECONDS if is_short else ())
    monkeypatch.setattr(lab, "planned", lambda names: doctor_time.Plan(list(names), [], short))
    monkeypatch.setattr(lab, "fresh", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # gguf
    return lab


class ShortOfTime(StubLab):
    """A lab whose time for shapes is over with the first timed method."""

    def step_seconds(self, *arguments, **how):
        if self.part == "shapes":
            self.part_end = 0.0
        return super().step_seconds(*arguments, **how)


@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "shorter"])
@pytest.mark.parametrize("made", [StubLab, ShortOfTime])
def test_every_file_goes_after_its_last_use(monkeypatch, made, is_short):
    lab = in_form(monkeypatch, made(), is_short)
    ran = []

    def noted(name, run):
        def check(lab):
            ran.append((name, list(lab.dropped)))
            yield from run(lab)

        return check

    runs = {name: noted(name, run) for name, run in doctor_runs.RUNS.items()}
    monkeypatch.setattr(doctor_runs, "RUNS", runs)
    found = full_findings(lab)
    assert made is StubLab or any(
        each.check == "shapes" and "minutes are over" in each.text for each in found
    )
    for name, dropped in ran:  # none before its last use
        assert ("flux",) not in dropped or name not in doctor_runs.OF_FLUX
    every = {("quantized", kind) for kind in KINDS}
    of_short = {("quantized", kind) for kind in (*doctor_quantized.TELLING, "bf16")}
    assert (of_short if is_short else every) <= set(lab.dropped) and ("flux",) in lab.dropped
    assert {("released", family) for family in doctor_steps.SHAPES} < set(lab.dropped)
    of_flux = {("released", "flux-dev", kind) for kind in doctor_flux_files.KINDS}
    assert of_flux < set(lab.dropped) and not of_flux & set(dict(ran)["shapes"])  # which runs them, too
    of_quantized = {each for each in dict(ran)["shapes"] if each[0] == "quantized"}
    assert of_quantized >= (of_short if is_short else every)  # the largest files are made then


class OnDisk(StubLab):
    """A lab that adds up the bytes of what lies in its folder, as on GPUs, without what is tiny or a LoRA."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks
        self.known, self.files, self.most = {}, {}, 0

    def cached(self, key, make):
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def hold(self, key, size):
        self.files[key] = size
        self.most = max(self.most, sum(self.files.values()))

    def drop(self, *key):
        super().drop(*key)
        self.files.pop(key, None)

    def flux(self):
        self.hold(("flux",), sum(sizes_of("flux-dev", self.ranks)))
        return super().flux()

    def released(self, family):
        if family == "flux-dev":
            self.flux()
        else:
            self.hold(("released", family), sum(sizes_of(family, self.ranks)))
        return super().released(family)

    def released_quantized(self, family, kind):
        matrices, others = sizes_of(family, self.ranks)
        self.hold(("released", family, kind), matrices // 2 + others)
        return super().released_quantized(family, kind)

    def quantized(self, kind):
        weights = doctor_room.weights_bytes(SIZES["cuda"].width)
        self.hold(("quantized", kind), weights if kind == "bf16" else int(weights * 17 / 32))  # as Q8_0
        return super().quantized(kind)


@cache
def sizes_of(family, ranks):
    """Count the bytes in bf16 of a timed model's matrices in its blocks, and of its other weights."""
    import common  # of benchmarks, which doctor_lab has put on the path

    model = FluxTransformer2DModel, common.FLUX | SIZES["cuda"].flux
    if family != "flux-dev":
        model = released_sizes.arguments_of(family, doctor_sizes.timed_blocks(ranks))
    with torch.device("meta"):
        named = list(model[0](**model[1]).named_parameters())
    every = 2 * sum(each.numel() for _, each in named)
    matrices = 2 * sum(
        each.numel() for name, each in named if each.ndim == 2 and quantized.ANY_MATRIX.search(name)
    )
    return matrices, every - matrices


@pytest.mark.parametrize("ranks, group", [(2, 1), (3, 2)])
def test_the_page_says_how_much_room_the_largest_files_take(monkeypatch, ranks, group):
    """Of all files that are there at once, in both forms of every check."""
    page = (doctor_models.ROOT / "docs/performance.md").read_text()
    room = re.search(r"Files take\s(\d+) GB of `TMPDIR` at\s+most \((\d+) on three GPUs\)", page)
    assert room and f"up to {room[1]} GB ({room[2]} on three GPUs)" in doctor_place.FILES_IN_MEMORY
    most = []
    for is_short in (False, True):
        lab = in_form(monkeypatch, OnDisk(ranks), is_short)
        full_findings(lab)
        assert not lab.files
        most.append(lab.most / 1e9)
    whole, shorter = most
    assert shorter <= whole and 1 < int(room[group]) / whole < 1.1


def test_the_bf16_file_goes_where_its_timing_fails():
    class Lab(StubLab):
        def step_seconds(self, config, path, request, **how):
            raise BackendError("rank 0 ended")

    lab = Lab()
    list(doctor_quantized.quantized(lab))
    assert ("quantized", "bf16") in lab.dropped
