"""The minutes of scripts/doctor.py --full on GPUs that are slower than those of its estimates."""

import importlib.util
import re

import doctor
import doctor_hangs
import doctor_lab
import doctor_quantized_ranks
import doctor_runs
import doctor_time
import pytest
from doctor_sizes import SIZES
from doctor_stubs import StubLab, Time, full_findings
from doctor_time import Clock

from backend.config import ParallelConfig

#: File -> TFLOP of a step, as far as it is not the mid-size Flux'.
TFLOP = {"wan21-t2v": 83.0, "minimax-h3": 36.0, "flux": 19.0, "flux-dev": 19.0}


@pytest.fixture
def time(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_quantized_ranks, "_written_lora", lambda lab: tmp_path)
    found = Time()
    for module in (doctor_time, doctor_lab, doctor_hangs):
        monkeypatch.setattr(module, "time", found)
    return found


class GpuLab(StubLab):
    """GPUs that take so many seconds for a step of the mid-size Flux, half one for a tiny model, six to start
    and two for another method."""

    device = "cuda"

    def __init__(self, time, step, minutes=10.0):
        super().__init__()
        Clock.__init__(self, minutes)
        self.time, self.step, self.config, self.made = time, step, None, {}

    def cached(self, key, make):
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def run(self, config, path, sample, dtype="default", matmul="auto", loras=(), steps=2):
        self.check()
        if self.config is None or self.config.topology() != config.topology():
            is_start = self.config is None or self.config.world_size != config.world_size
            self.time.seconds += 6.0 if is_start else 2.0
            self.config = config
        flux = self.step * steps / config.world_size
        is_tiny = self.part in ("one rank", "methods")
        self.time.seconds += 0.5 if is_tiny else flux * TFLOP.get(path.name, 9.3) / 19
        return StubLab.run(self, ParallelConfig(), path, sample, dtype, "auto", loras)

    def step_seconds(self, config, path, request, steps=None, **how):
        few, many = steps or SIZES["cuda"].steps
        run = self.run(config, path, request(2), steps=4 * few + 2 * many, **how)
        return self.step / config.world_size, run

    def fresh(self):
        self.config = None


def of_gpus(time, step, minutes, only=""):
    """Return what is found on GPUs of such a step, on a clock of its own."""
    time.seconds = 0.0
    lab = GpuLab(time, step, minutes)
    return full_findings(lab, "--minutes", str(minutes), "--only", only)


def told(found):
    """Return what is said of the minutes, at the start and once a step is timed."""
    return [each for each in found if "fitting" in each.values]


#: TFLOP/s in bf16 of data sheets, with sums in float32.
H200 = 989.0
TFLOPS = {"RTX 4090": 165.0, "RTX 3090": 71.0, "RTX 5060 Ti": 47.0}
STEPS = {card: doctor_time.STEP_SECONDS * H200 / rate for card, rate in TFLOPS.items()}


@pytest.mark.parametrize("card", TFLOPS)
def test_the_page_says_how_many_minutes_slower_gpus_need(card):
    """After 20 s of imports and quick checks."""
    minutes = doctor_time.minutes_of(doctor_runs.RUNS, 20.0, 2, STEPS[card])
    page = " ".join((doctor.ROOT / "docs" / "performance.md").read_text().split())
    assert f"{minutes} on two {card}" in page
    others = doctor_time.in_order(doctor_runs.RUNS, 10.0, 20.0, 2, STEPS[card]).others
    said = f"Ten minutes on two {card} have time for all but {' and '.join(others)}"
    assert said in page if card == "RTX 4090" else len(others) > 2


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_minutes_that_are_said_to_have_time_for_all_have(time, step):
    """Once a step is timed; those that the start names are an H200's."""
    first, again = told(of_gpus(time, step, 10))
    assert "on GPUs like an H200; what yours need is said after speed of one rank" in first.text
    assert f"{step / doctor_time.STEP_SECONDS:.1f} times as long as on an H200" in again.text
    assert {"shapes", "compiled"} <= {*again.values["others"], *again.values["short"]}
    needed = [int(re.search(r"--minutes (\d+) has time for all", each.text)[1]) for each in (first, again)]
    assert needed[1] > needed[0] == doctor_time.minutes_of(doctor_runs.RUNS)
    whole = of_gpus(time, step, needed[1])
    assert not [each.text for each in whole if "not run" in each.text]
    assert told(whole)[1].values["others"] == told(whole)[1].values["short"] == []


def test_an_h200s_minutes_stay_as_they_were_said(time):
    first, again = told(of_gpus(time, doctor_time.STEP_SECONDS * 1.001, 18))
    assert not any(each.values[key] for each in (first, again) for key in ("others", "short"))
    assert "1.0 times as long" in again.text and "may be short" not in again.text


#: What is said of what the shorter form of a check leaves out.
SHORTER = "in its shorter form, without "


def texts(found):
    return [each.text for each in found if each.check != "full"]


def of_share(time, check, share):
    """Return what a check finds on slow GPUs in this share of the minutes that it takes, and in all."""
    whole = of_gpus(time, 0.4, 60, check)
    return of_gpus(time, 0.4, share * time.seconds / 60, check), whole


@pytest.mark.parametrize("check", ["quantized", "fp8 and int8", "shapes", "kernels"])
@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_everything_that_is_left_out_is_named(time, monkeypatch, check, share):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # gguf
    found, whole = map(texts, of_share(time, check, share))
    every = {text.partition(":")[0] for text in whole}
    ran = {text.partition(":")[0] for text in found if "not run" not in text and SHORTER not in text}
    left_out = " ".join(text for text in found if "not run" in text or SHORTER in text)
    assert ran < every and "not run" not in str(whole)
    for what in every - ran:
        named = [what, what.partition(" (")[0], what.partition(", ")[0], what.partition(" ")[0]]
        assert any(name in left_out for name in named), (what, left_out)


def test_quantized_files_are_compared_on_all_ranks_first(time, monkeypatch):
    """What one GPU tells comes after it, in the whole form too."""
    monkeypatch.setattr(doctor_time, "SHORT_SECONDS", {})
    found, whole = of_share(time, "quantized", 0.8)
    ran, every = (
        [each for each in some if {"fp32", "seconds"} & set(each.values)] for some in (found, whole)
    )
    kinds = ["fp32" in each.values for each in every]
    assert kinds == sorted(kinds, reverse=True) and len(set(kinds)) == 2
    assert sum(kinds) <= len(ran) < len(every)


def test_bf16_of_all_ranks_comes_before_another_format_on_one(time):
    found, _ = of_share(time, "shapes", 0.5)
    of_wan = [each.values["method"] for each in found if each.text.startswith("wan21-t2v,") and each.values]
    assert of_wan[:3] == [f"wan21-t2v, {name}" for name in ("one rank", "ulysses", "pipefusion M=2")]
    assert all("speedup" in each.values for each in found if "wan21-t2v, ulysses" in each.text)
