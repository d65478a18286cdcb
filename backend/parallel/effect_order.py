"""Has Inductor run opaque operations (runtime/opaque_ops.py) in the order of the block, as effects promise.

Inductor writes down which operation an effectful one follows under the name of its buffer, and looks it up
under that of the operation (torch 2.13; pytorch/pytorch issue 189209). No edge reaches its scheduler, which
then moves operations to save memory, by sizes: ranks of unlike shares would send in unlike orders.
"""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_order() -> Iterator[None]:
    """Have graphs that Inductor compiles meanwhile keep the order of their opaque operations."""
    # here: Inductor takes long to import, and most requests compile nothing
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    compute = Scheduler.compute_dependencies

    def with_edges(self):
        _rename(V.graph.additional_star_deps, V.graph.operations)
        return compute(self)

    Scheduler.compute_dependencies = with_edges
    try:
        yield
    finally:
        Scheduler.compute_dependencies = compute


def _rename(edges, operations):
    """Put every edge under the name of its operation, too, which the scheduler looks up."""
    for operation in operations:
        buffer = operation.get_name()
        name = operation.get_operation_name()
        if buffer != name and edges.get(buffer):
            edges[name] |= edges[buffer]
