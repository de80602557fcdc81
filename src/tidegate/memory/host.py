"""Host memory that is left: the machine's, each control group's (v1 and v2), and the process's own limits."""

from __future__ import annotations

import functools
import os
import re
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostLimit", "HostReader", "host_headroom", "host_limits", "host_total"]

_ROOT = Path("/")
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
_LIMITS_EVERY = 1.0  # seconds; limits change rarely, what is used changes always
_AVAILABLE = re.compile(rb"MemAvailable:\s*(\d+)")
_TOTAL = re.compile(rb"MemTotal:\s*(\d+)")
_RLIMITS = (("RLIMIT_AS", resource.RLIMIT_AS, 0), ("RLIMIT_DATA", resource.RLIMIT_DATA, 5))


@dataclass(frozen=True, slots=True)
class HostLimit:
    """One bound on host memory.

    Args:
        source: What sets it: "meminfo", a control group's file, or an rlimit.
        available: Bytes that may still be taken under it.
        total: The bound itself, in bytes.
    """

    source: str
    available: int
    total: int


class HostReader:
    """Reads host headroom over and over: files stay open, and costly ones are read only when they decide.

    Thread-safe. A limit that changes is seen within a second; so is a move to another control group.

    Args:
        root: Where /proc and /sys are found.
    """

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._meminfo = _File(root / "proc/meminfo")
        self._membership: bytes | None = None
        self._groups: list[_Group] = []
        self._due = 0.0

    def headroom(self) -> int:
        """Bytes of host RAM that this process may still take."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _LIMITS_EVERY
            self._read_limits()
        left = _kibibytes(_AVAILABLE, self._meminfo.read(512))
        for group in self._groups:
            if group.limit < _UNLIMITED:
                left = group.lower(left)
        for limit in self._process_limits():
            left = min(left, limit.available)
        return left

    def limits(self) -> list[HostLimit]:
        """Every bound, each read now."""
        self._read_limits()
        text = self._meminfo.read(512)
        machine = HostLimit("meminfo", _kibibytes(_AVAILABLE, text), _kibibytes(_TOTAL, text))
        groups = [
            HostLimit(group.source, group.lower(group.limit), group.limit)
            for group in self._groups
            if group.limit < _UNLIMITED
        ]
        return [machine, *groups, *self._process_limits()]

    def _read_limits(self) -> None:
        membership = _contents(self._root / "proc/self/cgroup")
        if membership != self._membership:
            self._groups = list(_groups(self._root, membership))
            self._membership = membership
        for group in self._groups:
            group.read_limit()

    def _process_limits(self) -> Iterator[HostLimit]:
        for name, kind, field in _RLIMITS:
            soft, _ = resource.getrlimit(kind)
            if soft != resource.RLIM_INFINITY:
                # By path, not by an open file: after a fork that would still tell of the parent.
                used = int(_contents(self._root / "proc/self/statm").split()[field]) * resource.getpagesize()
                yield HostLimit(name, max(0, soft - used), soft)


class _Group:
    """One control group's memory files.

    Args:
        folder: Where they are.
        bounds: Names of the files that hold limits.
        usage: Name of the file that holds bytes in use.
        reclaimable: Line of memory.stat that counts file pages which the kernel gives up first.
    """

    def __init__(self, folder: Path, bounds: tuple[str, ...], usage: str, reclaimable: bytes) -> None:
        self._bounds = [(str(folder / name), _File(folder / name)) for name in bounds]
        self._usage = _File(folder / usage)
        self._stat = _File(folder / "memory.stat")
        self._reclaimable = re.compile(rb"^" + reclaimable + rb" (\d+)", re.MULTILINE)
        self.limit = _UNLIMITED
        self.source = ""

    @property
    def counts(self) -> bool:
        """Whether its controller counts memory; in a v2 root group, or a hybrid hierarchy, it does not."""
        return _number(self._usage.read(64)) is not None

    def read_limit(self) -> None:
        limits = [(_number(file.read(64)), source) for source, file in self._bounds]
        hidden = re.search(rb"^hierarchical_memory_limit (\d+)", self._stat.read(16384), re.MULTILINE)
        if hidden:  # v1 tells the tightest limit above, also of groups that a container does not see
            limits.append((int(hidden[1]), self._bounds[0][0]))
        known = [(limit, source) for limit, source in limits if limit is not None]
        self.limit, self.source = min(known, key=lambda pair: pair[0], default=(_UNLIMITED, ""))

    def lower(self, left: int) -> int:
        """The lesser of `left` and what this group leaves, both in bytes."""
        used = _number(self._usage.read(64)) or 0
        if self.limit - used >= left:
            return left  # memory.stat costs as much as all the rest, and could only raise the group's figure
        found = self._reclaimable.search(self._stat.read(16384))
        return max(0, min(left, self.limit - used + (int(found[1]) if found else 0)))


def _groups(root: Path, membership: bytes) -> Iterator[_Group]:
    mounts = list(_cgroup_mounts(root))
    for line in membership.decode().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 2 if not controllers else 1 if "memory" in controllers.split(",") else 0
        for kind, mounted, mount in mounts:
            if kind != version:
                continue
            for folder in _ancestors(root / mount.lstrip("/"), mounted, path):
                group = (
                    _Group(folder, ("memory.max", "memory.high"), "memory.current", b"inactive_file")
                    if version == 2
                    else _Group(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", b"total_inactive_file")
                )
                if group.counts:
                    yield group
            break  # a hierarchy that is mounted twice is the same hierarchy


def _cgroup_mounts(root: Path) -> Iterator[tuple[int, str, str]]:
    """(version, path of the hierarchy that is mounted, mount point) of hierarchies that may hold memory files."""
    mountinfo = _contents(root / "proc/self/mountinfo").decode(errors="replace")
    if not mountinfo:
        yield from ((2, "/", "/sys/fs/cgroup"), (1, "/", "/sys/fs/cgroup/memory"))
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, *rest) = left.split(), right.split() or [""]
        if kind == "cgroup2":
            yield 2, fields[3], fields[4]
        elif kind == "cgroup" and "memory" in rest[-1].split(","):
            yield 1, fields[3], fields[4]


def _ancestors(mount: Path, mounted: str, path: str) -> list[Path]:
    """The group's folder and those above it, up to the mount: what a container sees of the hierarchy may end there."""
    prefix = mounted.rstrip("/")
    folder = mount
    if path == prefix or path.startswith(prefix + "/"):
        folder = mount / path[len(prefix) :].lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = mount
    chain = [folder]
    while chain[-1] != mount:
        chain.append(chain[-1].parent)
    return chain


class _File:
    """A kernel file that stays open; empty where it is absent or has gone."""

    def __init__(self, path: Path) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._fd = -1

    def read(self, nbytes: int) -> bytes:
        if self._fd < 0:
            return b""
        try:
            return os.pread(self._fd, nbytes, 0)
        except OSError:
            return b""

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def _contents(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() else None  # absent, or "max"


def _kibibytes(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.search(text)
    if found is None:
        raise OSError(f"/proc/meminfo has no line {pattern.pattern.decode().partition(':')[0]}")
    return int(found[1]) * 1024


_reader = functools.cache(HostReader)


def host_headroom(root: Path = _ROOT) -> int:
    """Bytes of host RAM that this process may still take: the tightest of `host_limits`.

    Costs tens of microseconds.

    Args:
        root: Where /proc and /sys are found.

    Raises:
        OSError: /proc is not there.
    """
    return (_reader() if root == _ROOT else HostReader(root)).headroom()


def host_limits(root: Path = _ROOT) -> list[HostLimit]:
    """Every bound on this process's host memory: the machine, each control group above it (v1, v2), and rlimits.

    Args:
        root: Where /proc and /sys are found.

    Raises:
        OSError: /proc is not there.
    """
    return HostReader(root).limits()


def host_total(root: Path = _ROOT) -> int:
    """Bytes of host RAM that this process could ever have."""
    return min(limit.total for limit in host_limits(root))
