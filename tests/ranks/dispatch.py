"""What ranks do together besides sampling: rank 0 broadcasts bodies of all sizes, faster than the others can
copy them; rounds of admission and of parking with made-up memory; noise where GPUs differ; gathers; time-outs
of every group; the probe of ranks that compute in unlike types; and the rates for the planner."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from fake_memory import GB, FakeMemory

from backend import probe
from backend.config import ParallelConfig
from backend.loading import parking
from backend.parallel import comm, mesh
from backend.probe import Probe
from backend.protocol import Ping, Result, Sample, Unload
from backend.rank.admission import Admission, InsufficientMemory, Planned
from backend.rank.worker import Worker
from backend.rank_plan.need import Need
from backend.sampling.runs import Prepared
from backend.sampling.step_loop import broadcast_from_first_rank
from backend.serving import shared_memory
from backend.serving.broadcast import ControlChannel

#: Bodies longer than this do not fit the shared memory.
FITS = 1 << 20
#: What the ranks measure with: tokens, width, heads and head size, and bytes that are sent.
SMALL = ((64, 256, 4, 64), 1 << 18)
#: Methods whose ranks all draw noise, each for its own part of the latent, of the batch or of the prompts.
DRAWING = (
    *("ulysses_degree", "ring_degree", "cfg_degree"),
    *("data_parallel_degree", "tensor_parallel_degree"),
)
ELEMENTS = (0, 1, 1000, FITS // 4, FITS // 4 + 1, 3 * FITS, *[100_000] * 20)


def body(index: int) -> torch.Tensor:
    return torch.arange(ELEMENTS[index], dtype=torch.float32) + index


def heard(control: ControlChannel, index: int) -> bool:
    """Rank 0 tells a message, the others compare it with what it should be."""
    if dist.get_rank() == 0:
        control.broadcast(Result({"index": index}, {"half": body(index).half(), "whole": body(index)}))
        return True
    message = control.receive()
    return (
        message.stats == {"index": index}
        and message.tensors["whole"].equal(body(index))
        and message.tensors["half"].equal(body(index).half())
    )


def tell_all(control: ControlChannel) -> dict:
    """Rank -> what it heard rightly; and how many bodies rank 0 put into shared memory."""
    found = [heard(control, index) for index in range(len(ELEMENTS))]
    if dist.get_rank() == 0:
        control.broadcast(Ping())
    else:
        found.append(control.receive() == Ping())
    return {
        "right": control.all_gather_object(all(found)),
        "shared": control.buffer.sent if control.buffer else None,
    }


def rounds(control: ControlChannel) -> dict:
    """Rounds of admission over gloo with made-up memory: refused on every rank, then admitted. Counts the
    collectives of one."""
    ranks = control.ranks
    memory = FakeMemory(10 * GB, name=f"GPU-{dist.get_rank()}")
    admission = Admission(ParallelConfig(ulysses_degree=ranks), control, memory)
    found = []
    for least in (11 * GB, 9 * GB):
        needs = [Need(GB, GB)] * (ranks - 1) + [Need(least, least)]
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers:
            try:
                admission.check(planned(needs) if dist.get_rank() == 0 else None, can_make_room=[ranks - 1])
                found.append("admitted")
            except InsufficientMemory as error:
                found.append(error.lacking)
        collectives = gathers.call_count
    return {"decided": control.all_gather_object(found), "collectives": collectives}


class Parked:
    """In the place of a loaded model of 1 GB, on GPUs of its own."""

    can_park = True
    report = SimpleNamespace(weight_bytes=GB)
    weights = SimpleNamespace(stack=())
    dtype, head_size = torch.float32, 0
    parked_on: frozenset[int] = frozenset()

    @property
    def parked(self) -> bool:
        return dist.get_rank() in self.parked_on

    held_lora_bytes = 0

    def lora_bytes(self, stack) -> int:
        return 0


def parks(control: ControlChannel) -> list[list]:
    """Park a model on the last rank alone, and run a request of it with memory for the weights of one rank
    there, then on all; what each rank returned."""
    last = control.ranks - 1
    model, returned = Parked(), []

    def park(model, ranks):
        model.parked_on |= ranks

    def prepare(message, inputs):
        model.parked_on = frozenset()
        return Prepared(cast(Any, model), cast(Any, None))

    memory = FakeMemory(GB * (dist.get_rank() == last), name=f"GPU-{dist.get_rank()}")
    rank = Worker.__new__(Worker)
    rank.mesh = SimpleNamespace(rank=dist.get_rank(), world_size=control.ranks, device=torch.device("cpu"))
    rank.machines, rank.tried = [0] * control.ranks, {}
    config = ParallelConfig(ulysses_degree=control.ranks)
    rank.engine = SimpleNamespace(models={"m": model}, lora_stacks={}, park=park, config=config, parks=True)
    rank.control = control
    rank.admission = Admission(config, control, memory)
    needs = planned([Need(0, 0)] * control.ranks, weight_bytes=GB)
    sample = Sample("m", "euler", 1.0, 7, can_make_room=list(range(control.ranks)))
    with mock.patch.object(parking, "host_free", return_value=2 * GB * control.ranks):
        for ranks in ([last], []):
            returned += [rank.unload(Unload("m", True, ranks)), sorted(model.parked_on)]
            try:
                plan = needs if dist.get_rank() == 0 else None
                returned.append("prepared" if rank._admitted(sample, prepare, plan) else "")
            except InsufficientMemory as error:
                returned.append(sorted(error.lacking))
            returned.append(sorted(model.parked_on))
    return control.all_gather_object(returned)


def planned(needs: list[Need], weight_bytes: int = 0) -> Planned:
    """The needs of a plan of so many bytes of weights on each rank."""
    plans = [SimpleNamespace(weight_bytes=weight_bytes)] * len(needs)
    return Planned(None, plans, needs, is_loaded=True)


def noise() -> dict[str, bool]:
    """On every rank, whichever method divides them: are the numbers those of rank 0 where GPUs differ, and
    its own where they do not? And is it found out whether they do?"""
    ranks, own = dist.get_world_size(), float(dist.get_rank())
    mine, found = torch.full((1, 3, 2), own), {}
    for degree in DRAWING:
        if degree == "cfg_degree" and ranks != 2:
            continue
        made = mesh.build(ParallelConfig(device="cpu", **{degree: ranks}), "cpu")
        for differ, wanted in ((True, 0.0), (False, own)):
            drawn = broadcast_from_first_rank(replace(made, gpus_differ=differ), mine.clone())
            found[f"{degree} {differ}"] = drawn.eq(wanted).all().item()
        names = [mesh._differ(name, made.control) for name in ("one", f"GPU {dist.get_rank()}")]
        found[f"{degree} names"] = names == [False, True]
        mesh.close(made)
    return found


def gathered() -> list[bool]:
    """What GPUs gather by a collective, by gloo's: is each rank's tensor there, in its place?"""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    made = mesh.build(ParallelConfig(device="cpu", ulysses_degree=ranks), "cpu")
    sent = [torch.full((2, 3), float(each)) for each in range(ranks)]
    comm.SENT.clear()
    found = comm.gather_equal(sent[rank], made.ulysses, "probe")
    right = len(found) == ranks and all(map(torch.equal, found, sent))
    return [right, comm.SENT["probe"] == (ranks - 1) * 24]


def timeouts() -> set[float]:
    """Seconds that a collective of any group of some meshes waits for a peer."""
    ranks = dist.get_world_size()
    found = set()
    for degrees in ({"ulysses_degree": ranks, "shard_weights": True}, {"pipefusion_degree": ranks}):
        made = mesh.build(ParallelConfig(device="cpu", **degrees), "cpu")
        axes = [value.group for value in vars(made).values() if isinstance(value, mesh.Axis)]
        groups = [*axes, *vars(made.edges).values(), made.control, made.weights and made.weights.get_group()]
        for group in groups:
            if group is not None:
                backend = group._get_backend(torch.device("cpu"))
                found.add(backend.options._timeout.total_seconds())
    return found


def sent_by_unlike_ranks() -> dict[str, int]:
    """Bytes that the probe has sent, by kind, where ranks compute in different types, as a P40 next to a
    3090 does. Gloo fails where they are not the same on all ranks; NCCL may do anything."""
    dtypes = (torch.float32, torch.bfloat16)
    found = {}
    with mock.patch.object(probe, "computed_in", lambda device: dtypes[dist.get_rank() % 2]):
        one = Probe("cpu")
    for kind in (one._all_to_alls, one._rings, one._neighbours):
        before = comm.SENT["probe"]
        kind()
        found[kind.__name__] = comm.SENT["probe"] - before
    return found


def main(out: str):
    shared_memory.MAX_BYTES = FITS
    shared, alone = ControlChannel(dist.group.WORLD), ControlChannel(dist.group.WORLD)
    alone.buffer = None
    results = {"shared": tell_all(shared), "by broadcast": tell_all(alone), "timeouts": [*timeouts()]}
    results["admission"] = rounds(shared)
    results["parks"] = parks(shared)
    results["noise"] = shared.all_gather_object(noise())
    results["gathered"] = shared.all_gather_object(gathered())
    with mock.patch.dict(probe.SIZES, cpu=SMALL):
        one = Probe("cpu")
        results["unlike"] = shared.all_gather_object(sent_by_unlike_ranks())
        results["rates"] = one.measure().with_natives(one.natives()).as_dict()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()
