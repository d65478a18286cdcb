"""The environment of agents and ranks: what of ours they inherit, and which GPUs they see."""

import os
import platform
import sys

import pytest
import torch

from backend.client.launching import rank_environment
from backend.client.launching.launcher import BackendProcess
from backend.client.launching.rank_environment import PACK, sanitized_environment
from backend.config import ConfigError, ParallelConfig
from backend.hardware import host_system
from backend.hardware.device_memory import FIXED_SEGMENTS
from backend.hardware.gpu_sharing import SHARED_GPU
from backend.parallel import mesh

TWO_RANKS = ParallelConfig(ulysses_degree=2, device="cpu")


def test_environment_drops_other_launchers_settings():
    parent = {
        "PATH": "/bin",
        "RANK": "3",
        "WORLD_SIZE": "8",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "ROLE_RANK": "0",
        "PET_NNODES": "2",
        "PET_NO_PYTHON": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "NCCL_P2P_DISABLE": "1",
        "PYTHONPATH": "/other",
        "PARALLEL_DIT_TOKEN": "of a backend elsewhere",
        "PARALLEL_DIT_ADDRESSES": "tcp:elsewhere:1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "DIFFUSERS_ATTN_BACKEND": "flash",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_COMM_ID": "10.0.0.1:29500",
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_DIST_USE_NCCL2": "1",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "LOGLEVEL": "debug",
    }
    env = sanitized_environment(parent, TWO_RANKS, "cpu")
    assert not {
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "ROLE_RANK",
        "PET_NNODES",
        "PET_NO_PYTHON",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PARALLEL_DIT_TOKEN",
        "PARALLEL_DIT_ADDRESSES",
        "DIFFUSERS_ATTN_BACKEND",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "NCCL_COMM_ID",
        "CUDA_LAUNCH_BLOCKING",
        "TORCH_DIST_USE_NCCL2",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "TORCH_DISTRIBUTED_DEBUG",
        "LOGLEVEL",
    } & set(env)
    assert env["PATH"] == "/bin" and env["NCCL_P2P_DISABLE"] == "1"
    assert sanitized_environment(parent, TWO_RANKS, "cuda")["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert env["GLOO_SOCKET_IFNAME"] == "lo" and env["NCCL_SOCKET_IFNAME"] == "=lo"
    assert env["NCCL_RAS_ENABLE"] == "0" and env["TORCH_NCCL_HIGH_PRIORITY"] == "1"
    assert float(env["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) == mesh.TIMEOUT.total_seconds()
    assert env["PYTHONPATH"] == f"{PACK}{os.pathsep}/other" and env["CUDA_VISIBLE_DEVICES"] == ""
    assert int(env["OMP_NUM_THREADS"]) >= 1


@pytest.mark.parametrize("here, expected", [(1, "1"), (16, "8"), (192, "32")])
def test_ranks_compile_in_as_many_processes_as_torch_would(here, expected, monkeypatch):
    """At most, however many cores a rank has."""
    monkeypatch.setattr(rank_environment, "cores", lambda: here)
    env = sanitized_environment({}, TWO_RANKS, "cpu")
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == expected
    assert env["OMP_NUM_THREADS"] == str(max(1, here // 2))


def test_malloc_maps_the_tensors_of_ranks_on_gpus_alone():
    """On the CPU a step would take a quarter of a million page faults. The user's sizes count."""
    on_gpus, on_cpus = (sanitized_environment({}, TWO_RANKS, device) for device in ("cuda", "cpu"))
    assert (on_gpus["MALLOC_MMAP_THRESHOLD_"], on_gpus["MALLOC_TRIM_THRESHOLD_"]) == ("262144", "262144")
    assert (on_cpus["MALLOC_MMAP_THRESHOLD_"], on_cpus["MALLOC_TRIM_THRESHOLD_"]) == ("33554432", "67108864")
    assert on_gpus["MALLOC_ARENA_MAX"] == on_cpus["MALLOC_ARENA_MAX"] == "2"
    theirs = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    assert theirs.items() <= sanitized_environment(theirs, TWO_RANKS, "cpu").items()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "name",
    [
        *("NCCL_BLOCKING_WAIT", "TORCH_NCCL_BLOCKING_WAIT"),
        *("NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        "DIFFUSERS_ATTN_CHECKS",
    ],
)
def test_ranks_wait_and_attend_as_is_expected_of_them(name, device):
    """Not as another program was told to: to block in each collective, or to check attention's arguments."""
    assert name not in sanitized_environment({name: "1"}, TWO_RANKS, device)


@pytest.mark.parametrize("theirs", [{}, {"HF_HUB_OFFLINE": "0"}], ids=str)
def test_ranks_ask_no_hub(theirs):
    """Whatever ComfyUI does: they read what is on this disk."""
    assert sanitized_environment(theirs, TWO_RANKS, "cpu")["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    "theirs, expected",
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "expandable_segments:True"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,backend:cudaMallocAsync"},
            "max_split_size_mb:64,expandable_segments:True",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
    ],
)
def test_the_allocator_leaves_no_gaps_unless_the_user_has_set_it(theirs, expected, monkeypatch):
    """ComfyUI sets the backend for its own process."""
    monkeypatch.setattr(sys, "platform", "linux")
    assert sanitized_environment(theirs, TWO_RANKS, "cuda")["PYTORCH_CUDA_ALLOC_CONF"] == expected
    assert "PYTORCH_CUDA_ALLOC_CONF" not in sanitized_environment(theirs, TWO_RANKS, "cpu")


@pytest.mark.parametrize(
    "theirs, expected",
    [
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64,expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, "expandable_segments:False"),
        (
            {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_HIP_ALLOC_CONF": "max_split_size_mb:8"},
            None,
        ),
    ],
)
def test_every_torch_reads_what_the_user_has_set_for_the_newest(theirs, expected, monkeypatch):
    """Before 2.9 the older name alone is read, and later ones read it first. Not over a name of ROCm's."""
    monkeypatch.setattr(sys, "platform", "linux")
    environment = sanitized_environment(theirs, TWO_RANKS, "cuda")
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert expected is None or environment["PYTORCH_ALLOC_CONF"] == expected


def test_the_allocator_is_as_usual_on_wsl(monkeypatch):
    """Where segments that grow fail under many drivers; who sets them has them."""
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in sanitized_environment({}, TWO_RANKS, "cuda")
    several = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert several.items() <= sanitized_environment(several, TWO_RANKS, "cuda").items()
    theirs = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert theirs.items() <= sanitized_environment(theirs, TWO_RANKS, "cuda").items()


def test_the_allocator_is_as_usual_on_a_jetson(monkeypatch, tmp_path):
    """Whose driver may know no segments that grow."""
    monkeypatch.setattr(host_system, "TEGRA_RELEASE", tmp_path / "nv_tegra_release")
    assert sanitized_environment({}, TWO_RANKS, "cuda")[FIXED_SEGMENTS] == "0"
    host_system.TEGRA_RELEASE.write_text("# R36 (release), REVISION: 4.3\n")
    environment = sanitized_environment({}, TWO_RANKS, "cuda")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment and environment[FIXED_SEGMENTS] == "1"
    host_system.TEGRA_RELEASE.unlink()  # as in a container
    monkeypatch.setattr(platform, "release", lambda: "5.15.148-tegra")
    assert sanitized_environment({}, TWO_RANKS, "cuda")[FIXED_SEGMENTS] == "1"


@pytest.mark.parametrize(
    "release, theirs, expected",
    [
        ("6.8.0", {}, "0"),
        ("6.8.0", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "0"),
        ("6.8.0", {"PYTORCH_ALLOC_CONF": "expandable_segments:False, max_split_size_mb:64"}, "1"),
        ("6.6.87.2-microsoft-standard-WSL2", {}, "1"),
        ("6.6.87.2-microsoft-standard-WSL2", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "1"),
        ("6.6.87.2-microsoft-standard-WSL2", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "0"),
    ],
)
def test_ranks_know_whether_their_segments_grow(release, theirs, expected, monkeypatch):
    """Where they do not, stages post no receives ahead (tests/ranks/test_fixed_segments.py)."""
    monkeypatch.setattr(platform, "release", lambda: release)
    assert sanitized_environment(theirs, TWO_RANKS, "cuda")[FIXED_SEGMENTS] == expected
    assert FIXED_SEGMENTS not in sanitized_environment(theirs, TWO_RANKS, "cpu")


def test_values_of_nccl_that_somebody_set_stay():
    theirs = {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_RAS_ENABLE": "1"}
    assert theirs.items() <= sanitized_environment(theirs, TWO_RANKS, "cuda").items()


@pytest.mark.parametrize(
    "visible, gpus, expected",
    [
        (None, "", "0,1"),
        (None, "3,1", "3,1"),
        ("4,5,6", "", "4,5"),
        ("4,5,6", "2,0", "6,4"),
        ("GPU-a, GPU-b", "", "GPU-a,GPU-b"),
    ],
)
def test_gpus_are_picked_among_the_visible_ones(visible, gpus, expected):
    parent = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    config = ParallelConfig(ulysses_degree=2, gpus=gpus)
    assert sanitized_environment(parent, config, "cuda")["CUDA_VISIBLE_DEVICES"] == expected


def test_ranks_that_share_a_gpu_see_it_once(monkeypatch):
    monkeypatch.setenv(SHARED_GPU, "1")
    config = ParallelConfig(ulysses_degree=2)
    found = sanitized_environment({**os.environ, "CUDA_VISIBLE_DEVICES": "5"}, config, "cuda")
    assert config.gpu_indices == [0, 0] and config.resolve_device(1) == "cuda"
    assert found["CUDA_VISIBLE_DEVICES"] == "5" and found[SHARED_GPU] == "1"


@pytest.mark.parametrize(
    "parent, gpus, expected",
    [
        ({"HIP_VISIBLE_DEVICES": "1,0,2,3", "CUDA_VISIBLE_DEVICES": "1,0,2,3"}, "1,2", "0,2"),
        ({"HIP_VISIBLE_DEVICES": "5,4"}, "", "5,4"),
        ({"CUDA_VISIBLE_DEVICES": "5,4"}, "1,0", "4,5"),
        ({"ROCR_VISIBLE_DEVICES": "6,7"}, "1,0", "1,0"),
    ],
    ids=["ComfyUI", "HIP", "CUDA", "ROCR"],
)
def test_one_list_of_gpus_counts_on_amd(parent, gpus, expected, monkeypatch):
    """HIP's own counts before CUDA's; ROCR's is another layer, in whose order the others count."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    env = sanitized_environment(parent, ParallelConfig(ulysses_degree=2, gpus=gpus), "cuda")
    assert env["CUDA_VISIBLE_DEVICES"] == expected and "HIP_VISIBLE_DEVICES" not in env
    assert env.get("ROCR_VISIBLE_DEVICES") == parent.get("ROCR_VISIBLE_DEVICES")


def test_a_list_of_hip_means_nothing_to_cuda():
    env = sanitized_environment({"HIP_VISIBLE_DEVICES": "3"}, ParallelConfig(ulysses_degree=2), "cuda")
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_visible_gpus_that_changed_since_cuda_began_are_named(monkeypatch, tmp_path):
    """In one sentence; and nothing stays of the backend that was not started."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ConfigError, match="GPU 1 is wanted, but CUDA_VISIBLE_DEVICES is '0', .*; start"
    ) as no:
        BackendProcess(ParallelConfig(ulysses_degree=2), "cuda")
    assert str(no.value).count(". ") == 0
    assert not list(tmp_path.iterdir()) and len(os.listdir("/proc/self/fd")) == held


@pytest.mark.parametrize("version, expected", [((2, 7), "1"), ((2, 8), None)])
def test_early_versions_of_torch_keep_no_buffers_of_collectives(version, expected, monkeypatch):
    monkeypatch.setattr(rank_environment, "has_torch", lambda *asked: version >= asked)
    env = sanitized_environment({}, TWO_RANKS, "cuda")
    assert env.get("TORCH_NCCL_AVOID_RECORD_STREAMS") == expected
    monkeypatch.setenv("PARALLEL_DIT_PYTHON", "/bin/sh")  # whose torch may be an early one
    env = sanitized_environment({}, TWO_RANKS, "cuda")
    assert env["TORCH_NCCL_AVOID_RECORD_STREAMS"] == "1"
