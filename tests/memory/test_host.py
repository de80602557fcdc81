"""Host headroom is the tightest of the machine, of every control group above the process, and of its own limits."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidegate.memory import host
from tidegate.memory.host import HostReader, host_headroom, host_limits, host_total

GiB = 2**30
MEMINFO = "MemTotal:       33554432 kB\nMemFree:        1 kB\nMemAvailable:   16777216 kB\n"
V2 = "31 23 0:28 {mounted} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
NO_LIMIT = 9223372036854771712


def tree(root: Path, membership: str, mounts: str = "", groups: dict[str, dict[str, int | str]] | None = None) -> Path:
    """A fake /proc and /sys/fs/cgroup."""
    files: dict[str, object] = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": membership,
        "proc/self/statm": "3 1 1 1 1 2 1",
        "proc/self/mountinfo": "27 1 254:0 / / rw - ext4 /dev/vda rw\n" + mounts.rstrip(),
    }
    for group, values in (groups or {}).items():
        files |= {f"sys/fs/cgroup/{group}/{name}": value for name, value in values.items()}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n" if text != "" else "")
    return root


def v2(limit: int | str, used: int, **more: int | str) -> dict[str, int | str]:
    return {"memory.max": limit, "memory.current": used} | {f"memory.{name}": value for name, value in more.items()}


def v1(limit: int, used: int, stat: str = "") -> dict[str, int | str]:
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def headroom_v2(root: Path, path: str, groups: dict[str, dict[str, int | str]], mounted: str = "/") -> int:
    return host_headroom(tree(root, f"0::{path}", V2.format(mounted=mounted), groups))


def headroom_v1(root: Path, path: str, groups: dict[str, dict[str, int | str]], mounted: str = "/") -> int:
    return host_headroom(tree(root, f"4:memory:{path}\n1:cpu:/\n0::/", V1.format(mounted=mounted) + CPU, groups))


# The machine


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    root = tree(tmp_path, "")
    assert host_headroom(root) == 16 * GiB
    assert host_total(root) == 32 * GiB


def test_memory_that_grows_is_seen(tmp_path: Path) -> None:
    reader = HostReader(tree(tmp_path, ""))
    assert reader.headroom() == 16 * GiB
    (tmp_path / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 50331648 kB\n")
    assert reader.headroom() == 48 * GiB
    assert reader.limits()[0].total == 64 * GiB


def test_without_proc_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="meminfo"):
        host_headroom(tmp_path)


# Control groups, version 2


def test_v2_limit_less_usage_plus_reclaimable_file_pages(tmp_path: Path) -> None:
    stat = f"anon 1\ninactive_file {GiB}\nactive_file {5 * GiB}"
    assert headroom_v2(tmp_path, "/job", {"job": v2(8 * GiB, 6 * GiB, stat=stat)}) == 3 * GiB


def test_v2_total_is_the_limit(tmp_path: Path) -> None:
    headroom_v2(tmp_path, "/job", {"job": v2(8 * GiB, 6 * GiB)})
    assert host_total(tmp_path) == 8 * GiB


@pytest.mark.parametrize("tightest", ["a", "a/b", "a/b/c"])
def test_v2_every_ancestor_counts(tmp_path: Path, tightest: str) -> None:
    groups = {name: v2(9 * GiB, 0) for name in ("a", "a/b", "a/b/c")} | {tightest: v2(4 * GiB, GiB)}
    assert headroom_v2(tmp_path, "/a/b/c", groups) == 3 * GiB
    assert str(tmp_path / "sys/fs/cgroup" / tightest / "memory.max") in [
        limit.source for limit in host_limits(tmp_path)
    ]


def test_v2_the_throttling_limit_counts(tmp_path: Path) -> None:
    assert headroom_v2(tmp_path, "/a", {"a": v2("max", GiB, high=3 * GiB)}) == 2 * GiB


def test_v2_max_is_no_limit(tmp_path: Path) -> None:
    assert headroom_v2(tmp_path, "/a", {"a": v2("max", GiB, high="max")}) == 16 * GiB


def test_v2_usage_above_the_limit_is_no_headroom(tmp_path: Path) -> None:
    assert headroom_v2(tmp_path, "/a", {"a": v2(GiB, 2 * GiB)}) == 0


def test_v2_siblings_do_not_count(tmp_path: Path) -> None:
    assert headroom_v2(tmp_path, "/a/b", {"a": v2("max", 0), "a/b": v2("max", 0), "a/c": v2(GiB, 0)}) == 16 * GiB


def test_v2_a_container_with_its_own_namespace_sees_its_group_as_the_root(tmp_path: Path) -> None:
    assert headroom_v2(tmp_path, "/", {"": v2(2 * GiB, GiB)}) == GiB


def test_v2_a_container_that_keeps_the_host_s_path_finds_its_group_at_the_mount(tmp_path: Path) -> None:
    groups = {"": v2(5 * GiB, GiB), "inner": v2(3 * GiB, GiB)}
    assert headroom_v2(tmp_path, "/docker/0123/inner", groups, mounted="/docker/0123") == 2 * GiB


def test_v2_a_path_outside_the_mount_counts_what_the_mount_shows(tmp_path: Path) -> None:
    assert headroom_v2(tmp_path, "/../other", {"": v2(2 * GiB, 0)}, mounted="/mine") == 2 * GiB


# Control groups, version 1


def test_v1_limit_less_usage_plus_reclaimable_file_pages(tmp_path: Path) -> None:
    group = v1(8 * GiB, 7 * GiB, f"inactive_file 1\ntotal_inactive_file {GiB}")
    assert headroom_v1(tmp_path, "/job", {"memory/job": group}) == 2 * GiB


def test_v1_every_ancestor_counts(tmp_path: Path) -> None:
    groups = {"memory": v1(NO_LIMIT, 1), "memory/a": v1(4 * GiB, 3 * GiB), "memory/a/b": v1(8 * GiB, GiB)}
    assert headroom_v1(tmp_path, "/a/b", groups) == GiB


def test_v1_no_limit_is_a_huge_number(tmp_path: Path) -> None:
    assert headroom_v1(tmp_path, "/a", {"memory/a": v1(NO_LIMIT, 5 * GiB)}) == 16 * GiB


def test_v1_a_limit_above_what_a_container_sees_counts(tmp_path: Path) -> None:
    group = v1(NO_LIMIT, GiB, f"hierarchical_memory_limit {3 * GiB}")
    assert headroom_v1(tmp_path, "/docker/0123", {"memory": group}, mounted="/docker/0123") == 2 * GiB


def test_v1_a_memory_controller_beside_v2_counts(tmp_path: Path) -> None:
    mounts = V2.format(mounted="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified") + V1.format(mounted="/")
    groups = {"memory/a": v1(2 * GiB, 0), "unified/a": {"cgroup.controllers": "hugetlb"}}
    assert host_headroom(tree(tmp_path, "4:memory:/a\n0::/a", mounts, groups)) == 2 * GiB


# The process's own limits


@pytest.mark.parametrize(("kind", "pages"), [("RLIMIT_AS", 3), ("RLIMIT_DATA", 2)])
def test_a_limit_of_the_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, pages: int) -> None:
    def getrlimit(which: int) -> tuple[int, int]:
        return (GiB if which == getattr(resource, kind) else resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    assert host_headroom(tree(tmp_path, "")) == GiB - pages * resource.getpagesize()


def test_a_real_limit_on_the_address_space_counts() -> None:
    script = (
        "import resource; from tidegate.memory.host import host_headroom\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))\n"
        "before = host_headroom(); block = bytearray(64 << 20); print(before, before - host_headroom())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    before, taken = map(int, done.stdout.split())
    assert 0 < before < GiB
    assert taken >= 64 << 20


# Reading over and over


@contextmanager
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    with monkeypatch.context() as patch:
        patch.setattr(host.time, "monotonic", lambda: now[0])
        yield now


def test_usage_that_changes_is_seen_at_once(tmp_path: Path) -> None:
    reader = HostReader(tree(tmp_path, "0::/a", V2.format(mounted="/"), {"a": v2(8 * GiB, 0)}))
    assert reader.headroom() == 8 * GiB
    (tmp_path / "sys/fs/cgroup/a/memory.current").write_text(str(3 * GiB))
    assert reader.headroom() == 5 * GiB


def test_a_limit_that_changes_is_seen_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with clock(monkeypatch) as now:
        reader = HostReader(tree(tmp_path, "0::/a", V2.format(mounted="/"), {"a": v2("max", 0)}))
        assert reader.headroom() == 16 * GiB
        (tmp_path / "sys/fs/cgroup/a/memory.max").write_text(str(GiB))
        now[0] += 1.0
        assert reader.headroom() == GiB


def test_a_move_to_another_group_is_seen_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with clock(monkeypatch) as now:
        groups = {"a": v2(8 * GiB, 0), "b": v2(2 * GiB, 0)}
        reader = HostReader(tree(tmp_path, "0::/a", V2.format(mounted="/"), groups))
        assert reader.headroom() == 8 * GiB
        (tmp_path / "proc/self/cgroup").write_text("0::/b\n")
        now[0] += 1.0
        assert reader.headroom() == 2 * GiB


def test_open_files_are_closed_with_the_reader(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = HostReader(tree(tmp_path, "0::/a", V2.format(mounted="/"), {"a": v2(8 * GiB, 0)}))
    reader.headroom()
    assert len(os.listdir("/proc/self/fd")) > before
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


# This machine


def test_this_machine_has_some() -> None:
    assert 0 < host_headroom() <= host_total()
    assert host_limits()[0].source == "meminfo"


def test_a_reading_costs_little_enough_to_ask_often() -> None:
    host_headroom()
    best = min(timeit.repeat(host_headroom, number=200, repeat=5)) / 200
    assert best < 300e-6, f"{best * 1e6:.0f} us"  # measured 11 us; the bound leaves room for a loaded machine
