"""What scripts/doctor.py --full runs, as a list of functions of a Lab that return findings."""

import os
import time
from collections.abc import Callable
from functools import partial

import doctor_families
import doctor_models
import torch
from doctor_degrees import FAMILIES, TELLING, fitting, methods, named
from doctor_facts import Facts
from doctor_findings import OK, PROBLEM, WARNING, Finding, Found, OutOfTime, findings, possible
from doctor_flux_files import flux_files
from doctor_kernels import compiled, kernels
from doctor_lab import Lab, relative
from doctor_life import life
from doctor_limits import BF16_RATIO, COMFYUI, EXACT, USUAL, approximation
from doctor_links import links
from doctor_memory import memory
from doctor_next import ABOVE_USUAL
from doctor_overhead import overhead, overhead_compiled
from doctor_place import place, remarks
from doctor_quantized import dequantized_once, quantized
from doctor_requests import in_batch
from doctor_speed import speed, speed_of_one
from doctor_steps import shapes, waits
from doctor_time import DEFAULT_MINUTES, EARLIER_SECONDS, STEP_SECONDS, Plan, minutes_of, of_form, while_time

from backend.config import ParallelConfig
from backend.hardware.gpu_sharing import SHARED_GPU


def reference(lab: Lab, family: str, dtype: str) -> torch.Tensor:
    """Return what one rank gives, for the batch that every method gets."""
    path, sample, _ = lab.tiny(family)
    batch = in_batch(sample, max(2, lab.ranks))
    return lab.cached(
        ("reference", family, dtype), lambda: lab.run(ParallelConfig(), path, batch, dtype).samples
    )


def one_rank(lab: Lab) -> Found:
    """One rank against ComfyUI's latents, family by family."""
    for family in while_time(lab, of_form(lab, FAMILIES, TELLING)):
        yield from findings("one rank", _one_rank, lab, family, what=family)


def _one_rank(lab: Lab, family: str) -> Finding:
    path, sample, golden = lab.tiny(family)
    run = lab.run(ParallelConfig(), path, sample, "fp32")
    distance, _ = lab.distances_from_comfyui(family, sample, run.samples, golden)
    drift = relative(reference(lab, family, "bf16"), reference(lab, family, "fp32"))
    text = f"{family}: float32 is {distance:.1e} standard deviations from ComfyUI's latent"
    status = OK if distance <= COMFYUI else PROBLEM
    text += f", bf16 {drift:.1e} from float32"
    return Finding("one rank", status, text, {"family": family, "comfyui": distance, "bf16": drift})


def all_methods(lab: Lab) -> Found:
    """Every method against one rank, and then families once each, as long as there is time."""
    if lab.ranks == 1:
        text = "not run: one rank; parallel methods need two GPUs, or share one (--ranks 2)"
        yield Finding("methods", WARNING, text)
        return
    run = of_form(lab, FAMILIES, TELLING)
    for family in run:  # before the ranks change
        for dtype in ("fp32", "bf16"):
            reference(lab, family, dtype)
    configs = methods(lab.ranks)
    turns = _in_turn(lab, configs, run)
    # of many methods one family's bf16 has to do
    in_bf16 = run if lab.ranks == 2 and not lab.is_short else run[:1]
    if lab.is_short and lab.ranks == 2:
        lab.left_out += [f"{family} in bf16" for family in run if family not in in_bf16]
    of_once = doctor_families.runs(lab)
    if lab.is_short:
        lab.left_out += [*of_once, doctor_families.HALVES]  # families until they have run
    for turn in while_time(lab, [*turns, *([] if lab.is_short else of_once)]):
        if turn in of_once:
            yield from of_once[turn]()
            continue
        name, families = turns[turn]
        for family in families:
            halves = family in in_bf16
            what = f"{name}, {family}"
            yield from possible("methods", what, _method, lab, name, configs[name], family, halves)
    if lab.is_short:
        yield from doctor_families.while_time_is_left(lab, of_once)


def _in_turn(lab: Lab, configs: dict[str, ParallelConfig], of: list[str]) -> dict[str, tuple[str, list[str]]]:
    """Return what is run, in turn: in words -> a method's name and those ``of`` the families. Families of too
    few heads or blocks come after every method that fits as asked: their hybrids may not take its time."""
    as_asked: dict[str, tuple[str, list[str]]] = {}
    hybrids: dict[str, tuple[str, list[str]]] = {}
    for name, config in configs.items():
        is_stale_pair = " x " in name and config.has_stale_kv  # of which one family has to do
        families = of[:1] if is_stale_pair else of
        lacking = [family for family in families if lab.refusal(lab.tiny(family)[0], config)]
        if fit := [family for family in families if family not in lacking]:
            as_asked[name] = name, fit
        if lacking:
            hybrids[f"{name} ({', '.join(lacking)})"] = name, lacking
    return as_asked | hybrids


def _method(lab: Lab, name: str, config: ParallelConfig, family: str, halves: bool = True) -> Finding:
    path, sample, _ = lab.tiny(family)
    own, why = fitting(partial(lab.refusal, path), config)
    own = own or config  # which the ranks refuse
    same = next((other for other, each in methods(lab.ranks).items() if each == own), name)
    if same != name and not own.has_stale_kv:  # which has a line of its own, and is judged there
        return Finding("methods", OK, f"{name}, {family}: not possible ({why}); see {same}, {family}")
    name, config = named(name, config, own), own
    batch = in_batch(sample, max(2, lab.ranks))
    single, half = reference(lab, family, "fp32"), reference(lab, family, "bf16")
    exact = relative(lab.run(config, path, batch, "fp32").samples, single)
    drift = relative(lab.run(config, path, batch, "bf16").samples, single) if halves else 0.0
    approximate, left_out = approximation(config)
    usual = relative(half, single)
    values = {"method": name, "family": family, "fp32": exact, "bf16_one_rank": usual}
    values["bf16"] = drift if halves else None
    most = approximate or EXACT[lab.device]
    text = f"{name}, {family}: float32 {exact:.1e} from one rank ({left_out or f'limit {most:g}'})"
    text += f", bf16 {drift:.1e} from float32 (one rank in bf16: {usual:.1e})" if halves else ""
    text += f"; not as asked, since {why.partition(';')[0]}" if why else ""
    status = OK
    half_limit = BF16_RATIO * usual + approximate
    if drift > half_limit:
        text += "; bf16 is farther off than one rank's"
    if USUAL < exact <= most and not approximate:
        status = WARNING
        text += f"; {ABOVE_USUAL}"
    if not (exact <= most and drift <= half_limit):  # NaN is neither
        status = PROBLEM
    return Finding("methods", status, text, values)


#: Name -> run: what only several GPUs can tell comes first, after what it is compared with; fp8 and int8 with
#: a LoRA, which most people run, right after all methods, and quantized files before other shapes. "methods"
#: comes between the two of speed: it begins on the one rank of the first, and the second has its ranks.
RUNS: dict[str, Callable[[Lab], Found]] = {
    "links": links,
    "one rank": one_rank,
    "speed of one rank": speed_of_one,
    "methods": all_methods,
    "speed": speed,
    "fp8 and int8": flux_files,
    "life": life,
    "waits": waits,
    "quantized": quantized,
    "dequantized once": dequantized_once,
    "memory": memory,
    "overhead": overhead,
    "shapes": shapes,
    "compiled": compiled,
    "kernels": kernels,
    "overhead compiled": overhead_compiled,
}
#: Those that run the mid-size Flux, whose file goes after the last of them.
OF_FLUX = (
    *("speed of one rank", "speed", "fp8 and int8", "life", "memory", "overhead", "shapes", "compiled"),
    *("kernels", "overhead compiled"),
)
#: Those of all ranks: they would hang where links failed.
OF_SEVERAL = ("methods", "speed", "fp8 and int8", "life", "waits", "memory", "shapes", "compiled")
#: Those that do nothing on one rank.
NOT_OF_ONE = ("speed", "methods", "life")
#: Those of ranks that share a GPU: what they compute, and nothing that is timed.
OF_SHARED = ("one rank", "methods", "waits")
#: Those that need no folder which the registry's archive leaves out (.comfyignore).
ANYWHERE = ("links",)


def in_time(lab: Lab, run: Callable[[Lab], Found]) -> Found:
    """Run unless the minutes are over, or links failed that it needs. Raises OutOfTime."""
    lab.check()
    if lab.links_failed and lab.ranks > 1 and run in map(RUNS.get, OF_SEVERAL):
        raise OutOfTime("not run: the check links failed, and ranks would wait for each other")
    yield from run(lab)


def full(chosen, facts: Facts, lab: Lab | None = None, began: float | None = None) -> Found:
    """Run what ``chosen.only`` selects. ``lab``: by default one of this machine. ``began``: when the minutes
    did (time.monotonic), by default now."""
    names = [name for name in RUNS if name.startswith(tuple(chosen.only.split(",")))]
    if not names:
        known = ", ".join(RUNS)
        yield Finding("full", PROBLEM, f"--only {chosen.only} selects nothing; there are {known}")
        return
    missing = [path.name for path in (doctor_models.BENCHMARKS, doctor_models.SUPPORT) if not path.exists()]
    if missing:
        what = f"of --full only {', '.join(ANYWHERE)} can run: {' and '.join(missing)} are not in this folder"
        yield Finding(
            "full", WARNING, f"{what}, as in the registry's archive; clone the repository for the rest"
        )
        names = [name for name in names if name in ANYWHERE]
    about = remarks(chosen.device, chosen.ranks, facts)
    yield from about
    if any(each.status == PROBLEM for each in about):
        return
    device, ranks = place(chosen.device, chosen.ranks, facts)
    if device == "cuda" and len(facts.usable) == 1 < ranks:
        os.environ[SHARED_GPU] = "1"
        names = [name for name in names if name in OF_SHARED]
        text = f"{ranks} ranks share one GPU, which can only run {', '.join(OF_SHARED)}: nothing is timed"
        yield Finding("full", WARNING, text)
    if not names:
        return
    spent = 0.0 if began is None else time.monotonic() - began
    lab = lab or Lab(device, ranks, chosen.minutes, facts.usable, spent)
    try:
        yield from _in_order(lab, names)
    finally:
        lab.close()


def _in_order(lab: Lab, names: list[str]) -> Found:
    """Run checks, those last that the minutes may be short for: by the estimates, and again by them and by
    what a step takes here, once that is known. What a check has not used makes later ones whole."""
    left = list(names)
    step = lab.one_step
    plan = lab.planned(_timed(lab, left))
    about = f"{lab.ranks} ranks on {lab.device}, at most {lab.minutes:g} minutes"
    again = lab.device == "cuda" and "speed of one rank" in plan.fitting
    as_fast = " on GPUs like an H200; what yours need is said after speed of one rank" if again else ""
    yield _told(lab, about, plan, as_fast)
    while left:
        others = plan.others
        left = [name for name in left if name not in others] + [name for name in left if name in others]
        name = left.pop(0)
        same = others if name in others else plan.fitting  # the others have what is left
        lab.short = plan.short & lab.planned(_timed(lab, [name, *left])).short
        lab.begin(name, [each for each in left if each in same])
        yield from findings(name, in_time, lab, RUNS[name])
        if lab.left_out:
            yield _left_out(lab, name)
        if not set(left) & set(OF_FLUX):
            lab.drop("flux")
        if lab.one_step != step and left:
            step = lab.one_step
            plan = lab.planned(_timed(lab, left))
            about = f"a step of one rank takes {step / STEP_SECONDS:.1f} times as long as on an H200"
            yield _told(lab, about, plan)
    if lab.starts:
        yield _starts(lab.starts)


def _left_out(lab: Lab, name: str) -> Finding:
    """Say what the shorter form of a check has left out, and what runs it: --only takes every check whose
    name begins so, and has the default minutes unless it is told others."""
    selected = _timed(lab, [each for each in RUNS if each.startswith(name)])
    enough = minutes_of(selected, EARLIER_SECONDS, lab.ranks, lab.one_step)
    longer = f" --minutes {enough}" if enough > min(lab.minutes, DEFAULT_MINUTES) else ""
    text = f'in its shorter form, without {", ".join(lab.left_out)}; for these: --only "{name}"{longer}'
    return Finding(name, OK, text, {"left_out": list(lab.left_out)})


def _starts(starts: list[dict]) -> Finding:
    """Say in how many seconds ranks started."""
    seconds = {
        ranks: [each["seconds"] for each in starts if each["ranks"] == ranks]
        for ranks in sorted({each["ranks"] for each in starts})
    }
    listed = ", ".join(
        f"{ranks} in {min(times):.1f} to {max(times):.1f} s" for ranks, times in seconds.items()
    )
    return Finding("full", OK, f"ranks started {len(starts)} times: {listed}", {"starts": starts})


def _timed(lab: Lab, names: list[str]) -> list[str]:
    """Return the checks that do something on so many ranks."""
    return [name for name in names if lab.ranks > 1 or name not in NOT_OF_ONE]


def _told(lab: Lab, about: str, plan: Plan, as_fast: str = "") -> Finding:
    """Say what the minutes have time for, which checks run in their shorter form, and which minutes have time
    for all in their whole form."""
    if plan.others:
        about += f"; they may be short for {', '.join(plan.others)}, which then end early"
    planned = [*plan.fitting, *plan.others]
    shorter = [name for name in planned if name in plan.short]
    if shorter:
        about += f"; in a shorter form: {', '.join(shorter)}, whole where others leave time"
    if plan.others or shorter:
        about += f" (--minutes {lab.enough(planned)} has time for all of every check{as_fast})"
    values = {"fitting": plan.fitting, "others": plan.others, "short": shorter, "step": lab.one_step}
    return Finding("full", OK, about, values)
