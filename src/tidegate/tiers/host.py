"""The host tier: exact slabs of host RAM, page-locked when a GPU is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from tidegate.errors import SessionClosedError
from tidegate.memory.pinned import Slab, copy_bytes, read_bytes
from tidegate.tiers.extents import ExtentAllocator
from tidegate.tiers.tier import ALIGNMENT, Buffer, align_up

__all__ = ["HostLease", "HostTier", "SlabPool"]


@dataclass(slots=True, eq=False)
class HostLease:
    """A span of a slab.

    Args:
        nbytes: Bytes asked for.
        address: Where they start; `address % 4096` is the phase asked for.
        tensor: The span as uint8; keeps the slab mapped.
    """

    nbytes: int
    address: int
    tensor: Tensor
    slab: _Room
    offset: int
    busy: int = 0
    unwanted: bool = False
    freed: bool = False


class _Room:
    """A slab and its extents."""

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.slab = Slab(nbytes, pin=pin)
        self.extents = ExtentAllocator(nbytes)


class SlabPool:
    """Bounded host memory, mapped slab by slab as it is needed and handed out in exact spans. Thread-safe.

    Args:
        capacity: Bytes at most; slabs count as they are mapped.
        pin: Page-lock the slabs.
        slab_bytes: Size of a slab; a larger span gets a slab of its own.
    """

    def __init__(self, capacity: int, *, pin: bool, slab_bytes: int = 256 * 2**20) -> None:
        self.capacity = capacity // ALIGNMENT * ALIGNMENT
        self._pin = pin
        self._slab_bytes = align_up(max(slab_bytes, ALIGNMENT))
        self._rooms: list[_Room] = []
        self._lock = threading.Lock()
        self._freed = threading.Condition(self._lock)
        self._closed = False
        self._asked = self._peak = 0

    @property
    def peak(self) -> int:
        """The most bytes that were handed out at once, as asked for."""
        with self._lock:
            return self._peak

    @property
    def used(self) -> int:
        """Bytes handed out, alignment included."""
        with self._lock:
            return sum(room.extents.used for room in self._rooms)

    @property
    def mapped(self) -> int:
        """Bytes of all slabs; never above `capacity`."""
        with self._lock:
            return self._mapped()

    @property
    def pinned(self) -> int:
        """Bytes of the slabs that are page-locked."""
        with self._lock:
            return sum(room.slab.nbytes for room in self._rooms if room.slab.pinned)

    def reserve(self, nbytes: int, phase: int = 0, *, grow: bool = True, trim: bool = True) -> HostLease | None:
        """Takes a span, or None when there is no room.

        Args:
            nbytes: Bytes.
            phase: Page phase of the span.
            grow: Whether the pool may map another slab.
            trim: Whether it may unmap slabs that hold nothing in order to do so.
        """
        with self._lock:
            return self._reserve(nbytes, phase, grow=grow, trim=trim)

    def reserve_blocking(self, nbytes: int, timeout: float | None = None) -> HostLease | None:
        """Takes a span, waiting for room; None when the wait is over or the pool could never hold it."""
        if align_up(nbytes) > self.capacity:
            return None
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                lease = self._reserve(nbytes, 0, grow=True, trim=True)
                if lease is not None or self._closed:
                    return lease
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._freed.wait(left)

    def free(self, lease: HostLease) -> None:
        """Gives a span back; idempotent."""
        with self._lock:
            if not lease.freed:
                lease.freed = True
                self._give_back(lease)

    def trim(self) -> int:
        """Unmaps slabs that hold nothing; returns the bytes given back to the system."""
        with self._lock:
            return self._trim()

    def close(self) -> None:
        """Unmaps every slab as soon as nothing refers to it. Idempotent."""
        with self._lock:
            self._closed = True
            self._rooms.clear()
            self._freed.notify_all()

    def _reserve(self, nbytes: int, phase: int, *, grow: bool, trim: bool) -> HostLease | None:
        if self._closed:
            return None
        need = align_up(phase + nbytes)
        for room in self._rooms:
            offset = room.extents.alloc(need)
            if offset is not None:
                return self._lease(room, offset, nbytes, phase)
        if not grow:
            return None
        room_size = max(need, min(self._slab_bytes, self.capacity - self._mapped()))
        if self._mapped() + room_size > self.capacity:
            if trim:
                self._trim()
            room_size = max(need, min(self._slab_bytes, self.capacity - self._mapped()))
            if self._mapped() + room_size > self.capacity:
                return None
        try:
            new = _Room(room_size, pin=self._pin)
        except (OSError, ValueError):  # the system has no more memory to map
            return None
        self._rooms.append(new)
        offset = new.extents.alloc(need)
        assert offset is not None
        return self._lease(new, offset, nbytes, phase)

    def _lease(self, room: _Room, offset: int, nbytes: int, phase: int) -> HostLease:
        start = offset + phase
        self._asked += nbytes
        self._peak = max(self._peak, self._asked)
        return HostLease(nbytes, room.slab.address + start, room.slab.view(start, nbytes), room, offset)

    def _give_back(self, lease: HostLease) -> None:
        self._asked -= lease.nbytes
        lease.slab.extents.free(lease.offset)
        self._freed.notify_all()

    def _trim(self) -> int:
        before = self._mapped()
        self._rooms = [room for room in self._rooms if room.extents.used]
        return before - self._mapped()

    def _mapped(self) -> int:
        return sum(room.slab.nbytes for room in self._rooms)


class HostTier:
    """Host RAM as a tier; also open to a GPU's copy engine through `lease.tensor`.

    Args:
        capacity: Bytes at most.
        pin: Page-lock the slabs.
        slab_bytes: Size of a slab.
        threads: Workers that copy.
    """

    name = "host"

    def __init__(self, capacity: int, *, pin: bool, slab_bytes: int = 256 * 2**20, threads: int = 2) -> None:
        self._pool = SlabPool(capacity, pin=pin, slab_bytes=slab_bytes)
        self._pin = pin
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="tidegate-host")
        self._lock = threading.Lock()
        self._closed = False

    @property
    def mode(self) -> str:
        """What really runs: "pinned" or "pageable"."""
        return "pinned" if self._pin and self._pool.pinned == self._pool.mapped else "pageable"

    @property
    def capacity(self) -> int:
        """Bytes at most."""
        return self._pool.capacity

    @property
    def used(self) -> int:
        """Bytes reserved, alignment included."""
        return self._pool.used

    @property
    def pinned(self) -> int:
        """Bytes page-locked."""
        return self._pool.pinned

    @property
    def mapped(self) -> int:
        """Bytes mapped."""
        return self._pool.mapped

    @property
    def peak(self) -> int:
        """The most bytes that were handed out at once, as asked for."""
        return self._pool.peak

    def reserve(self, nbytes: int, phase: int = 0, *, grow: bool = True, trim: bool = True) -> HostLease | None:
        """Takes a span, or None when the tier is full; as SlabPool.reserve."""
        return self._pool.reserve(nbytes, phase, grow=grow, trim=trim)

    def write(self, lease: HostLease, source: Buffer, *, after: Callable[[], None] | None = None) -> Future[int]:
        """Starts copying `source` into the lease."""

        def work() -> int:
            if after is not None:
                after()
            read_bytes(lease.address, source.address, source.nbytes)
            source.check()
            return source.nbytes

        return self._submit(lease, work)

    def read(self, lease: HostLease, target: Buffer, *, then: Callable[[], None] | None = None) -> Future[int]:
        """Starts copying the lease into `target`."""

        def work() -> int:
            copy_bytes(target.address, lease.address, target.nbytes)
            if then is not None:
                then()
            return target.nbytes

        return self._submit(lease, work)

    def free(self, lease: HostLease) -> None:
        """Gives the span back, once no copy uses it. Idempotent."""
        with self._lock:
            lease.unwanted = True
            ready = not lease.busy
        if ready:
            self._pool.free(lease)

    def trim(self) -> int:
        """Gives slabs that hold nothing back to the system."""
        return self._pool.trim()

    def close(self) -> None:
        """Ends the workers and unmaps everything. Idempotent."""
        self._closed = True
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._pool.close()

    def _submit(self, lease: HostLease, work: Callable[[], int]) -> Future[int]:
        with self._lock:
            lease.busy += 1
        try:
            future = self._workers.submit(work)
        except RuntimeError:
            with self._lock:
                lease.busy -= 1
            raise SessionClosedError("the host tier is closed") from None
        future.add_done_callback(lambda done: self._done(lease))
        return future

    def _done(self, lease: HostLease) -> None:
        with self._lock:
            lease.busy -= 1
            ready = lease.unwanted and not lease.busy
        if ready:
            self._pool.free(lease)
