"""The side panel's button that ends the ranks, on stand-ins for ComfyUI's modules."""

import importlib
import sys
from types import SimpleNamespace

import pytest
from handles_in_numbers import handles
from without_comfy import HOST, StandIn


@pytest.fixture
def panel(monkeypatch):
    """nodes/panel/backends.py with ``running``: the graphs that ComfyUI executes, and ``interrupted``."""
    with handles() as host:
        monkeypatch.setitem(sys.modules, f"{HOST}.host.remote_solver", StandIn("remote_solver"))
        module = importlib.import_module(f"{HOST}.panel.backends")
        running, interrupted = {}, []
        queue = SimpleNamespace(currently_running=running)
        server = sys.modules["server"]
        monkeypatch.setattr(
            server, "PromptServer", SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue))
        )
        host.management.interrupt_current_processing = lambda: interrupted.append(True)
        yield SimpleNamespace(
            stop=module.stop, status=host.progress.NodeStatus, running=running, done=interrupted
        )


def item(*kinds: str) -> tuple:
    """A prompt as ComfyUI's queue has it."""
    graph = {str(index): {"class_type": kind, "inputs": {}} for index, kind in enumerate(kinds)}
    return 1, "prompt", graph, {}, ["0"]


@pytest.mark.parametrize(
    "kinds, is_ended",
    [(("CLIPTextEncode", "LoadParallelDiT"), True), (("CLIPTextEncode", "KSampler"), False)],
    ids=["of ours", "another"],
)
def test_a_graph_that_is_at_another_node_ends_with_the_ranks(panel, kinds, is_ended):
    """At a text encoder: it went on, and started the ranks again."""
    panel.running[0] = item(*kinds)
    assert panel.stop() == {"stopped": True} and panel.done == [True] * is_ended


def test_nothing_is_interrupted_where_nothing_runs(panel):
    panel.stop()
    assert not panel.done
    panel.status.latest = "step 1/2"
    panel.stop()
    panel.status.latest = ""
    assert panel.done == [True]
