"""What ComfyUI computes on decides whether ranks can run next to it."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pack  # noqa: F401  # makes parallel_dit importable
import pytest
import torch

from backend.config import ParallelConfig
from backend.planner.auto_config import AutoConfig


@pytest.fixture
def check(monkeypatch):
    """check(kind, config): check_device where ComfyUI computes on a device of that kind, without a GPU."""
    management = ModuleType("comfy.model_management")
    comfy = ModuleType("comfy")
    monkeypatch.setattr(comfy, "model_management", management, raising=False)
    monkeypatch.setitem(sys.modules, "comfy", comfy)
    monkeypatch.setitem(sys.modules, "comfy.model_management", management)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    device = importlib.import_module("parallel_dit.nodes.host.device")

    def run(kind: str, config):
        of_kind = SimpleNamespace(type=kind)
        monkeypatch.setattr(management, "get_torch_device", lambda: of_kind, raising=False)
        device.check_device(config)

    yield run
    del sys.modules[device.__name__]  # whose ComfyUI is a stand-in


def configs(**fields) -> list:
    """A config by hand and auto's."""
    by_hand = ParallelConfig(**fields)
    return [by_hand, AutoConfig(base=by_hand)]


@pytest.mark.parametrize("kind", ["xpu", "mps", "npu", "privateuseone"])
def test_gpus_of_other_makers_are_refused_by_kind(check, kind):
    for config in configs():
        with pytest.raises(ValueError, match=f"computes on {kind}, but ranks run on GPUs of NVIDIA and AMD"):
            check(kind, config)


def test_the_cpu_by_choice_and_ranks_elsewhere_are_not(check):
    for config in (*configs(device="cpu"), *configs(address="host:1")):
        check("xpu", config)
    for config in configs():
        check("cpu", config)
