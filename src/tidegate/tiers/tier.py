"""The Tier protocol: where bytes live. A tier knows bytes, not tensors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["ALIGNMENT", "Buffer", "Lease", "Staging", "Tier", "align_up"]

ALIGNMENT = 4096
"""Bytes. Page size and the strictest O_DIRECT alignment met in practice."""


def align_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Rounds `nbytes` up to a multiple of `alignment` (bytes)."""
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Buffer:
    """A span of host memory together with what keeps it alive.

    Args:
        address: First byte.
        nbytes: Length in bytes.
        owner: Any object whose life guarantees that the span stays mapped.
        valid: Whether the span still is that memory; None when nobody can take it away.
    """

    address: int
    nbytes: int
    owner: object
    valid: Callable[[], bool] | None = None

    def check(self) -> None:
        """Raises OSError (EFAULT) if the memory was taken away: what was read from it may be anything."""
        if self.valid is not None and not self.valid():
            raise OSError(errno.EFAULT, "the memory to be saved is gone: its storage was emptied")

    def part(self, start: int, nbytes: int) -> Buffer:
        """Bytes [start, start + nbytes) of it."""
        return Buffer(self.address + start, nbytes, self.owner, self.valid)

    @property
    def phase(self) -> int:
        """Distance in bytes from the page start: `address % ALIGNMENT`."""
        return self.address % ALIGNMENT


class Lease(Protocol):
    """A reservation in a tier, good for one write and any number of reads after it."""

    @property
    def nbytes(self) -> int: ...


class Staging(Protocol):
    """Bounded memory through which bytes pass on their way between a device and a tier. Thread-safe.

    A lease has `tensor` (uint8), `address` (a page's start), and `nbytes`.
    """

    capacity: int

    @property
    def used(self) -> int:
        """Bytes handed out, alignment included."""
        ...

    @property
    def pinned(self) -> int:
        """Bytes of page-locked host memory that it takes."""
        ...

    @property
    def peak(self) -> int:
        """The most bytes that were handed out at once, as asked for."""
        ...

    def reserve(self, nbytes: int) -> Any | None:
        """Takes a span, or None when there is no room."""
        ...

    def reserve_blocking(self, nbytes: int, timeout: float | None = None) -> Any | None:
        """Takes a span, waiting for room; None when the wait is over or it could never be had."""
        ...

    def free(self, lease: Any) -> None:
        """Gives a span back; idempotent."""
        ...


class Tier(Protocol):
    """Bounded storage for opaque bytes.

    All methods are thread-safe. `write` and `read` are asynchronous: the future gives the byte count, or
    raises OSError (TierIOError where bytes are lost). The tier keeps a reference to the Buffer until the
    future is done. A future that was not started may be cancelled.
    """

    @property
    def name(self) -> str:
        """Either "host" or "disk"."""
        ...

    @property
    def mode(self) -> str:
        """What really runs, e.g. "pinned", "pageable", "posix-direct", "posix-buffered"."""
        ...

    @property
    def capacity(self) -> int:
        """Bytes that the tier may hold at most."""
        ...

    @property
    def used(self) -> int:
        """Bytes reserved now, alignment included; never above `capacity`."""
        ...

    def reserve(self, nbytes: int, phase: int = 0) -> Any | None:
        """Reserves room for `nbytes` bytes; None when there is none (the caller takes the next tier).

        `phase` is the page phase of the memory the bytes come from and go back to; buffers with that phase
        move without a bounce copy.
        """
        ...

    def write(self, lease: Any, source: Buffer, *, after: Callable[[], None] | None = None) -> Future[int]:
        """Starts storing `source` under `lease`. `after` runs in the worker before the bytes are touched."""
        ...

    def read(self, lease: Any, target: Buffer, *, then: Callable[[], None] | None = None) -> Future[int]:
        """Starts filling `target`. `then` runs in the worker after all bytes arrived, before the future ends."""
        ...

    def free(self, lease: Any) -> None:
        """Gives the room back; idempotent. While I/O on the lease is in flight the room stays taken until it ends."""
        ...

    def close(self) -> None:
        """Cancels what has not started, waits for what has, releases everything. Idempotent."""
        ...
