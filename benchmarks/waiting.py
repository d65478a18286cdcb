"""Communication without overlap: what a rank begins to send is waited for where it begins.

Messages are the same, in the same order, and so are results: what overlap is worth is the difference of
seconds (overlap.py).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from backend.parallel.comm import Pipe

#: Collectives that ranks begin, and wait for later. The last one is FSDP's under a name that not every torch
#: has.
COLLECTIVES = ("all_to_all_single", "all_reduce", "all_gather_into_tensor", "all_gather_single")


@contextmanager
def waiting() -> Iterator[None]:
    """Wait at once for each collective, and for each send from stage to stage.

    Receives stay posted ahead: a send ends when it has been received, so stages that waited for a patch
    before they compute the last one would wait for each other. A transfer holds up its sender, and not its
    receiver. The flag of one byte that cancels a request is not waited for either: rank 0 would wait for what
    the other stages compute.
    """
    with ExitStack() as stack:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, _waited_for(getattr(dist, name))))
        stack.enter_context(patch.object(Pipe, "send", _sent(Pipe.send)))
        yield


def _waited_for(collective: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | None]:
    @wraps(collective)
    def whole(*args, **kwargs) -> dist.Work | None:
        work = collective(*args, **kwargs)
        if kwargs.get("async_op"):
            assert work is not None, "an operation that has begun has a handle"
            work.wait()
        return work

    return whole


def _sent(send: Callable[[Pipe, Tensor, int], None]) -> Callable[[Pipe, Tensor, int], None]:
    @wraps(send)
    def whole(pipe: Pipe, x: Tensor, to: int):
        send(pipe, x, to)
        work, _ = pipe.sending.pop()  # gloo's handle of a send may be waited for once
        work.wait()

    return whole
