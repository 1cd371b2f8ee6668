"""Memory of this machine, or of the container it is limited to: the smaller of the host's and the cgroup's numbers."""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def total_bytes(root: Path = ROOT) -> int:
    """Physical memory, or the cgroup's limit if that is lower."""
    return min([_physical_bytes(root), *(limit for limit, _ in _cgroup_limits(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can be allocated without swapping or exceeding the cgroup's limit."""
    available = _meminfo(root).get("MemAvailable", _physical_bytes(root) // 2)
    return max(0, min([available, *(limit - used for limit, used in _cgroup_limits(root))]))


def free_models() -> None:
    """Give back the memory of models that nobody uses any more, before another process needs it."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _physical_bytes(root: Path) -> int:
    return _meminfo(root).get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name; empty on systems without /proc."""
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, usage) of each cgroup that contains this process, in cgroup v2 and v1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Limits of parents apply too. In a container the path may be the host's: then only the base exists.
        own = base / path.strip("/")
        for directory in (own, *own.parents):
            if directory.is_relative_to(base) and (found := _limit(directory, *names)) is not None:
                yield found


def _limit(directory: Path, limit_name: str, usage_name: str, cache_key: str) -> tuple[int, int] | None:
    limit, usage = _read(directory / limit_name).strip(), _read(directory / usage_name).strip()
    if not limit.isdigit():  # no such file, or "max"
        return None
    stat = dict(line.split() for line in _read(directory / "memory.stat").splitlines())
    # The kernel drops this part of the page cache before it kills a process.
    return int(limit), int(usage or 0) - int(stat.get(cache_key, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
