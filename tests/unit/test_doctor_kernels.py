"""What scripts/doctor.py --full says of attention kernels in rings."""

import doctor_kernels
import doctor_lab
import pytest
import torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_stubs import StubLab

from backend.config import CHOICES
from backend.parallel.kernel_table import KERNELS
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


@pytest.mark.parametrize("wrong", ["", "sdpa", "flash-attn", "sage"])
def test_kernels_with_a_log_sum_exp_run_in_a_ring(wrong):
    lab = RingLab(wrong)
    found = [each for each in doctor_kernels.kernels(lab) if "in a ring" in each.text]
    assert lab.rings == ["sdpa", "flash-attn", "sage"] == [each.values["kernel"] for each in found]
    assert set(lab.rings) <= {name for name in CHOICES["attention"][1:] if KERNELS[name].lse}
    assert [each.status for each in found] == [PROBLEM if name == wrong else OK for name in lab.rings]
    for each in found:
        if each.status == PROBLEM:
            other = f"set attention to another kernel than {wrong} where ring_degree is above 1"
            remedy = "choose another method in Parallel Config" if wrong == "sdpa" else other
            assert each.text.endswith("report it, with the file of --json") and remedy in each.text


@pytest.mark.parametrize("ranks, failed, said", [(1, False, []), (2, True, [WARNING])])
def test_no_ring_without_links(ranks, failed, said):
    lab = RingLab()
    lab.ranks, lab.links_failed = ranks, failed
    found = [each for each in doctor_kernels.kernels(lab) if "ring" in each.text]
    assert not lab.rings and [each.status for each in found] == said
