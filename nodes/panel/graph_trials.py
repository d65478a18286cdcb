"""What a benchmark of a graph asks first, and what ends that question: it measures this machine, maybe for
minutes, and makes room on its GPUs."""

import threading
from collections.abc import Callable
from typing import Any

from ...backend.config import ConfigError

#: Name of a benchmark, of its page -> whether it is to stop, while its question is answered.
_stops: dict[str, threading.Event] = {}


def answer(body: dict, server: Any, trials: Callable) -> dict:
    """Answer by ``trials`` (benchmark_prompts.py) what the benchmark of a page is to queue. ConfigError where
    a graph runs, or begins meanwhile; where ComfyUI ends, which waits for it; and after ``stop``. ``server``:
    ComfyUI's PromptServer."""
    name = str(body.get("benchmark", ""))
    stopped = _stops[name] = threading.Event()

    def check():
        if stopped.is_set():
            raise ConfigError("the benchmark was stopped.")
        if not server.loop.is_running():
            raise ConfigError("ComfyUI ends.")
        if server.prompt_queue.currently_running:
            raise ConfigError("a graph runs; wait for its end, or cancel it, before a benchmark.")

    try:
        check()
        return trials(body.get("prompt") or {}, str(body.get("sampler", "")), check)
    finally:
        if _stops.get(name) is stopped:
            del _stops[name]


def stop(body: dict) -> dict:
    """Stop the question of a page's benchmark; say whether there was one."""
    stopped = _stops.get(str(body.get("benchmark", "")))
    if stopped is not None:
        stopped.set()
    return {"stopped": stopped is not None}
