"""Extents: which byte ranges of a slab or spill file are free."""

from __future__ import annotations

from bisect import bisect_left, insort

from tidegate.tiers.tier import ALIGNMENT, align_up

__all__ = ["ExtentAllocator"]


class ExtentAllocator:
    """Best-fit allocator over [0, size) with coalescing; not thread-safe.

    Args:
        size: Bytes to hand out at first.
        alignment: Every offset and length is a multiple of it, in bytes.
    """

    def __init__(self, size: int = 0, alignment: int = ALIGNMENT) -> None:
        self._alignment = alignment
        self._size = 0
        self._taken: dict[int, int] = {}
        self._by_start: dict[int, int] = {}
        self._by_end: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self.used = 0
        if size:
            self.grow(size)

    @property
    def size(self) -> int:
        """Bytes under management."""
        return self._size

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent."""
        return self._by_length[-1][0] if self._by_length else 0

    def alloc(self, nbytes: int) -> int | None:
        """Takes the smallest free extent that fits; returns its offset, or None."""
        length = align_up(max(nbytes, 1), self._alignment)
        index = bisect_left(self._by_length, (length, 0))
        if index == len(self._by_length):
            return None
        found, start = self._by_length[index]
        self._remove(start, found)
        if found > length:
            self._insert(start + length, found - length)
        self._taken[start] = length
        self.used += length
        return start

    def free(self, offset: int) -> None:
        """Gives an extent back.

        Raises:
            KeyError: No extent starts there.
        """
        length = self._taken.pop(offset)
        self.used -= length
        self._insert(offset, length)

    def grow(self, size: int) -> None:
        """Extends the managed range to [0, size)."""
        if size <= self._size or size % self._alignment:
            raise ValueError(f"cannot grow from {self._size} to {size} bytes: not larger, or not aligned")
        start, self._size = self._size, size
        self._insert(start, size - start)

    def _insert(self, start: int, length: int) -> None:
        before = self._by_end.get(start)
        if before is not None:
            size = self._by_start[before]
            self._remove(before, size)
            start, length = before, length + size
        after = self._by_start.get(start + length)
        if after is not None:
            self._remove(start + length, after)
            length += after
        self._by_start[start] = length
        self._by_end[start + length] = start
        insort(self._by_length, (length, start))

    def _remove(self, start: int, length: int) -> None:
        del self._by_start[start]
        del self._by_end[start + length]
        del self._by_length[bisect_left(self._by_length, (length, start))]
