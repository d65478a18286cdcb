"""Times copies between GPUs, and from and to page-locked host memory, in one process:

    python scripts/gpu_copies.py --out FILE --seconds 3 0 1 2

scripts/doctor.py runs it (doctor_copies.py): a copy may hang, or take its process with it, and what a process
holds of GPUs goes with it. Every line of FILE is an object, written as it comes:

{"doing"}: what comes next ("while copying from GPU 0 to GPU 1")
{"source", "target", "rate"}: bytes/s of one copy ("host" or a GPU's index), between GPUs also "is_same":
    whether the bytes arrived that were sent
{"gpu", "error"}: a GPU that cannot be used, and why
{"unlocked"}: why no host memory can be page locked
{"source", "target", "unmeasured"}: a copy that CUDA refuses without being broken, and why
{"left"}: the copies that there was no time for
{"error"}: what ended all further copies
{"done"}: the end: how the process ends says nothing more
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
import torch
from torch import Tensor

from backend.errors import reason
from backend.runtime.parent_pipe import be_killed_with_parent, end_with_parent

HOST = "host"
#: Bytes of a copy; of a GPU that is nearly full a part of what is free, and the least that shows a rate.
BYTES = 32 << 20
SHARE = 8
MIN_BYTES = 4 << 20
TYPE = torch.int32
#: Seconds of copies that are timed as one, so that launches hardly count, and how many these are at most.
TIMED_SECONDS = 2e-3
MAX_TOGETHER = 64
#: Timings of which the median counts, and seconds after which fewer do.
TIMINGS = 3
ENOUGH_SECONDS = 0.1
#: What CUDA says of a ninth GPU whose memory one reaches: eight are the most, of all processes together.
NO_MORE_PEERS = "peer mapping resources exhausted"
#: Seconds in which GPUs that idled raise their clocks and the rate of their PCIe lanes.
WARM_SECONDS = 0.5

Place = int | str
Note = Callable[..., None]


class Buffers:
    """Numbers that one GPU sends, others than any other GPU's, and room for what it receives. Raises
    MemoryError where the GPU is full."""

    def __init__(self, gpu: int):
        self.gpu = gpu
        free = torch.cuda.mem_get_info(gpu)[0]
        size = min(BYTES, free // SHARE)
        if size < MIN_BYTES:
            raise MemoryError(f"out of memory: {free / 1e6:.0f} MB are free")
        self.sent = torch.arange(size // TYPE.itemsize, dtype=TYPE, device=f"cuda:{gpu}") + gpu
        self.received = torch.zeros_like(self.sent)

    def has_received(self, other: "Buffers", count: int) -> bool:
        """Return whether the first ``count`` numbers are those that another GPU sent."""
        return self.received[:count].equal(self.sent[:count] + (other.gpu - self.gpu))


def time_copies(gpus: list[int], seconds: float, note: Note):
    """Note the rate of every copy among ``gpus`` and the host, as far as so many seconds allow once the GPUs
    can be used."""
    opened = [each for gpu in gpus if (each := _opened(gpu, note))]
    if opened:
        try:
            _time_all(opened, time.monotonic() + seconds, note)
        except RuntimeError as error:  # of CUDA: this process computes nothing more
            note(error=_first_line(error))
    note(done=True)


def _first_line(error: Exception) -> str:
    """Return what an error says, without the lines that torch appends to CUDA's."""
    return reason(str(error).partition("\n")[0])


def _opened(gpu: int, note: Note) -> Buffers | None:
    """Return a GPU's buffers, or note why it cannot be used: others can."""
    note(doing=f"while opening GPU {gpu}")
    try:
        buffers = Buffers(gpu)
        buffers.has_received(buffers, 1)  # loads the kernels that compare, before the clock starts
        return buffers
    except (RuntimeError, MemoryError) as error:
        note(gpu=gpu, error=_first_line(error))
        return None


def _time_all(opened: list[Buffers], end: float, note: Note):
    """Note the rates of copies in order; name those that are left at ``end`` (time.monotonic)."""
    by_gpu: dict[Place, Buffers] = {each.gpu: each for each in opened}
    host = _page_locked(opened[0], note)
    note(doing="while warming up")
    _warm_up(opened, min(end, time.monotonic() + WARM_SECONDS))
    copies = in_order([each.gpu for each in opened], with_host=host is not None)
    for index, (source, target) in enumerate(copies):
        if time.monotonic() >= end:
            note(left=copies[index:])
            return
        note(doing=f"while copying from {words(source)} to {words(target)}")
        if host is not None and HOST in (source, target):
            rate = _host_rate(by_gpu[source if target == HOST else target], host, target == HOST)
            note(source=source, target=target, rate=rate)
        else:
            _note_between(by_gpu[source], by_gpu[target], note)


def in_order(gpus: list[int], with_host: bool = True) -> list[tuple[Place, Place]]:
    """Return source and target of every copy: those of the host, then pairs both ways, neighbours first, so
    that each GPU is in some of them where time is short."""
    copies: list[tuple[Place, Place]] = []
    if with_host:
        copies += [pair for gpu in gpus for pair in ((HOST, gpu), (gpu, HOST))]
    count = len(gpus)
    for distance in sorted(range(1, count), key=lambda apart: (min(apart, count - apart), apart)):
        copies += [(gpu, gpus[(at + distance) % count]) for at, gpu in enumerate(gpus)]
    return copies


def words(place: Place) -> str:
    """Name a source or target in a sentence."""
    return "host memory" if place == HOST else f"GPU {place}"


def _page_locked(first: Buffers, note: Note) -> Tensor | None:
    """Return page-locked host memory, or None, and note why there is none."""
    try:
        with torch.cuda.device(first.gpu):  # else GPU 0 is opened for it
            return torch.empty(BYTES // TYPE.itemsize, dtype=TYPE, pin_memory=True)
    except RuntimeError as error:
        note(unlocked=_first_line(error))
        return None


def _warm_up(opened: list[Buffers], end: float):
    """Keep all GPUs busy until ``end``."""
    while time.monotonic() < end:
        for each in opened:
            each.received.copy_(each.sent)
        for each in opened:
            torch.cuda.synchronize(each.gpu)


def _host_rate(on_gpu: Buffers, host: Tensor, is_to_host: bool) -> float:
    """Return the bytes/s of a GPU to page-locked host memory, or from there."""
    part = host[: len(on_gpu.sent)]
    if is_to_host:
        return _rate(on_gpu.sent, part, on_gpu.gpu)
    return _rate(part, on_gpu.received, on_gpu.gpu)


def _note_between(source: Buffers, target: Buffers, note: Note):
    """Note the bytes/s of one GPU to another, and whether the same bytes arrive. Raises what CUDA does, but
    where it has no room for one more peer."""
    count = min(len(source.sent), len(target.received))
    target.received.zero_()  # the host may have written the same numbers
    torch.cuda.synchronize(target.gpu)
    try:
        rate = _rate(source.sent[:count], target.received[:count], source.gpu)
    except RuntimeError as error:
        if NO_MORE_PEERS not in str(error):
            raise
        note(source=source.gpu, target=target.gpu, unmeasured=_first_line(error))
        return
    note(source=source.gpu, target=target.gpu, rate=rate, is_same=target.has_received(source, count))


def _rate(source: Tensor, target: Tensor, gpu: int) -> float:
    """Return the bytes/s of a copy, on the current stream of ``gpu``: between two, torch takes the source's.
    The first copy, which opens peer access, is not timed; the second says how many are timed as one."""
    with torch.cuda.device(gpu):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(gpu)
        count = min(MAX_TOGETHER, math.ceil(TIMED_SECONDS / _seconds(source, target, 1)))
        timings = []
        began = time.monotonic()
        while not timings or (len(timings) < TIMINGS and time.monotonic() - began < ENOUGH_SECONDS):
            timings.append(_seconds(source, target, count))
    return count * source.nbytes / statistics.median(timings)


def _seconds(source: Tensor, target: Tensor, count: int) -> float:
    """Return the seconds of so many copies, by events on the current GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        target.copy_(source, non_blocking=True)
    end.record()
    end.synchronize()
    return max(1e-6, begin.elapsed_time(end) / 1e3)


def _writes_to(out: TextIO) -> Note:
    """Return what writes a line, so that it is there whatever comes next."""

    def note(**values):
        out.write(json.dumps(values) + "\n")
        out.flush()

    return note


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("gpus", type=int, nargs="+")
    chosen = parser.parse_args()
    be_killed_with_parent()  # a copy that hangs may keep the interpreter's lock
    end_with_parent()
    with chosen.out.open("w") as out, torch.inference_mode():
        time_copies(chosen.gpus, chosen.seconds, _writes_to(out))


if __name__ == "__main__":
    main()
