"""Where scripts/doctor.py --full runs models: backends of the client's pool, tiny and mid-size models, and a
deadline. Tests give another Lab."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import doctor_hangs
import doctor_processes
from doctor_findings import OutOfTime
from doctor_hangs import SLOW_START, Hung, HungError
from doctor_models import BENCHMARKS, Models
from doctor_processes import Ended
from doctor_sizes import SIZES
from torch import Tensor

from backend.client import pool
from backend.client.auto import measurements
from backend.client.auto.probe_process import UnmeasuredError
from backend.client.launching import nccl_settings
from backend.client.launching.private_folder import private_folder
from backend.client.launching.rank_environment import sanitized_environment
from backend.client.status import log_of_last_backend
from backend.config import ParallelConfig
from backend.hardware.gpu_sharing import shares_gpu
from backend.planner.machine import Machine
from backend.protocol import Sample
from backend.runtime.callbacks import nothing

ROOT = Path(__file__).resolve().parents[1]
#: A load or a request that takes longer hangs: they take seconds.
RUN_SECONDS = 150.0
#: The same of the first request of compiled blocks: a slow compiler is no hang.
COMPILE_SECONDS = 300.0
#: The same of what measures links: about a second, and the start of its ranks, of a torch that is in memory.
PROBE_SECONDS = 90.0
#: The same of all head sizes of one kernel.
KERNEL_SECONDS = 120.0
#: Of what a load cost a rank (LoadReport), what findings keep.
LOADED = ("rank", "seconds", "bytes_read", "weight_bytes", "peak_bytes")
#: Variables by which cuBLAS, cuDNN and torch compute float32 as such, not in TF32, whose 10 bits of mantissa
#: no float32 limit bears. cuDNN does that by default, and containers ask for it. Ranks inherit them.
PLAIN_FLOAT32 = {"NVIDIA_TF32_OVERRIDE": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0"}


@dataclass(frozen=True)
class Run:
    """A request's latent (float32, the model's space), its seconds at the client, what the load said, the
    ranks' statistics, and of ``step_seconds`` those of every timed request (few steps twice, many twice) and
    the notes of the one before them, which compiles blocks."""

    samples: Tensor
    seconds: float
    info: dict = field(default_factory=dict)
    stats: dict = field(default_factory=dict)
    timed: list[float] = field(default_factory=list)
    first_notes: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        return self.stats.get("notes", [])

    @property
    def loaded(self) -> dict:
        """Return as values of a finding how quantized layers multiply, and what the load cost each rank."""
        ranks = self.info.get("ranks", [])
        load = [{key: rank.get(key) for key in LOADED} for rank in ranks]
        return {"layers": self.info.get("quantized", []), "load": load}

    @property
    def products(self) -> set[str]:
        """Return the formats of rank 0's quantized layers, with how they multiply."""
        return {f"{kind['format']} {kind['multiplication']}" for kind in self.info.get("quantized", [])}

    def other_products(self, single: "Run") -> str:
        """Say which layers multiply in a way that none of one rank's does; empty where none do. On unlike
        GPUs all take what the least of them can, and one rank what the first can."""
        if not self.products - single.products:
            return ""
        own, other = (", ".join(sorted(each)) for each in (self.products, single.products))
        return f"; its layers multiply otherwise ({own}; one rank's {other}), so speeds compare both"


class Lab(Models):
    """Runs requests on ``ranks`` ranks of ``device`` ("cuda" or "cpu") until ``minutes`` are over, of which
    seconds are ``spent``. ``gpus``: those that torch has kernels for, the first ones by default."""

    def __init__(
        self, device: str, ranks: int, minutes: float, gpus: list[int] | None = None, spent: float = 0.0
    ):
        super().__init__(minutes, spent)
        self.device = device
        self.ranks = ranks
        first = list(range(ranks))
        #: Of each rank its GPU, as torch numbers them; other than ``first`` where one is left out.
        self.gpus = first
        if device == "cuda" and gpus and len(gpus) >= ranks and not shares_gpu():
            self.gpus = gpus[:ranks]
        self.size = SIZES[device]
        #: One that the next launch removes where the doctor is killed: gigabytes would stay.
        self._private = private_folder(sockets=False)
        self.folder = self._private.path
        self._cache: dict[tuple, Any] = {}
        #: Whether the links between ranks could not be measured.
        self.links_failed = False
        #: What "links" has measured.
        self.rates: Machine | None = None
        self.hung = Hung()
        #: Of each launch how many ranks, and in how many seconds they were ready.
        self.starts: list[dict] = []
        if device == "cpu":  # a rank stands for a GPU: one thread each, or one rank takes the cores of all
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        else:
            os.environ.update(PLAIN_FLOAT32)
            os.environ.setdefault("NCCL_DEBUG", "WARN")  # into the log, of which a report has the end

    def uuids(self) -> dict[int, str]:
        """Return the GPUs that are used, as torch numbers them -> bare UUID (measurements.gpu_uuid)."""
        return {index: measurements.gpu_uuid(index) for index in self.gpus}

    def close(self):
        """End the ranks and remove the files."""
        try:
            pool.close_all()
        finally:  # gigabytes
            self._private.close()

    def fresh(self):
        """End the ranks: the next request starts new ones."""
        pool.close_all()

    def backend(self, config: ParallelConfig) -> pool.Backend:
        """Return a live backend of that configuration, on this device."""
        pool.allow(self.folder)
        began, shown = time.monotonic(), []
        backend = pool.backend_for(self._placed(config), self._until(config, shown), show=shown.append)
        if shown:  # as of a launch alone
            self.starts.append({"ranks": config.world_size, "seconds": time.monotonic() - began})
        return backend

    def _placed(self, config: ParallelConfig) -> ParallelConfig:
        """Return a configuration on this device, on the GPUs that are used."""
        used = self.gpus[: config.world_size]
        listed = "" if used == list(range(len(used))) else ",".join(map(str, used))
        return replace(config, device=self.device, gpus=listed)

    def run(self, config: ParallelConfig, path: Path, sample: Sample, dtype: str = "default", **how) -> Run:
        """Sample once; ``how``: matmul, loras of Backend.load. Raises RefusedError, BackendError, OutOfTime;
        HungError where the ranks hang."""
        self.check()
        self.hung.check(config)
        backend = self.backend(config)
        loaded = backend.load(str(path), dtype, keep=(), check=self._until(config), **how)
        message = replace(sample, model=loaded.model, **config.per_request)
        compiles = config.compile == "blocks"
        compiles = compiles and ("ran", config.topology(), config.compile, path) not in self._cache
        longest = COMPILE_SECONDS if compiles else RUN_SECONDS
        began = time.monotonic()
        result = doctor_hangs.sample(self, config, backend, message, longest, compiles)
        assert result is not None, "nobody cancels it"
        self._cache[("ran", config.topology(), config.compile, path)] = True
        return Run(result.tensors["samples"], time.monotonic() - began, loaded.info, result.stats)

    def step_seconds(
        self,
        config: ParallelConfig,
        path: Path,
        request: Callable[[int], Sample],
        steps: tuple[int, int] | None = None,
        **how,
    ) -> tuple[float, Run]:
        """Return seconds of one step, by two requests of which one has more ``steps``: what comes before and
        after steps cancels. Each is timed twice after one that is not, and the faster counts. The Run is the
        second of few steps."""
        few, many = steps or self.size.steps
        first = self.run(config, path, request(few), **how)
        runs = [self.run(config, path, request(steps), **how) for steps in (few, few, many, many)]
        timed = [run.seconds for run in runs]
        step = max(1e-6, min(timed[2:]) - min(timed[:2])) / (many - few)
        return step, replace(runs[1], timed=timed, first_notes=first.notes)

    def machine(self) -> Machine:
        """Measure rates and links anew: cached ones of this machine may be of better days. Ranks that start
        later, ComfyUI's too, take the way between GPUs that works now; where /dev/shm was full, those of this
        process alone."""
        ranks = self.gpus
        with patch.dict(os.environ, {"XDG_CACHE_HOME": str(self.folder)}):
            try:
                measured = measurements.machine_rates(
                    self.device, ranks, self.check_end, nothing, longest=PROBE_SECONDS
                )
            except UnmeasuredError as error:
                self.links_failed = error.of_links
                raise
            way = nccl_settings.saved_way(os.environ, ranks)
        self.rates = measured
        if self.device == "cuda":
            nccl_settings.save_way(os.environ, ranks, way, measured.links_pass)
        return measured

    def waits(self, skipped: list[str], families: Sequence[str]) -> tuple[list[dict], Ended]:
        """Run benchmarks/waits.py of these families on as many ranks, without the ``skipped`` methods; return
        what they found, and how it ended."""
        prefix = self.folder / "waits"
        options = ["--ranks", self.ranks, "--json", prefix, "--skip", ";".join(skipped)]
        options += ["--families", *families]
        ended = self._benchmark("waits.py", 2 * RUN_SECONDS, *options)
        files = [Path(f"{prefix}.{rank}") for rank in range(self.ranks)]
        return [run for file in files if file.exists() for run in json.loads(file.read_text())], ended

    def overhead(self, model: Path, has_compiled: bool, rounds: int) -> tuple[dict, Ended]:
        """Run benchmarks/peers.py with a Flux on one rank; return its numbers, {} without, and how it ended.
        ``has_compiled``: with compiled blocks, too."""
        out = self.folder / "overhead"
        options: list = ["--ranks", 1, "--model", model, "--out", out]
        options += ["--side", self.size.side, "--text", self.size.text]
        options += ["--rounds", rounds, "--patience", 0]
        options += ["--compile"] if has_compiled else []
        ended = self._benchmark("peers.py", COMPILE_SECONDS if has_compiled else RUN_SECONDS, *options)
        file = out / f"peers-1{'-compiled' if has_compiled else ''}.json"
        return json.loads(file.read_text()) if file.exists() else {}, ended

    def kernel_rows(self, kernel: str, head_sizes: Sequence[int]) -> tuple[list[dict], Ended]:
        """Run benchmarks/kernels.py of one kernel, which may end its process, on these head sizes; return its
        rows, and how it ended."""
        path = self.folder / "kernels.jsonl"
        path.write_text("")
        options = ["--kernel", kernel, "--json", path, "--head-size", *head_sizes]
        ended = self._benchmark("kernels.py", KERNEL_SECONDS, *options)
        return doctor_processes.rows_in(path), ended

    def _benchmark(self, script: str, seconds: float, *options) -> Ended:
        """Run one for so many seconds, or until its check's time is over."""
        self.fresh()  # it wants the GPUs' memory
        left = max(1.0, self.limit(seconds) - time.monotonic())
        ours = ("--ends-with-stdin", "--device", self.device)
        command = [sys.executable, BENCHMARKS / script, *ours, *options]
        # that of ranks: NCCL's way between these GPUs, and nothing that would hold them up
        config = self._placed(ParallelConfig(ulysses_degree=self.ranks))
        environment = sanitized_environment(dict(os.environ), config, self.device)
        return doctor_processes.run(command, left, self.folder, environment)

    def _until(self, config: ParallelConfig, shown: list[str] | None = None) -> Callable[[], None]:
        """Return what raises once the time is over, or RUN_SECONDS from now. ``shown``: of a start what
        backend_for shows. Ranks that still import, as from a cold or a network disk, do not hang, and are
        started again; those that are all there wait for each other."""
        began, limit = time.monotonic(), self.limit(RUN_SECONDS)

        def check():
            spent = time.monotonic() - began
            if time.monotonic() <= limit:
                return
            doing = "load" if shown is None else "start"
            what = f"ranks with {config.product} did not {doing} within {spent:.0f} s"
            ready = shown[-1].partition(": ")[2] if shown else ""
            are_there = ready == f"{config.world_size} of {config.world_size} ready"
            still_import = bool(shown) and not are_there  # ranks that run already show nothing
            if still_import:
                what += f" ({ready or 'none ready'})"
            if not self.has_hung(spent, RUN_SECONDS, is_slow=still_import):
                raise OutOfTime(f"{what}, when the time was over; raise --minutes or use --only")
            if still_import:
                what += f"; {SLOW_START}"
            else:
                self.hung.note(config)
            raise HungError(what, {"log": log_of_last_backend()})

        return check


def relative(latent: Tensor, wanted: Tensor) -> float:
    """Return the relative distance of two latents, infinite where one has no numbers."""
    distance = ((latent - wanted).norm() / wanted.norm()).item()
    return distance if math.isfinite(distance) else math.inf
