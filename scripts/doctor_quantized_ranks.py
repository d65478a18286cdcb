"""What scripts/doctor.py --full runs of quantized files on all ranks, with and without a LoRA: the methods
that divide or move their weights, against one rank."""

from functools import partial
from itertools import product
from pathlib import Path

import doctor_degrees
import torch
from doctor_degrees import fitting, named
from doctor_findings import OK, PROBLEM, WARNING, Finding, Found, possible
from doctor_lab import Lab, relative
from doctor_limits import BF16_RATIO, EXACT, USUAL
from doctor_next import ABOVE_USUAL, OTHER_METHOD, REPORT
from doctor_time import while_time

from backend.config import ParallelConfig

#: A format with scales of rows, one with a scale for a layer, one of blocks in a GGUF file.
KINDS = ("int8_tensorwise", "float8_e4m3fn", "Q8_0")
STEPS = 2
#: Strength of the LoRA times the model's width: it adds less than the weights, and far more than rounding.
LORA_STRENGTH = 25.0
#: Least relative distance that the LoRA makes: less compares nothing.
MIN_LORA_EFFECT = 1e-3


def methods(ranks: int) -> dict[str, ParallelConfig]:
    """Return the methods that hold, divide, gather and distribute quantized weights. They are gathered around
    a ring, which auto takes for such files."""
    every = doctor_degrees.methods(ranks)
    return {name: every[name] for name in ("ulysses", "tensor parallel", "ring, FSDP", "pipefusion M=1")}


def on_all_ranks(lab: Lab, kinds: tuple[str, ...]) -> Found:
    """Run quantized files of ``kinds`` on all ranks, against one rank."""
    if lab.ranks == 1:
        return
    if lab.links_failed:
        yield Finding("quantized", WARNING, "not run on all ranks: the check links failed")
        return
    known = []
    for kind in kinds:
        failed = list(possible("quantized", f"{kind}, one rank", _references, lab, kind))
        yield from failed
        known += [] if failed else [kind]
    configs = _as_run(lab, known[0]) if known else {}
    # all files on the same ranks: to start these takes longest
    order = {f"{kind}, {name}": (name, kind) for name, kind in product(configs, known)}
    for what in while_time(lab, order):
        name, kind = order[what]
        for has_lora in (False, True):
            yield from possible("quantized", what, _compared, lab, name, configs[name], kind, has_lora)


def _as_run(lab: Lab, kind: str) -> dict[str, ParallelConfig]:
    """Return what is run, in turn: a method's name and degrees, a hybrid of as many ranks where the file of
    ``kind`` has too few heads or blocks. All kinds have as many."""
    refusal = partial(lab.refusal, lab.quantized(kind))
    as_run = {}
    for name, config in methods(lab.ranks).items():
        own = fitting(refusal, config)[0] or config  # which the ranks refuse
        as_run[named(name, config, own)] = own
    return as_run


def _references(lab: Lab, kind: str) -> list[Finding]:
    """Run one rank first, since the ranks change with the method: in float32, by which methods are judged,
    and without a LoRA in bf16, as files run. Find nothing."""
    for dtype, has_lora in (("fp32", False), ("bf16", False), ("fp32", True)):
        latent(lab, kind, dtype, has_lora)
    return []


def latent(lab: Lab, kind: str, dtype: str, has_lora: bool) -> torch.Tensor:
    """Return one rank's latent of the file."""
    key = ("quantized latent", kind, dtype, has_lora)
    return lab.cached(key, lambda: _run(lab, ParallelConfig(), kind, dtype, has_lora))


def _run(lab: Lab, config: ParallelConfig, kind: str, dtype: str, has_lora: bool) -> torch.Tensor:
    # native products round what they multiply; in float32 nothing is to hide a wrong scale
    how: dict = {"matmul": "weight only" if dtype == "fp32" else "auto"}
    if has_lora:
        lora = lab.cached(("lora",), partial(_written_lora, lab))
        how["loras"] = [(str(lora), LORA_STRENGTH / lab.size.width)]
    return lab.run(config, lab.quantized(kind), lab.plain_request(STEPS), dtype, **how).samples


def _written_lora(lab: Lab) -> Path:
    """Write a LoRA on every matrix of the blocks of what ``Lab.quantized`` writes."""
    import memory
    from loras import write_lora

    shapes = {
        name.removesuffix(".weight"): shape
        for name, shape in memory.shapes(lab.size.width).items()
        if name.endswith(".weight") and "_blocks." in name
    }
    return write_lora(lab.folder / "lora.safetensors", shapes, "comfyui")


def _compared(lab: Lab, name: str, config: ParallelConfig, kind: str, has_lora: bool) -> Finding:
    single = latent(lab, kind, "fp32", has_lora)
    exact = relative(_run(lab, config, kind, "fp32", has_lora), single)
    what = f"{kind}{' with a LoRA' if has_lora else ''}, {name}"
    values = {"kind": kind, "method": name, "lora": has_lora, "fp32": exact}
    text = f"{what}: float32 {exact:.1e} from one rank (limit {EXACT[lab.device]:g})"
    status = OK
    is_right = is_changed = True
    if has_lora:
        effect = relative(single, latent(lab, kind, "fp32", False))
        values["lora_effect"] = effect
        text += f", the LoRA changes it by {effect:.1e}"
        is_changed = effect >= MIN_LORA_EFFECT
    else:
        usual = relative(latent(lab, kind, "bf16", False), single)
        drift = relative(_run(lab, config, kind, "bf16", False), single)
        values |= {"bf16": drift, "bf16_one_rank": usual}
        text += f", bf16 {drift:.1e} from float32 (one rank in bf16: {usual:.1e})"
        is_right = drift <= BF16_RATIO * usual
    if not (is_right and exact <= EXACT[lab.device]):  # weight only already: matmul changes nothing
        status = PROBLEM
        text += f"; {OTHER_METHOD}"
    elif not is_changed:  # one rank leaves it out, too
        status = PROBLEM
        text += f"; the LoRA is not applied: {REPORT}"
    elif exact > USUAL:
        status = WARNING
        text += f"; {ABOVE_USUAL}"
    return Finding("quantized", status, text, values)
