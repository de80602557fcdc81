"""The disk tier: few private files per rank, striped over the paths, written and read by worker threads."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import SessionClosedError
from tidegate.tiers.extents import ExtentAllocator
from tidegate.tiers.io_posix import PieceIo, PosixIo, extent_bytes
from tidegate.tiers.run_dir import RunDir
from tidegate.tiers.tier import ALIGNMENT, Buffer, align_up

__all__ = ["DiskLease", "DiskTier"]

_log = logging.getLogger("tidegate")
_RETRY_SECONDS = 5.0
_MAX_FAILURES = 3
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_serials = itertools.count(1)


class _SpillFile:
    """One file: extents, growth, and whether it can still be used."""

    def __init__(self, path: Path, run: RunDir, pieces: PieceIo, *, direct: bool | None, threads: int) -> None:
        self.path = path
        self.run = run
        self.direct, self.fd = _open(run, pieces.io, direct)
        try:
            pieces.opened(self.fd)
        except BaseException:
            os.close(self.fd)
            raise
        self.extents = ExtentAllocator()
        self.failures = 0
        self._pieces = pieces
        self._full_until = 0.0
        self._said_full = False
        self.writers = ThreadPoolExecutor(threads, thread_name_prefix="tidegate-write")
        self.readers = ThreadPoolExecutor(threads, thread_name_prefix="tidegate-read")

    @property
    def usable(self) -> bool:
        return self.failures < _MAX_FAILURES

    def alloc(self, nbytes: int, step: int) -> int | None:
        """Takes an extent; grows the file by at most `step` bytes if it must."""
        offset = self.extents.alloc(nbytes)
        if offset is None and self._grow(nbytes, step):
            offset = self.extents.alloc(nbytes)
        return offset

    def _grow(self, nbytes: int, step: int) -> bool:
        size = self.extents.size
        if step < nbytes:
            return False
        refused: OSError | None = None
        for extra in dict.fromkeys((step, nbytes)):
            if time.monotonic() < self._full_until:
                continue
            try:
                self._pieces.io.allocate(self.fd, size, extra)
            except OSError as error:
                refused = error
            else:
                self.extents.grow(size + extra)
                return True
        if refused is not None:
            self._say_full(refused)
            self._full_until = time.monotonic() + _RETRY_SECONDS
        return False

    def _say_full(self, error: OSError) -> None:
        if not self._said_full:
            self._said_full = True
            _log.warning(
                "disk tier: %s cannot grow beyond %d bytes (%s); what does not fit goes to the next path or tier. "
                "Free space, raise the quota or file-size limit, or add a path to disk_paths",
                self.path,
                self.extents.size,
                error.strerror,
            )

    def failed(self, error: OSError) -> None:
        """Counts a failed write; after some in a row the file is not used any more."""
        self.failures += 1
        if self.failures == _MAX_FAILURES:
            _log.error("disk tier: %s is taken out of use after repeated write errors (%s)", self.path, error)

    def close(self) -> None:
        for pool in (self.writers, self.readers):
            pool.shutdown(wait=True, cancel_futures=True)
        self._pieces.closing(self.fd)
        os.close(self.fd)


def _open(run: RunDir, io: PosixIo, direct: bool | None) -> tuple[bool, int]:
    """Opens a spill file with O_DIRECT if a real write and read show that the file system takes it."""
    if direct is not False:
        try:
            fd = run.open_unnamed(direct=True)
        except OSError as error:
            if direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
        else:
            try:
                _probe(fd, io)
                return True, fd
            except OSError as error:
                if error.errno in _FULL:
                    return True, fd  # growing will fail, and say so
                os.close(fd)
                if direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
    return False, run.open_unnamed(direct=False)


def _probe(fd: int, io: PosixIo) -> None:
    probe = bytearray(os.urandom(ALIGNMENT))
    piece = PieceIo(io)
    address = ctypes.addressof(ctypes.c_char.from_buffer(probe))
    try:
        piece.write(fd, 0, Buffer(address, len(probe), probe), address % ALIGNMENT, 0)
        back = bytearray(len(probe))
        target = ctypes.addressof(ctypes.c_char.from_buffer(back))
        piece.read(fd, 0, Buffer(target, len(back), back), address % ALIGNMENT, 0, None)
        if back != probe:
            raise OSError(errno.EINVAL, "O_DIRECT gave other bytes back")
    finally:
        os.ftruncate(fd, 0)


@dataclass(slots=True, eq=False)
class _Piece:
    file: _SpillFile
    offset: int
    start: int
    nbytes: int
    phase: int
    serial: int
    mark: int | None = None


@dataclass(slots=True, eq=False)
class DiskLease:
    """Room on disk for one unit.

    Args:
        nbytes: Bytes of the unit.
        pieces: Where its parts lie.
    """

    nbytes: int
    pieces: tuple[_Piece, ...]
    busy: int = 0
    freed: bool = False


@dataclass(slots=True, eq=False)
class _Job:
    """All pieces of one write or read."""

    tier: DiskTier
    lease: DiskLease
    future: Future[int]
    buffer: Buffer
    left: int
    before: Callable[[], None] | None
    finally_: Callable[[], None] | None
    started: bool | None = None
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> bool:
        """Whether the work may go on; the first piece to start makes the job uncancellable."""
        with self.lock:
            if self.started is None:
                self.started = self.future.set_running_or_notify_cancel()
            return self.started and self.error is None

    def end(self, error: BaseException | None) -> None:
        """A piece ended; the last one ends the job."""
        with self.lock:
            self.left -= 1
            self.error = self.error or error
            if self.left:
                return
        if self.error is None and self.started and self.finally_ is not None:
            try:
                self.finally_()
            except BaseException as failure:
                self.error = failure
        buffer_bytes, self.buffer = self.buffer.nbytes, Buffer(0, 0, None)
        self.tier._job_done(self.lease)
        if not self.started:
            if not self.future.cancelled() and not self.future.cancel():
                self.future.set_exception(self.error or CancelledError())
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(buffer_bytes)


class DiskTier:
    """Spill files on one or more paths.

    Args:
        paths: Existing directories. Units are striped over them.
        capacity: Bytes at most, over all paths.
        threads: Workers per direction and path.
        direct: O_DIRECT; None takes it where a probe shows that the file system does.
        chunk_bytes: Units are cut into pieces of this size, so that several workers share a large one.
        grow_bytes: Files grow by this much at a time.
        rank: Rank of this process.
        io: The system calls.
        pieces: Moves pieces to and from the files; the tier closes it. None does so by system calls.

    Raises:
        OSError: No path can be used.
    """

    name = "disk"

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        capacity: int,
        *,
        threads: int = 4,
        direct: bool | None = None,
        chunk_bytes: int = 8 * 2**20,
        grow_bytes: int = 256 * 2**20,
        rank: int = 0,
        io: PosixIo | None = None,
        pieces: PieceIo | None = None,
    ) -> None:
        self._capacity = capacity // ALIGNMENT * ALIGNMENT
        self._chunk = align_up(max(chunk_bytes, ALIGNMENT))
        self._grow_by = align_up(max(grow_bytes, ALIGNMENT))
        self._piece_io = pieces or PieceIo(io or PosixIo())
        self._lock = threading.Lock()
        self._turn = itertools.count()
        self._closed = False
        self._files: list[_SpillFile] = []
        try:
            for path in paths:
                try:
                    self._files.append(self._open_path(Path(path), direct=direct, threads=threads, rank=rank))
                except OSError as error:
                    if error.errno not in _FULL or (path == paths[-1] and not self._files):
                        raise
                    _log.warning("disk tier: %s is left out: %s", path, error.strerror)
        except BaseException:
            _shut(self._files, self._piece_io, os.getpid())
            raise
        self._shut = weakref.finalize(self, _shut, self._files, self._piece_io, os.getpid())
        self._shut.atexit = True

    def _open_path(self, path: Path, *, direct: bool | None, threads: int, rank: int) -> _SpillFile:
        try:
            run = RunDir(path, rank)
            try:
                return _SpillFile(path, run, self._piece_io, direct=direct, threads=threads)
            except BaseException:
                run.close()
                raise
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error

    @property
    def mode(self) -> str:
        """What really runs: "posix-direct", "posix-buffered", "posix-mixed" when paths differ, or as `pieces` says."""
        kinds = {file.direct for file in self._files}
        posix = "posix-mixed" if len(kinds) > 1 else f"posix-{'direct' if True in kinds else 'buffered'}"
        return self._piece_io.mode(posix)

    @property
    def capacity(self) -> int:
        """Bytes at most."""
        return self._capacity

    @property
    def used(self) -> int:
        """Bytes reserved, alignment included."""
        with self._lock:
            return sum(file.extents.used for file in self._files)

    @property
    def allocated(self) -> int:
        """Bytes of all files; never above `capacity`."""
        with self._lock:
            return self._allocated()

    @property
    def directories(self) -> tuple[Path, ...]:
        """Run directories."""
        return tuple(file.run.path for file in self._files)

    def reserve(self, nbytes: int, phase: int = 0) -> DiskLease | None:
        """Takes room for a unit whose memory has the given page phase; None when there is none."""
        pieces: list[_Piece] = []
        with self._lock:
            if self._closed:
                return None
            start = 0
            while start < nbytes:
                shift = phase if not start else 0
                length = min(nbytes - start, self._chunk - shift)
                piece = self._place(start, length, shift)
                if piece is None:
                    for placed in pieces:
                        placed.file.extents.free(placed.offset)
                    return None
                pieces.append(piece)
                start += length
        return DiskLease(nbytes, tuple(pieces))

    def write(self, lease: DiskLease, source: Buffer, *, after: Callable[[], None] | None = None) -> Future[int]:
        """Starts storing `source`; a failed write raises OSError in the future."""
        return self._run(lease, source, after, None, self._write_piece, writing=True)

    def read(self, lease: DiskLease, target: Buffer, *, then: Callable[[], None] | None = None) -> Future[int]:
        """Starts filling `target`; lost bytes raise TierIOError in the future."""
        return self._run(lease, target, None, then, self._read_piece, writing=False)

    def free(self, lease: DiskLease) -> None:
        """Gives the room back, once no I/O uses it. Idempotent."""
        with self._lock:
            if lease.freed:
                return
            lease.freed = True
            if not lease.busy:
                self._give_back(lease)

    def close(self) -> None:
        """Cancels what has not started, waits for what has, removes the run directories. Idempotent."""
        with self._lock:
            self._closed = True
        self._shut()

    def _place(self, start: int, nbytes: int, phase: int) -> _Piece | None:
        extent = extent_bytes(nbytes, phase)
        usable = [file for file in self._files if file.usable]
        first = next(self._turn)
        for index in range(len(usable)):
            file = usable[(first + index) % len(usable)]
            step = min(self._grow_by, self._capacity - self._allocated())
            offset = file.alloc(extent, max(step, min(extent, self._capacity - self._allocated())))
            if offset is not None:
                return _Piece(file, offset, start, nbytes, phase, next(_serials))
        return None

    def _allocated(self) -> int:
        return sum(file.extents.size for file in self._files)

    def _run(
        self,
        lease: DiskLease,
        buffer: Buffer,
        before: Callable[[], None] | None,
        finally_: Callable[[], None] | None,
        work: Callable[[_Job, _Piece], None],
        *,
        writing: bool,
    ) -> Future[int]:
        if buffer.nbytes != lease.nbytes:
            raise ValueError(f"the lease holds {lease.nbytes} bytes, the buffer {buffer.nbytes}")
        job = _Job(self, lease, Future(), buffer, len(lease.pieces), before, finally_)
        with self._lock:
            if self._closed:
                raise SessionClosedError("the disk tier is closed")
            lease.busy += 1
        for piece in lease.pieces:
            pool = piece.file.writers if writing else piece.file.readers
            try:
                ended = pool.submit(work, job, piece)
            except RuntimeError:  # closed meanwhile
                job.end(CancelledError())
                continue
            ended.add_done_callback(lambda done: job.end(CancelledError()) if done.cancelled() else None)
        return job.future

    def _write_piece(self, job: _Job, piece: _Piece) -> None:
        error: BaseException | None = None
        try:
            if job.start():
                if job.before is not None:
                    job.before()
                part = job.buffer.part(piece.start, piece.nbytes)
                piece.mark = self._piece_io.write(piece.file.fd, piece.offset, part, piece.phase, piece.serial)
                job.buffer.check()
                piece.file.failures = 0
        except OSError as failure:
            if failure.errno != errno.EFAULT:  # the memory was at fault, not the file
                piece.file.failed(failure)
            error = failure
        except BaseException as failure:
            error = failure
        job.end(error)

    def _read_piece(self, job: _Job, piece: _Piece) -> None:
        error: BaseException | None = None
        try:
            if job.start():
                part = job.buffer.part(piece.start, piece.nbytes)
                self._piece_io.read(piece.file.fd, piece.offset, part, piece.phase, piece.serial, piece.mark)
        except BaseException as failure:
            error = failure
        job.end(error)

    def _job_done(self, lease: DiskLease) -> None:
        with self._lock:
            lease.busy -= 1
            if lease.freed and not lease.busy:
                self._give_back(lease)

    def _give_back(self, lease: DiskLease) -> None:
        for piece in lease.pieces:
            piece.file.extents.free(piece.offset)


def _shut(files: list[_SpillFile], pieces: PieceIo, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child must not touch its parent's files
    for file in files:
        file.close()
        with contextlib.suppress(OSError):
            file.run.close()
    pieces.close()
