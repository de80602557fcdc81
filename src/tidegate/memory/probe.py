"""Measured bandwidths and effective modes: probes of under a second each. All rates are GB/s, 1e9 bytes a second."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tidegate.memory.cufile import KvikioError, load_kvikio
from tidegate.memory.gds import GdsStatus, gds_status
from tidegate.memory.nvfs import gds_obstacles
from tidegate.memory.pinned import Slab, copy_bytes

__all__ = [
    "DiskRate",
    "GdsStatus",
    "KvikioStatus",
    "LinkRate",
    "device_copy_rate",
    "disk_rate",
    "gds_obstacles",
    "gds_status",
    "host_copy_rate",
    "kvikio_status",
    "link_rate",
]

_BLOCK = 32 << 20
_SECONDS = 0.3
_DISK_CHUNK, _DISK_BYTES = 4 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Bandwidth of a directory's disk.

    Args:
        write: GB/s.
        read: GB/s.
        mode: "posix-direct", or "posix-buffered" where the file system refuses O_DIRECT.
    """

    write: float
    read: float
    mode: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class LinkRate:
    """Bandwidth between a GPU and host memory.

    Args:
        to_host: GB/s.
        to_device: GB/s.
        pinned: Whether the host memory could be page-locked.
    """

    to_host: float
    to_device: float
    pinned: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class KvikioStatus:
    """What kvikio offers here.

    Args:
        usable: Whether it could be imported and asked.
        detail: Its compatibility mode, which alone does not prove GPUDirect; or why it is not usable.
    """

    usable: bool
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def disk_rate(path: str, threads: int = 4, seconds: float = _SECONDS) -> DiskRate:
    """Writes random data to a file without a name under `path`, then reads it back, by O_DIRECT where that works.

    Args:
        path: A directory.
        threads: Threads that write, then read.
        seconds: How long to write at most; no more than 256 MiB are written.

    Raises:
        OSError: The path cannot be used, or has no room.
    """
    buffers = [mmap.mmap(-1, _DISK_CHUNK) for _ in range(threads)]
    for buffer in buffers:
        buffer.write(secrets.token_bytes(_DISK_CHUNK))
    with _nameless_file(path) as (fd, mode):
        started = time.perf_counter()
        written = _sweep(os.pwritev, fd, buffers, _DISK_BYTES, seconds)
        os.fdatasync(fd)
        spent = time.perf_counter() - started
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # buffered reads, too, come from the disk
        started = time.perf_counter()
        read = _sweep(os.preadv, fd, buffers, written, seconds)
        took = time.perf_counter() - started
    return DiskRate(written / spent / 1e9, read / took / 1e9, mode)


@contextmanager
def _nameless_file(path: str) -> Iterator[tuple[int, str]]:
    """A private file that no name leads to, so that nothing is left behind, whatever ends the probe."""
    fd = _create(path, os.O_DIRECT)
    mode = "posix-direct"
    if fd is None or not _takes_direct(fd):
        if fd is not None:
            os.close(fd)
        fd, mode = _create(path, 0), "posix-buffered"
    if fd is None:
        raise OSError(errno.EINVAL, "files cannot be opened", path)
    try:
        yield fd, mode
    finally:
        os.close(fd)


def _create(path: str, flag: int) -> int | None:
    """Creates, opens and unlinks a file; None where the file system refuses the flag."""
    name = os.path.join(path, f".tidegate-probe-{secrets.token_hex(8)}")
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | flag, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # a file system that refuses the flag may have created the file before


def _takes_direct(fd: int) -> bool:
    try:
        return os.pwritev(fd, [mmap.mmap(-1, mmap.PAGESIZE)], 0) == mmap.PAGESIZE
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False


def _sweep(
    call: Callable[[int, list[mmap.mmap], int], int], fd: int, buffers: list[mmap.mmap], size: int, seconds: float
) -> int:
    """Moves chunks in file order until `size` or the time is up; at least one a thread. Gives the bytes moved."""
    offsets = iter(range(0, size, _DISK_CHUNK))
    started = time.perf_counter()

    def work(buffer: mmap.mmap) -> int:
        moved = 0
        while (offset := next(offsets, None)) is not None:
            done = call(fd, [buffer], offset)
            if done != len(buffer):
                raise OSError(errno.EIO, f"moved {done} of {len(buffer)} bytes")
            moved += done
            if time.perf_counter() - started >= seconds:
                break
        return moved

    with ThreadPoolExecutor(len(buffers)) as pool:
        return sum(pool.map(work, buffers))


def host_copy_rate() -> float:
    """Copies within host memory by one thread, in GB/s of bytes copied."""
    source, target = Slab(_BLOCK, pin=False), Slab(_BLOCK, pin=False)
    source.tensor.fill_(1)
    target.tensor.fill_(0)
    return _rate(lambda: copy_bytes(target.address, source.address, _BLOCK))


def link_rate(device: torch.device) -> LinkRate:
    """Copies between a GPU and pinned host memory, one direction at a time."""
    slab = Slab(_BLOCK, pin=True)
    generator = torch.Generator(device).manual_seed(0)  # the program's own random numbers are not touched
    block = torch.randint(256, (_BLOCK,), dtype=torch.uint8, device=device, generator=generator)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return run

    return LinkRate(_rate(copy(slab.tensor, block)), _rate(copy(block, slab.tensor)), slab.pinned)


def device_copy_rate(device: torch.device) -> float:
    """Copies within a GPU's memory, in GB/s of bytes copied."""
    source = torch.zeros(_BLOCK, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def run() -> None:
        target.copy_(source)
        torch.cuda.synchronize(device)

    return _rate(run)


def kvikio_status() -> KvikioStatus:
    """Whether kvikio can be imported and asked; whether its I/O works is for `gds_status` to see."""
    try:
        mode = load_kvikio().defaults.get("compat_mode")
    except KvikioError as error:
        return KvikioStatus(False, str(error))
    except Exception as error:
        return KvikioStatus(False, f"asking kvikio fails: {error}")
    return KvikioStatus(True, f"compat_mode={getattr(mode, 'name', mode)}")


def _rate(copy: Callable[[], None]) -> float:
    copy()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < _SECONDS:
        copy()
        count += 1
    return count * _BLOCK / (time.perf_counter() - started) / 1e9
