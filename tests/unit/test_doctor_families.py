"""The families that the check "methods" of scripts/doctor.py --full runs with one method each."""

from itertools import groupby

import doctor
import doctor_degrees
import doctor_families
import doctor_lab
import doctor_runs
import doctor_time
import families
import pytest
import torch
from doctor_families import ONCE
from doctor_findings import OK, PROBLEM, WARNING, findings
from doctor_stubs import StubLab, Time

RANKS = (2, 3, 4, 5, 6, 7, 8)


class Right(StubLab):
    """Ranks that compute what ComfyUI does."""

    def run(self, config, path, sample, dtype="default", **how):
        return doctor_lab.Run(torch.ones(1, 4), 1.0)


class Slow(Right):
    """Whose requests for some models take so many seconds of ``time``."""

    def __init__(self, time, seconds, models):
        super().__init__()
        self.time, self.seconds, self.models = time, seconds, models

    def run(self, config, path, sample, dtype="default", **how):
        self.time.seconds += self.seconds * (path.name in self.models)
        return super().run(config, path, sample)


@pytest.fixture
def time(monkeypatch):
    clock = Time()
    monkeypatch.setattr(doctor_time, "time", clock)
    return clock


def methods_of(lab):
    return list(findings("methods", doctor_runs.all_methods, lab))


def test_every_golden_family_meets_the_ranks():
    assert sorted([*doctor_degrees.FAMILIES, *ONCE]) == sorted(families.LATENT_FORMATS)
    page = (doctor.ROOT / "docs" / "performance.md").read_text()
    assert f"each of the {len(ONCE)} other families with one method" in page


@pytest.mark.parametrize("ranks", RANKS)
def test_every_method_has_about_as_many_families_one_after_another(ranks):
    turns = doctor_families.once(ranks)
    assert list(turns) == list(ONCE)
    sizes = [len(list(group)) for _, group in groupby(turns.values())]
    assert len(sizes) == len(set(turns.values())) and max(sizes) - min(sizes) <= 1
    asked = doctor_degrees.methods(ranks)
    cut = {axis for name in turns.values() for axis, size in asked[name].degrees.items() if size > 1}
    assert cut == {"ulysses", "ring", "tp", "pp"} | ({"cfg"} if ranks % 2 == 0 else set())


@pytest.mark.parametrize("ranks", RANKS)
def test_every_family_runs_on_all_ranks(ranks):
    ran = []

    class Lab(Right):
        def run(self, config, path, sample, dtype="default", **how):
            ran.append((config.validate().world_size, path.name, dtype))
            assert not self.refusal(path, config)
            return super().run(config, path, sample)

    lab = Lab()
    lab.ranks = ranks
    found = [each for run in doctor_families.runs(lab).values() for each in run()]
    assert [(each.status, each.values["family"]) for each in found] == [(OK, family) for family in ONCE]
    assert ran == [(ranks, family, dtype) for family in ONCE for dtype in ("fp32", "bf16")]


def test_they_come_after_every_method_in_both_forms():
    for short in (frozenset(["methods"]), frozenset()):
        lab = Right()
        lab.short = short
        lab.begin("methods")
        ran = [each.values["family"] for each in methods_of(lab)]
        assert tuple(ran[-len(ONCE) :]) == ONCE and not set(ran[: -len(ONCE)]) & set(ONCE)


def test_the_shorter_form_runs_as_many_as_fit_and_names_the_others(time):
    lab = Slow(time, doctor_time.FAMILY_SECONDS, ONCE)
    lab.short = frozenset(["methods"])
    lab.begin("methods")
    lab.part_end = 3.5 * doctor_time.FAMILY_SECONDS
    found = methods_of(lab)
    assert {each.status for each in found} == {OK}
    once = [each for each in found if each.values["family"] in ONCE]
    assert [each.values["family"] for each in once] == list(ONCE[:3])
    assert [name for name in lab.left_out if name in ONCE] == list(ONCE[3:])
    assert all(each.values["bf16"] is None for each in once) and doctor_families.HALVES in lab.left_out


@pytest.mark.parametrize("is_short", [True, False])
def test_families_are_named_where_methods_themselves_have_no_time(time, is_short):
    lab = Slow(time, 1.0, doctor_degrees.FAMILIES)
    lab.short = frozenset(["methods"] if is_short else [])
    lab.begin("methods")
    lab.part_end = 20.0
    (late,) = [each for each in methods_of(lab) if each.status == WARNING]
    left_out = lab.left_out if is_short else late.text.partition(": ")[0].split("; ")
    assert set(ONCE) <= set(left_out) and '--only "methods"' in late.text


@pytest.mark.parametrize(
    "off, alone, status, says",
    [
        (1e-3, 0.0, OK, "1.0e-03 standard deviations from ComfyUI's latent"),
        (1e-2, 0.0, PROBLEM, "1.0e-02 from one rank"),
        (1e-2, 1e-2, PROBLEM, "0.0e+00 from one rank, so images of this GPU are off"),
        (float("nan"), 0.0, PROBLEM, "inf from one rank"),
    ],
)
def test_one_rank_tells_a_wrong_method_from_a_wrong_family(off, alone, status, says):
    class Lab(Right):
        def run(self, config, path, sample, dtype="default", **how):
            return doctor_lab.Run(torch.ones(1, 4) * (1 + (off if config.world_size > 1 else alone)), 1.0)

    lab = Lab()
    lab.short = frozenset([lab.part])
    found = doctor_families.compare(lab, "ulysses", "chroma")
    assert found.status == status and says in found.text, found.text


@pytest.mark.parametrize("off, status", [(0.1, OK), (0.3, PROBLEM)])
def test_stale_keys_and_values_may_be_farther_off(off, status):
    class Lab(Right):
        def run(self, config, path, sample, dtype="default", **how):
            return doctor_lab.Run(torch.ones(1, 4) * (1 + off * (config.world_size > 1)), 1.0)

    assert doctor_families.compare(Lab(), "pipefusion M=2", "sana").status == status


def test_latents_of_several_parts_are_compared_in_the_units_of_each():
    """ComfyUI scales MiniMax-H3's audio by another factor than its video."""
    lab = doctor_lab.Lab("cpu", 1, 1.0)
    sample, golden = families.golden("minimax-h3__euler_simple")
    samples = families.to_model_space("minimax-h3", golden, sample.latent_shapes)
    assert max(lab.distances_from_comfyui("minimax-h3", sample, samples, golden)) < 1e-5
    lab.close()
