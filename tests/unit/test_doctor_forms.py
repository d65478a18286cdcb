"""The shorter forms of checks of scripts/doctor.py --full."""

import doctor
import doctor_lab
import doctor_runs
import doctor_time
import kernels
import pytest
from doctor_findings import OK, findings
from doctor_stubs import StubLab, full_findings

#: Those that run the same names in both forms.
OF_SAME_NAMES = {"overhead", "overhead compiled", "waits"}


def run(lab, check, is_short):
    """What a check finds in one of its forms, ahead of which other checks may come."""
    lab.short = frozenset([check] if is_short else [])
    lab.begin(check)
    return list(findings(check, doctor_runs.RUNS[check], lab))


def labels(found):
    return {each.text.partition(":")[0] for each in found}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("check", sorted(doctor_time.SHORT_SECONDS.keys() - OF_SAME_NAMES))
def test_what_is_left_out_is_named(check, ranks):
    lab = StubLab()
    lab.ranks = ranks
    whole = labels(run(lab, check, is_short=False))
    assert not lab.left_out
    shorter = labels(run(lab, check, is_short=True))
    assert shorter and shorter < whole or check == "kernels" and shorter <= whole
    assert lab.left_out
    for label in whole - shorter:
        assert any(name.split()[0] in label for name in lab.left_out), label


def test_one_rank_is_told_of_no_other():
    lab = StubLab()
    lab.ranks = 1
    run(lab, "quantized", is_short=True)
    assert "int8_tensorwise on one rank" in lab.left_out and "all ranks" not in str(lab.left_out)
    run(lab, "compiled", is_short=True)
    assert not lab.left_out


@pytest.mark.parametrize("is_short", [True, False])
def test_programs_are_asked_for_less(is_short):
    asked = []

    class Lab(StubLab):
        def overhead(self, model, has_compiled, rounds):
            asked.append(rounds)
            return super().overhead(model, has_compiled, rounds)

        def waits(self, skipped, families):
            asked.append(len(families))
            return super().waits(skipped, families)

        def kernel_rows(self, kernel, head_sizes):
            asked.append(tuple(head_sizes))
            return super().kernel_rows(kernel, head_sizes)

    for check in ("overhead", "overhead compiled", "waits", "kernels"):
        run(lab := Lab(), check, is_short)
        assert bool(lab.left_out) == is_short, check
    sizes = (128,) if is_short else kernels.HEAD_SIZES
    assert asked[:3] == ([3, 3, 1] if is_short else [5, 5, 4]) and set(asked[3:]) == {sizes}


def test_shapes_start_ranks_once_for_all_families():
    ran = []

    class Lab(StubLab):
        def step_seconds(self, config, path, request, steps=None, **how):
            ran.append((config.world_size, path.name))
            return super().step_seconds(config, path, request, steps, **how)

    found = run(lab := Lab(), "shapes", is_short=True)
    families = ["wan21-t2v", "minimax-h3"]
    assert ran == [(ranks, family) for ranks in (1, 2, 2) for family in families]
    assert {each.status for each in found} == {OK}
    assert all("speedup" in each.values for each in found)
    assert ("released", "flux-dev", "int8_tensorwise") in lab.dropped  # of "fp8 and int8"


@pytest.mark.parametrize("minutes, longer", [(2.0, " --minutes 4"), (6.0, "")])
def test_the_rest_is_run_by_name(monkeypatch, minutes, longer):
    monkeypatch.setattr(StubLab, "planned", lambda lab, names: doctor_time.in_order(names, 1.0))
    found = full_findings(StubLab(minutes=minutes), "--only", "shapes")
    (told,) = [each for each in found if "in its shorter form, without" in each.text]
    assert told.check == "shapes" and told.text.endswith(f'; for these: --only "shapes"{longer}')
    assert "minimax-h3 float8_e4m3fn" in told.values["left_out"]


def test_families_in_bf16_are_left_out_where_the_whole_form_has_them():
    """On more ranks that runs bf16 of the first family alone, too."""
    for ranks, is_named in ((2, True), (3, False), (4, False)):
        lab = StubLab()
        lab.ranks = ranks
        run(lab, "methods", is_short=True)
        assert ("wan21-t2v in bf16" in lab.left_out) == is_named and "qwen-image" in lab.left_out


@pytest.mark.parametrize("minutes, step, longer", [(30.0, 0.6, True), (30.0, 0.05, False)])
def test_the_rest_is_told_the_minutes_that_its_command_needs(minutes, step, longer):
    """That has the default ones, whatever this run has."""
    lab = StubLab(minutes=minutes)
    lab.one_step = step
    enough = doctor_time.minutes_of(["shapes"], doctor_time.EARLIER_SECONDS, 2, step)
    text = doctor_runs._left_out(lab, "shapes").text
    assert doctor.options([]).minutes == doctor_time.DEFAULT_MINUTES
    assert (enough > doctor_time.DEFAULT_MINUTES) == longer
    assert text.endswith(f" --minutes {enough}" if longer else '--only "shapes"')


@pytest.mark.parametrize("check", ["speed", "overhead"])
def test_the_rest_has_the_minutes_of_every_check_that_its_name_selects(check):
    lab = StubLab(minutes=1.0)
    both = [name for name in doctor_runs.RUNS if name.startswith(check)]
    enough = doctor_time.minutes_of(both, doctor_time.EARLIER_SECONDS)
    assert len(both) == 2 and enough > doctor_time.minutes_of([check], doctor_time.EARLIER_SECONDS)
    assert doctor_runs._left_out(lab, check).text.endswith(f'--only "{check}" --minutes {enough}')


def test_a_timed_method_is_run_five_times(monkeypatch):
    """The latent is that of a timed request of few steps."""
    lab, steps = doctor_lab.Lab("cpu", 1, 10.0), []

    def run(config, path, sample, **how):
        steps.append(sample)
        return doctor_lab.Run(sample, float(sample) * len(steps))

    monkeypatch.setattr(lab, "run", run)
    _, found = lab.step_seconds(None, None, lambda steps: steps, steps=(2, 5))
    lab.close()
    assert steps == [2, 2, 2, 5, 5] and found.samples == 2
    assert found.timed == [4.0, 6.0, 20.0, 25.0]
