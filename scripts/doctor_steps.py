"""What scripts/doctor.py --full runs in steady state: seconds at released shapes, waits for the GPU, and the
chart of all seconds."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from doctor_degrees import FAMILIES, methods, shape_methods, turns_of
from doctor_findings import OK, PROBLEM, WARNING, Finding, Found, findings, possible
from doctor_kernels import cut_short
from doctor_lab import Lab, Run, relative
from doctor_limits import compared
from doctor_time import of_form, while_time

from backend.config import ParallelConfig
from backend.protocol import Sample

#: Golden families at whose released models' shapes steps are timed.
SHAPES = ("flux-dev", "wan21-t2v", "minimax-h3")
BF16 = "bf16"
#: Formats of files that are timed, too: what most people load.
KINDS = ("int8_tensorwise", "float8_e4m3fn")
#: Its bf16 is timed by the check "speed".
TIMED_BEFORE = "flux-dev"
#: Steps of the two requests of families whose steps are long: of two to four times the mid-size Flux'.
STEPS = {"wan21-t2v": (2, 5), "minimax-h3": (2, 5)}

#: As Lab.released returns them.
Made = tuple[Path, Callable[[int], Sample], str]


def shapes(lab: Lab) -> Found:
    """Seconds a step at the shapes of Flux.1, Wan 14B and MiniMax-H3, of which a few blocks have random
    weights, in bf16 (Flux.1's by the check "speed"), int8 and fp8; in the shorter form in bf16 alone."""
    try:
        if lab.is_short:
            lab.left_out += [f"{family} {kind}" for family in SHAPES for kind in KINDS]
            yield from _in_bf16(lab)
            return
        for family in while_time(lab, SHAPES):
            yield from findings("shapes", _of_family, lab, family, what=family)
            _drop(lab, family)
    finally:
        for family in SHAPES:  # also where the time is over
            _drop(lab, family)


def _drop(lab: Lab, family: str):
    """Delete the files of a family, those of "fp8 and int8" too."""
    for kind in KINDS:
        lab.drop("released", family, kind)
    lab.drop("released", family)


def _in_bf16(lab: Lab) -> Found:
    """Time all families on the ranks of each method: to start these takes longest. The files of all are there
    at once, so those of "fp8 and int8" go first."""
    _drop(lab, TIMED_BEFORE)
    known: dict[str, Made] = {}
    for family in SHAPES:
        if family != TIMED_BEFORE:
            yield from findings("shapes", _made, lab, family, known, what=family)
    methods_of = {family: shape_methods(lab, made[0]).items() for family, made in known.items()}
    order = {  # each has as many methods
        f"{family}, {name}": (family, config)
        for of_all in zip(*methods_of.values())
        for family, (name, config) in zip(methods_of, of_all)
    }
    one: dict[str, dict[str, tuple[float, Run]]] = {family: {} for family in known}
    for label in while_time(lab, order):
        family, config = order[label]
        path, request, what = known[family]
        timed = partial(
            _shape,
            label=label,
            config=config,
            kind=BF16,
            path=path,
            request=request,
            what=what,
            one=one[family],
            steps=STEPS.get(family),
        )
        yield from possible("shapes", label, timed, lab)


def _made(lab: Lab, family: str, known: dict[str, Made]) -> list[Finding]:
    """Make a family's model and note it in ``known``; find nothing."""
    known[family] = lab.released(family)
    return []


def _of_family(lab: Lab, family: str) -> Found:
    """bf16 on all ranks comes before other formats on one: any GPU can tell what those take."""
    path, request, what = lab.released(family)
    rounds = [KINDS] if family == TIMED_BEFORE else [(BF16,), KINDS]
    configs = shape_methods(lab, path)
    order = {  # all files of a round on the same ranks
        ", ".join([family, *([] if kind == BF16 else [kind]), name]): (name, kind)
        for kinds in rounds
        for name in configs
        for kind in kinds
    }
    files: dict[str, Path | None] = {BF16: path}
    one: dict[str, tuple[float, Run]] = {}
    for label in while_time(lab, order):
        name, kind = order[label]
        if kind not in files:
            yield from possible("shapes", f"{family}, {kind}", make_file, lab, family, kind, files)
        if file := files[kind]:
            timed = partial(
                _shape,
                label=label,
                config=configs[name],
                kind=kind,
                path=file,
                request=request,
                what=what,
                one=one,
                steps=STEPS.get(family),
            )
            yield from possible("shapes", label, timed, lab)


def make_file(lab: Lab, family: str, kind: str, files: dict[str, Path | None]) -> list[Finding]:
    """Write the file of ``kind`` and note it in ``files``, None where that fails, which is then said once;
    find nothing."""
    files[kind] = None
    files[kind] = lab.released_quantized(family, kind)
    return []


def _shape(
    lab: Lab,
    label: str,
    config: ParallelConfig,
    kind: str,
    path: Path,
    request: Callable,
    what: str,
    one: dict[str, tuple[float, Run]],
    steps: tuple[int, int] | None = None,
) -> Finding:
    """``one``: kind -> seconds and run of one rank, which this fills; nothing where they are not known."""
    seconds, run = lab.step_seconds(config, path, request, steps=steps)
    text = f"{label} ({what}): {seconds:.4f} s a step"
    values = {"method": label, "kind": kind, "seconds": seconds, "timed": run.timed, **run.loaded}
    if config.world_size == 1:
        one[kind] = seconds, run
        if BF16 in one and kind != BF16:
            values |= {"over_bf16": seconds / one[BF16][0]}
            text += f", {values['over_bf16']:.2f} times bf16's"
    if kind not in one:
        return Finding("shapes", OK, text, values)
    alone, single = one[kind]
    text += f", {alone / seconds:.2f} times one rank"
    values |= {"speedup": alone / seconds}
    if run is single:
        return Finding("shapes", OK, text, values)
    values["distance"] = relative(run.samples, single.samples)
    is_right, off = compared(values["distance"], config, lab.device, kind != BF16)
    text += f", {off}{run.other_products(single)}"
    return Finding("shapes", OK if is_right else PROBLEM, text, values)


def waits(lab: Lab) -> Found:
    """Waits of the host for a GPU in steady state, of every method or its hybrid (benchmarks/waits.py)."""
    families = of_form(lab, FAMILIES, FAMILIES[:1])
    turns, left_out = turns_of(lab, families)
    hung = [turn.name for turn in turns if lab.hung.has(turn.config)]
    runs, ended = lab.waits(hung, families)
    yield _waits(lab, runs)
    for name, families in left_out.items():
        what = "too few heads or blocks, also for a hybrid"
        yield Finding("waits", OK, f"{name}, {' and '.join(families)}: not possible ({what})")
    if hung:
        yield Finding("waits", WARNING, f"not run: {', '.join(hung)}, whose ranks hung before")
    yield from cut_short(lab, "waits", "benchmarks/waits.py", ended)


def _waits(lab: Lab, runs: list[dict]) -> Finding:
    """Say where steps in steady state wait."""
    if not any(run["steps"] for run in runs):
        what = "nothing was measured: no method came to a step in steady state"
        remedy = f"run python scripts/doctor.py --full --only waits --ranks {lab.ranks}"
        return Finding("waits", WARNING, f"{what}; {remedy}", {"runs": runs})
    if lab.device != "cuda":
        text = f"{len(runs)} runs in steady state; only CUDA can say what waits{_hybrids(lab, runs)}"
        return Finding("waits", OK, text)
    places: Counter[str] = Counter()
    for run in runs:
        for place, times in run["waits"].items():
            places[f"{place} ({run['method']}, {run['family']})"] += times
    if not places:
        text = f"{len(runs)} runs: no step in steady state waits for its GPU{_hybrids(lab, runs)}"
        return Finding("waits", OK, text, {"runs": runs})
    listed = ", ".join(f"{place} {times}x" for place, times in places.most_common(8))
    text = f"steps in steady state wait for their GPU at {listed}: that costs speed, please report it"
    return Finding("waits", WARNING, text, {"runs": runs})


def _hybrids(lab: Lab, runs: list[dict]) -> str:
    """Name the hybrids that ran, and for which families."""
    asked = methods(lab.ranks)
    families: dict[str, dict[str, None]] = {}
    for run in runs:  # of every rank, so each of them several times
        if run["method"] not in asked:
            families.setdefault(run["method"], {})[run["family"]] = None
    listed = ", ".join(f"{name} ({' and '.join(those)})" for name, those in families.items())
    return f"; where heads or blocks do not fit {listed}" if listed else ""


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
