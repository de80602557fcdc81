"""Readings of the memory that is left: device, host (with its cgroups) and disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = [
    "Filesystem",
    "HostLimit",
    "auto_disk_budget",
    "auto_host_budget",
    "auto_margin",
    "auto_window",
    "device_headroom",
    "device_total",
    "disk_headroom",
    "filesystem_of",
    "host_headroom",
    "host_limits",
    "host_total",
]

MiB, GiB = 2**20, 2**30

_RAM_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "ncpfs"}
    | {"fuse.sshfs", "fuse.glusterfs", "fuse.ceph-fuse", "fuse.s3fs", "fuse.gcsfuse", "fuse.juicefs", "virtiofs"}
)
_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, slots=True)
class HostLimit:
    """One bound on host memory.

    Args:
        source: What sets it: "meminfo", a cgroup's path, or an rlimit.
        available: Bytes that may still be taken under it.
        total: The bound itself, in bytes.
    """

    source: str
    available: int
    total: int


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The file system that holds a path.

    Args:
        mount: Mount point.
        kind: Type as the kernel names it, e.g. "ext4".
        device: Device number; equal for paths that share a device.
        read_only: Mounted read-only.
    """

    mount: str
    kind: str
    device: int
    read_only: bool

    @property
    def is_ram(self) -> bool:
        """Whether its files live in RAM."""
        return self.kind in _RAM_FILESYSTEMS

    @property
    def is_network(self) -> bool:
        """Whether its files live on another machine."""
        return self.kind in _NETWORK_FILESYSTEMS


# Host


def host_limits(root: Path = Path("/")) -> list[HostLimit]:
    """Every bound on this process's host memory: the machine, each ancestor cgroup (v1 and v2), and rlimits.

    Args:
        root: Where /proc and /sys are found.
    """
    limits = [_meminfo(root), *_cgroup_limits(root)]
    for name, kind in (("RLIMIT_AS", resource.RLIMIT_AS), ("RLIMIT_DATA", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            field = 0 if kind == resource.RLIMIT_AS else 5
            used = int((root / "proc/self/statm").read_text().split()[field]) * resource.getpagesize()
            limits.append(HostLimit(name, max(0, soft - used), soft))
    return limits


def host_headroom(root: Path = Path("/")) -> int:
    """Bytes of host RAM that this process may still take: the tightest of `host_limits`."""
    return min(limit.available for limit in host_limits(root))


def host_total(root: Path = Path("/")) -> int:
    """Bytes of host RAM that this process could ever have."""
    return min(limit.total for limit in host_limits(root))


def _meminfo(root: Path) -> HostLimit:
    values = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    available = values.get("MemAvailable", values.get("MemFree", 0) + values.get("Cached", 0))
    return HostLimit("meminfo", available, values["MemTotal"])


def _cgroup_limits(root: Path) -> Iterator[HostLimit]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _ancestors(root / "sys/fs/cgroup", path):
                yield from _v2_limits(folder)
        elif "memory" in controllers.split(","):
            for folder in _ancestors(root / "sys/fs/cgroup/memory", path):
                yield from _v1_limit(folder)


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The cgroup's folder and those above it. Inside a container the path may not exist below the mount."""
    folder = mount / path.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = mount
    chain = [folder]
    while chain[-1] != mount:
        chain.append(chain[-1].parent)
    return chain


def _v2_limits(folder: Path) -> Iterator[HostLimit]:
    used = _number(folder / "memory.current")
    if used is None:
        return
    reclaimable = _stat(folder, "inactive_file")
    for name in ("memory.max", "memory.high"):
        limit = _number(folder / name)
        if limit is not None and limit < _UNLIMITED:
            yield HostLimit(str(folder / name), max(0, limit - used + reclaimable), limit)


def _v1_limit(folder: Path) -> Iterator[HostLimit]:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    if limit is not None and used is not None and limit < _UNLIMITED:
        reclaimable = _stat(folder, "total_inactive_file")
        yield HostLimit(str(folder / "memory.limit_in_bytes"), max(0, limit - used + reclaimable), limit)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _stat(folder: Path, name: str) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


# Device


def device_headroom(device: torch.device) -> int:
    """Bytes that this process can still allocate on a device; on the CPU, host headroom.

    What the driver has free, plus what the caching allocator holds unused, within the process's memory fraction.
    """
    if device.type == "cpu":
        return host_headroom()
    free, total = torch.cuda.mem_get_info(device)
    reserved, active = torch.cuda.memory_reserved(device), _active(device)
    headroom = free + reserved - active
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return int(max(0, min(headroom, fraction * total - active)))


def device_total(device: torch.device) -> int:
    """Bytes of memory of a device; on the CPU, the host bound."""
    return host_total() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[1])


def _active(device: torch.device) -> int:
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("active_bytes.all.current", 0))


# Disk


def filesystem_of(path: str | os.PathLike[str], root: Path = Path("/")) -> Filesystem:
    """The file system of an existing path.

    Raises:
        OSError: The path does not exist.
    """
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    real = os.path.realpath(path)
    best: tuple[int, str, str, str] | None = None
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields = left.split()
        mount = fields[4].encode().decode("unicode_escape")
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and (best is None or (fields[2] == wanted, len(mount)) >= (best[1] == wanted, best[0])):
            best = (len(mount), fields[2], mount, right.split()[0])
    read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    if best is None:
        return Filesystem("/", "unknown", device, read_only)
    return Filesystem(best[2], best[3], device, read_only)


def disk_headroom(path: str | os.PathLike[str]) -> int:
    """Bytes that files under `path` may still take.

    Free blocks less those reserved for root, and never more than host headroom where the file system is RAM. A
    quota below that shows when a file grows.

    Raises:
        OSError: The path cannot be read.
    """
    status = os.statvfs(path)
    free = status.f_bavail * status.f_frsize
    return min(free, host_headroom()) if filesystem_of(path).is_ram else free


# Budgets


def auto_host_budget(headroom: int) -> int:
    """Half of the host headroom."""
    return headroom // 2


def auto_disk_budget(free: int) -> int:
    """Nine tenths of the free space, and 1 GiB is never touched."""
    return max(0, min(free * 9 // 10, free - GiB))


def auto_window(device: torch.device) -> int:
    """Bytes in flight: 128 MiB on the CPU; 1/32 of a GPU's memory, 64 MiB to 4 GiB."""
    if device.type == "cpu":
        return 128 * MiB
    return max(64 * MiB, min(4 * GiB, device_total(device) // 32))


def auto_margin(device: torch.device) -> int:
    """Bytes that `device_budget="auto"` leaves free: 1/16 of the device, 256 MiB to 4 GiB."""
    return max(256 * MiB, min(4 * GiB, device_total(device) // 16))
