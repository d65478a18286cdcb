"""What control groups leave this process: a container's limits of memory and of processors, which
psutil's numbers of the machine and the affinity of processes do not have."""

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
#: The groups of this process.
GROUPS = Path("/proc/self/cgroup")
#: Controller in a line of /proc/self/cgroup -> folder of its groups, files of the limit and of what is used,
#: and how memory.stat's names of CACHED begin. Version 2's line names no controller.
VERSIONS = {
    "": ("", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
#: Cached files, which the system takes back.
CACHED = ("active_file", "inactive_file")
#: Version 1's limit of processors: quota (-1 for none) and period.
CPU_FILES = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
#: Limits from here on are none: version 1 writes the largest number of pages.
NO_LIMIT = 1 << 60


def memory_limits() -> list[tuple[int, int]]:
    """Return (limit, used) in bytes of every group with a limit that this process is in; used is without
    cached files."""
    limits = []
    for controllers, path in _groups():
        for name in VERSIONS.keys() & set(controllers):
            folder, *files = VERSIONS[name]
            limits += [_limit(group, *files) for group in _with_parents(ROOT / folder, path)]
    return [each for each in limits if each is not None]


def cpu_limit() -> float:
    """Return how many processors' time this process's groups may take; infinity without a limit."""
    limits = [math.inf]
    for controllers, path in _groups():
        if controllers == [""]:
            limits += [_cpus(group, "cpu.max") for group in _with_parents(ROOT, path)]
        elif "cpu" in controllers:
            limits += [_cpus(group, *CPU_FILES) for group in _with_parents(ROOT / "cpu", path)]
    return min(limits)


def _groups() -> list[tuple[list[str], str]]:
    """Return (controllers, path) of each group of this process; version 2 names none: [""]."""
    try:
        lines = GROUPS.read_text().splitlines()
    except OSError:
        return []  # no Linux
    fields = [line.split(":", 2) for line in lines]
    return [(controllers.split(","), path) for _, controllers, path in fields]


def _cpus(group: Path, *files: str) -> float:
    """Return the quota over the period, in microseconds, that a group's files have."""
    try:
        quota, period = " ".join((group / name).read_text() for name in files).split()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf  # no such group here, or its limit is "max"


def _with_parents(root: Path, path: str) -> Iterator[Path]:
    """Return the group and those that it is in; in a container ``root`` may be the group itself."""
    below = Path(path.lstrip("/"))
    yield from (root / each for each in (below, *below.parents) if each != Path())
    yield root


def _limit(group: Path, limit: str, used: str, prefix: str) -> tuple[int, int] | None:
    try:
        size = int((group / limit).read_text())
        if size >= NO_LIMIT:
            return None
        parts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        files = sum(int(parts.get(prefix + name, 0)) for name in CACHED)
        return size, max(0, int((group / used).read_text()) - files)
    except (OSError, ValueError):
        return None  # no such group here, or its limit is "max"
