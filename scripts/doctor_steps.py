"""What scripts/doctor.py --full runs of steady steps: seconds at released shapes, waits for the GPU, and the
chart of all seconds."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from doctor_findings import OK, PROBLEM, WARNING, Finding, findings, possible
from doctor_kernels import cut_short
from doctor_lab import Lab, Run, relative
from doctor_limits import compared
from doctor_time import while_time

from backend.config import ParallelConfig

#: Golden families whose released models are timed.
SHAPES = ("wan21-t2v", "minimax-h3")

Found = Iterator[Finding]


def shapes(lab: Lab) -> Found:
    """Seconds a step at the shapes of Wan 14B and MiniMax-H3, of which a few blocks have random weights."""
    for family in while_time(lab, SHAPES):
        yield from findings("shapes", partial(_of_family, family=family), lab, family)
        lab.drop("released", family)


def _of_family(lab: Lab, family: str) -> Found:
    import scaling

    configs = {"one rank": ParallelConfig()}
    if lab.ranks > 1:
        configs |= {name: each for name, each in scaling.methods(lab.ranks).items() if each.cfg_degree == 1}
    path, request, what = lab.released(family)
    one = []
    for name in while_time(lab, configs):  # one rank is the first
        measured = partial(_shape, name=name, config=configs[name], path=path, request=request)
        timed = partial(measured, family=family, what=what, one=one)
        yield from possible("shapes", f"{family}, {name}", timed, lab)


def _shape(
    lab: Lab,
    name: str,
    config: ParallelConfig,
    path: Path,
    request: Callable,
    family: str,
    what: str,
    one: list[tuple[float, Run]],
) -> Found:
    """``one``: seconds and run of one rank, which this fills; nothing where they are not known."""
    seconds, run = lab.step_seconds(config, path, request)
    text = f"{family} ({what}), {name}: {seconds:.4f} s a step"
    values = {"method": f"{family}, {name}", "seconds": seconds}
    if config.world_size == 1:
        one.append((seconds, run))
    if not one:
        yield Finding("shapes", OK, text, values)
        return
    alone, single = one[0]
    text += f", {alone / seconds:.2f} times one rank"
    values |= {"speedup": alone / seconds}
    if run is single:
        yield Finding("shapes", OK, text, values)
        return
    values["distance"] = relative(run.samples, single.samples)
    is_right, off = compared(values["distance"], config.has_stale_kv, lab.device)
    yield Finding("shapes", OK if is_right else PROBLEM, f"{text}, {off}", values)


def waits(lab: Lab) -> Found:
    """Waits of the host for a GPU in steady steps, of every method (benchmarks/waits.py)."""
    import doctor_runs  # which imports this

    hung = [name for name, config in doctor_runs.methods(lab.ranks).items() if lab.hung.has(config)]
    runs, ended = lab.waits(hung)
    yield _waits(lab, runs)
    if hung:
        yield Finding("waits", WARNING, f"not run: {', '.join(hung)}, whose ranks hung before")
    yield from cut_short(lab, "waits", "benchmarks/waits.py", ended)


def _waits(lab: Lab, runs: list[dict]) -> Finding:
    """Say where steady steps wait."""
    if not any(run["steps"] for run in runs):
        what = "nothing was measured: no method came to a steady step"
        remedy = f"run python scripts/doctor.py --full --only waits --ranks {lab.ranks}"
        return Finding("waits", WARNING, f"{what}; {remedy}", {"runs": runs})
    if lab.device != "cuda":
        return Finding("waits", OK, f"{len(runs)} runs of steady steps; only CUDA can say what waits")
    places: Counter[str] = Counter()
    for run in runs:
        for place, times in run["waits"].items():
            places[f"{place} ({run['method']}, {run['family']})"] += times
    if not places:
        return Finding("waits", OK, f"{len(runs)} runs: no steady step waits for its GPU", {"runs": runs})
    listed = ", ".join(f"{place} {times}x" for place, times in places.most_common(8))
    text = f"steady steps wait for their GPU at {listed}: that costs speed, please report it"
    return Finding("waits", WARNING, text, {"runs": runs})


def chart(findings: Iterable[Finding], path: Path) -> bool:
    """Draw how many times one rank's speed every timed method has; return whether there was any."""
    import report

    bars = [
        report.Bar(each.values["method"], *[each.values["speedup"]] * 3)
        for each in findings
        if "speedup" in each.values
    ]
    if bars:
        report.chart(path, "Times the speed of one rank", bars)
    return bool(bars)
