"""The question that a benchmark of a graph asks first, and what ends it."""

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pack  # noqa: F401  # makes parallel_dit importable
import pytest
from parallel_dit.nodes.panel import graph_trials

from backend.config import ConfigError


@pytest.fixture
def server():
    """In the place of ComfyUI's PromptServer."""
    queue = SimpleNamespace(currently_running={})
    return SimpleNamespace(loop=SimpleNamespace(is_running=lambda: True), prompt_queue=queue)


def measure(prompt, sampler, check):
    """Measure a machine for a minute, which nobody waits for: a test that fails ends."""
    for _ in range(6000):
        check()
        time.sleep(0.01)
    raise AssertionError("nothing ended it")


def test_a_question_is_answered(server):
    body = {"prompt": {"1": {}}, "sampler": "1", "benchmark": "a"}
    found = graph_trials.answer(body, server, lambda prompt, sampler, check: {"asked": (prompt, sampler)})
    assert found == {"asked": ({"1": {}}, "1")} and not graph_trials._stops


def test_stop_ends_the_question_of_its_page_alone(server):
    """It did nothing while the machine was measured."""
    with ThreadPoolExecutor() as threads:
        first, second = (
            threads.submit(graph_trials.answer, {"benchmark": name}, server, measure) for name in "ab"
        )
        deadline = time.monotonic() + 60
        while len(graph_trials._stops) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert graph_trials.stop({"benchmark": "a"}) == {"stopped": True}
        with pytest.raises(ConfigError, match="the benchmark was stopped"):
            first.result(60)
        assert not second.done() and graph_trials.stop({"benchmark": "a"}) == {"stopped": False}
        graph_trials.stop({"benchmark": "b"})
        with pytest.raises(ConfigError):
            second.result(60)
    assert not graph_trials._stops


@pytest.mark.parametrize("what", ["graph", "end"])
def test_a_graph_or_the_end_of_comfyui_ends_the_question(server, what):
    def begin(prompt, sampler, check):
        check()
        if what == "graph":
            server.prompt_queue.currently_running["1"] = ()
        else:
            server.loop.is_running = lambda: False
        measure(prompt, sampler, check)

    with pytest.raises(ConfigError, match="a graph runs" if what == "graph" else "ComfyUI ends"):
        graph_trials.answer({}, server, begin)
