"""What scripts/doctor.py --full runs of quantized files: each format weight only and natively, and weights
that stay dequantized through a request against those that do not."""

import importlib.util
import os
from unittest.mock import patch

from doctor_findings import OK, PROBLEM, WARNING, Finding, Found, findings, gb
from doctor_lab import Lab, relative
from doctor_quantized_ranks import KINDS, on_all_ranks
from doctor_time import of_form, while_time

from backend.client.auto.planning import is_memory_shortage
from backend.config import ParallelConfig
from backend.protocol import RefusedError
from backend.quantization.dequantized_cache import CACHE_VARIABLE

#: Formats with native products, and all that are run; of blocks (mxfp8, nvfp4) values are random.
NATIVE = ("float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4")
OF_GGUF = ("Q8_0", "Q4_K")
#: Of the shorter form: on all ranks the first alone.
TELLING = ("float8_e4m3fn", "Q4_K")
#: What is timed with and without memory that it may stay dequantized in.
CACHED_KIND = "Q4_K"
#: Largest relative distance of a native latent from weight only's, which random weights drift by.
DRIFT = 0.25
#: By how much two timings of the same may differ.
NOISE = 1.05
#: Words of refusals that no package and no setting changes (quantization/matmul.py).
OF_GPUS = ("compute capability", "only NVIDIA GPUs")


def quantized(lab: Lab) -> Found:
    """Quantized files on all ranks, against one; then on one rank natively against weight only, and bf16's
    seconds, which any GPU can tell."""
    if importlib.util.find_spec("gguf") is None:
        text = f"{', '.join(OF_GGUF)}: not run, since gguf is not installed, which is optional"
        yield Finding("quantized", OK, text)
    try:
        known = [kind for kind in KINDS if kind in _kinds() and lab.ranks > 1]
        of_all = {f"{kind} on all ranks": kind for kind in known}
        on_all = of_form(lab, of_all, [f"{kind} on all ranks" for kind in TELLING[:1]])
        kinds = tuple(of_all[what] for what in on_all)
        yield from findings("quantized", on_all_ranks, lab, kinds, what="all ranks")
        lab.drop("quantized", KINDS[0])  # int8's, made anew: bf16's comes next, the largest
        of_one = {f"{kind} on one rank": kind for kind in _kinds()}
        for what in while_time(lab, of_form(lab, of_one, [f"{kind} on one rank" for kind in TELLING])):
            kind = of_one[what]
            for matmul in ("weight only", "native") if kind in NATIVE else ("weight only",):
                yield from findings("quantized", _quantized, lab, kind, matmul, what=f"{kind}, {matmul}")
            if kind != CACHED_KIND:
                lab.drop("quantized", kind)
    finally:
        for kind in ("bf16", *KINDS):  # also where their runs failed
            lab.drop("quantized", kind)
        lab.forget_weights()


def _kinds() -> tuple[str, ...]:
    """Return the formats that can be written here."""
    return (*NATIVE, *(OF_GGUF if importlib.util.find_spec("gguf") else ()))


def _quantized(lab: Lab, kind: str, matmul: str) -> Finding:
    seconds, _ = lab.cached(("bf16",), lambda: _timed_file(lab, "bf16", "auto"))
    lab.drop("quantized", "bf16")
    # not bf16's latent: the file stands for weights of its own where they are rotated
    stored = lab.cached(("weight only", kind), lambda: _timed_file(lab, kind, "weight only"))
    try:
        own, run = stored if matmul == "weight only" else _timed_file(lab, kind, matmul)
    except RefusedError as refusal:
        if is_memory_shortage(refusal):
            raise
        is_of_gpu = any(words in str(refusal) for words in OF_GPUS)
        status = OK if is_of_gpu else WARNING
        return Finding("quantized", status, f"{kind}, {matmul}: not possible ({refusal})")
    distance = relative(run.samples, stored[1].samples)
    text = f"{kind}, {matmul}: {own:.4f} s a step, bf16 {seconds:.4f} s"
    text += f"; latent {distance:.1e} from weight only's"
    values = {"kind": kind, "matmul": matmul, "seconds": own, "bf16": seconds, "distance": distance}
    values |= {"timed": run.timed, "dequantized_once": run.stats.get("dequantized_once"), **run.loaded}
    status = OK if distance < DRIFT else PROBLEM
    if matmul == "native" and distance == 0:
        status = PROBLEM
        text += ": the product failed, and ranks went on weight only (the end of the ranks' log says why)"
    return Finding("quantized", status, text, values)


def _timed_file(lab: Lab, kind: str, matmul: str):
    path = lab.quantized(kind)
    return lab.step_seconds(ParallelConfig(), path, lab.plain_request, dtype="bf16", matmul=matmul)


def dequantized_once(lab: Lab) -> Found:
    """Seconds a step of a weight-only file where its weights stay dequantized, and where they do not."""
    if CACHED_KIND not in _kinds():
        return
    seconds, run = lab.cached(
        ("weight only", CACHED_KIND), lambda: _timed_file(lab, CACHED_KIND, "weight only")
    )
    cached = run.stats.get("dequantized_once")
    lab.fresh()
    with patch.dict(os.environ, {CACHE_VARIABLE: "0"}):
        each, _ = _timed_file(lab, CACHED_KIND, "weight only")
    lab.fresh()  # the next ranks cache again
    lab.drop("quantized", CACHED_KIND)
    lab.forget_weights()
    values = {"kind": CACHED_KIND, "seconds": seconds, "each_pass": each, "dequantized_once": cached}
    stays = f"{gb(cached or 0)} that stay dequantized"
    text = f"{CACHED_KIND}: {seconds:.4f} s a step with {stays}, {each:.4f} s without"
    yield Finding("dequantized once", WARNING if cached and seconds > NOISE * each else OK, text, values)
