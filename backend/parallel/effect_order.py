"""Has Inductor run opaque operations (opaque_ops.py) in the order of the block, as ordered effects promise.

Inductor writes down which operation an effectful one follows under the name of its buffer, and looks it up
under that of the operation (torch 2.13; pytorch/pytorch issue 189209). No edge reaches its scheduler, which
then moves operations to save memory, by sizes: ranks of unlike shares would send in unlike orders.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_order() -> Iterator[None]:
    """Graphs that Inductor compiles meanwhile keep the order of their opaque operations. A torch that knows
    no such edges reorders nothing."""
    # here: Inductor takes long to import, and most requests compile nothing
    import torch._inductor.config
    from torch._inductor.scheduler import Scheduler as scheduler
    from torch._inductor.virtualized import V

    compute = getattr(scheduler, "compute_dependencies", None)
    if compute is None or not hasattr(torch._inductor.config, "reorder_for_peak_memory"):
        yield
        return

    def with_edges(self):
        edges = getattr(V.graph, "additional_star_deps", None)
        if edges is None:
            torch._inductor.config.reorder_for_peak_memory = False  # until the patch below ends
        else:
            _rename(edges, V.graph.operations)
        return compute(self)

    keeps = torch._inductor.config.reorder_for_peak_memory
    scheduler.compute_dependencies = with_edges
    try:
        with torch._inductor.config.patch(reorder_for_peak_memory=keeps):
            yield
    finally:
        scheduler.compute_dependencies = compute


def _rename(edges, operations):
    """Put every edge under the name of its operation, too, which the scheduler looks up."""
    for operation in operations:
        buffer, name = operation.get_name(), operation.get_operation_name()
        if buffer != name and edges.get(buffer):
            edges[name] |= edges[buffer]
