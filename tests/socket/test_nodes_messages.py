"""What the nodes' own code sends to warm ranks (nodes/host), on stand-ins for ComfyUI and a fake backend."""

import importlib
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from fake_backend import TOKEN, FakeBackend, reply
from handles_in_numbers import handles
from without_comfy import HOST, StandIn

from backend.client import client as client_module
from backend.client.auto import measurements
from backend.client.client import BackendClient
from backend.client.connected import LEFT, WAITS
from backend.config import ParallelConfig
from backend.hardware.device_memory import device_name
from backend.protocol import Cancel, Cancelled, Load, Loaded, Result, Sample, Unload, Welcome, framing

CONFIG = ParallelConfig(device="cpu")
#: What remote_solver.py imports of ComfyUI besides.
FURTHER = (
    *("comfy.conds", "comfy.latent_formats", "comfy.model_sampling", "comfy.patcher_extension"),
    *("comfy.samplers", "comfy_api", "comfy_api.latest", "comfy_api.latest.io"),
    *("comfy.cli_args.args", "comfy.cli_args.LatentPreviewMethod"),
)
INFO = {
    "ranks": [{"weight_bytes": 8, "text": ""}],
    "warnings": [],
    "device": "cpu",
    "dtype": "float32",
    "config": {},
    "conditioning": ["c_crossattn"],
}
LATENT = torch.zeros(1, 16, 4, 4)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Modules of nodes/host as handles() has them, with ``remote_solver``."""
    monkeypatch.setattr(measurements, "HELD", [*measurements.HELD])  # auto_plan.py adds to it
    with handles() as found:
        for each in FURTHER:
            monkeypatch.setitem(sys.modules, each, StandIn(each))
        for each in FURTHER:
            parent, _, child = each.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, sys.modules[each])
        found.remote_solver = importlib.import_module(f"{HOST}.host.remote_solver")
        family = SimpleNamespace(translate=lambda values: values, zeros={})
        monkeypatch.setattr(found.remote_solver, "family_named", lambda loaded: family)
        monkeypatch.setattr(found.remote_solver.one_rank, "path", lambda: tmp_path / "one_rank.json")
        yield found


@pytest.fixture
def step():
    """Set once a step may end that is cancelled."""
    return threading.Event()


@pytest.fixture
def received(host, tmp_path, step):
    """The kinds of messages that ranks receive, which the pool has at hand as a backend of CONFIG."""
    kinds: list[type] = []

    def ranks(connection):
        while True:
            kinds.append(type(framing.receive(connection)))
            if kinds[-1] is Sample and host.management.processing_interrupted():
                kinds.append(type(framing.receive(connection)))
                assert step.wait(120)
                reply(connection, Cancelled())
                continue
            left = {"left": [0], "freed": True}
            done = Result(left if kinds[-1] is Unload else {"seconds": 1.0}, {"samples": LATENT})
            reply(connection, Loaded("m", "flux", INFO) if kinds[-1] is Load else done)

    fake = FakeBackend(tmp_path)
    welcome = Welcome(1, "cpu", {}, [], [device_name(torch.device("cpu"))])
    backend = host.pool.Backend(CONFIG, BackendClient(fake.start(ranks, welcome=welcome), TOKEN))
    host.pool._backends[CONFIG.topology()] = backend
    yield kinds
    host.pool.close_all()
    fake.close()


def queue_sampler(host, dit, seed: int) -> torch.Tensor:
    """Sample as Parallel Sampler does, whose loop ComfyUI has handed to the ranks."""
    prompt = SimpleNamespace(process_cond=lambda **_: SimpleNamespace(cond=torch.zeros(1, 3, 8)))
    conds = {"positive": [{"model_conds": {"c_crossattn": prompt}}]}
    guider = SimpleNamespace(conds=conds, cfg=1.0)
    solver = host.remote_solver.RemoteSolver(dit, "euler")
    sigmas = torch.tensor([1.0, 0.5, 0.0])
    return solver(None, guider, sigmas, {"seed": seed}, None, LATENT + 1, LATENT, None, True)


def test_a_warm_run_sends_load_and_sample(host, received):
    """The loader's handle is in ComfyUI's cache; the sampler runs again with another seed."""
    dit = host.handle.load(CONFIG, host.handle.ModelChoice("/m.safetensors"))
    for seed in (1, 2):
        received.clear()
        assert queue_sampler(host, dit, seed).equal(LATENT)
        assert received == [Load, Sample]


def test_cancel_frees_comfyuis_queue_while_a_first_step_goes_on(host, received, step, monkeypatch):
    """Its node waited for the step, which takes minutes where blocks compile. The next run waits, and says
    for what; Cancel ends that wait at once, too."""
    monkeypatch.setattr(client_module, "LEAVE_SECONDS", 0.0)
    dit = host.handle.load(CONFIG, host.handle.ModelChoice("/m.safetensors"))
    received.clear()
    lines = []
    monkeypatch.setattr(host.progress, "node_text", lambda: lines.append)
    host.management.processing_interrupted = lambda: True
    with pytest.raises(host.management.InterruptProcessingException):
        queue_sampler(host, dit, 1)
    assert lines[-1].startswith(LEFT)

    def throw():
        raise host.management.InterruptProcessingException

    host.management.throw_exception_if_processing_interrupted = throw
    with pytest.raises(host.management.InterruptProcessingException):
        queue_sampler(host, dit, 2)
    assert lines[-1] == "cancelled" and not step.is_set()

    def show(line):
        lines.append(line)
        step.set()

    monkeypatch.setattr(host.progress, "node_text", lambda: show)
    host.management.processing_interrupted = lambda: False
    assert queue_sampler(host, dit, 3).equal(LATENT)
    assert received == [Load, Sample, Cancel, Load, Sample] and any(each.startswith(WAITS) for each in lines)


def test_weights_leave_once_a_step_that_goes_on_after_cancel_has_ended(host, received, step, monkeypatch):
    """ComfyUI wants their memory for another model: it waits, as the step computes on the same device, unless
    Cancel is pressed again."""
    monkeypatch.setattr(client_module, "LEAVE_SECONDS", 0.0)
    dit = host.handle.load(CONFIG, host.handle.ModelChoice("/m.safetensors"))
    [(backend, [weights])] = host.models_on_ranks._weights.values()
    host.management.processing_interrupted = lambda: True
    with pytest.raises(host.management.InterruptProcessingException):
        queue_sampler(host, dit, 1)
    monkeypatch.setattr(host.models_on_ranks, "get_executing_context", object)  # a node wants it
    assert not weights.free_weights() and weights.held and backend.is_left
    host.management.processing_interrupted = lambda: False
    threading.Timer(0.3, step.set).start()
    assert weights.free_weights() and step.is_set() and received[-1] is Unload
