"""The CUDA mover: copy streams, pinned staging, and release of device memory in stream order.

The CPU enqueues a whole forward long before the GPU has run it, so polling for finished copies would free
nothing. Device memory is let go at a release point (the in-flight window is full, or the course of the step says that
the copy is over): the stream that saved the bytes is made to wait for the copy, and the allocator may then hand the
block to later work of that stream. Host memory is used again in the same way: the next copy into a span waits, on the
device, for the last copy from it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tidegate.memory.pinned import Slab
from tidegate.offload.transfer import Window, byte_view, restore_buffer
from tidegate.offload.unit import Arrival, State, Unit
from tidegate.tiers.host import HostLease, HostTier
from tidegate.tiers.tier import Buffer, Staging, Tier, align_up

__all__ = ["CudaMover"]

_DEVICE_ALIGNMENT = 512


@dataclass(slots=True, eq=False)
class _Departure:
    """Way out of a unit: the copy's event, and the staging slab while something still needs it."""

    slab: Any = None
    copied: Any = None
    read: Any = None
    users: int = 1


@dataclass(slots=True, eq=False)
class _Route:
    """Way back of a unit."""

    stream: torch.cuda.Stream
    ready: Any = None
    landed: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class _Timed:
    """A copy between two events, for measuring the link while training runs."""

    nbytes: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class CudaMover:
    """Moves units of one GPU through pinned host memory, or through device memory that the disk takes bytes from.

    Args:
        device: The GPU.
        staging: Opens the pool through which bytes pass on their way to a tier that the copy engine cannot reach.
    """

    vacates_when_stored = False

    def __init__(self, device: torch.device, staging: Callable[[], Staging]) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._leaving: deque[Unit] = deque()
        self._open_staging = staging
        self._pool: Staging | None = None
        self._pool_lock = threading.Lock()
        self._later: deque[tuple[tuple[torch.cuda.Event, ...], Callable[[], None]]] = deque()
        self._later_lock = threading.Lock()
        self._dying: deque[tuple[tuple[torch.cuda.Event, ...], HostTier, HostLease]] = deque()
        self._dying_lock = threading.Lock()
        self._reclaimed: deque[torch.cuda.Event] = deque()  # memory that these still use must not be unmapped
        self._outward, self._inward = _Rate(), _Rate()
        self._watching = False

    def pinned(self) -> tuple[int, int]:
        pool = self._pool
        return (0, 0) if pool is None or not pool.pinned else (pool.pinned, pool.peak)

    def producer(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def returns(self, nbytes: int) -> bool:
        return nbytes <= self._staging().capacity

    def saving(self, unit: Unit) -> torch.cuda.StreamContext:
        return torch.cuda.stream(unit.producer)

    def quiesce(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    # Time

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def passed(self, stamp: torch.cuda.Event) -> bool:
        return bool(stamp.query())

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    # Out

    def reserve(self, unit: Unit, tier: Tier) -> Any | None:
        """Takes room in a tier. Spans of dead units come first, in stream order; then new memory is pinned."""
        if not isinstance(tier, HostTier):
            return tier.reserve(unit.nbytes, 0)
        self._reclaim()
        lease = tier.reserve(unit.nbytes, 0, grow=False)
        while lease is None and self._reclaim_oldest():
            lease = tier.reserve(unit.nbytes, 0, grow=False)
        if lease is None:
            lease = tier.reserve(unit.nbytes, 0, trim=not self._reclaimed)
        if lease is None and self._reclaimed:
            for event in self._reclaimed:
                event.synchronize()
            self._reclaimed.clear()
            lease = tier.reserve(unit.nbytes, 0)
        return lease

    def _reclaim(self) -> None:
        """Frees the spans of dead units whose copies are over."""
        with self._dying_lock:
            while self._dying and all(event.query() for event in self._dying[0][0]):
                _, tier, lease = self._dying.popleft()
                tier.free(lease)
            while self._reclaimed and self._reclaimed[0].query():
                self._reclaimed.popleft()

    def _reclaim_oldest(self) -> bool:
        """Frees a span that copies may still use: whatever is copied there next waits for them on the device."""
        with self._dying_lock:
            if not self._dying:
                return False
            events, tier, lease = self._dying.popleft()
        for event in events:
            self._out.wait_event(event)
        self._reclaimed.extend(events)
        tier.free(lease)
        return True

    def make_room(self, window: Window, nbytes: int) -> None:
        self._run_later()
        window.vacate_while(nbytes, self._oldest)

    def _oldest(self) -> Unit | None:
        """The unit whose copy has been in flight for longest."""
        while self._leaving:
            unit = self._leaving.popleft()
            if unit.state is State.LEAVING and unit.departure is not None:
                return unit
        return None

    def release(self, unit: Unit) -> None:
        """Makes the stream that saved the unit wait for its copy, so that its memory may be used again after that.

        `record_stream` costs nothing where the memory was allocated for that stream; it holds the block back where
        it was allocated for another one, or other streams have saved the unit too.
        """
        if unit.departure.copied is None:
            return
        unit.producer.wait_event(unit.departure.copied)
        source = unit.source
        if source is not None:
            for stream in (unit.producer, *unit.savers):
                source.record_stream(stream)

    def stage(self, unit: Unit, tier: Tier, *, wait: bool) -> bool:
        unit.departure = _Departure()
        if isinstance(tier, HostTier):
            return True
        pool = self._staging()
        while True:
            self._run_later()
            unit.departure.slab = pool.reserve_blocking(unit.nbytes, timeout=0.05 if wait else 0.0)
            if unit.departure.slab is not None:
                return True
            if not wait or unit.nbytes > pool.capacity or not (self._run_later() or pool.used):
                return False

    def unstage(self, unit: Unit) -> None:
        if unit.departure is not None:
            self._finish_use(unit.departure)

    def _finish_use(self, departure: _Departure) -> None:
        departure.users -= 1
        slab = departure.slab
        if departure.users == 0 and slab is not None:
            departure.slab = None
            pool = self._staging()
            events = () if departure.copied is None else (departure.copied,)
            self._after(events, lambda: pool.free(slab))

    def leave(self, unit: Unit) -> Future[int]:
        assert unit.source is not None
        assert unit.tier is not None
        departure: _Departure = unit.departure
        start = unit.key.span.start + unit.source_shift
        source = byte_view(unit.source, start, unit.nbytes)
        slab = departure.slab if departure.slab is not None else unit.lease
        self._out.wait_event(unit.producer.record_event())
        with torch.cuda.stream(self._out):
            with self._timed(self._out, unit.nbytes, self._outward):
                slab.tensor[: unit.nbytes].copy_(source, non_blocking=True)
            departure.copied = self._out.record_event()
        while self._leaving and self._leaving[0].state is not State.LEAVING:
            self._leaving.popleft()
        self._leaving.append(unit)
        if departure.slab is None:
            done: Future[int] = Future()
            done.set_result(unit.nbytes)
            return done
        buffer = Buffer(slab.address, unit.nbytes, slab)
        return unit.tier.write(unit.lease, buffer, after=departure.copied.synchronize)

    def stored(self, unit: Unit) -> None:
        departure: _Departure = unit.departure
        if departure.slab is not None:
            self._finish_use(departure)

    def stored_by(self, unit: Unit) -> Callable[[], None]:
        wait: Callable[[], None] = unit.departure.copied.synchronize
        return wait

    def settle(self, nbytes: int) -> None:
        pass

    # Back

    def bring(self, unit: Unit) -> Arrival | None:
        departure: _Departure = unit.departure
        slab = departure.slab
        if slab is None and isinstance(unit.tier, HostTier):
            slab = unit.lease
        staged = None
        if slab is None:
            staged = self._span(unit.nbytes)
            if staged is None:
                return None
        buffer, position = restore_buffer(unit.nbytes, unit.address, self._device, _DEVICE_ALIGNMENT)
        target = byte_view(buffer, position, unit.nbytes)
        stream = torch.cuda.current_stream(self._device)
        route = _Route(stream)
        self._in.wait_event(stream.record_event())
        arrival = Arrival(buffer, position - unit.key.span.start, route=route)
        if staged is not None:
            assert unit.tier is not None
            arrival.future = unit.tier.read(
                unit.lease,
                Buffer(staged.address, unit.nbytes, staged),
                then=lambda: self._copy_in(route, staged, target),
            )
            arrival.future.add_done_callback(lambda done: self._free_staged(route, staged))
        else:
            if departure.copied is not None:
                self._in.wait_event(departure.copied)
            self._copy_in(route, slab, target)
            departure.read = route.ready
            if slab is departure.slab:
                departure.users += 1
                assert route.ready is not None
                self._after((route.ready,), lambda: self._finish_use(departure))
        return arrival

    def _copy_in(self, route: _Route, slab: Any, target: Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._in):
            with self._timed(self._in, target.numel(), self._inward):
                target.copy_(slab.tensor[: target.numel()], non_blocking=True)
            route.ready = self._in.record_event()

    def _span(self, nbytes: int) -> Any | None:
        """Memory to read into; of its own where the pool could never give it, since these bytes must come back."""
        pool = self._staging()
        span = pool.reserve(nbytes)
        if span is None and (nbytes > pool.capacity or not (self._run_later() or pool.used)):
            return Slab(align_up(nbytes), pin=False)
        return span

    def _free_staged(self, route: _Route, span: Any) -> None:
        pool = self._staging()
        events = () if route.ready is None else (route.ready,)
        self._after(events, lambda: None if isinstance(span, Slab) else pool.free(span))

    def wait_for_staging(self, nbytes: int) -> None:
        pool = self._staging()
        self._run_later()
        slab = pool.reserve_blocking(nbytes, timeout=0.05)
        if slab is not None:
            pool.free(slab)

    def land(self, arrival: Arrival) -> None:
        if arrival.future is not None:
            arrival.future.result()
        route: _Route = arrival.route
        stream = torch.cuda.current_stream(self._device)
        assert route.ready is not None
        stream.wait_event(route.ready)
        if stream != route.stream:
            arrival.base.record_stream(stream)
        route.landed = True

    def abandon(self, arrival: Arrival) -> None:
        route: _Route = arrival.route
        if route.landed:
            return
        base = arrival.base  # the copy may still be running, or not even be enqueued: keep the block until it is
        if arrival.future is None:
            base.record_stream(self._in)
        elif not arrival.future.cancel():
            arrival.future.add_done_callback(lambda done: base.record_stream(self._in))

    def drop(self, unit: Unit) -> None:
        departure = unit.departure
        if departure is None:
            return
        if unit.future is None or unit.future.done():
            self._drop_slab(departure)
        if unit.tier is not None and unit.lease is not None:
            self.free(unit, unit.tier, unit.lease)

    def free(self, unit: Unit, tier: Tier, lease: Any) -> None:
        if not isinstance(tier, HostTier):
            tier.free(lease)
            return
        departure: _Departure = unit.departure
        events = tuple(event for event in (departure.copied, departure.read) if event is not None)
        with self._dying_lock:
            self._dying.append((events, tier, lease))

    def _drop_slab(self, departure: _Departure) -> None:
        if departure.slab is not None and departure.users:
            self._finish_use(departure)

    # Things to do once events have passed

    def _after(self, events: tuple[torch.cuda.Event, ...], action: Callable[[], None]) -> None:
        with self._later_lock:
            self._later.append((events, action))
        self._run_later()

    def _run_later(self) -> bool:
        """Runs what is due; whether something is still waiting."""
        due: list[Callable[[], None]] = []
        with self._later_lock:
            waiting = deque(self._later)
            self._later.clear()
            for events, action in waiting:
                if all(event.query() for event in events):
                    due.append(action)
                else:
                    self._later.append((events, action))
            left = bool(self._later)
        for action in due:
            action()
        return left

    def _staging(self) -> Staging:
        with self._pool_lock:
            if self._pool is None:
                self._pool = self._open_staging()
            return self._pool

    # Rates

    def watch_rates(self, on: bool) -> None:
        """Times the copies from now on, or no longer."""
        self._watching = on

    def rates(self) -> tuple[float | None, float | None]:
        """Bytes a second of the copies out and in that are over, since the last call; None where there was none."""
        return self._outward.take(), self._inward.take()

    @contextmanager
    def _timed(self, stream: torch.cuda.Stream, nbytes: int, rate: _Rate) -> Iterator[None]:
        if not self._watching:
            yield
            return
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record(stream)
        yield
        ended.record(stream)
        rate.add(_Timed(nbytes, began, ended))


class _Rate:
    """Rate of the copies of one direction, over enough of them to mean something."""

    def __init__(self) -> None:
        self._copies: deque[_Timed] = deque(maxlen=4096)
        self._nbytes = 0
        self._seconds = 0.0

    def add(self, copy: _Timed) -> None:
        self._copies.append(copy)

    def take(self) -> float | None:
        """Bytes a second since the last answer; None until there is enough to tell."""
        while self._copies and self._copies[0].ended.query():
            copy = self._copies.popleft()
            self._nbytes += copy.nbytes
            self._seconds += copy.began.elapsed_time(copy.ended) / 1e3
        if self._nbytes < _TELLING or not self._seconds:
            return None
        rate = self._nbytes / self._seconds
        self._nbytes, self._seconds = 0, 0.0
        return rate


_TELLING = 4 << 30
"""Bytes of copies that tell a rate."""
