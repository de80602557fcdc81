"""The CUDA mover: copy streams, pinned staging, and release of device memory in stream order.

The CPU enqueues a whole forward long before the GPU has run it, so polling for finished copies would free
nothing. Device memory is let go when the in-flight window is full: the compute stream is made to wait for the
oldest copy, and the allocator may then hand the block to later work of that stream.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tidegate.offload.transfer import Window, byte_view, restore_buffer
from tidegate.offload.unit import Arrival, State, Unit
from tidegate.tiers.host import SlabPool
from tidegate.tiers.tier import Buffer, Tier

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


class CudaMover:
    """Moves units of one GPU through pinned host memory.

    Args:
        device: The GPU.
        staging: Opens the pinned pool through which bytes pass on their way to a tier that the GPU cannot reach.
    """

    vacates_when_stored = False

    def __init__(self, device: torch.device, staging: Callable[[], SlabPool]) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._leaving: deque[Unit] = deque()
        self._open_staging = staging
        self._pool: SlabPool | None = None
        self._later: deque[tuple[tuple[torch.cuda.Event, ...], Callable[[], None]]] = deque()
        self._later_lock = threading.Lock()
        self._default = torch.cuda.default_stream(device)

    def producer(self) -> torch.cuda.Stream | None:
        stream = torch.cuda.current_stream(self._device)
        return None if stream == self._default else stream

    def lease_phase(self, unit: Unit) -> int:
        return 0

    # Out

    def make_room(self, window: Window, nbytes: int) -> None:
        self._run_later()
        window.vacate_while(nbytes, self._oldest)

    def _oldest(self) -> Unit | None:
        """Makes the current stream wait for the oldest copy still in flight and returns its unit."""
        while self._leaving:
            unit = self._leaving.popleft()
            if unit.state is State.LEAVING and unit.departure is not None:
                torch.cuda.current_stream(self._device).wait_event(unit.departure.copied)
                return unit
        return None

    def stage(self, unit: Unit, tier: Tier) -> bool:
        unit.departure = _Departure()
        if tier.name == "host":
            return True
        pool = self._staging()
        while True:
            unit.departure.slab = pool.reserve_blocking(unit.nbytes, timeout=0.05)
            if unit.departure.slab is not None:
                return True
            if unit.nbytes > pool.capacity or not (self._run_later() or pool.used):
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
        stream = unit.producer or torch.cuda.current_stream(self._device)
        self._out.wait_event(stream.record_event())
        with torch.cuda.stream(self._out):
            slab.tensor[: unit.nbytes].copy_(source, non_blocking=True)
        departure.copied = self._out.record_event()
        if unit.producer is not None:
            source.record_stream(self._out)
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

    def settle(self, nbytes: int) -> None:
        pass

    # Back

    def bring(self, unit: Unit) -> Arrival | None:
        departure: _Departure = unit.departure
        slab = departure.slab
        if slab is None and unit.tier is not None and unit.tier.name == "host":
            slab = unit.lease
        staged = None
        if slab is None:
            staged = self._staging().reserve(unit.nbytes)
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
            target.copy_(slab.tensor[: target.numel()], non_blocking=True)
            route.ready = self._in.record_event()

    def _free_staged(self, route: _Route, slab: Any) -> None:
        pool = self._staging()
        self._after(() if route.ready is None else (route.ready,), lambda: pool.free(slab))

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
        tier, lease, departure = unit.tier, unit.lease, unit.departure
        if departure is None:
            return
        events = tuple(event for event in (departure.copied, departure.read) if event is not None)
        if unit.future is None or unit.future.done():
            self._drop_slab(departure)
        if tier is not None and lease is not None:
            if tier.name == "host":
                self._after(events, lambda: tier.free(lease))
            else:
                tier.free(lease)

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

    def _staging(self) -> SlabPool:
        if self._pool is None:
            self._pool = self._open_staging()
        return self._pool
