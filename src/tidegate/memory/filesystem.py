"""Room on file systems: what kind they are, what is free, what a quota leaves."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from tidegate.memory.host import host_headroom

__all__ = ["Filesystem", "disk_headroom", "filesystem_of", "quota_headroom"]

_RAM = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
_NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "ncpfs"}
    | {"fuse", "orangefs", "pvfs2", "virtiofs", "wekafs"}
)
_LOCAL_FUSE = frozenset({"fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.fuse-overlayfs", "fuse.mergerfs", "fuse.zfs"})


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The file system that holds a path.

    Args:
        mount: Mount point.
        kind: Type as the kernel names it, e.g. "ext4".
        source: What is mounted, e.g. "/dev/nvme0n1".
        device: Device number; equal for paths that share a device.
        read_only: Mounted read-only.
        options: Options of the mount and of its file system, e.g. "data=ordered".
    """

    mount: str
    kind: str
    source: str
    device: int
    read_only: bool
    options: frozenset[str] = frozenset()

    @property
    def is_ram(self) -> bool:
        """Whether its files live in RAM."""
        return self.kind in _RAM

    @property
    def is_network(self) -> bool:
        """Whether its files live, or may live, on another machine."""
        return self.kind in _NETWORK or (self.kind.startswith("fuse.") and self.kind not in _LOCAL_FUSE)

    @property
    def is_local(self) -> bool:
        """Whether its files live on a disk of this machine, as far as its type tells."""
        return not self.is_ram and not self.is_network


def filesystem_of(path: str | os.PathLike[str]) -> Filesystem:
    """The file system of an existing path.

    Raises:
        OSError: The path does not exist.
    """
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status, mount_id = os.fstat(fd), _mount_id(fd)
        read_only = bool(os.fstatvfs(fd).f_flag & os.ST_RDONLY)
    finally:
        os.close(fd)
    device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    best: tuple[bool, bool] = (False, False)
    found, options = ("/", "unknown", ""), frozenset[str]()
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        left, _, right = line.partition(b" - ")
        fields, (kind, source, *more) = left.split(), right.split()
        # The mount's number decides. Kernels that do not tell it leave the device number, which subvolumes lack.
        rank = (fields[0] == mount_id, fields[2] == device.encode())
        if rank >= best and any(rank):
            best, found = rank, (_unescaped(fields[4]), kind.decode(), _unescaped(source))
            options = frozenset(os.fsdecode(b",".join([fields[5], *more])).split(","))
    return Filesystem(*found, status.st_dev, read_only, options)


def _mount_id(fd: int) -> bytes | None:
    try:
        found = re.search(rb"^mnt_id:\s*(\d+)", Path(f"/proc/self/fdinfo/{fd}").read_bytes(), re.MULTILINE)
    except OSError:
        return None
    return found[1] if found else None


def _unescaped(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field))


def disk_headroom(path: str | os.PathLike[str]) -> int:
    """Bytes that files under `path` may still take.

    Free blocks less those reserved for root, less than that where a quota that can be read leaves less, and never
    more than host headroom where the file system is RAM.

    Raises:
        OSError: The path cannot be read.
    """
    status = os.statvfs(path)
    rooms = [status.f_bavail * status.f_frsize]
    quota = quota_headroom(path)
    if quota is not None:
        rooms.append(quota)
    if filesystem_of(path).is_ram:
        rooms.append(host_headroom())
    return min(rooms)


# Quotas; see quotactl(2). quotactl_fd has one number on all architectures.
_SYS_QUOTACTL_FD = 443
_Q_GETQUOTA = 0x800007
_USER, _GROUP = 0, 1
_BLOCK = struct.Struct("=8QI4x")  # struct if_dqblk: hard and soft limit in KiB, bytes in use, ...


def quota_headroom(path: str | os.PathLike[str]) -> int | None:
    """Bytes that the quotas of this user and group leave; None where there is no quota or none can be read.

    Project quotas show in the free blocks already.

    Raises:
        OSError: The path cannot be opened.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        blocks = (_get_quota(fd, _USER, os.geteuid()), _get_quota(fd, _GROUP, os.getegid()))
    finally:
        os.close(fd)
    rooms = [_quota_room(block) for block in blocks if block is not None]
    return min((room for room in rooms if room is not None), default=None)


def _get_quota(fd: int, kind: int, owner: int) -> bytes | None:
    block = ctypes.create_string_buffer(_BLOCK.size)
    failed = _syscall(_SYS_QUOTACTL_FD, fd, _Q_GETQUOTA << 8 | kind, owner, block)
    return None if failed else block.raw


def _quota_room(block: bytes) -> int | None:
    hard, soft, used, *_ = _BLOCK.unpack(block)
    limit = hard or soft
    return max(0, limit * 1024 - used) if limit else None


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_char_p)
_syscall.restype = ctypes.c_long
