"""Movers: how bytes travel between a device and a tier, and when device memory may be reused."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from tidegate.offload.storage import ViewSpec
from tidegate.offload.unit import Arrival, Unit
from tidegate.tiers.tier import ALIGNMENT, Buffer, Tier, align_up

__all__ = ["CpuMover", "Mover", "Movers", "Window", "byte_view", "checksum", "rebuild", "restore_buffer"]


class Window(Protocol):
    """What a mover may ask of the engine: room for more bytes in flight."""

    def wait_for_room(self, nbytes: int) -> None: ...

    def vacate_while(self, nbytes: int, oldest: Any) -> None: ...


class Mover(Protocol):
    """Moves the units of one device.

    `leave`, `release`, `bring`, `stored`, `unstage`, `abandon`, `free` and `drop` run under the engine's lock and never
    wait. A mover is the clock of its device, too.
    """

    vacates_when_stored: bool
    """Whether device memory may go as soon as the write has ended; otherwise in stream order."""

    def producer(self) -> Any:
        """The stream that saves now."""
        ...

    def reserve(self, unit: Unit, tier: Tier) -> Any | None:
        """Takes room in `tier`; None when there is none."""
        ...

    def make_room(self, window: Window, nbytes: int) -> None:
        """Waits until `nbytes` more may be in flight."""
        ...

    def stage(self, unit: Unit, tier: Tier, *, wait: bool) -> bool:
        """Takes what the way to `tier` needs, waiting if it may and must; False when it cannot be had."""
        ...

    def unstage(self, unit: Unit) -> None:
        """Gives back what `stage` took."""
        ...

    def leave(self, unit: Unit) -> Future[int]:
        """Starts moving the unit's source to its lease."""
        ...

    def stored(self, unit: Unit) -> None:
        """The tier has the bytes."""
        ...

    def stored_by(self, unit: Unit) -> Callable[[], None] | None:
        """What a thread must wait for before the unit's bytes are in the host tier; None if they are there."""
        ...

    def release(self, unit: Unit) -> None:
        """Orders the unit's copy before whatever will use its device memory next."""
        ...

    def settle(self, nbytes: int) -> None:
        """A write of `nbytes` has ended and its device memory may be free; called without the lock."""
        ...

    def bring(self, unit: Unit) -> Arrival | None:
        """Starts moving the bytes back; None when staging room lacks now."""
        ...

    def wait_for_staging(self, nbytes: int) -> None:
        """Waits until `bring` of `nbytes` may succeed."""
        ...

    def land(self, arrival: Arrival) -> None:
        """Waits until the current stream may use the arrival."""
        ...

    def abandon(self, arrival: Arrival) -> None:
        """The arrival's memory is about to be let go, used or not."""
        ...

    def free(self, unit: Unit, tier: Tier, lease: Any) -> None:
        """Frees a lease that the unit no longer needs, as soon as that is safe."""
        ...

    def drop(self, unit: Unit) -> None:
        """The unit is dead: frees what its way took, its lease included."""
        ...

    def returns(self, nbytes: int) -> bool:
        """Whether a unit of so many bytes can come back from a disk through the staging memory."""
        ...

    def saving(self, unit: Unit) -> AbstractContextManager[Any]:
        """What is computed inside comes after what the unit's stream had to do when it saved."""
        ...

    def quiesce(self) -> None:
        """Waits until no copy uses host memory."""
        ...

    def pinned(self) -> tuple[int, int]:
        """Bytes of staging memory that are page-locked, and the most that were asked for at once."""
        ...

    def stamp(self) -> Any:
        """Marks a moment of the current stream."""
        ...

    def passed(self, stamp: Any) -> bool:
        """Whether the moment is over."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two moments that are over."""
        ...

    def watch_rates(self, on: bool) -> None:
        """Times the copies from now on, or no longer."""
        ...

    def rates(self) -> tuple[float | None, float | None]:
        """Bytes a second of the copies out and in since the last call, where that is known."""
        ...


class Movers:
    """The movers of a session, one a device, made when they are first needed.

    Args:
        make: Makes the mover of a device.
    """

    def __init__(self, make: Callable[[torch.device], Mover]) -> None:
        self._make = make
        self._movers: dict[torch.device, Mover] = {}

    def __call__(self, device: torch.device) -> Mover:
        mover = self._movers.get(device)
        return self._movers.setdefault(device, self._make(device)) if mover is None else mover

    def __iter__(self) -> Iterator[Mover]:
        return iter(tuple(self._movers.values()))


def byte_view(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """Returns bytes [start, start + nbytes) of the tensor's storage as a uint8 tensor."""
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def restore_buffer(nbytes: int, address: int, device: torch.device, alignment: int) -> tuple[Tensor, int]:
    """Allocates room for `nbytes` whose address equals `address` modulo `alignment` at the returned position.

    Kernels choose by alignment, so a restored tensor must sit as the saved one did. The buffer's length is a
    multiple of the alignment, so that it can be viewed as any element type.
    """
    length = align_up(nbytes + 2 * alignment, alignment)
    if device.type == "cpu":
        buffer = _recycled.take(length)
        return buffer, (address - buffer.data_ptr()) % alignment
    storage = torch.UntypedStorage(length, device=device)  # torch.empty would fill it in deterministic mode
    buffer = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (length,), (1,))
    return buffer, (address - buffer.data_ptr()) % alignment


def rebuild(view: ViewSpec, base: Tensor, shift: int, unit: Unit) -> Tensor:
    """Builds a saved view over bytes that are back; a dense copy is first spread over the view's strides."""
    if not unit.key.span.dense:
        return view.over(base, shift)
    dense = byte_view(base, view.offset + shift, unit.nbytes).view(view.dtype).view(view.shape)
    extent = view.extent * view.dtype.itemsize
    buffer, position = restore_buffer(extent, unit.origin + view.offset, base.device, ALIGNMENT)
    view.physical().over(buffer, position - view.offset).copy_(dense)
    return view.over(buffer, position - view.offset)


_CHUNK = 1 << 22
_TRIM_BYTES = 128 << 20


def checksum(tensor: Tensor, start: int, nbytes: int) -> Tensor:
    """Position-dependent 64-bit sum of bytes [start, start + nbytes) of the tensor's storage, on its device."""
    data = byte_view(tensor, start, nbytes)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for offset in range(0, nbytes, _CHUNK):
        piece = data[offset : offset + _CHUNK]
        words = torch.zeros(align_up(piece.numel(), 8), dtype=torch.uint8, device=tensor.device)
        words[: piece.numel()] = piece
        numbers = words.view(torch.int64)
        weights = torch.arange(offset + 1, offset + 1 + 2 * numbers.numel(), 2, device=tensor.device)
        total += ((numbers ^ (numbers >> 29)) * weights).sum()
    return total


class CpuMover:
    """On a CPU run the tier's workers read and write the tensors' own memory; nothing is staged."""

    vacates_when_stored = True

    def __init__(self) -> None:
        self._freed = 0

    def producer(self) -> None:
        return None

    def reserve(self, unit: Unit, tier: Tier) -> Any | None:
        return tier.reserve(unit.nbytes, self._address(unit) % ALIGNMENT)

    def make_room(self, window: Window, nbytes: int) -> None:
        window.wait_for_room(nbytes)

    def stage(self, unit: Unit, tier: Tier, *, wait: bool) -> bool:
        return True

    def unstage(self, unit: Unit) -> None:
        pass

    def leave(self, unit: Unit) -> Future[int]:
        assert unit.tier is not None
        return unit.tier.write(unit.lease, Buffer(self._address(unit), unit.nbytes, unit.source, unit.intact))

    def stored(self, unit: Unit) -> None:
        pass

    def stored_by(self, unit: Unit) -> None:
        return None

    def release(self, unit: Unit) -> None:
        pass

    def settle(self, nbytes: int) -> None:
        _recycled.tidy()
        self._freed += nbytes
        if self._freed >= _TRIM_BYTES:
            self._freed = 0
            return_free_memory()

    def bring(self, unit: Unit) -> Arrival:
        assert unit.tier is not None
        buffer, position = restore_buffer(unit.nbytes, unit.address, unit.device, ALIGNMENT)
        future = unit.tier.read(unit.lease, Buffer(buffer.data_ptr() + position, unit.nbytes, buffer))
        return Arrival(buffer, position - unit.key.span.start, future)

    def wait_for_staging(self, nbytes: int) -> None:
        pass

    def land(self, arrival: Arrival) -> None:
        if arrival.future is not None:
            arrival.future.result()

    def abandon(self, arrival: Arrival) -> None:
        if arrival.future is not None:
            arrival.future.cancel()

    def free(self, unit: Unit, tier: Tier, lease: Any) -> None:
        tier.free(lease)

    def drop(self, unit: Unit) -> None:
        if unit.tier is not None and unit.lease is not None:
            unit.tier.free(unit.lease)

    def returns(self, nbytes: int) -> bool:
        return True

    def saving(self, unit: Unit) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def quiesce(self) -> None:
        pass

    def pinned(self) -> tuple[int, int]:
        return 0, 0

    def stamp(self) -> float:
        return time.perf_counter()

    def passed(self, stamp: float) -> bool:
        return True

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def watch_rates(self, on: bool) -> None:
        pass

    def rates(self) -> tuple[None, None]:
        return None, None

    @staticmethod
    def _address(unit: Unit) -> int:
        assert unit.source is not None
        return unit.source.untyped_storage().data_ptr() + unit.key.span.start + unit.source_shift


class _Returned(weakref.ref["ctypes.Array[ctypes.c_char]"]):
    """A mapping that nothing views any more. Like a saved handle's, its end runs no Python code of ours."""

    __slots__ = ("mapping",)
    mapping: mmap.mmap


class _Recycler:
    """Mappings for restored bytes on the CPU, used again while they fit.

    malloc keeps freed blocks of this size resident and fragments; a fresh mapping costs a page fault per page.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free: dict[int, list[mmap.mmap]] = {}
        self._bytes = 0
        self._lent: dict[int, _Returned] = {}  # keeps them until they have come back
        self._returned: deque[weakref.ref[Any]] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Tensor:
        """Returns a uint8 tensor of `nbytes`; its memory comes back here when the last view of it dies."""
        with self._lock:
            self._tidy()
            waiting = self._free.get(nbytes)
            mapping = waiting.pop() if waiting else None
            if mapping is not None:
                self._bytes -= nbytes
        if mapping is None:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if nbytes >= _HUGE_PAGE:
                with contextlib.suppress(OSError):
                    mapping.madvise(mmap.MADV_HUGEPAGE)
        memory = (ctypes.c_char * nbytes).from_buffer(mapping)
        returned = _Returned(memory, self._returned.append)
        returned.mapping = mapping
        self._lent[id(returned)] = returned
        return torch.frombuffer(memory, dtype=torch.uint8)

    def tidy(self) -> None:
        """Takes back what has come back; what does not fit goes to the system."""
        with self._lock:
            self._tidy()

    def _tidy(self) -> None:
        while self._returned:
            returned = self._returned.popleft()
            assert isinstance(returned, _Returned)
            del self._lent[id(returned)]
            nbytes = len(returned.mapping)
            if self._bytes + nbytes <= self._capacity:
                self._bytes += nbytes
                self._free.setdefault(nbytes, []).append(returned.mapping)

    def clear(self) -> None:
        """Gives everything that waits back to the system."""
        with self._lock:
            self._tidy()
            self._free.clear()
            self._bytes = 0


_HUGE_PAGE = 2 << 20
_recycled = _Recycler(64 << 20)


def return_free_memory() -> None:
    """Gives freed memory back to the system: malloc keeps what lies between live blocks resident otherwise."""
    if _malloc_trim is not None:
        _malloc_trim(0)


_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
