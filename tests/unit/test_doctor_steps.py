"""What scripts/doctor.py says of the steady state: waits, seconds at released shapes, the chart."""

import doctor_degrees
import doctor_findings
import doctor_kernels
import doctor_lab
import doctor_requests
import doctor_runs
import doctor_sizes
import doctor_steps
import kernels
import pytest
import released_sizes
import tiny
import torch
import waits
from doctor_findings import OK, PROBLEM, WARNING
from doctor_processes import Ended
from doctor_stubs import ENDED, StubLab

from backend.config import ParallelConfig
from backend.parallel import mesh
from backend.rank_plan.shape_of import shape_of


class Ranks(StubLab):
    """Ranks that wait in one line."""

    skipped = None

    def waits(self, skipped, families):
        self.skipped = skipped
        return [{"method": "ulysses", "family": "flux-dev", "steps": 2, "waits": {"stage.py:7": 3}}], ENDED


@pytest.mark.parametrize(
    "device, status, says", [("cpu", OK, "only CUDA"), ("cuda", WARNING, "stage.py:7 (ulysses")]
)
def test_waits_are_named_with_their_line(device, status, says):
    lab = Ranks()
    lab.device = device
    (found,) = doctor_steps.waits(lab)
    assert found.status == status and says in found.text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("steps", [[], [0]])
def test_waits_of_no_step_are_not_called_ok(device, steps):
    lab = Ranks()
    lab.device = device
    runs = [{"method": "ulysses", "family": "flux-dev", "steps": each, "waits": {}} for each in steps]
    lab.waits = lambda skipped, families: (runs, ENDED)
    (found,) = doctor_steps.waits(lab)
    assert found.status == WARNING and "nothing was measured" in found.text and "--only waits" in found.text


def test_hybrids_that_were_watched_are_named_and_what_none_divides():
    """Seven are prime, and more than the blocks of three families."""
    lab = Ranks()
    lab.device, lab.ranks = "cuda", 8
    turns, left_out = doctor_degrees.turns_of(lab)
    runs = [
        {"method": turn.name, "family": family, "steps": 2, "waits": {}}
        for turn in turns
        for family in turn.families * 2  # of two ranks
    ]
    lab.waits = lambda skipped, families: (runs, ENDED)
    (found,) = doctor_steps.waits(lab)
    assert not left_out and found.status == OK
    assert "ulysses, wire fp8 as ring 2 x ulysses 4 (wan21-t2v)" in found.text
    lab.ranks = 7
    *_, found = doctor_steps.waits(lab)
    assert found.status == OK
    assert found.text.startswith("pipefusion M=7, wan21-t2v and qwen-image and z-image-turbo: not possible")


def test_a_hybrid_whose_ranks_hung_is_not_watched():
    lab = Ranks()
    lab.ranks = 8
    hybrid = ParallelConfig(ulysses_degree=4, ring_degree=2, wire="fp8")
    lab.hung.note(hybrid)
    *_, found = doctor_steps.waits(lab)
    assert "ulysses, wire fp8 as ring 2 x ulysses 4" in lab.skipped
    assert found.status == WARNING and "ring 2 x ulysses 4, whose ranks hung before" in found.text


def test_a_method_that_hangs_takes_no_other_with_it(monkeypatch, tmp_path):
    """In benchmarks/waits.py, which runs all in one group of ranks."""
    lab = Ranks()
    every = doctor_runs.methods(2)
    lab.hung.note(every["ring"])
    lab.hung.note(every["ring, FSDP"])
    found = list(doctor_steps.waits(lab))
    skipped = ["ring", "ring, wire fp8", "ring, FSDP"]
    assert lab.skipped == skipped and found[-1].status == WARNING and "ring" in found[-1].text
    ran = []
    monkeypatch.setattr(waits, "watch", lambda config, *_: ran.append(config) or None)
    monkeypatch.setattr(waits.mesh, "build", lambda *_: None)
    monkeypatch.setattr(waits.mesh, "close", lambda groups: None)
    waits.write_models(tmp_path)
    waits.rank(2, "cpu", tmp_path, lambda found: None, skipped=(*skipped, "cfg"))
    assert ran and not [each for each in ran if each.ring_degree > 1 or each.cfg_degree > 1]


def test_torchs_own_warning_is_a_wait():
    """Of the library that is installed, where it was built with CUDA; the words are torch's."""
    assert waits.is_wait(
        "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:6)"
    )
    assert not waits.is_wait("TypedStorage is deprecated")


def test_the_steady_state_alone_is_watched(tmp_path):
    path = tiny.write_checkpoint(tmp_path / "flux-dev.safetensors")
    sample = doctor_requests.in_steps(tiny.golden_request("euler_simple")[0], 4)
    seen = waits.watch(ParallelConfig(), mesh.single(), path, sample)
    assert seen == {"steps": 2, "waits": {}}  # of four, without the first and the warm-up step


def test_the_chart_has_what_was_timed(tmp_path):
    timed = doctor_findings.Finding("speed", OK, "", {"method": "ulysses", "speedup": 1.7})
    assert not doctor_steps.chart([doctor_findings.Finding("disk", OK, "")], tmp_path / "none.png")
    assert doctor_steps.chart([timed], tmp_path / "speeds.png") and (tmp_path / "speeds.png").stat().st_size
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("family", doctor_steps.SHAPES[1:])
def test_a_released_model_is_timed_with_few_blocks(family):
    cls, arguments = released_sizes.arguments_of(family, doctor_sizes.BLOCKS)
    with torch.device("meta"):
        model = cls(**arguments)
    whole = released_sizes.checkpoint_of(family)
    assert {name for name, _ in model.named_parameters()} < set(whole.parameters)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert all(whole.shapes[name] == shape for name, shape in shapes.items())
    sample = released_sizes.random_request(family)
    assert sample.tensors["noise"].is_contiguous() and sample.tensors["noise"].std() > 0.9


class Kernels:
    """A GPU on which benchmarks/kernels.py has these rows, and may end early."""

    device = "cuda"

    def __init__(self, distance, ended=ENDED, failed=False):
        self.ended = ended
        self.run = {"seconds": 0.001, "distance": distance, "own": True}
        if failed:
            self.run = {"failed": "RuntimeError: no kernel image is available"}

    def kernel_rows(self, kernel, head_sizes):
        cases = [{"kernel": kernel, "head_size": size, "masked": False} for size in head_sizes]
        return [{**cases[0], **self.run}, {**cases[1], "unavailable": "no such heads"}], self.ended


@pytest.mark.parametrize(
    "lab, statuses, says",
    [
        (Kernels(1e-3), [OK], "256 not possible"),
        (Kernels(0.5), [PROBLEM], "5e-01 off"),
        (Kernels(float("nan")), [PROBLEM], "nan off"),
        (Kernels(1e-3, Ended(-11, 1.0)), [OK, PROBLEM], "flash-attn, after heads of 256: signal 11"),
        (Kernels(0, failed=True), [PROBLEM], "64 failed (RuntimeError: no kernel image is available)"),
    ],
    ids=["right", "wrong", "no numbers", "a crash", "a failure"],
)
def test_kernels_are_told_by_head_size(lab, statuses, says):
    found = list(doctor_kernels._head_sizes(lab, "flash-attn", (64, 256)))
    assert [each.status for each in found] == statuses and says in found[-1].text


@pytest.mark.parametrize("head_size", kernels.HEAD_SIZES)
def test_torchs_kernel_runs_on_every_head_size_and_with_a_mask(head_size):
    for masked in (False, True):
        row = kernels.row("sdpa", "cpu", head_size, masked)
        assert row["seconds"] > 0 and row["distance"] < 1e-5 and row["own"]
        q, k, v, mask = kernels.inputs("cpu", head_size, masked)
        assert masked == (mask is not None and not mask.all())
    assert "unavailable" in kernels.row("flash-attn", "cpu", head_size, False)


def test_kernels_run_on_the_head_sizes_of_released_models():
    """Also on those that are no power of two, which kernels pad or lack."""
    sizes = {}
    for family in ("pixart-sigma", "hunyuan-dit", "lumina2", "flux-dev", "ideogram4"):
        shape = shape_of(released_sizes.checkpoint_of(family), torch.bfloat16)
        sizes[family] = shape.width // shape.heads
    assert sizes["pixart-sigma"] == 72 and set(sizes.values()) <= set(kernels.HEAD_SIZES)


@pytest.mark.parametrize(
    "distance, notes, status", [(0.0, [], OK), (1.0, [], PROBLEM), (0.0, ["x"], WARNING)]
)
def test_compiled_blocks_are_compared_with_eager_ones(distance, notes, status):
    class Lab:
        device, ranks, is_short = "cpu", 1, False

        def check(self):
            """In time."""

        def flux(self):
            return "flux"

        def request(self, path, steps):
            return steps

        def step_seconds(self, config, path, request):
            return (0.5 if config.compile == "blocks" else 1.0), doctor_lab.Run(torch.ones(4), 1.0)

        def run(self, config, path, sample):
            is_compiled = config.compile == "blocks"
            said = [f"blocks run uncompiled: {note}" for note in notes]
            return doctor_lab.Run(torch.ones(4) + distance * is_compiled, 1.0, {}, {"notes": said})

    (found,) = doctor_kernels.compiled(Lab())
    assert found.status == status and found.values["eager"] == 2 * found.values["seconds"]
