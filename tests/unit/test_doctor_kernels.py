"""What scripts/doctor.py --full says of attention kernels in rings."""

import doctor_kernels
import doctor_lab
import pytest
import torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_stubs import StubLab

from backend.config import CHOICES, ParallelConfig
from backend.parallel import compiled_blocks
from backend.parallel.attention.kernel_table import KERNELS, MIN_APPROXIMATE_KEYS
from backend.protocol import RefusedError


class RingLab(StubLab):
    """GPUs without FlashAttention 3 and 4, where the log-sum-exp of a kernel may be wrong."""

    device = "cuda"

    def __init__(self, wrong=""):
        super().__init__()
        self.wrong, self.rings = wrong, []

    def run(self, config, path, sample, dtype="default", **how):
        if config.attention in ("flash-attn-3", "flash-attn-4"):
            raise RefusedError("it has no kernels for these GPUs")
        if config.ring_degree > 1:
            self.rings.append(config.attention)
        off = 0.5 if self.wrong == config.attention and config.ring_degree > 1 else 0.0
        return doctor_lab.Run(torch.ones(4) * (1 + off), 1.0)


@pytest.mark.parametrize("wrong", ["", "sdpa", "flash-attn", "sage", "cudnn"])
def test_kernels_with_a_log_sum_exp_run_in_a_ring(wrong):
    lab = RingLab(wrong)
    found = [each for each in doctor_kernels.kernels(lab) if "in a ring" in each.text]
    assert lab.rings == ["sdpa", "flash-attn", "sage", "cudnn"] == [each.values["kernel"] for each in found]
    assert set(lab.rings) <= {name for name in CHOICES["attention"][1:] if KERNELS[name].lse}
    assert [each.status for each in found] == [PROBLEM if name == wrong else OK for name in lab.rings]
    for each in found:
        if each.status == PROBLEM:
            other = f"set attention to another kernel than {wrong} where ring_degree is above 1"
            remedy = "choose another method in Parallel Config" if wrong == "sdpa" else other
            assert each.text.endswith("report it, with the file of --json") and remedy in each.text


@pytest.mark.parametrize(
    "kernel, ranks, degrees",
    [
        ("flash-attn", 8, (8, 1)),
        ("sage", 4, (4, 1)),
        ("sage", 5, (5, 1)),
        ("sage", 6, (2, 3)),
        ("sage", 8, (2, 4)),
    ],
)
def test_rings_of_approximate_kernels_have_keys_enough(kernel, ranks, degrees):
    """For 4,096 tokens of an image, where that many ranks can be had so."""
    assert doctor_kernels._ring_degrees(kernel, ranks) == degrees
    if ranks % 2 == 0 and kernel == "sage":
        assert 4096 // degrees[0] >= MIN_APPROXIMATE_KEYS


@pytest.mark.parametrize("ranks, failed, said", [(1, False, []), (2, True, [WARNING])])
def test_no_ring_without_links(ranks, failed, said):
    lab = RingLab()
    lab.ranks, lab.links_failed = ranks, failed
    found = [each for each in doctor_kernels.kernels(lab) if "ring" in each.text]
    assert not lab.rings and [each.status for each in found] == said


class CompilingLab(StubLab):
    """Ranks whose first request compiles."""

    ranks = 1

    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def step_seconds(self, config, path, request, **how):
        notes = self.notes if config.compile == "blocks" else []
        return 1.0, doctor_lab.Run(torch.ones(4), 1.0, first_notes=notes)


@pytest.mark.parametrize("graphs", [1, 12])
def test_the_seconds_of_compiling_are_reported(monkeypatch, tmp_path, graphs):
    """As ranks say them: a note of the first request alone."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(doctor_kernels, "cache_folder", lambda: tmp_path)
    compiler = compiled_blocks.Compiler()
    monkeypatch.setattr(compiled_blocks, "COMPILER", compiler)
    monkeypatch.setattr(compiled_blocks, "unavailable", lambda: "")
    with compiled_blocks.compiled([]) as outcome:
        compiler.graphs += graphs
        compiler.seconds += 34.56
        said = ["another note", outcome().made]
    (found,) = doctor_kernels.compiled(CompilingLab(said))
    wanted = {"graphs": graphs, "compile_seconds": 34.6, "had_cache": False}
    assert found.values.items() >= wanted.items() and f"compiled {graphs} graphs in 34.6 s" in found.text
    (tmp_path / "inductor" / "ab").mkdir(parents=True)
    (again,) = doctor_kernels.compiled(CompilingLab([]))
    assert again.values["had_cache"] and "compile_seconds" not in again.values


def test_the_notes_of_the_request_before_those_that_are_timed_stay(monkeypatch):
    lab = doctor_lab.Lab("cpu", 1, 10.0)
    notes = iter([["compiled 2 graphs of blocks in 3.0 s"], *[[]] * 5])
    monkeypatch.setattr(
        lab, "run", lambda *rest, **how: doctor_lab.Run(torch.ones(2), 1.0, stats={"notes": next(notes)})
    )
    _, run = lab.step_seconds(ParallelConfig(), lab.folder, lambda steps: None)
    assert doctor_kernels.compiling(run.first_notes) == {"graphs": 2, "compile_seconds": 3.0}
    assert not run.notes and len(run.timed) == 4
    lab.close()
