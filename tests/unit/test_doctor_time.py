"""The minutes of scripts/doctor.py --full, on a clock that does not wait."""

import re
from itertools import product

import doctor
import doctor_hangs
import doctor_lab
import doctor_room
import doctor_runs
import doctor_time
import pytest
from doctor_findings import WARNING, OutOfTime
from doctor_hangs import HungError
from doctor_sizes import SIZES
from doctor_stubs import StubLab, Time, full_findings, machine

from backend.config import ParallelConfig
from backend.protocol import Loaded, Sample


@pytest.fixture
def time(monkeypatch):
    found = Time()
    monkeypatch.setattr(doctor_time, "time", found)
    monkeypatch.setattr(doctor_lab, "time", found)
    monkeypatch.setattr(doctor_hangs, "time", found)
    return found


class SlowLab(StubLab):
    """Ranks each of whose requests takes so many seconds."""

    def __init__(self, time, seconds):
        super().__init__()
        self.time, self.seconds = time, seconds
        self.ran = {}

    def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
        self.check()
        self.time.seconds += self.seconds
        self.ran[self.part] = self.ran.get(self.part, 0) + 1
        return StubLab.run(self, ParallelConfig(), path, sample, dtype, "auto", loras)

    def step_seconds(self, config, path, request, **how):
        for _ in range(5):
            self.run(config, path, request(2))
        return super().step_seconds(config, path, request)

    def fresh(self):
        """The ranks of nobody end."""


#: Checks that run requests by Lab.run, of a lab whose ranks are stand-ins.
OF_REQUESTS = (
    *("one rank", "speed of one rank", "speed", "methods"),
    *("compiled", "kernels", "quantized", "fp8 and int8", "shapes"),
)
#: Those whose findings have another name, or that need gguf.
UNSAID = {"speed of one rank", "dequantized once"}


@pytest.mark.parametrize("seconds", [0.5, 3.0, 9.0])
def test_full_ends_within_its_minutes_and_every_check_has_its_part(time, seconds):
    lab = SlowLab(time, seconds)
    chosen = doctor.options(["--full"])
    found = [(time.seconds, each) for each in doctor_runs.full(chosen, machine(), lab)]
    assert found[-1][0] <= 600 - doctor_time.CLOSING_SECONDS + seconds
    assert {each.check for _, each in found} - {"full"} >= set(doctor_runs.RUNS) - UNSAID
    if seconds < 1:
        assert set(lab.ran) >= set(OF_REQUESTS)
    assert set(lab.ran) >= set(OF_REQUESTS) & set(doctor_time.in_order(doctor_runs.RUNS, 10).fitting)
    if seconds > 1:
        left_out = [each for _, each in found if "minutes are over" in each.text]
        assert left_out and {each.status for each in left_out} == {WARNING}
        speed = [each.text for each in left_out if each.check == "speed"]
        assert any(
            "FSDP: not run: its" in text and 'to try it again: --only "speed"' in text for text in speed
        )


def test_what_one_check_does_not_use_others_have(time):
    clock = doctor_time.Clock(10.0)
    parts = {}
    names = doctor_time.in_order(doctor_runs.RUNS, 10.0).fitting
    for index, name in enumerate(names):
        clock.begin(name, names[index + 1 :])
        parts[name] = clock.part_seconds
    assert parts[names[-1]] == pytest.approx(580) and parts["links"] < 90
    clock.begin("links")
    assert clock.part_seconds == pytest.approx(580)  # of --only links


def test_estimates_and_the_default_agree(time, monkeypatch):
    """Every check has all of the estimate of its form, which is the shorter one of most."""
    assert list(doctor_time.SECONDS) == list(doctor_runs.RUNS)
    lab, parts, planned = StubLab(spent=20.0), {}, {}

    def begin(name, later=()):
        StubLab.begin(lab, name, later)
        parts[name] = lab.part_seconds
        planned[name] = doctor_time.seconds_of(name, is_short=lab.is_short)
        time.seconds += planned[name]

    monkeypatch.setattr(lab, "begin", begin)
    (about, *_) = [each for each in full_findings(lab) if each.check == "full"]
    assert list(parts) == about.values["fitting"] == list(doctor_runs.RUNS) and not about.values["others"]
    assert 0.9 < time.seconds / (doctor_time.usable_seconds(lab.minutes) - 20.0) <= 1
    assert all(parts[name] >= seconds - 1e-6 for name, seconds in planned.items())
    enough = doctor_time.minutes_of(doctor_runs.RUNS, spent=20.0)
    shorter = about.values["short"]
    assert f"in a shorter form: {', '.join(shorter)}, whole where others leave time" in about.text
    assert f"--minutes {enough} has time for all" in about.text
    assert "fp8 and int8" not in doctor_time.SHORT_SECONDS  # which most people run
    whole = doctor_time.in_order(doctor_runs.RUNS, enough, spent=20.0)
    assert whole == doctor_time.Plan(list(doctor_runs.RUNS), [])


@pytest.mark.parametrize("ranks, short_for", [(2, 0), (3, 0), (4, 1), (6, 1), (8, 1)])
def test_ten_minutes_have_time_for_what_the_page_says(ranks, short_for):
    """After 20 s of imports and quick checks."""
    names = list(doctor_runs.RUNS)
    plan = doctor_time.in_order(names, 10.0, 20.0, ranks=ranks)
    assert plan.fitting == names[: len(names) - short_for]
    enough = doctor_time.minutes_of(names, 20.0, ranks)
    where = "on two and three GPUs" if ranks < 4 else "on four, six and eight"
    page = " ".join((doctor.ROOT / "docs" / "performance.md").read_text().split())
    assert re.search(rf"`--minutes {enough}`[^.`]* {where}[.,]", page)
    more = f"on four, six and eight, which have more methods, for all but {names[-1]}"
    assert f"that is time on two and three GPUs for every check; {more}" in page


def test_a_check_is_never_longer_in_its_shorter_form():
    for name, ranks in product(doctor_time.SHORT_SECONDS, range(1, 10)):
        for step in (doctor_time.STEP_SECONDS, 0.5):
            whole, short = (doctor_time.seconds_of(name, ranks, step, short) for short in (False, True))
            assert short < whole, name
    assert doctor_time.SHORT_STEPS.keys() == doctor_time.STEPS.keys() - {"fp8 and int8", "dequantized once"}


@pytest.mark.parametrize("spent", [0.0, 150.0])
def test_checks_are_whole_where_others_leave_time(time, monkeypatch, spent):
    """In the order of what they are worth."""
    lab, forms = StubLab(), {}

    def begin(name, later=()):
        StubLab.begin(lab, name, later)
        forms[name] = lab.is_short
        time.seconds += spent if name == "links" else 1.0

    monkeypatch.setattr(lab, "begin", begin)
    found = full_findings(lab)
    told = {each.check for each in found if "in its shorter form, without" in each.text}
    shorter = {name for name, is_short in forms.items() if is_short}
    assert told == shorter <= doctor_time.SHORT_SECONDS.keys()
    assert ("methods" in shorter) == (spent > 0) and not forms["overhead compiled"]


@pytest.mark.parametrize("check, more", [("methods", (4, 6, 8)), ("shapes", (3, 9))])
def test_estimates_depend_on_ranks_where_more_is_run(check, more):
    for ranks in range(1, 10):
        seconds = doctor_time.seconds_of(check, ranks)
        assert (seconds > doctor_time.SECONDS[check]) == (ranks in more), ranks
        shorter = doctor_time.seconds_of(check, ranks, is_short=True)
        assert (shorter > doctor_time.SHORT_SECONDS[check]) == (ranks in more), ranks
    clock = doctor_time.Clock(10.0)
    parts = []
    for clock.ranks in (2, more[0]):
        clock.begin(check, ["speed"])
        parts.append(clock.part_seconds)
    assert parts[1] > parts[0]
    assert doctor_time.minutes_of([check] * 9, ranks=more[0]) > doctor_time.minutes_of([check] * 9)


def test_the_flux_is_made_in_less_than_its_check_may_take(time):
    """The file is made in the time of the first check that asks for it, and then requests run."""
    import common  # of benchmarks, which doctor_lab has put on the path
    from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

    size = doctor_room.model_bytes(FluxTransformer2DModel, common.FLUX | SIZES["cuda"].flux, 2)
    clock, plan = doctor_time.Clock(10.0), doctor_time.in_order(doctor_runs.RUNS, 10.0)
    clock.short, names = plan.short, plan.fitting
    begun = names.index("speed of one rank")
    time.seconds = 20.0  # of what comes before
    clock.begin(names[begun], names[begun + 1 :])
    assert clock.part_seconds > 1.8 * size / 1e9 * doctor_time.MAKE_SECONDS_A_GB


@pytest.mark.parametrize("ranks", [1, 2])
def test_checks_that_do_nothing_on_one_rank_have_no_part(time, monkeypatch, ranks):
    lab, later = StubLab(), []
    lab.ranks = ranks
    monkeypatch.setattr(lab, "begin", lambda name, names=(): later.append(list(names)))
    list(doctor_runs.full(doctor.options(["--full", "--ranks", str(ranks)]), machine(), lab))
    wanted = [name for name in doctor_runs.RUNS if ranks > 1 or name not in ("speed", "methods", "life")]
    fitting = doctor_time.in_order(wanted, 10.0).fitting
    assert later[0] == fitting[1:] and len(later) == len(doctor_runs.RUNS)


def test_the_minutes_begin_with_the_program(time, monkeypatch):
    """Its imports and quick checks are of the minutes that somebody waits for."""
    begun = []

    class Lab(StubLab):
        def __init__(self, device, ranks, minutes, gpus, spent):
            super().__init__(spent)
            begun.append(self)

    monkeypatch.setattr(doctor_runs, "Lab", Lab)
    monkeypatch.setattr(doctor_runs, "time", time)
    monkeypatch.setattr(doctor, "BEGAN", 100.0)
    time.seconds = 140.0
    first = next(iter(doctor.run_backend(machine(), doctor.options(["--full"]))))
    (lab,) = begun
    assert lab.end == 100.0 + doctor_time.usable_seconds(10.0)
    assert "kernels" in first.values["fitting"] and "overhead compiled" in first.values["others"]


def test_methods_and_speed_share_their_ranks():
    """One rank starts once for both, and so do all ranks, which go on as each method."""
    ranks = []

    class Lab(StubLab):
        def run(self, config, *args, **how):
            ranks.append(config.world_size)
            return super().run(config, *args, **how)

        def distances_from_comfyui(self, family, sample, samples, golden):
            return 0.0, 0.0  # else one rank would tell whose fault it is

        def cached(self, key, make):
            if key not in known:
                known[key] = make()
            return known[key]

    known = {}
    full_findings(Lab(), "--only", "methods,speed")
    starts = [size for before, size in zip([0, *ranks], ranks) if size != before]
    assert starts == [1, 2]


def test_nothing_is_made_beyond_the_end(time):
    clock = doctor_time.Clock(10.0)
    clock.need_time(3_600_000_000, "the mid-size Flux")
    time.seconds = 560.0
    with pytest.raises(OutOfTime, match="20 s are left, and the mid-size Flux takes about 36"):
        clock.need_time(3_600_000_000, "the mid-size Flux")


@pytest.mark.parametrize(
    "left, compile, spent, error",
    [(10.0, "off", 11.0, OutOfTime), (100.0, "off", 101.0, HungError), (100.0, "blocks", 101.0, OutOfTime)],
)
def test_a_request_ends_with_the_minutes(monkeypatch, tmp_path, time, left, compile, spent, error):
    """One that has only begun is no hang; nor is a compiler."""
    ended = []

    class Ranks:
        closed, process = False, None

        def load(self, *args, **named):
            return Loaded("tiny", "flux")

        def sample(self, message, should_cancel):
            assert not should_cancel()
            time.seconds += spent
            assert should_cancel() and ended

        def close(self):
            ended.append(True)

    lab = doctor_lab.Lab("cpu", 2, 10.0)
    monkeypatch.setattr(lab, "backend", lambda config: Ranks())
    monkeypatch.setattr(lab, "_until", lambda *_: lambda: None)
    lab.end = lab.part_end = left
    config = ParallelConfig(ulysses_degree=2, compile=compile)
    with pytest.raises(error):
        lab.run(config, tmp_path, Sample("", "euler", 1.0, 0))
    assert lab.hung.has(config) == (error is HungError)
    lab.close()
