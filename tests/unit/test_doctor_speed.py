"""What scripts/doctor.py --full compares of what it times."""

import math
from dataclasses import replace
from functools import partial

import doctor_flux_files
import doctor_lab
import doctor_links
import doctor_memory
import doctor_runs
import doctor_speed
import doctor_steps
import pytest
import torch
from doctor_findings import OK, PROBLEM, WARNING
from doctor_stubs import StubLab

from backend.config import ParallelConfig
from backend.loading.load_report import LoadReport

METHODS = {
    "exact": ParallelConfig(ulysses_degree=2),
    "stale": ParallelConfig(pipefusion_degree=2, num_pipeline_patch=2),
    "fp8": ParallelConfig(ring_degree=2, wire="fp8"),
}


class TimedLab(StubLab):
    """Ranks that are twice as fast in steady state, and whose latents are off."""

    def __init__(self, device, off):
        super().__init__()
        self.device, self.off = device, off

    def step_seconds(self, config, path, request, steps=None):
        if config.world_size == 1:
            return 1.0, doctor_lab.Run(torch.ones(4), 3.0, timed=[4.0, 3.0, 6.0, 7.0])
        return 0.5, doctor_lab.Run(torch.ones(4) * (1 + self.off), 2.5, timed=[2.5, 3.0, 4.0, 4.5])


CASES = [
    ("exact", "cpu", 1e-6, OK),
    ("exact", "cpu", 1e-3, PROBLEM),
    ("exact", "cuda", 1e-3, OK),
    ("exact", "cuda", 1e-1, PROBLEM),
    ("exact", "cuda", math.nan, PROBLEM),
    ("stale", "cuda", 1e-1, OK),
    ("stale", "cuda", math.nan, PROBLEM),
    ("fp8", "cpu", 5e-2, OK),
    ("fp8", "cuda", 0.5, PROBLEM),
]


@pytest.mark.parametrize("method, device, off, status", CASES)
def test_what_is_timed_is_compared_with_one_rank(method, device, off, status):
    lab, config = TimedLab(device, off), METHODS[method]
    speed = doctor_speed._speed(lab, method, config, 1.8)
    one = {"bf16": lab.step_seconds(ParallelConfig(), None, None)}
    shape = doctor_steps._shape(lab, method, config, "bf16", lab.flux(), lab.request, "tiny", one)
    for found in (speed, shape):
        assert found.status == status, found.text
        assert found.values["distance"] == (pytest.approx(off, rel=0.1) if off == off else math.inf)


def test_whole_requests_are_reported_next_to_the_steady_state():
    """PipeFusion's warm-up, fill and drain are in them."""
    lab = TimedLab("cpu", 0.0)
    found = doctor_speed._speed(lab, "pipefusion M=2", METHODS["stale"], 1.8)
    assert "(whole requests of 2 steps 1.20 times, of 5 steps 1.50 times)" in found.text
    assert found.values["whole_requests"] == {"2": 1.2, "5": 1.5}


def unlike(names, speeds):
    """Return rates of GPUs of these names and speeds."""
    return replace(StubLab().machine(), names=names, speeds=speeds)


class UnlikeLab(TimedLab):
    """Two GPUs of which the first is three times as fast: of equal parts the second decides."""

    def __init__(self, names, speeds=(3.0, 1.0)):
        super().__init__("cuda", 0.0)
        self.rates = unlike(names, speeds)

    def step_seconds(self, config, path, request, steps=None):
        seconds = 3.0 if config.data_parallel_degree > 1 else 1.5 if config.world_size > 1 else 1.0
        seconds = 0.8 if config.shares else seconds
        return seconds, replace(super().step_seconds(config, path, request)[1], timed=[])


MIXED, THROTTLED = ("RTX 4090", "RTX 3060"), ("RTX 4090", "RTX 4090")


@pytest.mark.parametrize("names", [MIXED, THROTTLED])
@pytest.mark.parametrize("is_short", [True, False])
def test_the_ceiling_of_unlike_gpus_is_that_of_their_speeds(names, is_short):
    """Not that of latents at once, of which the slower GPU has the last: 0.67 of the first GPU alone."""
    lab = UnlikeLab(names)
    lab.short = frozenset([lab.part] if is_short else [])
    found = {each.values["method"]: each for each in doctor_speed.speed(lab)}
    assert found["ceiling"].values["speedup"] == pytest.approx(4 / 3)
    assert found["ceiling"].values["at_once"] == pytest.approx(2 / 3)
    (shares,) = [each for name, each in found.items() if name.startswith("ulysses, shares")]
    assert shares.values["of_ceiling"] == pytest.approx(1.25 * 3 / 4)


@pytest.mark.parametrize(
    "names, status, says", [(MIXED, OK, "slower GPU"), (THROTTLED, WARNING, "see links")]
)
def test_a_card_that_is_slowed_down_is_no_excuse(names, status, says):
    found = doctor_speed._speed(UnlikeLab(names), "ulysses", METHODS["exact"], 1.8)
    assert found.status == status and says in found.text
    lab = TimedLab("cuda", 0.0)
    lab.machine = partial(unlike, names, (3.0, 1.0))
    (line,) = [each for each in doctor_links.links(lab) if "GPUs differ" in each.text]
    assert line.status == status and f"{names[0]} 3.00x" in line.text
    lab.machine = partial(unlike, THROTTLED, (1.05, 1.0))
    assert not [each for each in doctor_links.links(lab) if "GPUs differ" in each.text]


def fp8(multiplication):
    """Return what a load says of a file in fp8, on two ranks."""
    layers = [{"format": "float8_e4m3fn", "layers": 76, "bytes": 10**9, "multiplication": multiplication}]
    ranks = [
        LoadReport(rank, 0, (0, 10), 10**9, 2 * 10**9, 9 * 10**8, 10**9, 3.5 + rank).as_dict()
        for rank in range(2)
    ]
    return {"quantized": layers, "ranks": ranks}


class Fp8Lab(TimedLab):
    """Ranks of which one multiplies natively, and two as the older of two GPUs can."""

    def step_seconds(self, config, path, request, steps=None, **how):
        seconds, run = super().step_seconds(config, path, request)
        own = "native" if config.world_size == 1 or not self.off else "weight only (compute capability 8.6)"
        return seconds, replace(run, info=fp8(own))


@pytest.mark.parametrize("off, says", [(0.0, False), (1e-3, True)])
@pytest.mark.parametrize("check", ["fp8 and int8", "shapes"])
def test_files_say_how_their_layers_multiply_and_what_loads_cost(check, off, says):
    """Of unlike GPUs all ranks multiply otherwise than one."""
    lab, one = Fp8Lab("cuda", off), {}
    for config in (ParallelConfig(), METHODS["exact"]):
        if check == "shapes":
            arguments = ("ulysses", config, "float8_e4m3fn", lab.flux(), lab.request, "tiny", one)
            found = doctor_steps._shape(lab, *arguments)
        else:
            request = partial(lab.request, lab.flux())
            arguments = ("ulysses", config, "float8_e4m3fn", lab.flux(), [], request, "tiny", one)
            found = doctor_flux_files._timed(lab, *arguments)
        assert found.values["layers"][0]["layers"] == 76
        assert [each["seconds"] for each in found.values["load"]] == [3.5, 4.5]
        assert set(found.values["load"][0]) == set(doctor_lab.LOADED)
    assert found.status == OK and says == ("multiply otherwise (float8_e4m3fn weight only" in found.text)


def test_fsdp_is_timed_and_measured(monkeypatch):
    lab, measured = TimedLab("cpu", 0.0), []
    monkeypatch.setattr(
        doctor_memory, "_memory", lambda lab, name, config: measured.append(config.shard_weights) or []
    )
    timed = [found.values["method"] for found in doctor_speed.speed(lab)]
    assert "FSDP" in timed
    list(doctor_memory.memory(lab))
    assert measured == [False, False, False, True]  # tensor parallelism before it


def test_hybrids_of_pipefusion_run_with_several_patches_too(monkeypatch):
    """Of one family, since stale keys and values tell little."""
    found = doctor_runs.methods(4)
    pairs = {name for name in found if " x " in name and "pp 2" in name}
    assert {name for name in pairs if found[name].has_stale_kv} == {
        f"{name} M=2" for name in pairs if not found[name].has_stale_kv
    }
    lab, ran = StubLab(), []
    lab.ranks = 4
    monkeypatch.setattr(doctor_runs, "reference", lambda *_: None)
    monkeypatch.setattr(
        doctor_runs, "_method", lambda lab, name, config, family, halves: ran.append((name, family)) or []
    )
    list(doctor_runs.all_methods(lab))
    assert [family for name, family in ran if name == "cfg 2 x pp 2 M=2"] == ["flux-dev"]
    assert len([name for name, _ in ran if name == "cfg 2 x pp 2"]) == len(doctor_runs.FAMILIES)
