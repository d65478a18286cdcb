"""Rank 0 tells the others bodies of all sizes, faster than they can copy them; every rank says what it
heard. Then all of them measure their rates for the planner."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from fake_memory import GB, FakeMemory

from backend.admission import Admission, OutOfRoom, Planned
from backend.config import ParallelConfig
from backend.parallel import mesh
from backend.probe import Probe
from backend.protocol import Ping, Result
from backend.rank_plan.need import Need
from backend.sampling.step_loop import of_first_rank
from backend.serving import shared_memory
from backend.serving.broadcast import Dispatcher

#: Bodies longer than this do not fit the shared memory.
FITS = 1 << 20
ELEMENTS = (0, 1, 1000, FITS // 4, FITS // 4 + 1, 3 * FITS, *[100_000] * 20)


def body(index: int) -> torch.Tensor:
    return torch.arange(ELEMENTS[index], dtype=torch.float32) + index


def heard(dispatcher: Dispatcher, index: int) -> bool:
    """Rank 0 tells a message, the others compare it with what it should be."""
    if dist.get_rank() == 0:
        dispatcher.broadcast(Result({"index": index}, {"half": body(index).half(), "whole": body(index)}))
        return True
    message = dispatcher.receive()
    return (
        message.stats == {"index": index}
        and message.tensors["whole"].equal(body(index))
        and message.tensors["half"].equal(body(index).half())
    )


def tell_all(dispatcher: Dispatcher) -> dict:
    """Rank -> what it heard rightly; and how many bodies rank 0 put into shared memory."""
    found = [heard(dispatcher, index) for index in range(len(ELEMENTS))]
    if dist.get_rank() == 0:
        dispatcher.broadcast(Ping())
    else:
        found.append(dispatcher.receive() == Ping())
    return {
        "right": dispatcher.all_gather_object(all(found)),
        "shared": dispatcher.buffer.sent if dispatcher.buffer else None,
    }


def rounds(dispatcher: Dispatcher) -> dict:
    """Rounds of admission over gloo with made-up memory: refused on every rank, then admitted. Counts the
    collectives of one."""
    ranks = dispatcher.ranks
    memory = FakeMemory(10 * GB, name=f"GPU-{dist.get_rank()}")
    admission = Admission(ParallelConfig(ulysses_degree=ranks), dispatcher, memory)
    found = []
    for least in (11 * GB, 9 * GB):
        needs = [Need(GB, GB)] * (ranks - 1) + [Need(least, least)]
        with mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gathers:
            try:
                admission.check(planned(needs) if dist.get_rank() == 0 else None, asking=[ranks - 1])
                found.append("admitted")
            except OutOfRoom as error:
                found.append(error.lacking)
        collectives = gathers.call_count
    return {"decided": dispatcher.all_gather_object(found), "collectives": collectives}


def planned(needs: list[Need]) -> Planned:
    """The needs of a plan of nothing."""
    plans = [SimpleNamespace(weight_bytes=0)] * len(needs)
    return Planned(ParallelConfig(), None, None, torch.float32, plans, needs, reloads=True)


def noise() -> list[bool]:
    """On every rank: are the numbers those of rank 0 where GPUs differ, and its own where they do not?"""
    ranks = dist.get_world_size()
    made = mesh.build(ParallelConfig(device="cpu", ulysses_degree=ranks), "cpu")
    mine = torch.full((1, 3, 2), float(dist.get_rank()))
    found = []
    for differ, wanted in ((True, 0.0), (False, float(dist.get_rank()))):
        drawn = of_first_rank(replace(made, gpus_differ=differ), mine.clone())
        found.append(drawn.eq(wanted).all().item())
    names = [mesh._differ(name, made.control) for name in ("one", f"GPU {dist.get_rank()}")]
    return [*found, names == [False, True]]


def timeouts() -> set[float]:
    """Seconds that a collective of any group of some meshes waits for a peer."""
    ranks = dist.get_world_size()
    found = set()
    for degrees in ({"ulysses_degree": ranks, "shard_weights": True}, {"pipefusion_degree": ranks}):
        made = mesh.build(ParallelConfig(device="cpu", **degrees), "cpu")
        axes = [value.group for value in vars(made).values() if isinstance(value, mesh.Axis)]
        groups = [*axes, *made.edges.groups, made.control, made.weights and made.weights.get_group()]
        for group in groups:
            if group is not None:
                backend = group._get_backend(torch.device("cpu"))
                found.add(backend.options._timeout.total_seconds())
    return found


def main(out: str):
    shared_memory.MAX_BYTES = FITS
    shared, alone = Dispatcher(dist.group.WORLD), Dispatcher(dist.group.WORLD)
    alone.buffer = None
    results = {"shared": tell_all(shared), "by broadcast": tell_all(alone), "timeouts": [*timeouts()]}
    results["admission"] = rounds(shared)
    results["noise"] = shared.all_gather_object(noise())
    results["rates"] = Probe("cpu").measure().as_dict()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()
