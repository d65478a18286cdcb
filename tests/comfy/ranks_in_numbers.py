"""In the place of ranks in a real ComfyUI's process: their memory is a number."""

import pytest
from comfy_modules import comfy_modules

with comfy_modules():
    import comfy.model_management as management
    from comfy_execution.graph import DynamicPrompt
    from comfy_execution.progress import reset_progress_state
    from parallel_dit.backend.client import pool
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.protocol import Loaded, RefusedError, Result, Unload, Welcome
    from parallel_dit.nodes.host import graph_requests, handle, models_on_ranks

CONFIG = ParallelConfig(address="tcp:host:1")
#: Elsewhere: ComfyUI's manager makes no room there.
DEVICE = "GPU-of-another-machine"


class Ranks:
    """In the client's place: ranks with ``room`` for so many bytes, where each model takes 6. Refuses as the
    backend does; ``held``: the models there."""

    def __init__(self):
        self.welcome = Welcome(1, "cpu", {}, [], [DEVICE])
        self.held: list[str] = []
        self.parked: list[str] = []
        self.room = 10
        self.closed = False
        self.waiting = self.timer = None
        self.late_reply = None
        self.left = None
        self.withdrawn = False

    def request(self, message, *_):
        if isinstance(message, Unload):
            for names in (self.held, self.parked):
                names[:] = [name for name in names if name != message.model]
            self.parked += [message.model] if message.park else []
            return Result(
                {"left": list(range(self.welcome.world_size)), "freed": not message.park, "dropped": []}
            )
        if message.path not in self.held:
            self.refuse_without(6)
            self.parked = [name for name in self.parked if name != message.path]
            self.held.append(message.path)
        ranks = [{"weight_bytes": 6, "text": ""}] * self.welcome.world_size
        return Loaded(message.path, "flux", {"ranks": ranks, "warnings": [""] * len(message.loras)})

    def sample(self, message, *_, **__):
        self.refuse_without(0)
        return Result()

    def refuse_without(self, size: int):
        if 6 * len(self.held) + size > self.room:
            error = RefusedError("rank 0 lacks memory to load this model, so nothing is loaded.")
            error.lacking = {0: size}
            raise error

    def is_open(self):
        return True


@pytest.fixture
def backend(monkeypatch):
    """The backend of CONFIG, on Ranks."""
    found = pool.Backend(CONFIG, Ranks())
    monkeypatch.setitem(pool._backends, CONFIG.topology(), found)
    monkeypatch.setattr(handle, "weightless_patcher", lambda loaded: None)
    monkeypatch.setattr(models_on_ranks, "_weights", {})
    monkeypatch.setattr(management, "current_loaded_models", [])
    monkeypatch.setattr(graph_requests, "model_choice_of", lambda inputs: ModelChoice(inputs["model_name"]))
    yield found
    reset_progress_state("", DynamicPrompt({}))


def run(*names: str):
    """ComfyUI runs a graph that loads these models."""
    nodes = {name: {"class_type": "LoadParallelDiT", "inputs": {"model_name": name}} for name in names}
    reset_progress_state("prompt", DynamicPrompt(nodes))
