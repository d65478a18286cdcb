"""What scripts/doctor.py --full says of quantized files on all ranks."""

import doctor_lab
import doctor_quantized_ranks
import pytest
import torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_next import advised
from doctor_sizes import SIZES
from doctor_stubs import StubLab
from safetensors import safe_open

from backend.config import ParallelConfig
from backend.protocol import Loaded, RefusedError


class QuantizedLab(StubLab):
    """Ranks whose tensor parallelism may be off, and which may ignore a LoRA."""

    def __init__(self, folder, wrong=0.0, lora=0.1):
        super().__init__()
        self.folder, self.wrong, self.lora = folder, wrong, lora

    def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
        if why := self.refusal(path, config):
            raise RefusedError(why)
        assert (dtype, matmul) in (("fp32", "weight only"), ("bf16", "auto"))
        off = self.wrong if config.tensor_parallel_degree > 1 and bool(loras) == (dtype == "fp32") else 0.0
        off += 1e-3 if dtype == "bf16" else 0.0
        off += self.lora if loras else 0.0
        return doctor_lab.Run(torch.ones(4) * (1 + off), 1.0)


@pytest.mark.parametrize(
    "wrong, lora, wanted",
    [
        (0.0, 0.1, set()),
        (1e-2, 0.1, {(False, "tensor parallel"), (True, "tensor parallel")}),
        (0.0, 0.0, {(True, name) for name in doctor_quantized_ranks.methods(2)}),
    ],
    ids=["right", "wrong bf16 and LoRA", "a LoRA without effect"],
)
def test_a_quantized_file_is_compared_with_one_rank(tmp_path, wrong, lora, wanted):
    lab = QuantizedLab(tmp_path, wrong, lora)
    found = list(doctor_quantized_ranks.on_all_ranks(lab, ("Q8_0",)))
    assert len(found) == 8 and {each.status for each in found} <= {OK, PROBLEM}
    problems = {(each.values["lora"], each.values["method"]) for each in found if each.status == PROBLEM}
    assert problems == wanted
    for each in found:
        if each.status == PROBLEM:
            remedy = "choose another method in Parallel Config" if lora else "the LoRA is not applied"
            assert remedy in each.text and advised(each).text == each.text


@pytest.mark.parametrize(
    "ranks, wanted",
    [
        (2, set()),
        (3, {"tensor parallel as tp 3 by rows"}),
        (5, {"tensor parallel as tp 5 by rows"}),
        (6, {"tensor parallel as ring 3 x tp 2"}),
        (8, set()),
    ],
)
def test_tensor_parallelism_that_divides_no_heads_has_a_hybrid(monkeypatch, tmp_path, ranks, wanted):
    """Of 16 heads, as on GPUs. Nothing is left out."""
    monkeypatch.setattr(doctor_quantized_ranks, "_written_lora", lambda lab: tmp_path)
    lab = QuantizedLab(tmp_path)
    lab.ranks, lab.size = ranks, SIZES["cuda"]
    found = list(doctor_quantized_ranks.on_all_ranks(lab, ("Q8_0", "int8_tensorwise")))
    ran = {each.values["method"] for each in found if "fp32" in each.values}
    assert {name for name in ran if " as " in name} == wanted
    assert len(ran) == 4 and len(found) == 2 * 2 * 4 and {each.status for each in found} == {OK}


def test_other_kernels_may_add_in_another_order(tmp_path):
    """No native product does: float32 runs are weight only."""
    lab = QuantizedLab(tmp_path, 1e-4)
    lab.device = "cuda"
    found = list(doctor_quantized_ranks.on_all_ranks(lab, ("Q8_0",)))
    (off,) = [each for each in found if each.status == WARNING]
    assert (off.values["lora"], off.values["method"]) == (True, "tensor parallel")
    assert "other kernels of GPUs may explain it: report it" in off.text and advised(off).text == off.text


def test_links_that_failed_are_not_waited_for(tmp_path):
    lab = QuantizedLab(tmp_path)
    lab.links_failed = True
    (found,) = doctor_quantized_ranks.on_all_ranks(lab, ("Q8_0",))
    assert found.status == WARNING and "links failed" in found.text


def test_the_lora_is_loaded_next_to_the_file(monkeypatch, tmp_path):
    """On every matrix of the blocks, also on those that tensor parallelism cuts."""
    asked = []

    class Ranks:
        closed = process = None

        def load(self, path, dtype, **how):
            asked.append(how)
            return Loaded("with lora", "flux")

        def sample(self, message, should_cancel):
            assert message.model == "with lora"
            return type("Result", (), {"tensors": {"samples": torch.ones(2)}, "stats": {}})

    lab = doctor_lab.Lab("cpu", 2, 10.0)
    monkeypatch.setattr(lab, "backend", lambda config: Ranks())
    monkeypatch.setattr(lab, "quantized", lambda kind: tmp_path / kind)
    doctor_quantized_ranks._run(lab, ParallelConfig(), "Q8_0", "fp32", True)
    (((path, strength),),) = [how["loras"] for how in asked]
    with safe_open(path, "pt") as file:
        keys = set(file.keys())
    assert 0 < strength < 1 and "diffusion_model.single_blocks.9.linear1.lora_up.weight" in keys
    lab.close()
