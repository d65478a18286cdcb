"""Rates of copies between GPUs and host memory, for scripts/doctor.py: measured by a program of its own
(gpu_copies.py), which may hang on a lost GPU, or end with it."""

import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import doctor_processes

PROGRAM = Path(__file__).with_name("gpu_copies.py")
#: Seconds of warming up and copying.
SECONDS = 3.0
#: Importing torch and opening GPUs comes before; a program that takes longer than this hangs.
MAX_SECONDS = 60.0
#: Bytes that a GPU needs free: half a GB of a process's context, the buffers, kernels that compare them. With
#: less, others' work could fail meanwhile.
ROOM = 10**9

Place = int | str


@dataclass(frozen=True)
class Copy:
    """One measured copy: "host" or a GPU's index, bytes/s, and between GPUs whether the bytes arrived that
    were sent."""

    source: Place
    target: Place
    rate: float
    is_same: bool = True


@dataclass(frozen=True)
class Copies:
    """What was measured. full: GPU -> its free bytes, too few to measure it; broken: GPU -> why it cannot be
    used; unlocked: why no host memory can be page locked; ended: what ended all further copies, and during:
    what was being done then; left: the copies that there was no time for; refused: those for which CUDA had
    no room, and why. Empty: none of that."""

    rates: tuple[Copy, ...] = ()
    full: dict[int, int] = field(default_factory=dict)
    broken: dict[int, str] = field(default_factory=dict)
    unlocked: str = ""
    ended: str = ""
    during: str = ""
    left: tuple[tuple[Place, Place], ...] = ()
    refused: tuple[tuple[Place, Place, str], ...] = ()


def measured(free: dict[int, int]) -> Copies:
    """Time copies between GPUs, whose ``free`` bytes are given, and with the host; leave out full ones. Where
    nvidia-smi says nothing ``free`` is what is usual, so that a full one is opened, and left out by what CUDA
    says then."""
    gpus = [gpu for gpu, size in free.items() if size >= ROOM]
    full = {gpu: size for gpu, size in free.items() if size < ROOM}
    if not gpus:
        return Copies(full=full)
    with tempfile.TemporaryDirectory(prefix="parallel-dit-doctor-") as name:
        out = Path(name) / "copies.jsonl"
        out.touch()
        command = [sys.executable, PROGRAM, "--out", out, "--seconds", SECONDS, *gpus]
        ended = doctor_processes.run(command, MAX_SECONDS, Path(name))
        rows = doctor_processes.rows_in(out)
    return replace(_parsed(rows, "" if ended.code == 0 else ended.why), full=full)


def _parsed(rows: list[dict], why: str) -> Copies:
    """Return what the program wrote; ``why`` it did not come to its end, empty where it did."""
    found: dict[str, Any] = {}
    for row in rows:
        found |= row
    raised = [row["error"] for row in rows if "error" in row and "gpu" not in row]
    ended = (raised or ["" if "done" in found else why])[0]
    refused = [(row["source"], row["target"], row["unmeasured"]) for row in rows if "unmeasured" in row]
    return Copies(
        rates=tuple(Copy(**row) for row in rows if "rate" in row),
        broken={row["gpu"]: row["error"] for row in rows if "gpu" in row},
        unlocked=found.get("unlocked", ""),
        ended=ended,
        during=found.get("doing", "") if ended else "",
        left=tuple((source, target) for source, target in found.get("left", ())),
        refused=tuple(refused),
    )
