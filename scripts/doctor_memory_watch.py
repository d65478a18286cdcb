"""The memory that ranks hold while scripts/doctor.py --full runs something."""

import threading
import time

import psutil
from doctor_gpu_memory import GpuMemory
from doctor_lab import Lab

from backend.config import ParallelConfig

POLL_SECONDS = 0.02


class MemoryWatch(threading.Thread):
    """Samples the memory of every rank: of its GPU, all of it, or of its process on the CPU."""

    def __init__(self, lab: Lab, config: ParallelConfig):
        super().__init__(daemon=True)
        self.pids = lab.backend(config).welcome.pids
        self.memory = GpuMemory(lab.gpus[: len(self.pids)]) if lab.device == "cuda" else None
        self.done = threading.Event()
        self.before = self.most = self.held()
        self.start()

    def held(self) -> list[int]:
        """Return the bytes that each rank holds now."""
        if self.memory is None:
            return [psutil.Process(pid).memory_info().rss for pid in self.pids]
        return self.memory.taken()

    def run(self):
        while not self.done.is_set():
            self.most = [max(pair) for pair in zip(self.most, self.held())]
            time.sleep(POLL_SECONDS)

    def stop(self) -> list[int]:
        """End; return the most above what was held at the start."""
        self.done.set()
        self.join()
        return [most - before for most, before in zip(self.most, self.before)]
