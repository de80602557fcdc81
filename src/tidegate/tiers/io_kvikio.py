"""Positioned I/O of one piece by kvikio, straight between device memory and disk where GPUDirect Storage is real.

A piece lies on disk as `io_posix` lays it, so that bytes written from host memory can be read into device memory. There
is no stamp behind a piece that came from the device: its fingerprint is taken on the device and kept in memory, and a
lost, torn or misdirected write, a truncated file, zeros and stale bytes all show when the piece is read.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidegate.errors import CorruptionError, TierIOError
from tidegate.memory.cufile import DeviceFile, DeviceSpan, own_stream
from tidegate.memory.pinned import Slab, copy_bytes
from tidegate.tiers.extents import ExtentAllocator
from tidegate.tiers.io_posix import PieceIo, PosixIo
from tidegate.tiers.tier import ALIGNMENT, Buffer, align_up

__all__ = ["DeviceLease", "DeviceRing", "KvikioPieceIo", "fingerprint"]

_log = logging.getLogger("tidegate")
_WORDS = ALIGNMENT // 8


@dataclass(slots=True, eq=False)
class DeviceLease:
    """Whole pages of a ring.

    Args:
        nbytes: Bytes asked for.
        address: Where they start; a page's start.
        tensor: They as uint8; keeps the ring's memory.
        span: The memory that they are of.
    """

    nbytes: int
    address: int
    tensor: Tensor
    span: DeviceSpan
    offset: int
    freed: bool = False


class DeviceRing:
    """Staging in device memory: one allocation, registered once, handed out in spans of whole pages. Thread-safe.

    Args:
        capacity: Bytes; a multiple of 2 MiB is taken.
        device: The GPU.
        kvikio: The module.

    Raises:
        KvikioError: The memory cannot be had or registered.
    """

    def __init__(self, capacity: int, device: torch.device, kvikio: Any) -> None:
        self._span: DeviceSpan | None = DeviceSpan(capacity, device, kvikio)
        self.capacity = self._span.nbytes
        self._extents = ExtentAllocator(self.capacity)
        self._freed = threading.Condition()
        self._asked = self._peak = 0

    @property
    def used(self) -> int:
        """Bytes handed out, alignment included."""
        with self._freed:
            return self._extents.used

    @property
    def pinned(self) -> int:
        """Bytes of host memory: none."""
        return 0

    @property
    def peak(self) -> int:
        """The most bytes that were handed out at once, as asked for."""
        with self._freed:
            return self._peak

    def reserve(self, nbytes: int) -> DeviceLease | None:
        """Takes a span, or None when there is no room."""
        with self._freed:
            return self._reserve(nbytes)

    def reserve_blocking(self, nbytes: int, timeout: float | None = None) -> DeviceLease | None:
        """Takes a span, waiting for room; None when the wait is over or the ring could never hold it."""
        if align_up(nbytes) > self.capacity:
            return None
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._freed:
            while True:
                lease = self._reserve(nbytes)
                if lease is not None or self._span is None:
                    return lease
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._freed.wait(left)

    def free(self, lease: DeviceLease) -> None:
        """Gives a span back; idempotent."""
        with self._freed:
            if not lease.freed:
                lease.freed = True
                self._asked -= lease.nbytes
                self._extents.free(lease.offset)
                self._freed.notify_all()

    def close(self) -> None:
        """Ends the registration, when no I/O is in flight; the memory goes with the last lease. Idempotent."""
        with self._freed:
            span, self._span = self._span, None
            self._freed.notify_all()
        if span is not None:
            span.close()

    def _reserve(self, nbytes: int) -> DeviceLease | None:
        span = self._span
        offset = None if span is None else self._extents.alloc(nbytes)
        if span is None or offset is None:
            return None
        self._asked += nbytes
        self._peak = max(self._peak, self._asked)
        return DeviceLease(nbytes, span.address + offset, span.tensor[offset : offset + nbytes], span, offset)


def fingerprint(pages: Tensor) -> int:
    """A 64-bit number that tells whole pages apart by their contents and their order.

    Args:
        pages: uint8 tensor [N * 4096] of any device; the current stream computes it.
    """
    sums = pages.view(torch.int64).view(-1, _WORDS).sum(1)
    weights = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return int((sums * weights).sum())


class KvikioPieceIo(PieceIo):
    """Moves pieces between a `DeviceRing` and disk by kvikio; pieces in host memory go by POSIX calls, as without it.

    Args:
        kvikio: The module.
        mode: What it really does: "kvikio-gds" or "kvikio-compat".
        io: The system calls.
    """

    def __init__(self, kvikio: Any, mode: str, io: PosixIo | None = None) -> None:
        super().__init__(io or PosixIo())
        self._kvikio = kvikio
        self._mode = mode
        self._files: dict[int, DeviceFile] = {}
        self._rings: list[DeviceRing] = []
        self._hosted = False
        self._said = False

    def mode(self, posix: str) -> str:
        """What really runs; once something went from host memory to disk, both."""
        return f"{self._mode}+{posix}" if self._hosted else self._mode

    def open_ring(self, capacity: int, device: torch.device) -> DeviceRing:
        """Opens staging that is closed with the tier.

        Raises:
            KvikioError: The memory cannot be had or registered.
        """
        ring = DeviceRing(capacity, device, self._kvikio)
        self._rings.append(ring)
        return ring

    def opened(self, fd: int) -> None:
        """Opens a spill file with kvikio, too.

        Raises:
            KvikioError: It cannot be opened so.
        """
        self._files[fd] = DeviceFile(fd, self._kvikio)

    def closing(self, fd: int) -> None:
        file = self._files.pop(fd, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for ring in self._rings:
            ring.close()

    def write(self, fd: int, offset: int, source: Buffer, phase: int, serial: int) -> int | None:
        lease = source.owner
        if not isinstance(lease, DeviceLease):
            self._hosted = True
            return super().write(fd, offset, source, phase, serial)
        assert phase == 0
        start, nbytes = source.address - lease.span.address, align_up(source.nbytes)
        mark = _fingerprint(lease.span, start, nbytes)
        self._files[fd].write(lease.span, start, nbytes, offset)
        return mark

    def read(self, fd: int, offset: int, target: Buffer, phase: int, serial: int, mark: int | None) -> None:
        lease = target.owner
        if not isinstance(lease, DeviceLease):
            if mark is None:
                super().read(fd, offset, target, phase, serial, mark)
            else:
                self._read_to_host(fd, offset, target, mark)
            return
        start = target.address - lease.span.address
        if phase == 0:
            try:
                self._read_direct(fd, offset, lease.span, start, target.nbytes, serial, mark)
                return
            except (OSError, torch.OutOfMemoryError) as error:  # the fingerprint takes a little memory
                self._say(error)
        self._read_by_host(fd, offset, lease.span, start, target.nbytes, phase, serial, mark)

    def _read_direct(
        self, fd: int, offset: int, span: DeviceSpan, start: int, nbytes: int, serial: int, mark: int | None
    ) -> None:
        whole = align_up(nbytes)
        self._files[fd].read(span, start, whole, offset)
        if mark is None:  # it came from host memory, and a stamp lies behind it
            self.check(fd, offset, nbytes, serial)
        elif _fingerprint(span, start, whole) != mark:
            raise _other_bytes(nbytes)

    def _read_by_host(
        self, fd: int, offset: int, span: DeviceSpan, start: int, nbytes: int, phase: int, serial: int, mark: int | None
    ) -> None:
        """The second try, in another way."""
        slab = Slab(align_up(nbytes) + ALIGNMENT, pin=False)
        bounce = Buffer(slab.address + phase, nbytes, slab)
        if mark is None:
            super().read(fd, offset, bounce, phase, serial, mark)
        else:
            self._read_to_host(fd, offset, bounce, mark)
        with own_stream(span.device):
            span.tensor[start : start + nbytes].copy_(slab.view(phase, nbytes))
            if span.device.type == "cuda":
                torch.cuda.current_stream().synchronize()

    def _read_to_host(self, fd: int, offset: int, target: Buffer, mark: int) -> None:
        whole = Slab(align_up(target.nbytes), pin=False)
        try:
            self.read_pages(fd, offset, whole.address, whole.nbytes)
        except OSError as error:
            raise TierIOError(
                error.errno,
                f"disk tier: reading back {target.nbytes} bytes failed twice ({error.strerror}); the step's gradients "
                f"cannot be computed. Check the disk, or use another disk_paths",
            ) from error
        if fingerprint(whole.tensor) != mark:
            raise _other_bytes(target.nbytes)
        copy_bytes(target.address, whole.address, target.nbytes)

    def _say(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            _log.warning("disk tier: a read by kvikio failed (%s); it is tried again by POSIX calls", error)


def _fingerprint(span: DeviceSpan, start: int, nbytes: int) -> int:
    with own_stream(span.device):
        return fingerprint(span.tensor[start : start + nbytes])


def _other_bytes(nbytes: int) -> CorruptionError:
    return CorruptionError(
        errno.EIO,
        f"disk tier: the {nbytes} bytes read back are not those that were written; "
        f"the file was changed from outside, or the disk lost a write",
    )
