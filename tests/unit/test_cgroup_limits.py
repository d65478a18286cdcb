"""Limits of control groups, as files in a folder: of containers, and of services on a host."""

import math

import pytest

from backend.client.auto import measurements
from backend.client.launching import rank_environment
from backend.config import ParallelConfig
from backend.hardware import cgroup_limits, device_memory
from backend.hardware.cgroup_limits import cpu_limit, memory_limits

GB = 1 << 30


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


@pytest.fixture
def join(tmp_path, monkeypatch):
    """Puts this process into the groups of a text as in /proc/self/cgroup, below tmp_path."""
    monkeypatch.setattr(cgroup_limits, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup_limits, "GROUPS", tmp_path / "groups")
    return cgroup_limits.GROUPS.write_text


def test_version_2_counts_the_group_and_those_it_is_in(tmp_path, join):
    """Cached files are not in use: the system takes them back. The service's own group has no limit."""
    stat = f"anon 7\nactive_file {GB}\ninactive_file {2 * GB}"
    write(tmp_path / "user" / "service", memory__max="max", memory__current=GB, memory__stat=stat)
    write(tmp_path / "user", memory__max=16 * GB, memory__current=5 * GB, memory__stat=stat)
    join("0::/user/service\n")
    assert memory_limits() == [(16 * GB, 2 * GB)]


def test_a_container_sees_its_group_at_the_root(tmp_path, join):
    """Docker without a namespace of groups: the path is the host's, and is not there."""
    write(tmp_path, memory__max=8 * GB, memory__current=GB, memory__stat="inactive_file 0")
    join("0::/docker/0123abc\n")
    assert memory_limits() == [(8 * GB, GB)]


def test_version_1_has_a_folder_for_memory(tmp_path, join):
    files = dict(memory__stat=f"total_inactive_file {GB}\ntotal_active_file 0", memory__usage_in_bytes=3 * GB)
    write(tmp_path / "memory" / "job", memory__limit_in_bytes=4 * GB, **files)
    write(tmp_path / "memory", memory__limit_in_bytes=9223372036854771712, **files)
    groups = "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n"
    join(groups)
    assert memory_limits() == [(4 * GB, 2 * GB)]


@pytest.mark.parametrize("groups", ["", "1:name=systemd:/\n", "0::/\n"])
def test_no_group_has_no_limit(join, groups):
    join(groups)
    assert memory_limits() == []


def test_a_limit_is_the_host_memory_of_this_process(monkeypatch):
    """Where it is less than what the machine has, used up or not."""
    whole, free = device_memory.host_bytes(), device_memory.host_free(swap=False)
    monkeypatch.setattr(device_memory, "memory_limits", lambda: [(3 << 20, 1 << 20)])
    assert device_memory.host_bytes() == 3 << 20 < whole
    assert device_memory.host_free() == 2 << 20 < free
    monkeypatch.setattr(device_memory, "memory_limits", lambda: [(1 << 20, 3 << 20)])
    assert device_memory.host_free() == 0


def test_auto_plans_within_the_limit(monkeypatch):
    monkeypatch.setattr(device_memory, "memory_limits", lambda: [(3 << 20, 1 << 20)])
    assert measurements.free_memory("cpu", []) == (2 << 20,)


def test_the_least_quota_of_processors_counts(tmp_path, join):
    """Version 2: of the group and those that it is in; docker --cpus 2.5 in a pod of 8."""
    write(tmp_path / "pod" / "job", cpu__max="250000 100000")
    write(tmp_path / "pod", cpu__max="800000 100000")
    write(tmp_path, cpu__max="max 100000")
    join("0::/pod/job\n")
    assert cpu_limit() == 2.5
    join("0::/elsewhere\n")
    assert cpu_limit() == math.inf


def test_version_1_has_quota_and_period_in_files_of_their_own(tmp_path, join):
    write(tmp_path / "cpu" / "job", cpu__cfs_quota_us=400000, cpu__cfs_period_us=100000)
    write(tmp_path / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    join("5:cpu,cpuacct:/job\n4:memory:/job\n")
    assert cpu_limit() == 4
    join("5:cpu,cpuacct:/\n")
    assert cpu_limit() == math.inf


@pytest.mark.parametrize("limit, threads", [(math.inf, "8"), (6.5, "3"), (0.5, "1")])
def test_ranks_share_the_processors_of_their_container(monkeypatch, limit, threads):
    """A machine's 16 would start as many threads as the container has no time for."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    monkeypatch.setattr(rank_environment, "cpu_limit", lambda: limit)
    config = ParallelConfig(ulysses_degree=2, device="cpu")
    env = rank_environment.sanitized_environment({}, config, "cpu")
    assert env["OMP_NUM_THREADS"] == env["TORCHINDUCTOR_COMPILE_THREADS"] == threads
