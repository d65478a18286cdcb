"""Rank 0 tells the others bodies of all sizes, faster than they can copy them; every rank says what it
heard. Then all of them measure their rates for the planner."""

import json
from pathlib import Path

import torch
import torch.distributed as dist

from backend.probe import Probe
from backend.protocol import Ping, Result
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


def main(out: str):
    shared_memory.MAX_BYTES = FITS
    shared, alone = Dispatcher(dist.group.WORLD), Dispatcher(dist.group.WORLD)
    alone.buffer = None
    results = {"shared": tell_all(shared), "by broadcast": tell_all(alone)}
    results["rates"] = Probe("cpu").measure().as_dict()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.destroy_process_group()
