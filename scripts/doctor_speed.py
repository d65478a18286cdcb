"""The checks "speed of one rank" and "speed" of scripts/doctor.py --full: seconds a step of the
mid-size Flux."""

import shutil
from contextlib import suppress
from dataclasses import replace
from functools import partial

import doctor_lab
from doctor_degrees import methods
from doctor_findings import OK, PROBLEM, WARNING, Finding, Found, possible
from doctor_hangs import HungError
from doctor_lab import Lab, relative
from doctor_limits import compared
from doctor_requests import whole_requests
from doctor_time import of_form, while_time
from doctor_under_load import UnderLoad, judged, of_gpus

from backend.config import ParallelConfig
from backend.protocol import BackendError, RefusedError
from backend.shares import written

#: In which all GPUs compute while nvidia-smi is asked, which takes a part of one.
LOAD_SECONDS = 2.0
#: Methods of the shorter form, besides PipeFusion with as many patches as stages.
TELLING = ("cfg", "cfg x ulysses", "ulysses", "ring", "tp", "FSDP")


def timed_alone(lab: Lab, guided: bool) -> tuple[float, doctor_lab.Run]:
    """Return one rank's seconds a step of the mid-size Flux, and its last run."""

    def measure():
        path = lab.flux()
        return lab.step_seconds(ParallelConfig(), path, partial(lab.request, path, guided=guided))

    return lab.cached(("step", guided), measure)


def timed_or_none(lab: Lab, guided: bool) -> tuple[float, doctor_lab.Run] | None:
    """As timed_alone, None where it fails: that is tried once more after speed_of_one, and not for every
    method."""

    def measure():
        with suppress(BackendError, RefusedError, HungError):
            return timed_alone(lab, guided)

    return lab.cached(("step of one", guided), measure)


def speed_of_one(lab: Lab) -> Found:
    """Seconds a step of the mid-size Flux on one rank, with and without a negative prompt."""
    for name, guided in (("one rank", False), ("one rank, cfg", True)):
        seconds, run = timed_alone(lab, guided)
        if lab.device == "cuda" and not guided:  # estimates are of GPUs
            lab.one_step = seconds
        values = {"method": name, "seconds": seconds, "timed": run.timed, **run.loaded}
        yield Finding("speed", OK, f"{name}: {seconds:.4f} s a step", values)


def speed(lab: Lab) -> Found:
    """Seconds a step of the mid-size Flux on all ranks: the ceiling, every method."""
    if lab.ranks == 1:
        return
    import scaling

    configs = {}
    for name, config in scaling.methods(lab.ranks).items():
        configs[name] = config
        if name in ("ulysses", "ring"):  # of the same ranks
            configs[f"{name}, wire fp8"] = replace(config, wire="fp8")
    for name in ("FSDP", "ring, FSDP"):
        configs[name] = methods(lab.ranks)[name]
    if lab.rates and lab.rates.differs:  # as auto divides, which the methods above do not
        parts = written(lab.rates.speeds_of(lab.ranks))
        unlike = {name: replace(configs[name], shares=parts) for name in ("ulysses", "ring", "tp")}
        configs |= {f"{name}, shares {parts}": config for name, config in unlike.items()}
    lab.flux()  # where it cannot be made, no method has to say so
    ceiling = None
    for finding in possible("speed", "ceiling", _ceiling, lab):
        ceiling = finding.values.get("speedup")
        yield finding
        if lab.device == "cuda" and "seconds" in finding.values:
            yield from possible("speed", "GPUs under load", _under_load, lab, finding.values["seconds"])
    telling = [*TELLING, f"pipefusion M={lab.ranks}"]
    telling += [name for name in configs if name.startswith("ulysses, shares")]
    for name in while_time(lab, of_form(lab, configs, telling)):
        yield from possible("speed", name, _speed, lab, name, configs[name], ceiling)


def _ceiling(lab: Lab) -> list[Finding]:
    path = lab.flux()
    one = timed_or_none(lab, False)
    alone = ParallelConfig(data_parallel_degree=lab.ranks)
    together, _ = lab.step_seconds(alone, path, partial(lab.request, path, batch=lab.ranks))
    if not one:
        return []
    ceiling = at_once = lab.ranks * one[0] / together
    text = f"ceiling: {ceiling:.2f} times one rank, {lab.ranks} latents at once"
    if lab.rates and lab.rates.differs:  # of equal parts the slowest has the last
        speeds = lab.rates.speeds_of(lab.ranks)
        ceiling = sum(speeds) / speeds[0]
        text = f"ceiling: {ceiling:.2f} times the first GPU, by the speeds of links, which differ; "
        text += f"{lab.ranks} latents at once {at_once:.2f} times"
    values = {"method": "ceiling", "seconds": together, "speedup": ceiling, "latents": lab.ranks}
    values["at_once"] = at_once
    return [Finding("speed", OK, text, values)]


def _under_load(lab: Lab, step: float) -> list[Finding]:
    """Ask nvidia-smi while all GPUs compute for LOAD_SECONDS, of so many seconds a ``step``."""
    if shutil.which("nvidia-smi") is None:
        return []
    path, config = lab.flux(), ParallelConfig(data_parallel_degree=lab.ranks)
    request = lab.request(path, max(2, round(LOAD_SECONDS / step)), batch=lab.ranks)
    with UnderLoad() as seen:
        lab.run(config, path, request)
    return judged(of_gpus(seen.rows, lab.uuids()))


def _speed(lab: Lab, name: str, config: ParallelConfig, ceiling: float | None) -> Finding:
    path, guided = lab.flux(), config.cfg_degree > 1
    seconds, run = lab.step_seconds(config, path, partial(lab.request, path, guided=guided))
    text = f"{name}: {seconds:.4f} s a step"
    values = {"method": name, "seconds": seconds, "timed": run.timed, "sent": run.stats.get("bytes_sent")}
    values |= run.loaded
    one = timed_or_none(lab, guided)
    if not one:
        return Finding("speed", WARNING, f"{text}; one rank could not be timed", values)
    alone, single = one
    times = alone / seconds
    text += f", {times:.2f} times one rank"
    values |= {"speedup": times}
    if ceiling:
        text += f", {times / ceiling:.2f} of the ceiling"
        values |= {"of_ceiling": times / ceiling}
    whole, in_words = whole_requests(lab.size.steps, single.timed, run.timed)
    values |= whole
    text += in_words
    values["distance"] = relative(run.samples, single.samples)
    is_right, off = compared(values["distance"], config, lab.device)
    text += f", {off}"
    if not is_right:
        return Finding("speed", PROBLEM, text, values)
    if times >= 1:
        return Finding("speed", OK, text, values)
    if lab.rates and lab.rates.is_disturbed:
        why = "slower than one rank, as where one of several like GPUs is slowed down: see links"
        return Finding("speed", WARNING, f"{text}: {why}", values)
    if lab.rates and lab.rates.differs and not config.shares:
        return Finding("speed", OK, f"{text}: with equal parts the slower GPU decides", values)
    return Finding("speed", WARNING, f"{text}: slower than one rank, as on slow links", values)
