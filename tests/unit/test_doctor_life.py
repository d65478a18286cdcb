"""What scripts/doctor.py --full says of the life of ranks."""

import subprocess
import sys
import time
from types import SimpleNamespace

import doctor_hangs
import doctor_lab
import doctor_life
import doctor_sizes
import pytest
import tiny
import torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_hangs import HungError
from doctor_next import advised
from doctor_stubs import StubLab

from backend.client.auto.model_choice import ModelChoice
from backend.config import ParallelConfig
from backend.loading.recognition import open_checkpoint
from backend.protocol import BackendError
from backend.rank_plan import RequestSize, describe
from backend.runtime.callbacks import nothing

ULYSSES = ParallelConfig(ulysses_degree=2)


class Ranks:
    """Ranks of which rank 1 is a real process, with one fault."""

    process, closed = SimpleNamespace(silence=""), False

    def __init__(self, fault):
        self.fault, self.models, self.parked = fault, {ModelChoice("flux"): "flux"}, 0
        self.other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.welcome = SimpleNamespace(pids=[0, self.other.pid])

    def load(self, path, keep, check):
        staying = {choice for choice in self.models if choice in keep or self.fault != "forgets"}
        self.models = dict.fromkeys(staying, "") | (
            {} if self.fault == "forgets" else {ModelChoice(path): ""}
        )
        return SimpleNamespace(model=path)

    def unload(self, choice, park, check):
        self.parked += 1
        time.sleep(0.05 if self.parked == 1 else 0.0)  # pages are locked once
        if self.fault == "frees":
            self.models.pop(choice)
        return [0] if self.fault == "stays" else [0, 1]

    def sample(self, message, should_cancel, on_progress=nothing):
        for step in range(1, doctor_life.LONG + 1):
            on_progress(SimpleNamespace(step=step))
            is_seen = self.other.poll() is not None or step > 2 and self._is_dead()
            if is_seen and self.fault == "silent":
                self.process = SimpleNamespace(silence="rank 0 has been silent for 120 s")
                raise BackendError(self.process.silence)
            if is_seen and self.fault != "deaf":
                raise BackendError("a rank ended" if self.fault == "nameless" else "rank 1 was killed")
            if should_cancel() and self.fault != "deaf":
                return None
        return SimpleNamespace(tensors={"samples": torch.ones(4)})

    def _is_dead(self):
        try:
            return self.other.wait(0.02) is not None
        except subprocess.TimeoutExpired:
            return False

    def close(self):
        self.closed = True
        self.other.kill()
        self.other.wait()


class LifeLab(StubLab):
    def __init__(self, fault):
        super().__init__()
        self.fault, self.ranks_here, self.runs = fault, Ranks(fault), 0

    def backend(self, config):
        return self.ranks_here

    def run(self, config, path, sample, dtype="default", **how):
        self.hung.check(config)
        self.runs += 1
        return doctor_lab.Run(torch.ones(4) + (self.fault == "drifts" and self.runs > 1), 0.1)


@pytest.mark.parametrize(
    "fault, wrong",
    [
        ("", set()),
        ("deaf", {"cancel", "a killed rank"}),
        ("stays", {"parking"}),
        ("forgets", {"two models"}),
        ("nameless", {"a killed rank"}),
        ("silent", {"a killed rank"}),
        ("drifts", {"cancel", "parking", "a killed rank"}),
    ],
)
def test_the_life_of_ranks_is_judged(fault, wrong):
    lab = LifeLab(fault)
    try:
        found = list(doctor_life.life(lab))
    finally:
        lab.ranks_here.close()
    assert {each.status for each in found} <= {OK, PROBLEM}
    assert [each.values.get("life") for each in found] == ["cancel", "parking", "two models", "a killed rank"]
    assert {each.values["life"] for each in found if each.status == PROBLEM} == wrong, found


def test_parking_is_timed_with_and_without_locking_pages(tmp_path):
    lab = LifeLab("")
    (tmp_path / "a.safetensors").write_bytes(bytes(10**6))
    lab.flux = lambda: tmp_path
    lab.ranks_here.models = {ModelChoice(str(tmp_path)): "flux"}
    try:
        found = doctor_life._parked(lab, ULYSSES, torch.ones(4))
    finally:
        lab.ranks_here.close()
    seconds = found.values["seconds"]
    assert found.status == OK and seconds["first"] >= 0.05 > seconds["second"]
    assert "0.0 GB/s with its pages to be locked" in found.text and "GB/s again, back" in found.text


def test_ranks_that_hang_are_ended(monkeypatch):
    lab = LifeLab("")
    monkeypatch.setattr(doctor_hangs, "evidence", lambda backend: {})
    with pytest.raises(HungError, match="the ranks hang"):
        doctor_hangs.sample(lab, ULYSSES, lab.ranks_here, doctor_life._long(lab, ULYSSES), 0.0)
    assert lab.ranks_here.other.poll() is not None and lab.hung.has(ULYSSES)


def test_weights_that_are_freed_are_not_called_parked():
    lab = LifeLab("frees")
    try:
        found = doctor_life._parked(lab, ULYSSES, torch.ones(4))
    finally:
        lab.ranks_here.close()
    assert found.status == WARNING and "not parked but freed" in found.text and "GB/s" not in found.text
    assert "weights are read from the file again" in advised(found).text == found.text


def test_ranks_of_somebody_else_are_not_killed():
    lab = LifeLab("")
    lab.ranks_here.process = None
    try:
        found = doctor_life._killed(lab, ULYSSES, torch.ones(4))
        assert lab.ranks_here.other.poll() is None
    finally:
        lab.ranks_here.close()
    assert found.status == WARNING and advised(found).text.endswith("nothing has to be done")


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("device", doctor_sizes.SIZES)
def test_both_models_run_on_so_many_ranks(tmp_path, ranks, device):
    """Ulysses on all ranks would divide the tiny model's four heads by five."""
    import common  # of benchmarks, which doctor_lab has put on the path

    config = doctor_life.for_both(ranks)
    assert config.validate().world_size == ranks
    path = tiny.write_checkpoint(tmp_path / "tiny.safetensors", doctor_life.OTHER)
    describe(config, open_checkpoint(str(path)), RequestSize(192, 12))
    flux = {"num_attention_heads": common.FLUX["num_attention_heads"], **doctor_sizes.SIZES[device].flux}
    assert flux["num_attention_heads"] % config.ulysses_degree == 0
