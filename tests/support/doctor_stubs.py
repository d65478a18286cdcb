"""Machines and ranks that are not here, for the tests of scripts/doctor.py."""

from functools import cache
from pathlib import Path

import doctor
import doctor_checks
import doctor_families
import doctor_lab
import doctor_models
import doctor_runs
import doctor_steps
import torch
from doctor_copies import Copies, Copy
from doctor_facts import Facts, Gpu, Torch
from doctor_findings import OutOfTime
from doctor_hangs import Hung
from doctor_processes import Ended
from doctor_time import Clock
from doctor_wheels import Wheel
from tiny import facts

from backend.loading.recognition import recognise
from backend.planner.machine import Machine
from backend.protocol import BackendError, RefusedError, Sample

#: Golden families whose tiny models labs run.
FAMILIES = {*doctor_runs.FAMILIES, *doctor_steps.SHAPES}
TORCH = Torch("2.9.0", "12.8", "", ("sm_80", "sm_90", "compute_90"), "2.27.3", True)
GPU = Gpu(0, "H100", 80 << 30, 79 << 30, (9, 0))
#: A program that ran to its end.
ENDED = Ended(0, 1.0)
MODE = {
    **{"index": "0", "name": "H100", "driver_version": "580.1", "compute_mode": "Default"},
    **{"mig.mode.current": "Disabled", "pcie.link.width.current": "16", "pcie.link.width.max": "16"},
    **{
        "pcie.link.gen.current": "1",
        "pcie.link.gen.max": "5",
        "power.limit": "700.00",
        "temperature.gpu": "31",
        "clocks.sm": "345",
    },
}


class Time:
    """A clock that stands until somebody spends seconds."""

    seconds = 0.0

    def monotonic(self):
        return self.seconds


def copies(pairs: dict[tuple[int, int], float], host: dict[int, float]) -> Copies:
    """Rates (GB/s) of pairs of GPUs, the same in both directions, and of GPUs from and to host memory."""
    ways: dict[tuple[int | str, int | str], float] = {**pairs, **{(b, a): pairs[a, b] for a, b in pairs}}
    ways |= {way: rate for gpu, rate in host.items() for way in (("host", gpu), (gpu, "host"))}
    return Copies(tuple(Copy(*way, 1e9 * rate) for way, rate in ways.items()))


def machine(**changes) -> Facts:
    """A healthy machine with two GPUs, with ``changes``."""
    gpus = [GPU, Gpu(1, "H100", 80 << 30, 79 << 30, (9, 0))]
    healthy = dict(python=(3, 12, 1), platform="linux", system="Linux", unmet=[], torch=TORCH, gpus=gpus)
    healthy |= dict(driver=[MODE, {**MODE, "index": "1"}], peers=[[True, True], [True, True]])
    healthy |= dict(copies=copies({(0, 1): 24.0}, {0: 25.0, 1: 26.0}))
    healthy |= dict(
        smi=("", ""), shared_memory=8 << 30, disks={"temporary folder": 50 << 30}, unwritable=[], cores=16
    )
    healthy |= dict(
        free_shared_memory=8 << 30,
        is_temporary_in_memory=False,
        host_memory=64 << 30,
        open_files=65536,
        locked_memory=None,
        loopback="",
    )
    healthy |= dict(
        variables={}, way="", topology="", build={"pack": "1a2b3c"}, wheels={"diffusers": Wheel("0.42.1")}
    )
    return Facts(**healthy | changes)


def said(facts: Facts, check: str) -> list[tuple[str, str]]:
    return [(each.status, each.text) for each in doctor_checks.quick(facts) if each.check == check]


@cache
def tiny_blocks_and_heads(family: str) -> tuple[int, int]:
    """Count the blocks and heads of a golden family's tiny model."""
    from released_sizes import DryFiles  # of benchmarks, which doctor_lab has put on the path

    tensors = {key: ("F32", shape) for key, shape in facts(family)["shapes"].items()}
    checkpoint = recognise(family, DryFiles(family, tensors, {}, {}))
    return checkpoint.block_count, checkpoint.family.blocks.heads(checkpoint.config)


def flux_blocks_and_heads(size):
    """Count those of the mid-size Flux."""
    import common

    sizes = common.FLUX | size.flux
    return sizes["num_layers"] + sizes["num_single_layers"], sizes["num_attention_heads"]


class StubLab(Clock):
    """Ranks that answer at once: those of tensor parallelism wrongly, those of a ring not at all. They refuse
    degrees that their models have too few blocks or heads for."""

    device = "cpu"
    ranks = 2
    gpus = (0, 1)
    size = doctor_lab.SIZES["cpu"]

    def __init__(self, spent=0.0, is_late=False, minutes=10.0):
        super().__init__(minutes, spent)
        self.is_late = is_late
        self.closed = self.links_failed = False
        self.rates = None
        self.hung = Hung()
        self.dropped = []
        self.starts = []

    def check(self):
        super().check()
        if self.is_late:
            raise OutOfTime("not run: the 10 minutes are over")

    def uuids(self):
        return {0: "1a"}

    def cached(self, key, make):
        return make()

    def tiny(self, family):
        noise = torch.ones(1, 4)
        sample = Sample("", "euler", 3.0, 0, tensors={"noise": noise, "latent": noise})
        return Path(family), sample, noise

    def flux(self):
        return Path("flux")

    def quantized(self, kind):
        return Path(kind)

    def blocks_and_heads(self, path):
        """Count those of what the methods of this lab return."""
        import memory

        if path.name == "flux":
            return flux_blocks_and_heads(self.size)
        if path.name in FAMILIES or path.name in doctor_families.ONCE:
            return tiny_blocks_and_heads(path.name)
        return memory.DOUBLE + memory.SINGLE, self.size.width // memory.HEAD

    def refusal(self, path, config):
        return doctor_models.refusal(path.name, self.blocks_and_heads(path), config)

    def drop(self, *key):
        self.dropped.append(key)

    def forget_weights(self):
        self.forgotten = True

    def request(self, path, steps, guided=False, batch=1):
        return self.tiny("flux")[1]

    def released(self, family):
        return Path(family), lambda steps: self.tiny(family)[1], "two blocks"

    def released_quantized(self, family, kind):
        return Path(family)

    def released_lora(self, family):
        return Path("lora"), 1.0

    def waits(self, skipped, families):
        return [{"method": "ulysses", "family": "flux-dev", "steps": 2, "waits": {"stage.py:7": 3}}], ENDED

    def overhead(self, model, has_compiled, rounds):
        names = ("diffusers, compiled", "ours, compiled") if has_compiled else ("diffusers", "ours")
        spread = {"median": 1.01, "low": 1.0, "high": 1.03}
        numbers = {"rounds": dict(zip(names, ([1.0, 2.0, 3.0], [2.02, 4.0, 1.0]))), "ratio": spread}
        return numbers | {"by_cpu": spread, "difference": 0.0, "goal": 1.02, "options": {"steps": 4}}, ENDED

    def kernel_rows(self, kernel, head_sizes):
        case = {"kernel": kernel, "head_size": 256, "masked": True}
        return [{**case, "seconds": 1.0, "distance": 0.0, "own": True}], ENDED

    def plain_request(self, steps):
        return self.tiny("flux")[1]

    def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
        if why := self.refusal(path, config):
            raise RefusedError(why)
        if config.ring_degree > 1:
            raise BackendError("rank 1 ended")
        if matmul == "native":
            raise RefusedError("comfy-kitchen is not installed")
        samples = torch.ones_like(sample.tensors["noise"])
        samples[0, 0] += (1e-2 if dtype == "bf16" else 0) + (1e-2 if config.tensor_parallel_degree > 1 else 0)
        samples[0, 1] += 0.1 if loras else 0
        return doctor_lab.Run(samples, 1.0)

    def step_seconds(self, config, path, request, steps=None, **how):
        run = self.run(config, path, request(2), **how)
        return 1.0 / (1 + (config.world_size > 1)), run

    def distances_from_comfyui(self, family, sample, samples, golden):
        return (samples - golden).abs().max().item(), doctor_lab.relative(samples, golden)

    def machine(self):
        return Machine("CPU", 1e12, 1e12, 1e10, 1e9, {2: 1e9}, rings={2: 1e9})

    def fresh(self):
        raise OSError("the disk is full")

    def close(self):
        self.closed = True


def full_findings(lab, *arguments, facts=None):
    chosen = doctor.options(["--full", *arguments])
    return list(doctor_runs.full(chosen, facts or machine(), lab))
