"""Positioned I/O of one piece: whole pages straight from and to its memory, partial ones through a bounce.

On disk a byte sits at the same page offset as in memory, so O_DIRECT's alignment holds without copying the
piece. Every piece ends with a stamp; a lost, torn or misdirected write, a truncated file, zeros and stale bytes
all show as a wrong stamp when the piece is read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence

from tidegate.errors import CorruptionError, TierIOError
from tidegate.memory.pinned import copy_bytes, read_bytes
from tidegate.tiers.tier import ALIGNMENT, Buffer, align_up

__all__ = ["STAMP_BYTES", "PieceIo", "PosixIo", "extent_bytes"]

_STAMP = struct.Struct("<8sQQQ")
_MAGIC = b"tidegate"
STAMP_BYTES = _STAMP.size
_BOUNCE_PAGES = 4


def extent_bytes(nbytes: int, phase: int) -> int:
    """Bytes that a piece takes on disk: whole pages around it, with room for the stamp."""
    return align_up(phase + nbytes + STAMP_BYTES)


class PosixIo:
    """The system calls. Tests put faults here."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Makes [offset, offset + nbytes) exist, with its blocks where the file system can.

        Raises:
            OSError: ENOSPC, EDQUOT, EFBIG and the like.
        """
        try:
            os.posix_fallocate(fd, offset, nbytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(fd, offset + nbytes)


class PieceIo:
    """Writes and reads stamped pieces. A kind of its own may move some buffers in another way.

    Args:
        io: The system calls.
    """

    def __init__(self, io: PosixIo) -> None:
        self.io = io
        self._local = threading.local()

    def mode(self, posix: str) -> str:
        """What really runs, where system calls would be `posix`."""
        return posix

    def opened(self, fd: int) -> None:
        """A spill file was opened."""

    def closing(self, fd: int) -> None:
        """A spill file is about to be closed; no I/O is in flight."""

    def close(self) -> None:
        """All spill files are closed. Idempotent."""

    def write(self, fd: int, offset: int, source: Buffer, phase: int, serial: int) -> int | None:
        """Writes the bytes of `source` as the piece at `offset`, and gives what `read` must know as `mark`.

        Raises:
            OSError: The system refused, or wrote nothing; EFAULT if the memory is gone.
        """
        self._write(fd, offset, source.address, source.nbytes, phase, serial)
        return None

    def read(self, fd: int, offset: int, target: Buffer, phase: int, serial: int, mark: int | None) -> None:
        """Reads the piece at `offset` to `target`.

        Raises:
            TierIOError: The system refused, or the file is too short.
            CorruptionError: The piece is not the one that was written.
        """
        self._read(fd, offset, target.address, target.nbytes, phase, serial)

    def read_pages(self, fd: int, offset: int, address: int, nbytes: int) -> None:
        """Reads whole pages to a page's start.

        Raises:
            OSError: The system refused, or the file is too short.
        """
        self._transfer(self.io.preadv, fd, [_memory(address, nbytes)], offset, "read")

    def check(self, fd: int, offset: int, nbytes: int, serial: int) -> None:
        """Looks whether the stamp behind a piece of phase 0 is there.

        Raises:
            OSError: The system refused, or the file is too short.
            CorruptionError: The piece is not the one that was written.
        """
        bounce = self._bounce()
        page = offset + extent_bytes(nbytes, 0) - ALIGNMENT
        self.read_pages(fd, page, bounce.address, ALIGNMENT)
        self._check(bounce, ALIGNMENT - STAMP_BYTES, offset, nbytes, serial)

    def _write(self, fd: int, offset: int, address: int, nbytes: int, phase: int, serial: int) -> None:
        if address % ALIGNMENT != phase:
            with _Bounce(extent_bytes(nbytes, phase)) as bounce:
                read_bytes(bounce.address + phase, address, nbytes)
                self._write(fd, offset, bounce.address + phase, nbytes, phase, serial)
            return
        layout, bounce = _Layout(nbytes, phase), self._bounce()
        for inside, within, length in layout.bounced:
            read_bytes(bounce.address + inside, address + within, length)
        bounce.map[layout.stamp : layout.stamp + STAMP_BYTES] = _STAMP.pack(_MAGIC, serial, nbytes, offset)
        self._transfer(self.io.pwritev, fd, layout.buffers(bounce.address, address), offset, "wrote")

    def _read(self, fd: int, offset: int, address: int, nbytes: int, phase: int, serial: int) -> None:
        if address % ALIGNMENT != phase:
            with _Bounce(extent_bytes(nbytes, phase)) as whole:
                self._read(fd, offset, whole.address + phase, nbytes, phase, serial)
                copy_bytes(address, whole.address + phase, nbytes)
            return
        try:
            self._read_once(fd, offset, address, nbytes, phase, serial)
        except OSError:
            self._read_again(fd, offset, address, nbytes, phase, serial)

    def _read_again(self, fd: int, offset: int, address: int, nbytes: int, phase: int, serial: int) -> None:
        try:
            self._read_once(fd, offset, address, nbytes, phase, serial)
        except TierIOError:
            raise
        except OSError as error:
            raise TierIOError(
                error.errno,
                f"disk tier: reading back {nbytes} bytes failed twice ({error.strerror}); the step's gradients "
                f"cannot be computed. Check the disk, or use another disk_paths",
            ) from error

    def _read_once(self, fd: int, offset: int, address: int, nbytes: int, phase: int, serial: int) -> None:
        layout, bounce = _Layout(nbytes, phase), self._bounce()
        self._transfer(self.io.preadv, fd, layout.buffers(bounce.address, address), offset, "read")
        self._check(bounce, layout.stamp, offset, nbytes, serial)
        for inside, within, length in layout.bounced:
            copy_bytes(address + within, bounce.address + inside, length)

    @staticmethod
    def _check(bounce: _Bounce, where: int, offset: int, nbytes: int, serial: int) -> None:
        if bounce.map[where : where + STAMP_BYTES] != _STAMP.pack(_MAGIC, serial, nbytes, offset):
            raise CorruptionError(
                errno.EIO,
                f"disk tier: the {nbytes} bytes read back are not those that were written; "
                f"the file was changed from outside, or the disk lost a write",
            )

    def _bounce(self) -> _Bounce:
        bounce = getattr(self._local, "bounce", None)
        if bounce is None:
            bounce = self._local.bounce = _Bounce(_BOUNCE_PAGES * ALIGNMENT)
        return bounce

    def _transfer(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        fd: int,
        buffers: list[memoryview],
        offset: int,
        verb: str,
    ) -> None:
        wanted = sum(len(buffer) for buffer in buffers)
        done = 0
        while done < wanted:
            try:
                step = call(fd, _skip(buffers, done), offset + done)
            except InterruptedError:
                continue
            whole = step if done + step >= wanted else step // ALIGNMENT * ALIGNMENT
            if whole <= 0:
                raise OSError(errno.EIO, f"{verb} {done + max(step, 0)} of {wanted} bytes")
            done += whole


def _skip(buffers: list[memoryview], done: int) -> list[memoryview]:
    rest = []
    for buffer in buffers:
        if done < len(buffer):
            rest.append(buffer[done:])
        done = max(0, done - len(buffer))
    return rest


class _Layout:
    """How a piece divides: whole pages that move straight, and page parts that pass through the bounce.

    Args:
        nbytes: Bytes of the piece.
        phase: Page offset of its first byte.

    Attributes:
        bounced: (offset in the bounce, offset in the piece, bytes) of each part that is copied.
        stamp: Offset of the stamp in the bounce.
    """

    __slots__ = ("_head", "_middle", "_start", "_tail", "bounced", "stamp")

    def __init__(self, nbytes: int, phase: int) -> None:
        extent, end = extent_bytes(nbytes, phase), phase + nbytes
        first, last = align_up(phase), end // ALIGNMENT * ALIGNMENT
        if last <= first:  # no whole page
            self._head, self._start, self._middle, self._tail = 0, 0, 0, extent
            self.bounced = [(phase, 0, nbytes)]
        else:
            self._head, self._start, self._middle, self._tail = first, first - phase, last - first, extent - last
            self.bounced = [(phase, 0, first - phase), (first, last - phase, end - last)]
        self.stamp = self._head + self._tail - STAMP_BYTES

    def buffers(self, bounce: int, address: int) -> list[memoryview]:
        """The memory of the piece's extent, in order."""
        parts = [(bounce, self._head), (address + self._start, self._middle), (bounce + self._head, self._tail)]
        return [_memory(start, length) for start, length in parts if length]


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


class _Bounce:
    """Page-aligned scratch memory."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def __enter__(self) -> _Bounce:
        return self

    def __exit__(self, *_: object) -> None:
        pass
