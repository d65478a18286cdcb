"""The checks "overhead" and "overhead compiled" of scripts/doctor.py --full: what the engine takes on one
rank over diffusers' transformer in a plain loop (benchmarks/peers.py)."""

import statistics

from doctor_findings import OK, PROBLEM, WARNING, Finding, Found
from doctor_kernels import COMPILED, cut_short
from doctor_lab import Lab
from doctor_next import NOTHING
from doctor_processes import Ended

from backend.hardware.device_memory import says_full_gpu, says_out_of_memory

#: Of benchmarks/peers.py, of a request of each side; and of the shorter form.
ROUNDS, SHORT_ROUNDS = 5, 3
#: Where exceptions are from that a compiler raises: no crash is among them, and nothing that a kernel raises.
OF_COMPILERS = ("torch._dynamo.exc.", "torch._inductor.exc.", "triton.compiler.", "triton.runtime.errors.")


def overhead(lab: Lab) -> Found:
    """Seconds of the mid-size Flux on one rank over those of a plain loop, in rounds."""
    yield from _compared(lab, "overhead", has_compiled=False)


def overhead_compiled(lab: Lab) -> Found:
    """The same with compiled blocks on both sides."""
    yield from _compared(lab, "overhead compiled", has_compiled=True)


def _compared(lab: Lab, check: str, has_compiled: bool) -> Found:
    rounds = SHORT_ROUNDS if lab.is_short else ROUNDS
    if lab.is_short:
        lab.left_out.append(f"{ROUNDS - rounds} of {ROUNDS} rounds")
    numbers, ended = lab.overhead(lab.flux(), has_compiled, rounds)
    if numbers:
        yield _judged(lab, check, numbers, has_compiled)
        return
    if _is_full(ended):
        device = "this GPU" if lab.device == "cuda" else "this device"
        text = f"not run: {device} has no room for two of the mid-size Flux; close what else uses it"
        yield Finding(check, WARNING, text, {"stderr": ended.errors})
        return
    for finding in cut_short(lab, check, "benchmarks/peers.py", ended):
        if not (has_compiled and _has_not_compiled(ended)):
            yield finding
            continue
        text = f"{finding.text}; {NOTHING} where the check compiled is ok"
        yield Finding(check, WARNING, text, finding.values)


def _is_full(ended: Ended) -> bool:
    """Return whether a program has said that memory ran out."""
    text = ended.errors
    return says_full_gpu(text) or says_out_of_memory(text) or "MemoryError" in text


def _has_not_compiled(ended: Ended) -> bool:
    """Return whether a program ended by what a compiler raises, not by a signal and not for its time."""
    is_raised = ended.code is not None and ended.code > 0
    return is_raised and any(words in ended.errors for words in OF_COMPILERS)


def _judged(lab: Lab, check: str, numbers: dict, has_compiled: bool) -> Finding:
    """Say what peers.py has measured. numbers: as it writes them. Its seconds are those of whole requests
    over their steps, which other checks' seconds a step are not."""
    blocks = "compiled blocks" if has_compiled else "eager blocks"
    plain, ours, *_ = numbers["rounds"]
    goal = numbers["goal"]
    ratio, difference = numbers["ratio"], numbers["difference"]
    seconds = statistics.median(numbers["rounds"][ours]) / numbers["options"]["steps"]
    text = f"one rank, {blocks}: {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) times the "
    text += f"seconds of diffusers' transformer in a plain loop (goal {goal:g}), {seconds:.4f} s a step"
    text += " of whole requests"
    text += f"; latents {difference:.1e} apart (limit {COMPILED[lab.device]:g})"
    values = {"method": f"one rank, {blocks}", "seconds": seconds, "goal": goal, "over": plain}
    values |= {key: numbers[key] for key in ("ratio", "by_cpu", "difference", "rounds")}
    status = OK if ratio["median"] <= goal else WARNING
    if not difference <= COMPILED[lab.device]:  # NaN is not
        status = PROBLEM
    return Finding(check, status, text, values)
