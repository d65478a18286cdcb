"""The check "fp8 and int8" of scripts/doctor.py --full: files of Flux.1's shapes as most people run them,
with a LoRA, in requests of few steps without a negative prompt."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from doctor_degrees import shape_methods
from doctor_findings import OK, PROBLEM, Finding, Found, possible
from doctor_lab import Lab, Run, relative
from doctor_limits import compared
from doctor_next import REPORT
from doctor_quantized_ranks import MIN_LORA_EFFECT
from doctor_requests import whole_requests
from doctor_steps import make_file
from doctor_time import while_time

from backend.config import ParallelConfig
from backend.protocol import Sample

CHECK = "fp8 and int8"
FAMILY = "flux-dev"
#: Format of a file -> its name in the findings.
KINDS = {"float8_e4m3fn": "fp8", "int8_tensorwise": "int8"}
#: Steps of the two requests that are timed, which distilled models and LoRAs for few steps have.
STEPS = (4, 8)


def flux_files(lab: Lab) -> Found:
    """Seconds a step and of whole requests of Flux.1's shapes in fp8 and int8 with a LoRA: one rank, Ulysses,
    PipeFusion, and latents against one rank's. The files stay for the check "shapes", which deletes them, its
    shorter form before it makes others."""
    path, request, what = lab.released(FAMILY)
    files: dict[str, Path | None] = {}
    for kind in KINDS:
        yield from possible(CHECK, KINDS[kind], make_file, lab, FAMILY, kind, files)
    lora, strength = lab.released_lora(FAMILY)
    loras = [(str(lora), strength)]
    configs = shape_methods(lab, path)
    order = {  # both files on the same ranks
        f"{FAMILY}, {KINDS[kind]} with a LoRA, {name}": (name, kind, file)
        for name in configs
        for kind, file in files.items()
        if file
    }
    one: dict[str, tuple[float, Run]] = {}
    for label in while_time(lab, order):
        name, kind, file = order[label]
        timed = partial(
            _timed,
            label=label,
            config=configs[name],
            kind=kind,
            path=file,
            loras=loras,
            request=request,
            what=what,
            one=one,
        )
        yield from possible(CHECK, label, timed, lab)


def _timed(
    lab: Lab,
    label: str,
    config: ParallelConfig,
    kind: str,
    path: Path,
    loras: list[tuple[str, float]],
    request: Callable[[int], Sample],
    what: str,
    one: dict[str, tuple[float, Run]],
) -> Finding:
    """``one``: kind -> seconds and run of one rank, which this fills; nothing where they are not known."""
    seconds, run = lab.step_seconds(config, path, request, steps=STEPS, loras=loras)
    text = f"{label} ({what}): {seconds:.4f} s a step"
    values: dict = {"method": label, "kind": kind, "seconds": seconds, "timed": run.timed, **run.loaded}
    if config.world_size == 1:
        one[kind] = seconds, run
        plain = lab.run(config, path, request(STEPS[0]))
        return _changed(text, values, relative(run.samples, plain.samples))
    if kind not in one:
        return Finding(CHECK, OK, text, values)
    alone, single = one[kind]
    text += f", {alone / seconds:.2f} times one rank"
    values |= {"speedup": alone / seconds, "distance": relative(run.samples, single.samples)}
    whole, in_words = whole_requests(STEPS, single.timed, run.timed)
    values |= whole
    text += in_words
    is_right, off = compared(values["distance"], config, lab.device, is_quantized=True)
    text += f", {off}{run.other_products(single)}"
    return Finding(CHECK, OK if is_right else PROBLEM, text, values)


def _changed(text: str, values: dict, effect: float) -> Finding:
    """Say what the LoRA changes on one rank, by the relative distance of the latents."""
    values = {**values, "lora_effect": effect}
    if effect >= MIN_LORA_EFFECT:
        return Finding(CHECK, OK, f"{text}; the LoRA changes the latent by {effect:.1e}", values)
    return Finding(CHECK, PROBLEM, f"{text}; the LoRA is not applied: {REPORT}", values)
