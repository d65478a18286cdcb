"""The families that the check "methods" of scripts/doctor.py --full runs with one method each, after those of
doctor_degrees. They are compared with ComfyUI's latents, so that no rank runs them alone."""

from collections.abc import Callable
from functools import partial

from doctor_degrees import fitting, methods, named
from doctor_findings import OK, PROBLEM, Finding, Found, possible
from doctor_lab import Lab, relative
from doctor_limits import COMFYUI, EXACT, STALE
from doctor_next import NEXT
from doctor_time import FAMILY_SECONDS

from backend.config import ParallelConfig

#: Golden families with one configuration each: those that more people run come first.
ONCE = (
    *("flux2-dev", "ltx2", "wan21-vace", "hunyuan-video15", "minimax-h3"),
    *("chroma", "sd3", "qwen-image21", "ltx23", "hunyuan-video"),
    *("krea2", "flux3", "hidream", "ltxv", "lumina2"),
    *("kandinsky5", "hunyuan-image21", "cogvideox", "sana", "pixart-sigma"),
    *("ideogram4", "hunyuan-dit", "kandinsky5-image", "minimax-h3-curves"),
)
#: Largest relative distance of bf16 from float32. On the CPU random weights have 0.007 to 0.43, by family;
#: latents that have nothing to do with each other have 1.4.
HALF = 1.0
#: What the check's shorter form leaves out of those that it runs.
HALVES = "bf16 of families with one method"


def once(ranks: int) -> dict[str, str]:
    """Return family -> the name of its method. As many families have each: ranks change into the next method
    once, and those that fewer people run are last."""
    asked = methods(ranks)
    cfg = "cfg" if ranks == 2 else f"cfg 2 x ulysses {ranks // 2}"
    names = ("ulysses", "ring", "tensor parallel", f"pipefusion M={ranks}", cfg)
    able = [name for name in names if name in asked]
    return {family: able[index * len(able) // len(ONCE)] for index, family in enumerate(ONCE)}


def runs(lab: Lab) -> dict[str, Callable[[], Found]]:
    """Return family -> what runs it, in turn."""
    every = once(lab.ranks)
    return {
        family: partial(possible, "methods", f"{name}, {family}", _once, lab, name, family)
        for family, name in every.items()
    }


def while_time_is_left(lab: Lab, families: dict[str, Callable[[], Found]]) -> Found:
    """Run families in the check's shorter form, whose estimate has none: as many as there is time left for.
    The others stay left out, which is said after the check."""
    for family, run in families.items():
        if not lab.has_time_for(FAMILY_SECONDS):
            return
        lab.left_out.remove(family)
        yield from run()


def _once(lab: Lab, name: str, family: str) -> Finding:
    try:
        return compare(lab, name, family)
    finally:
        lab.drop("tiny", family)  # all of them have 1.3 GB


def compare(lab: Lab, name: str, family: str) -> Finding:
    """Compare a family under a method with ComfyUI's latent, and in the check's whole form bf16 with float32.
    Where float32 is far off, one rank tells a method that is wrong from a family that these GPUs compute
    otherwise."""
    path, sample, golden = lab.tiny(family)
    asked = methods(lab.ranks)[name]
    own, why = fitting(partial(lab.refusal, path), asked)
    own = own or ParallelConfig(ring_degree=lab.ranks)  # which needs neither heads nor blocks
    name = named(name, asked, own)
    samples = lab.run(own, path, sample, "fp32").samples
    largest, distance = lab.distances_from_comfyui(family, sample, samples, golden)
    values = {"method": name, "family": family, "fp32": distance, "comfyui": largest, "bf16": None}
    text = f"{name}, {family}: float32 is {largest:.1e} standard deviations from ComfyUI's latent"
    is_near = largest <= COMFYUI  # NaN is not
    if own.has_stale_kv:
        is_near = distance <= STALE
        text += f", relative {distance:.1e} (stale keys and values)"
    half = 0.0
    if not lab.is_short:
        values["bf16"] = half = relative(lab.run(own, path, sample, "bf16").samples, samples)
        text += f", bf16 {half:.1e} from float32" + (f" (limit {HALF:g})" if half > HALF else "")
    if why:
        text += f"; not as asked, since {why.partition(';')[0]}"
    if not is_near:
        limit = STALE if own.has_stale_kv else EXACT[lab.device]
        values["one_rank"] = relative(samples, lab.run(ParallelConfig(), path, sample, "fp32").samples)
        text += f"; {values['one_rank']:.1e} from one rank"
        text += f", so {NEXT['one rank', PROBLEM]}" if values["one_rank"] <= limit else ""
    return Finding("methods", OK if is_near and half <= HALF else PROBLEM, text, values)
