"""Several paths: each works at its own pace with workers of its own, so that their bandwidths add up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.tiers.memory_buffers import Span

from tidegate.tiers.disk import DiskTier
from tidegate.tiers.io_posix import PosixIo

KiB = 2**10
CHUNK, PIECES = 64 * KiB, 16


class OneDiskWaits(PosixIo):
    """One of two disks moves nothing until the other has moved all of its share."""

    def __init__(self) -> None:
        self.slow = -1
        self.moved = 0
        self._done = threading.Event()
        self.failed = False
        self.armed = False

    def _gate(self, fd: int) -> None:
        if not self.armed:
            return
        if fd == self.slow:
            self.failed |= not self._done.wait(timeout=60)
        else:
            self.moved += 1
            if self.moved == PIECES // 2:
                self._done.set()

    def arm(self) -> None:
        self.moved, self.armed = 0, True
        self._done.clear()

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._gate(fd)
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._gate(fd)
        return super().preadv(fd, buffers, offset)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_unit_is_spread_evenly_and_no_path_waits_for_another(tmp_path: Path, slow: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    io = OneDiskWaits()
    tier = DiskTier(paths, 64 * PIECES * CHUNK, threads=2, chunk_bytes=CHUNK, grow_bytes=PIECES * CHUNK, io=io)
    try:
        io.slow = tier._files[slow].fd
        source = Span(PIECES * CHUNK, 0, seed=1)
        lease = tier.reserve(PIECES * CHUNK)
        assert lease is not None
        assert [sum(piece.file is file for piece in lease.pieces) for file in tier._files] == [PIECES // 2] * 2
        io.arm()
        assert tier.write(lease, source.buffer).result() == PIECES * CHUNK
        target = Span(PIECES * CHUNK, 0)
        io.arm()
        assert tier.read(lease, target.buffer).result() == PIECES * CHUNK
        assert not io.failed
        assert bool((target.bytes == source.bytes).all())
        tier.free(lease)
    finally:
        tier.close()
