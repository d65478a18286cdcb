"""What scripts/doctor.py says of steady steps: their waits, their seconds at released shapes, the chart."""

import doctor_checks
import doctor_lab
import doctor_steps
import pytest
import released_sizes
import tiny
import torch
import waits
from doctor_checks import OK, WARNING

from backend.config import ParallelConfig
from backend.parallel import mesh


class Ranks:
    """Ranks that wait in one line."""

    device = "cpu"

    def waits(self):
        return [{"method": "ulysses", "family": "flux-dev", "steps": 2, "waits": {"stage.py:7": 3}}]


@pytest.mark.parametrize(
    "device, status, says", [("cpu", OK, "only CUDA"), ("cuda", WARNING, "stage.py:7 (ulysses")]
)
def test_waits_are_named_with_their_line(device, status, says):
    lab = Ranks()
    lab.device = device
    (found,) = doctor_steps.waits(lab)
    assert found.status == status and says in found.text


def test_torchs_own_warning_is_a_wait():
    """Of the library that is installed, where it was built with CUDA; the words are torch's."""
    assert waits.is_wait(
        "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:6)"
    )
    assert not waits.is_wait("TypedStorage is deprecated")


def test_steady_steps_alone_are_watched(tmp_path):
    path = tiny.write_checkpoint(tmp_path / "flux-dev.safetensors")
    sample = doctor_lab.in_steps(tiny.golden_request("euler_simple")[0], 4)
    seen = waits.watch(ParallelConfig(), mesh.single(), path, sample)
    assert seen == {"steps": 2, "waits": {}}  # of four, without the first and the warm-up step


def test_the_chart_has_what_was_timed(tmp_path):
    timed = doctor_checks.Finding("speed", OK, "", {"method": "ulysses", "speedup": 1.7})
    assert not doctor_steps.chart([doctor_checks.Finding("disk", OK, "")], tmp_path / "none.png")
    assert doctor_steps.chart([timed], tmp_path / "speeds.png") and (tmp_path / "speeds.png").stat().st_size
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("family", doctor_steps.SHAPES)
def test_a_released_model_is_timed_with_few_blocks(family):
    cls, arguments = released_sizes.arguments_of(family, doctor_lab.BLOCKS)
    with torch.device("meta"):
        model = cls(**arguments)
    whole = released_sizes.checkpoint_of(family)
    assert {name for name, _ in model.named_parameters()} < set(whole.parameters)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert all(whole.shapes[name] == shape for name, shape in shapes.items())
    sample = released_sizes.random_request(family)
    assert sample.tensors["noise"].is_contiguous() and sample.tensors["noise"].std() > 0.9
