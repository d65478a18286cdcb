"""Measures one machine in about ten seconds, by python -m torch.distributed.run ... -m backend.probe
--store FILE --device cuda --out FILE, on as many ranks as a plan may use.

All ranks compute and send at once, as in a request, and the slowest counts. The planner (backend/planner)
reads the result; client/auto/measurements.py starts this and keeps what it found.
"""

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from .config import ParallelConfig
from .loading.compute_dtype import compute_dtype, fast_dtypes
from .loading.staging import page_locked
from .parallel import comm, mesh
from .planner.machine import OVERHEAD, Machine
from .quantization import native_trial
from .quantization.matmul import capability_of, native_formats
from .rank.start import linked_file, ready_file, run_and_exit
from .runtime.parent_pipe import be_killed_with_parent, end_with_parent
from .runtime.whole_files import replace_file
from .serving.broadcast import ControlChannel

#: Device -> (tokens, width, heads, head size) of what is computed, and bytes that are sent.
SIZES = {"cuda": ((4096, 3072, 24, 128), 1 << 24), "cpu": ((512, 768, 12, 64), 1 << 21)}
#: Calls of each measurement, after one that is not counted.
CALLS = 5
#: Copies from host memory that are timed as one: some milliseconds, in which all ranks copy.
COPIES = 8
#: Seconds in which a GPU that idled raises its clocks.
WARM = 0.5
#: Seconds for which ranks on the CPU compute at once: more than a few turns of those that share a core.
SPAN = 0.1
#: Linear layers of a stream in a block that is timed.
LAYERS = 4
#: Small kernels that a block starts for each stream.
KERNELS = 24
MICROSECOND = 1e-6
#: Type of what is sent, and bytes of a message that takes no time but its latency.
MESSAGE, TINY = torch.int32, 16
#: Exchanges of which every byte is compared.
CHECKS = 3


class LinkError(Exception):
    """A rank received other bytes than were sent to it."""


def computed_in(device: torch.device) -> torch.dtype:
    """Return the type in which most models compute there."""
    return compute_dtype(None, (torch.bfloat16, torch.float16), fast_dtypes(device, capability_of(device)))


class Probe:
    """The measurements of one rank; every rank makes the same in the same order."""

    def __init__(self, device: str, store: mesh.Store | None = None):
        """``store``: where the ranks meet; None where they have met, or meet in torchrun's own."""
        self.ranks = int(os.environ["WORLD_SIZE"])
        self.kind = device
        self.mesh = mesh.build(ParallelConfig(ulysses_degree=self.ranks), device, store)
        self.device = self.mesh.device
        self.dtype = computed_in(self.device)
        self.control = ControlChannel(self.mesh.control)
        (self.tokens, self.width, self.heads, self.head_size), self.sent = SIZES[device]

    def seconds(self, action: Callable[[], object]) -> float:
        """Return the least seconds of ``action`` on this rank: other processes only add to them."""
        times = []
        for _ in range(1 + CALLS):
            self._wait()
            started = time.perf_counter()
            action()
            self._wait()
            times.append(time.perf_counter() - started)
        return max(MICROSECOND, min(times[1:]))

    def check_links(self):
        """Raise LinkError on every rank unless each receives what the others send: GPUs whose driver promises
        peer access have been seen to read something else (vLLM's can_actually_p2p tests the same)."""
        wrong = [peer for number in range(CHECKS) for peer in self._wrong_peers(number)]
        for rank, peers in enumerate(self.control.all_gather_object(wrong)):
            if peers:
                raise LinkError(f"rank {rank} received other bytes than rank {peers[0]} sent")

    def _wrong_peers(self, number: int) -> list[int]:
        """Return the ranks that this one received other bytes from, in one exchange among all."""
        count = self.sent // MESSAGE.itemsize // self.ranks
        ramp = torch.arange(count, dtype=MESSAGE, device=self.device)

        def message(sender: int, receiver: int) -> torch.Tensor:
            return ramp * (number + 2) + sender * self.ranks + receiver

        axis, peers = self.mesh.ulysses, range(self.ranks)
        sent = [message(axis.rank, peer) for peer in peers]
        received = comm.all_to_all(sent, [(count,)] * self.ranks, axis, "probe")
        return [peer for peer in peers if not received[peer].equal(message(peer, axis.rank))]

    def measure(self) -> Machine:
        """Return the rates of the slowest rank, without those of native products."""
        if self.kind == "cuda":
            self.warm_up()
        own = self._compute()
        own["latency"], exchanges = self._all_to_alls()
        rings = self._rings()
        own |= {"p2p": self._neighbours(), "host_link": self._host_link(), "float32": 1.0}
        if self.kind == "cuda":
            own["float32"] = max(1.0, own["gemm"] / self._gemm(self.together, torch.float32))
        ranks = self._gathered(own)
        of_gpus = {}
        if self.kind == "cuda":
            of_gpus = {"overhead": OVERHEAD, "speeds": self.speeds(), "bandwidths": ranks["bandwidth"]}
        return Machine(
            name=self._name(),
            **{name: min(ranks[name]) for name in ("gemm", "attention", "bandwidth", "p2p", "host_link")},
            **{name: max(ranks[name]) for name in ("launch", "latency", "float32")},
            all_to_all={size: min(rates) for size, rates in self._gathered(exchanges).items()},
            rings={size: min(rates) for size, rates in self._gathered(rings).items()},
            alone=self._alone(min(ranks["gemm"])),
            ranks=self.ranks,
            names=tuple(self.control.all_gather_object(self._name())),
            on_host=self.kind == "cpu",
            **of_gpus,
        )

    def _gathered(self, own: dict) -> dict[Any, tuple[float, ...]]:
        """Return the numbers of every rank under the names of ``own``, which all ranks have, in order."""
        ranks = self.control.all_gather_object(list(own.values()))
        return dict(zip(own, zip(*ranks)))

    def natives(self) -> list[dict[str, float]]:
        """Return of each rank how many times as fast as those of its type native products of each format are;
        without those that it has none of, or that fail. After everything else: a kernel that fails may take
        the device with it, or the process."""
        products = native_formats(self.dtype, self.device, capability_of(self.device))
        own = {kind: rate for kind, name in products if (rate := self._native_rate(kind, name))}
        return self.control.all_gather_object(own)

    def _native_rate(self, kind: str, name: str) -> float:
        """Return this rank's rate for the slowest of a format's kinds; 0 where there is none, or it fails."""
        try:
            if native_trial.refusals([(kind, name)], self.device):
                return 0.0
            weights = native_trial.examples(kind, self.dtype, self.device, self.width)
            usual = self.sustained(partial(F.linear, self.x, self.weight))
            return usual / max(self.sustained(partial(weight.linear, self.x, None)) for weight in weights)
        except Exception:  # the other ranks wait for this one, and its products may run all the same
            traceback.print_exc()
            return 0.0

    def speeds(self) -> tuple[float, ...]:
        """Return how many times as fast as the slowest rank each is, by one timed step of all at once: linear
        layers and attention as in a block."""

        def step():
            for _ in range(LAYERS):
                F.linear(self.x, self.weight)
            F.scaled_dot_product_attention(self.q, self.q, self.q)

        self.control.all_gather_object(None)  # begin together
        seconds_of_ranks = self.control.all_gather_object(self.seconds(step))
        return tuple(max(seconds_of_ranks) / each for each in seconds_of_ranks)

    def warm_up(self):
        """Compute for a while: a GPU that idled is slower at first, and links would seem fast next to it."""
        end = time.perf_counter() + WARM
        while time.perf_counter() < end:
            F.linear(self.x, self.weight)
            self._wait()

    def together(self, action: Callable[[], object]) -> float:
        """Return the seconds of ``action`` while all ranks compute."""
        self.control.all_gather_object(None)  # begin together
        return self.sustained(action)

    def sustained(self, action: Callable[[], object]) -> float:
        """Return the mean seconds of ``action``: the fastest call does not show that ranks share a core."""
        if self.kind == "cuda":
            return self.seconds(action)
        action()
        started, calls, elapsed = time.perf_counter(), 0, 0.0
        while elapsed < SPAN:
            action()
            calls += 1
            elapsed = time.perf_counter() - started
        return elapsed / calls

    def _wait(self):
        if self.kind == "cuda":
            torch.cuda.synchronize()

    def _name(self) -> str:
        return torch.cuda.get_device_name() if self.kind == "cuda" else "CPU"

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _message(self, size: int) -> torch.Tensor:
        """Return about ``size`` bytes to send, the same on ranks that compute in different types."""
        return torch.zeros(size // MESSAGE.itemsize, device=self.device, dtype=MESSAGE)

    @cached_property
    def x(self) -> torch.Tensor:
        """(tokens, width), the input of a linear layer."""
        return self._random(self.tokens, self.width)

    @cached_property
    def weight(self) -> torch.Tensor:
        """(width, width), that of a linear layer."""
        return self._random(self.width, self.width)

    @cached_property
    def q(self) -> torch.Tensor:
        """(1, heads, tokens, head size), the queries, keys and values of attention."""
        return self._random(1, self.heads, self.tokens, self.head_size)

    def _gemm(self, clock: Callable, dtype: torch.dtype | None = None) -> float:
        """Return the FLOP/s of a linear layer; ``clock``: seconds of a call."""
        x, weight = (torch.randn_like(each, dtype=dtype or self.dtype) for each in (self.x, self.weight))
        return 2 * self.tokens * self.width**2 / clock(partial(F.linear, x, weight))

    def _compute(self) -> dict[str, float]:
        """Measure FLOP/s of a linear layer and of attention, bytes/s of memory, seconds to start kernels."""
        small = self._random(8, 64)
        weight = self._random(64, 64)
        flop = 4 * self.tokens**2 * self.heads * self.head_size

        def kernels():
            for _ in range(KERNELS // 2):
                F.layer_norm(F.linear(small, weight), (64,))

        attend = partial(F.scaled_dot_product_attention, self.q, self.q, self.q)
        return {
            "attention": flop / self.together(attend),
            "bandwidth": 2 * self.x.nbytes / self.together(self.x.clone),
            "gemm": self._gemm(self.together),
            "launch": self.together(kernels),
        }

    def _host_link(self) -> float:
        """Return the bytes/s from host memory, page locked if possible, as parked weights come back."""
        empty = page_locked if self.kind == "cuda" else torch.empty
        waiting = empty((self.sent,), dtype=torch.uint8)
        x = torch.empty(self.sent, dtype=torch.uint8, device=self.device)

        def copy():
            for _ in range(COPIES):
                x.copy_(waiting, non_blocking=True)

        return COPIES * self.sent / self.together(copy)

    def _alone(self, together: float) -> float:
        """Return how many times as fast rank 0 computes while the others sleep: cores of a CPU are shared."""
        if self.kind == "cuda" or self.ranks == 1:
            return 1.0
        rate = self._gemm(self.sustained) if self.mesh.rank == 0 else 0.0
        return max(1.0, self.control.all_gather_object(rate)[0] / together)

    def _neighbours(self) -> float:
        """Return the bytes/s between pairs of ranks, all pairs at once; of an odd number, among all."""
        size = 2 if self.ranks % 2 == 0 else self.ranks
        x = self._message(self.sent)
        found = self._grouped(size, lambda axis: comm.all_gather(x, [x.shape] * size, axis, "probe"))
        return (size - 1) * self.sent / found

    def _rings(self) -> dict[int, float]:
        """Return ranks of a group -> bytes/s of each to the next one around, all groups at once: of four GPUs
        in two bridged pairs the links between the pairs count, which _neighbours does not use."""
        rates = {}
        x = self._message(self.sent)
        for size in self._sizes():
            rates[size] = self.sent / self._grouped(size, lambda to: comm.pass_on(x, x.shape, to, "probe")())
        return rates

    def _sizes(self) -> list[int]:
        """Return how many ranks each measured group has."""
        return [size for size in range(2, self.ranks + 1) if self.ranks % size == 0]

    def _all_to_alls(self) -> tuple[float, dict[int, float]]:
        """Return the seconds of a tiny all-to-all; ranks of a group -> bytes/s of each in a large one."""
        rates = {}
        latency = MICROSECOND
        for size in self._sizes():
            latency = self._grouped(size, partial(_all_to_all, [self._message(TINY)] * size))
            large = self._grouped(size, partial(_all_to_all, [self._message(self.sent // size)] * size))
            rates[size] = self.sent * (size - 1) / size / max(MICROSECOND, large - latency)
        return latency, rates

    def _grouped(self, size: int, action: Callable[[mesh.Axis], object]) -> float:
        """Return the seconds of ``action`` in all groups of ``size`` ranks at once."""
        config = ParallelConfig(data_parallel_degree=self.ranks // size, ulysses_degree=size)
        groups = mesh.build(config, self.kind)
        seconds = self.seconds(partial(action, groups.ulysses))
        mesh.close(groups)
        return seconds


def _all_to_all(chunks: list[torch.Tensor], axis: mesh.Axis):
    """Send ``chunks[i]`` to rank i of a group; all are of one shape."""
    comm.all_to_all(chunks, [tuple(chunk.shape) for chunk in chunks], axis, "probe")


def main():
    """Measure; rank 0 writes the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True, help="a new file in which the ranks meet")
    parser.add_argument("--device", choices=SIZES, required=True)
    parser.add_argument("--out", required=True, help="where rank 0 writes the result")
    options = parser.parse_args()
    ready_file(options.store, os.environ["RANK"]).touch()
    end_with_parent()
    be_killed_with_parent()
    with torch.inference_mode():
        probe = Probe(options.device, mesh.file_store(options.store))
        if probe.ranks > 1:
            probe.check_links()
        linked_file(options.store).touch()
        machine = probe.measure()
        if probe.mesh.rank == 0:
            write(machine, Path(options.out))
        probe.control.all_gather_object(None)  # it is written, whatever becomes of a rank
        machine = machine.with_natives(probe.natives())
    if probe.mesh.rank == 0:
        write(machine, Path(options.out))
    probe.control.all_gather_object(None)  # nobody leaves while another one still measures


def write(machine: Machine, out: Path):
    """Write the rates."""
    replace_file(out, json.dumps(machine.as_dict()))


if __name__ == "__main__":
    run_and_exit(main)
