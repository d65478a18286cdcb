"""What scripts/doctor.py --full says of Flux.1's shapes in fp8 and int8."""

from dataclasses import replace

import doctor_flux_files
import doctor_lab
import pytest
import torch
from doctor_findings import OK, PROBLEM
from doctor_next import advised
from doctor_stubs import StubLab


class Timed(StubLab):
    """Ranks that are twice as fast as one, whose latents are off, and which may ignore a LoRA."""

    def __init__(self, off=0.0, lora=0.1):
        super().__init__()
        self.off, self.lora = off, lora
        self.asked = []

    def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
        off = self.off if config.world_size > 1 else 0.0
        return doctor_lab.Run(torch.ones(4) * (1 + off + (self.lora if loras else 0.0)), 1.0)

    def step_seconds(self, config, path, request, steps=None, loras=()):
        assert loras
        self.asked.append((steps, config.world_size))
        seconds = 1.0 / config.world_size
        run = self.run(config, path, request(2), loras=loras)
        return seconds, replace(run, timed=[4 * seconds] * 2 + [8 * seconds] * 2)


def test_every_file_is_timed_with_a_lora_in_few_steps():
    lab = Timed()
    found = list(doctor_flux_files.flux_files(lab))
    assert {each.status for each in found} == {OK}
    assert lab.asked == [((4, 8), size) for size in (1, 1, 2, 2, 2, 2)]  # ranks start once for both files
    by_name = {each.values["method"]: each for each in found}
    assert len(by_name) == 6
    one = by_name["flux-dev, int8 with a LoRA, one rank"]
    assert one.text.endswith("1.0000 s a step; the LoRA changes the latent by 1.0e-01")
    ulysses = by_name["flux-dev, fp8 with a LoRA, ulysses"]
    assert ulysses.values["speedup"] == 2.0 and ulysses.values["whole_requests"] == {"4": 2.0, "8": 2.0}
    assert "2.00 times one rank (whole requests of 4 steps 2.00 times, of 8 steps 2.00 times)" in ulysses.text


@pytest.mark.parametrize(
    "off, lora, wrong",
    [
        (0.3, 0.1, "ulysses"),  # keys and values of PipeFusion are stale
        (0.0, 0.0, "one rank"),
    ],
    ids=["other latents", "a LoRA without effect"],
)
def test_what_is_wrong_is_a_problem_with_a_next_step(off, lora, wrong):
    found = [each for each in doctor_flux_files.flux_files(Timed(off, lora)) if each.status == PROBLEM]
    assert [each.values["method"].rpartition(", ")[2] for each in found] == [wrong] * 2
    assert all(advised(each).text.count("report it") == 1 for each in found)
