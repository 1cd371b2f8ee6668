"""Host memory with and without cgroup limits, read from a made-up file system."""

import os
from pathlib import Path

import pytest

from peagle.host_memory import available_bytes, total_bytes

GIB = 1 << 30
V1_NO_LIMIT = 9223372036854771712


def write(root: Path, files: dict[str, object]) -> Path:
    meminfo = (
        f"MemTotal:       {64 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {40 << 20} kB\nHugePages_Total:       0\n"
    )
    for name, content in ({"proc/meminfo": meminfo} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def test_without_cgroups_the_hosts_numbers_count(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (64 * GIB, 40 * GIB)


def test_a_cgroup_v2_limit_below_the_hosts_memory_counts(tmp_path: Path) -> None:
    cgroup = {"memory.max": 8 * GIB, "memory.current": 5 * GIB, "memory.stat": f"anon 1\ninactive_file {2 * GIB}"}
    write(tmp_path, {"proc/self/cgroup": "0::/"} | {f"sys/fs/cgroup/{name}": value for name, value in cgroup.items()})
    assert total_bytes(tmp_path) == 8 * GIB
    assert available_bytes(tmp_path) == 5 * GIB, "cache that the kernel can drop is not in use"


def test_a_cgroup_v2_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"})
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (64 * GIB, 40 * GIB)


def test_the_limit_of_a_parent_cgroup_counts(tmp_path: Path) -> None:
    slice_ = "sys/fs/cgroup/user.slice"
    own = {f"{slice_}/a.service/memory.max": 16 * GIB, f"{slice_}/a.service/memory.current": GIB}
    parent = {f"{slice_}/memory.max": 12 * GIB, f"{slice_}/memory.current": 11 * GIB}
    write(tmp_path, {"proc/self/cgroup": "0::/user.slice/a.service"} | own | parent)
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (12 * GIB, GIB)


@pytest.mark.parametrize("path", ["/", "/docker/0123abc"])
def test_a_cgroup_v1_limit_counts_even_if_the_path_is_the_hosts(tmp_path: Path, path: str) -> None:
    cgroup = {
        "memory.limit_in_bytes": 4 * GIB,
        "memory.usage_in_bytes": 3 * GIB,
        "memory.stat": f"total_inactive_file {GIB}",
    }
    lines = f"12:cpu,cpuacct:{path}\n5:memory:{path}\n1:name=systemd:{path}"
    files = {f"sys/fs/cgroup/memory/{name}": value for name, value in cgroup.items()}
    write(tmp_path, {"proc/self/cgroup": lines} | files)
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (4 * GIB, 2 * GIB)


def test_a_cgroup_v1_without_a_limit_changes_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "5:memory:/", "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NO_LIMIT}
    assert (total_bytes(write(tmp_path, files)), available_bytes(tmp_path)) == (64 * GIB, 40 * GIB)


def test_a_cgroup_that_uses_more_than_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": 2 * GIB}
    assert available_bytes(write(tmp_path, {"proc/self/cgroup": "0::/"} | files)) == 0


def test_systems_without_proc_are_asked_for_their_pages(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert (total_bytes(tmp_path), available_bytes(tmp_path)) == (physical, physical // 2)
