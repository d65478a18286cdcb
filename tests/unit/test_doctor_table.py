"""The table that ends scripts/doctor.py --full."""

import sys

import doctor
import doctor_table
from doctor_stubs import StubLab, full_findings


def test_the_table_has_every_method_that_was_timed(capsys):
    found = full_findings(StubLab())
    rows = {tuple(row[:3]): row[3:] for row in doctor_table.rows(found)}
    assert rows["speed", "flux-dev", "ulysses"] == ["0.5000", "2.00", "0.50", ""]
    assert rows["speed", "flux-dev", "one rank"] == ["1.0000", "", "", ""]
    assert rows["shapes", "wan21-t2v, int8_tensorwise", "pipefusion M=2"] == ["0.5000", "2.00", "", ""]
    with_lora = "flux-dev, int8 with a LoRA"
    assert rows["fp8 and int8", with_lora, "pipefusion M=2"] == ["0.5000", "2.00", "", ""]
    assert rows["shapes", "minimax-h3", "ulysses"] == ["0.5000", "2.00", "", ""]
    assert rows["compiled", "flux-dev", "one rank, compiled"] == ["1.0000", "", "", ""]
    assert rows["quantized", "small Flux, int8_tensorwise", "weight only"] == ["1.0000", "", "", ""]
    assert rows["kernels", "flux-dev", "sdpa"] == ["1.0000", "", "", ""]
    assert rows["overhead", "flux-dev", "1.010 x plain loop"] == ["", "", "", ""]
    assert rows["speed", "flux-dev", "ceiling, 2 latents"][1] == "4.00"
    assert rows["speed", "flux-dev", "tp"][-1] == "problem"  # whose images are wrong
    assert rows["compiled", "flux-dev", "one rank, eager"] == ["1.0000", "", "", ""]
    assert rows["quantized", "small Flux, bf16", "one rank"] == ["1.0000", "", "", ""]
    timed = {each.check for each in found if "seconds" in each.values and each.check not in ("life", "links")}
    assert {check for check, _, _ in rows} == timed
    doctor.conclude(found, doctor.options(["--full"]))
    shown, _, rest = capsys.readouterr().out.strip().partition("\n\n")
    assert len(shown.splitlines()) == len(doctor_table.rows(found)) + 2
    assert shown.split()[0] == "check" and max(map(len, shown.splitlines())) <= doctor.COLUMNS
    assert " problems, " in rest


def test_nothing_timed_is_no_table_and_no_benchmarks_no_traceback(monkeypatch, capsys):
    found = full_findings(StubLab(), "--only", "links,methods")
    doctor.tabulate(found)
    monkeypatch.setitem(sys.modules, "report", None)  # importing it fails
    doctor.tabulate(full_findings(StubLab(), "--only", "speed"))
    assert capsys.readouterr().out == ""
