"""Headroom is the tightest of all bounds, and tells RAM from disk."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from tidegate.memory import headroom

GiB = 2**30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1 kB\nMemAvailable: 16777216 kB\n"


def tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """A fake /proc and /sys/fs/cgroup."""
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/statm": "1 1 1 1 1 1 1"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    assert headroom.host_headroom(tree(tmp_path, "", {})) == 16 * GiB
    assert headroom.host_total(tmp_path) == 32 * GiB


def test_v2_limit_less_usage_plus_reclaimable_cache(tmp_path: Path) -> None:
    files = {
        "job/memory.max": str(8 * GiB),
        "job/memory.current": str(6 * GiB),
        "job/memory.stat": f"anon 1\ninactive_file {GiB}\n",
    }
    assert headroom.host_headroom(tree(tmp_path, "0::/job\n", files)) == 3 * GiB
    assert headroom.host_total(tmp_path) == 8 * GiB


@pytest.mark.parametrize("outer", [4, 12])
def test_every_ancestor_counts(tmp_path: Path, outer: int) -> None:
    files = {
        "a/memory.max": str(outer * GiB),
        "a/memory.current": "0",
        "a/b/memory.max": str(8 * GiB),
        "a/b/memory.current": "0",
    }
    assert headroom.host_headroom(tree(tmp_path, "0::/a/b\n", files)) == min(outer, 8) * GiB


def test_v2_high_counts_and_max_is_no_limit(tmp_path: Path) -> None:
    files = {"a/memory.max": "max", "a/memory.high": str(2 * GiB), "a/memory.current": str(GiB)}
    assert headroom.host_headroom(tree(tmp_path, "0::/a\n", files)) == GiB


def test_v1_limit(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": str(8 * GiB),
        "memory/job/memory.usage_in_bytes": str(7 * GiB),
        "memory/job/memory.stat": f"total_inactive_file {GiB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712",
        "memory/memory.usage_in_bytes": "1",
    }
    assert headroom.host_headroom(tree(tmp_path, "4:memory:/job\n1:cpu:/\n", files)) == 2 * GiB


def test_a_cgroup_path_of_the_host_falls_back_to_the_mount(tmp_path: Path) -> None:
    files = {"memory.max": str(2 * GiB), "memory.current": "0"}
    assert headroom.host_headroom(tree(tmp_path, "0::/docker/0123\n", files)) == 2 * GiB


def test_an_address_space_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def limits(kind: int) -> tuple[int, int]:
        return (GiB if kind == resource.RLIMIT_AS else resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    monkeypatch.setattr(resource, "getrlimit", limits)
    assert headroom.host_headroom(tree(tmp_path, "", {})) == GiB - resource.getpagesize()


def test_usage_above_the_limit_is_no_headroom(tmp_path: Path) -> None:
    files = {"a/memory.max": str(GiB), "a/memory.current": str(2 * GiB)}
    assert headroom.host_headroom(tree(tmp_path, "0::/a\n", files)) == 0


def test_this_machine_has_some() -> None:
    assert 0 < headroom.host_headroom() <= headroom.host_total()
    assert headroom.device_headroom(torch.device("cpu")) > 0
    assert {limit.source for limit in headroom.host_limits()} >= {"meminfo"}


def test_shared_memory_is_ram(tmp_path: Path) -> None:
    system = headroom.filesystem_of("/dev/shm")
    assert system.is_ram
    assert not system.is_network
    assert headroom.disk_headroom("/dev/shm") <= headroom.host_headroom() + GiB
    assert headroom.disk_headroom(tmp_path) > 0


def test_a_missing_path_has_no_file_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="none"):
        headroom.filesystem_of(tmp_path / "none")


def test_budgets() -> None:
    assert headroom.auto_host_budget(10 * GiB) == 5 * GiB
    assert headroom.auto_disk_budget(100 * GiB) == 90 * GiB
    assert headroom.auto_disk_budget(GiB // 2) == 0
    assert headroom.auto_window(torch.device("cpu")) == 128 * 2**20
    assert headroom.auto_margin(torch.device("cpu")) >= 256 * 2**20
