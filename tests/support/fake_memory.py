"""Memory of devices that are not there: numbers in the places of torch.cuda's, and of what other ranks
gather."""

import threading

import torch

GB = 10**9


class FakeMemory:
    """Stands in for device_memory.DeviceMemory on a GPU named ``name``, whose memory is the host's where it
    ``is_unified``. release(): what was cached is free then."""

    def __init__(
        self, free: int, cached: int = 0, name: str = "GPU-0", kind: str = "cuda", is_unified: bool = False
    ):
        self.device = torch.device(kind)
        self.name = name
        self.is_host = is_unified or kind == "cpu"
        self.bytes_free = free
        self.bytes_cached = cached
        self.released = 0

    def free(self) -> int:
        return self.bytes_free

    def cached(self) -> int:
        return self.bytes_cached

    def reserved(self) -> int:
        return self.bytes_cached

    def release(self):
        self.released += 1
        self.bytes_free += self.bytes_cached
        self.bytes_cached = 0


class FakeRanks:
    """The gathers of a few ranks, each a thread of this process."""

    def __init__(self, ranks: int):
        self.barrier = threading.Barrier(ranks, timeout=60)
        self.given = [None] * ranks
        #: Rounds made.
        self.rounds = 0

    def control(self, rank: int):
        return _Dispatcher(self, rank)

    def gather(self, rank: int, value) -> list:
        self.given[rank] = value
        if self.barrier.wait() == 0:
            self.rounds += 1
        answers = list(self.given)
        self.barrier.wait()  # before somebody gives the next
        return answers


class _Dispatcher:
    """One rank's end, as serving.broadcast.ControlChannel."""

    def __init__(self, ranks: FakeRanks, rank: int):
        self._ranks = ranks
        self.rank = rank

    def all_gather_object(self, value) -> list:
        return self._ranks.gather(self.rank, value)

    all_gather_numbers = all_gather_object


def on_ranks(memories: list[FakeMemory], act) -> tuple[list, FakeRanks]:
    """Run act(rank, control, memory) on a thread for each memory; what each returned or raised, and the
    ranks."""
    ranks = FakeRanks(len(memories))
    results: list = [None] * len(memories)

    def run(rank: int):
        try:
            results[rank] = act(rank, ranks.control(rank), memories[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(memories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, ranks
