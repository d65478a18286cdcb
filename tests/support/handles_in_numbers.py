"""Handles of models (nodes/host/handle.py) on stand-ins for ComfyUI, whose memory manager has a list and no
rules, and on ranks whose memory is a number."""

import importlib
import sys
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from without_comfy import COMFYUI, HOST, StandIn

#: What handles import besides.
FURTHER = ("comfy.model_patcher", "comfy.sd", "comfy.cli_args", "server", f"{HOST}.comfy_models.registry")


class Patcher:
    """As much of ComfyUI's ModelPatcher as an entry of weights on ranks needs."""

    def __init__(self, model, load_device, offload_device, size=0):
        self.model = model
        self.load_device = load_device
        self.offload_device = offload_device
        self.size = size


class Listed:
    """In the place of comfy.model_management.LoadedModel."""

    def __init__(self, model):
        self.model = model
        self.device = model.load_device

    def __eq__(self, other):
        return self.model is other.model

    def model_load(self):
        """Load nothing: the ranks have."""

    def model_unload(self, memory_to_free=None, unpatch_weights=True):
        self.model.detach(unpatch_weights)
        return True


class Interrupted(BaseException):
    """In the place of ComfyUI's own interrupt."""


def _fill(modules: dict[str, Any], graph: dict):
    """Have stand-ins behave as far as handles ask."""
    management = modules["comfy.model_management"]
    management.LoadedModel = Listed
    management.InterruptProcessingException = Interrupted
    management.current_loaded_models = []
    management.get_torch_device = lambda: torch.device("cpu")
    management.processing_interrupted = lambda: False
    management.throw_exception_if_processing_interrupted = lambda: None
    modules["comfy.model_patcher"].ModelPatcher = Patcher
    bar = SimpleNamespace(current=0, update_absolute=lambda done, total: None)
    modules["comfy.utils"].ProgressBar = lambda total: bar
    modules["comfy_execution.utils"].get_executing_context = lambda: None
    shown = SimpleNamespace(all_node_ids=lambda: list(graph), get_node=graph.__getitem__)
    state = SimpleNamespace(dynprompt=shown)
    modules["comfy_execution.progress"].get_progress_state = lambda: state
    modules[f"{HOST}.comfy_models.registry"].weightless_patcher = lambda loaded: None


@contextmanager
def handles():
    """Give modules of nodes/host, ``pool``, ComfyUI's ``management``, and ``graph``: node id -> node of the
    graph that runs. No trace of them stays, but for the pool, which has no backend."""
    graph: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        modules: dict[str, ModuleType] = {}
        for each in (*COMFYUI, *FURTHER):
            modules[each] = StandIn(each)
            patch.setitem(sys.modules, each, modules[each])
            parent, _, child = each.rpartition(".")
            if parent in modules:
                setattr(modules[parent], child, modules[each])
        _fill(modules, graph)
        before = set(sys.modules)
        names = ("handle", "models_on_ranks", "rank_weights", "graph_requests", "progress", "remote_patcher")
        modules_of_host = {name: importlib.import_module(f"{HOST}.host.{name}") for name in names}
        choice = modules_of_host["handle"].ModelChoice
        patch.setattr(
            modules_of_host["graph_requests"], "model_choice_of", lambda of: choice(of["model_name"])
        )
        pool = importlib.import_module("backend.client.pool")
        patch.setattr(pool, "_backends", {})
        yield SimpleNamespace(
            **modules_of_host, pool=pool, management=modules["comfy.model_management"], graph=graph
        )
        for name in set(sys.modules) - before:
            if name.startswith(HOST):
                del sys.modules[name]


def run(host, *names: str):
    """ComfyUI runs a graph that loads these models."""
    host.graph.clear()
    for name in names:
        host.graph[name] = {"class_type": "LoadParallelDiT", "inputs": {"model_name": name}}
