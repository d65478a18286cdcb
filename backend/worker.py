"""Entry point of every rank: python -m torch.distributed.run ... -m backend.worker --address unix:PATH ...
(docs/security.md has the whole command for a start by hand; rank/start.py reads the rest of it).

Rank 0 serves the socket and broadcasts what the others do. A failure inside a collective ends the rank,
torchrun ends its peers, and the client starts a fresh backend (crash-only).
"""

from .runtime import lean_imports  # noqa: F401  # before all that imports torch and diffusers

# isort: split
import gc

from torch.distributed.elastic.multiprocessing.errors import record

from .rank import start
from .rank.leader import Leader
from .rank.worker import Worker


@record
def main():
    """Join the others and serve. Raises what ends this rank, which torchrun then reports."""
    begun = start.begin()
    gc.freeze()  # what is imported stays: no collection looks through it again
    if begun.token:
        Leader(begun).lead()
    else:
        Worker(begun).follow()


if __name__ == "__main__":
    start.run_and_exit(main)
