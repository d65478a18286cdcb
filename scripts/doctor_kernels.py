"""What scripts/doctor.py --full runs of kernels: attention in the mid-size Flux and by itself on every head
size, attention in rings, and compiled blocks against eager ones."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from doctor_degrees import methods
from doctor_findings import OK, PROBLEM, WARNING, Finding, Found, findings, possible, refused
from doctor_lab import Lab, relative
from doctor_limits import REAL_SIZE
from doctor_next import OTHER_METHOD, REPORT
from doctor_processes import Ended
from doctor_time import of_form, while_time

from backend.client.cache_files import cache_folder
from backend.config import CHOICES, ParallelConfig
from backend.parallel.attention.kernel_table import kernel_of
from backend.protocol import RefusedError

#: Attention kernels that are timed: all but auto, which is one of them.
KERNELS = CHOICES["attention"][1:]
#: What the shorter form has of head sizes: those of most models.
MOST_HEADS = "heads of 128"
#: Largest relative distance of a latent from torch's kernel: random weights are sharp.
LATENT = 0.25
#: The same of one call: int8 and fp4 kernels round their inputs; others round their outputs to bf16.
APPROXIMATE, EXACT = 0.2, 2e-2
#: Compiled blocks add in another order: distance of latents in float32, and in bf16.
COMPILED = {"cpu": 1e-5, "cuda": 5e-2}
#: Ranks of a ring in which each hop of that Flux has keys enough for approximate kernels (kernel_table.py).
MOST_HOPS = 4
#: A request's note of what it compiled (backend/parallel/compiled_blocks.py).
GRAPHS = re.compile(r"compiled (\d+) graphs? of blocks in ([\d.]+) s")


def kernels(lab: Lab) -> Found:
    """Attention kernels on one rank: seconds and distance from torch's; rings; each head size by itself."""
    path = lab.flux()
    wanted = lab.run(ParallelConfig(), path, lab.request(path, 2)).samples
    here: list[str] = []
    yield from findings("kernels", _timed_kernels, lab, wanted, here)
    yield from findings("kernels", in_rings, lab, here, wanted, what="in a ring")
    from kernels import HEAD_SIZES  # of benchmarks

    sizes = {f"heads of {size}": size for size in HEAD_SIZES}
    head_sizes = [sizes[name] for name in of_form(lab, sizes, [MOST_HEADS])]
    by_head_size = {f"{kernel} by head size": kernel for kernel in here}
    for what in while_time(lab, by_head_size):
        yield from findings("kernels", _head_sizes, lab, by_head_size[what], head_sizes, what=what)


def _timed_kernels(lab: Lab, wanted: torch.Tensor, here: list[str]) -> Found:
    """Time every kernel; add those to ``here`` that can be chosen on this machine."""
    for kernel in while_time(lab, KERNELS):
        for finding in findings("kernels", _kernel, lab, kernel, wanted, what=kernel):
            here += [kernel] if finding.values else []
            yield finding


def in_rings(lab: Lab, here: list[str], wanted: torch.Tensor) -> Found:
    """Run one request in a ring of all ranks with each kernel of ``here`` that the table has for rings, which
    merge attention by its log-sum-exp. ``wanted``: one rank's latent by torch's kernel."""
    able = [kernel for kernel in here if kernel_of(kernel).lse]
    if lab.ranks == 1 or not able:
        return
    if lab.links_failed:
        yield Finding("kernels", WARNING, "not run in rings: the check links failed; see to it first")
        return
    rings = {f"{kernel} in a ring": kernel for kernel in able}
    for what in while_time(lab, of_form(lab, rings, [])):
        yield from possible("kernels", what, _in_ring, lab, rings[what], wanted)


def _ring_degrees(kernel: str, ranks: int) -> tuple[int, int]:
    """Return the ring's and Ulysses' degree of all ranks. Approximate kernels leave few keys of a hop to
    torch's, as rings of five and more would have: theirs has two hops, of Ulysses groups, where that divides
    the ranks."""
    if kernel_of(kernel).exact or ranks <= MOST_HOPS or ranks % 2:
        return ranks, 1
    return 2, ranks // 2


def _in_ring(lab: Lab, kernel: str, wanted: torch.Tensor) -> Finding:
    path = lab.flux()
    ring, ulysses = _ring_degrees(kernel, lab.ranks)
    config = ParallelConfig(ring_degree=ring, ulysses_degree=ulysses, attention=kernel)
    distance = relative(lab.run(config, path, lab.request(path, 2)).samples, wanted)
    most = REAL_SIZE[lab.device] if kernel_of(kernel).exact else LATENT
    with_ulysses = f" with Ulysses {ulysses}" if ulysses > 1 else ""
    text = (
        f"{kernel} in a ring of {ring}{with_ulysses}: latent {distance:.1e} from one rank by torch's "
        f"(limit {most:g})"
    )
    values = {"kernel": kernel, "ring": ring, "distance": distance}
    if distance <= most:  # NaN is not
        return Finding("kernels", OK, text, values)
    remedy = f"set attention to another kernel than {kernel} where ring_degree is above 1, and {REPORT}"
    if kernel == "sdpa":  # which others fall back to
        remedy = OTHER_METHOD
    return Finding("kernels", PROBLEM, f"{text}; {remedy}", values)


def _kernel(lab: Lab, kernel: str, wanted: torch.Tensor) -> Finding:
    path = lab.flux()
    config = ParallelConfig(attention=kernel)
    try:
        seconds, run = lab.step_seconds(config, path, partial(lab.request, path))
        distance = relative(lab.run(config, path, lab.request(path, 2)).samples, wanted)
    except RefusedError as refusal:
        return refused("kernels", kernel, refusal)
    status = OK if distance < LATENT else PROBLEM
    text = f"{kernel}: {seconds:.4f} s a step, latent {distance:.1e} from torch's kernel"
    values = {"kernel": kernel, "seconds": seconds, "distance": distance, "timed": run.timed}
    return Finding("kernels", status, text, values)


def _head_sizes(lab: Lab, kernel: str, head_sizes: Sequence[int]) -> Found:
    """benchmarks/kernels.py of one kernel, which ends alone where it crashes."""
    rows, ended = lab.kernel_rows(kernel, head_sizes)
    run = [row for row in rows if "seconds" in row]
    failed = [row for row in rows if "failed" in row]
    if run or failed:
        most = APPROXIMATE if kernel.startswith("sage") else EXACT
        status = PROBLEM if failed or any(not row["distance"] < most for row in run) else OK
        cells = ", ".join(_cell(row) for row in rows)
        yield Finding("kernels", status, f"{kernel} by head size: {cells}", {"rows": rows})
    last = f"heads of {rows[-1]['head_size']}" if rows else "its start"
    yield from cut_short(lab, "kernels", f"benchmarks/kernels.py, {kernel}, after {last}", ended)


def cut_short(lab: Lab, check: str, what: str, ended: Ended) -> Found:
    """Say why a program did not come to its end. Raises OutOfTime where the minutes are over."""
    if ended.code == 0:
        return
    if ended.code is None:
        lab.check()
    yield Finding(check, PROBLEM, f"{what}: {ended.why}", {"stderr": ended.errors})


def _cell(row: dict) -> str:
    """Write one row in short."""
    name = f"{row['head_size']}{' masked' if row['masked'] else ''}"
    if "failed" in row:
        return f"{name} failed ({row['failed']})"
    if "seconds" not in row:
        return f"{name} not possible"
    by_torch = "" if row["own"] else " (torch's)"
    return f"{name} {row['seconds'] * 1e3:.2f} ms{by_torch}, {row['distance']:.0e} off"


def compiled(lab: Lab) -> Found:
    """Compiled blocks against eager ones, on one rank and with what auto may choose of all of them, whole and
    sharded: seconds a step, those of compiling, latents, notes."""
    configs = {"one rank": ParallelConfig()}
    telling = ["one rank"]
    if lab.ranks > 1:
        every = methods(lab.ranks)
        configs |= {name: every[name] for name in ("ulysses", "FSDP", "ring")}
        configs |= {"tp": every["tensor parallel"], "pipefusion": every[f"pipefusion M={lab.ranks}"]}
        telling = ["ulysses"]
    lab.flux()
    for name in while_time(lab, of_form(lab, configs, telling)):
        yield from possible("compiled", name, _compiled, lab, name, configs[name])


def compiling(notes: list[str]) -> dict[str, float]:
    """Return how many graphs a request compiled by its notes, and in how many seconds; nothing where it had
    them."""
    found = next(filter(None, map(GRAPHS.match, notes)), None)
    return {"graphs": int(found[1]), "compile_seconds": float(found[2])} if found else {}


def _compiled(lab: Lab, name: str, config: ParallelConfig) -> Finding:
    """Compare one configuration. Ranks that stay have the graphs of the one before: a note counts further
    ones alone, and some may be read from the cache's folder."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or cache_folder() / "inductor"
    had_cache = any(Path(folder).glob("*"))
    path = lab.flux()
    request = partial(lab.request, path)
    eager, whole = lab.step_seconds(config, path, request)
    seconds, run = lab.step_seconds(replace(config, compile="blocks"), path, request)
    runs = [lab.run(replace(config, compile=each), path, request(2)) for each in ("off", "blocks")]
    distance = relative(runs[1].samples, runs[0].samples)
    notes = [note for note in runs[1].notes if "uncompiled" in note]
    values = {"method": f"{name}, compiled", "seconds": seconds, "eager": eager, "distance": distance}
    values |= {"timed": run.timed, "timed_eager": whole.timed, "had_cache": had_cache}
    made = compiling(run.first_notes)
    values |= made
    if notes:
        return Finding("compiled", WARNING, f"{name}: {notes[0]}", values)
    text = f"{name}: {seconds:.4f} s a step with compiled blocks, {eager:.4f} s without, "
    text += f"{eager / seconds:.2f} times as fast; latent {distance:.1e} off"
    if made:
        text += f"; compiled {made['graphs']} graphs in {made['compile_seconds']:.1f} s"
    status = OK if distance <= COMPILED[lab.device] else PROBLEM
    if status == OK and seconds > eager:
        status = WARNING
    return Finding("compiled", status, text, values)
