"""The benchmarks run and write what they say; what they measure is theirs."""

import importlib.util
import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarked import BENCHMARKS, SMALL, save_model
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from backend.client import pool
from backend.client.launching import nccl_settings
from backend.config import ParallelConfig
from backend.protocol import Ping


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("benchmarks") / "model")


@pytest.fixture
def start(monkeypatch):
    """start(NAME, OPTION...) runs a benchmark in this process."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), str(BENCHMARKS.parent / "scripts"), *sys.path])

    def start(name: str, *options: str):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        return runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")

    return start


@pytest.mark.parametrize(
    "name",
    [
        *(
            "auto",
            "drift",
            "launches",
            "load",
            "memory",
            "overlap",
            "peers",
            "scaling",
            "shares",
            "start",
            "where",
            "wire_drift",
        ),
        "transport",
    ],
)
def test_every_command_tells_its_options(start, name, capsys):
    with pytest.raises(SystemExit) as end:
        start(name, "--help")
    assert end.value.code == 0 and "--quick" in capsys.readouterr().out


def test_peers_compares_two_ways_to_the_same_latent(start, model, tmp_path):
    start("peers", *SMALL, "--ranks", "1", "--model", model, "--out", str(tmp_path))
    report = json.loads((tmp_path / "peers-1.json").read_text())
    assert report["difference"] < 1e-5 and report["ratio"]["median"] > 0
    assert (tmp_path / "peers-1.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("option, degree", [([], "ulysses_degree"), (["--ring"], "ring_degree")])
def test_peers_has_both_run_the_same_method(monkeypatch, option, degree):
    """Of as many ranks as it starts."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import peers

    run = []
    monkeypatch.setattr(peers, "contest", lambda options, model: run.extend(peers.configurations(options)))
    monkeypatch.setattr(peers, "show", lambda results, options: None)
    monkeypatch.setattr(peers.common, "hold_to_one_core", lambda device: None)
    monkeypatch.setattr(peers.common, "leave", lambda: None)
    for name, value in (("RANK", "0"), (peers.common.MODEL_VARIABLE, "a model")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--ranks", "3", *option])
    peers.main()
    ours, theirs = run
    degrees = {"ring_degree": 1, "ulysses_degree": 1, degree: 3}
    assert {name: getattr(theirs, name) for name in degrees} == degrees
    assert ours == replace(ParallelConfig(), **{degree: 3})


def test_a_ring_of_one_rank_is_refused(start, capsys):
    with pytest.raises(SystemExit):
        start("peers", "--ring", "--ranks", "1")
    assert "--ring wants at least 2 ranks" in capsys.readouterr().err


def test_peers_compares_rings_of_two_ranks(start, model, tmp_path):
    """diffusers' own runs on the CPU, too, and attends by a backend that this model alone has."""
    with pytest.raises(SystemExit) as end:
        start("peers", *SMALL, "--ring", "--model", model, "--out", str(tmp_path))
    assert end.value.code == 0
    report = json.loads((tmp_path / "peers-2-ring.json").read_text())
    assert report["difference"] < 1e-5 and report["rounds"].keys() == {"diffusers", "ours"}


def test_where_says_what_ranks_wait_for(start, model, tmp_path, capfd):
    """Of a pipeline each rank has a row."""
    found = tmp_path / "where.json"
    methods = ["one", "ulysses", "pipefusion 2", "pipefusion 4", "cfg"]
    with pytest.raises(SystemExit) as end:
        start("where", *SMALL, "--model", model, "--methods", *methods, "--json", str(found))
    assert end.value.code == 0
    stages = [f"pipefusion {patches}, rank {rank}" for patches in (2, 4) for rank in (0, 1)]
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].split()[-3:] == ["waiting", "wall", "clock"]
    assert [line.partition("  ")[0] for line in lines[2:7]] == ["one", "ulysses", *stages[:3]]
    assert [line.partition("  ")[0] for line in lines[7:]] == [stages[3], "cfg"]
    rounds = json.loads(found.read_text())
    assert list(rounds) == methods and {len(each) for each in rounds.values()} == {1}
    one, ulysses, *others = (each[0] for each in rounds.values())
    assert one["waiting"] == 0 < ulysses["waiting"] < ulysses["wall clock"]
    for sums in (one, ulysses, *others):
        assert sums["aten::linear"] > 0 and sums["matrix products"] < sums["CPU"]


def test_where_counts_pipefusion_in_its_steady_state(monkeypatch):
    """Without the warm-up, the step that fills the pipeline and the one that drains it."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import where

    begins = [7, 100, 1000, 2000, 3000]  # of the steps of a request
    readings = [{"thread": each} for each in (0.0, *begins, 5000.0)]
    pipeline = where.METHODS["pipefusion 2"]
    assert pipeline.steps(2) == len(begins)
    assert pipeline.counted(readings)["thread"] == begins[4] - begins[2]
    assert where.METHODS["ulysses"].steps(2) == 2
    assert where.METHODS["ulysses"].counted(readings)["thread"] == 5000


def test_the_operator_of_flash_attention_is_exact_on_the_cpu(monkeypatch):
    """Outputs and log-sum-exps, by which diffusers' ring merges."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import loops

    loops.flash_on_cpu()
    query, key, value = torch.randn(3, 1, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=0.3)
    scores = 0.3 * query @ key.mT
    torch.testing.assert_close(out, scores.softmax(-1) @ value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-6)
    # as the operator promises compiled code
    assert out.is_contiguous() and lse.is_contiguous()


def test_a_model_has_its_ring_to_itself(monkeypatch, model):
    """Setting the backend of one sets that of every other model, whose attention is then another."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import loops

    before = _AttentionBackendRegistry.get_active_backend()
    loop = loops.PlainLoop(model, "cpu")
    loop._attend_with_lse()
    assert _AttentionBackendRegistry.get_active_backend() == before
    backends = {vars(each)["_attention_backend"] for each in loop.transformer.attn_processors.values()}
    assert backends == {loops.RING_BACKEND}


def test_start_reports_every_round_but_the_first(start, tmp_path, monkeypatch, capsys):
    """Of ranks that are not there: what it writes of them."""
    asked, ended = [], []
    backend = SimpleNamespace(client=SimpleNamespace(request=asked.append))
    monkeypatch.setattr(pool, "backend_for", lambda config: backend)
    monkeypatch.setattr(pool, "close_all", lambda: ended.append(len(asked)))
    start("start", "--rounds", "3", "--patience", "0", "--out", str(tmp_path))
    assert ended[:4] == [1, 2, 3, 4] and set(map(type, asked)) == {Ping}
    found = json.loads((tmp_path / "start.json").read_text())
    assert len(found["rounds"]["2 ranks"]) == 3 == len(found["busy_percent"])
    assert all(0 < seconds < 60 for seconds in found["rounds"]["2 ranks"])
    assert (tmp_path / "start.png").read_bytes()[:4] == b"\x89PNG"
    assert capsys.readouterr().out.splitlines()[2].startswith("2 ranks  ")


def test_who_imports_a_benchmark_keeps_its_threads(monkeypatch):
    """The doctor, whose ranks and other programs inherit its environment."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("common_again", Path(BENCHMARKS, "common.py"))
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "OMP_NUM_THREADS" not in os.environ


def test_ranks_of_benchmarks_start_as_the_backends_do(monkeypatch, tmp_path):
    """With NCCL's way between these GPUs: else they would hang where the backend's do not."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import common

    for name in nccl_settings.LINK_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    way = {"NCCL_P2P_DISABLE": "1"}
    nccl_settings.save_way(os.environ, [0, 1], way)
    started = []

    def run(command, env):
        started.append(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(common.subprocess, "run", run)
    for device in ("cuda", "cpu"):
        with pytest.raises(SystemExit):
            common.spawn("any.py", 2, device, "a model")
    gpu, cpu = started
    assert gpu.items() >= way.items() and "NCCL_P2P_DISABLE" not in cpu
    assert gpu["CUDA_DEVICE_MAX_CONNECTIONS"] == "32" and "MALLOC_ARENA_MAX" in cpu
    assert {(each["OMP_NUM_THREADS"], each[common.MODEL_VARIABLE]) for each in started} == {("1", "a model")}
