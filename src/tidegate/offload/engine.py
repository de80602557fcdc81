"""The engine: owns units, lets the gate decide what leaves, brings bytes back, frees what no graph needs."""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef

from tidegate.errors import CorruptionError, SessionClosedError
from tidegate.offload.cascade import Cascade
from tidegate.offload.compiled import RegionWatch
from tidegate.offload.core import Core
from tidegate.offload.gate import Gate
from tidegate.offload.handle import Grave, SavedHandle
from tidegate.offload.prefetch import Prefetch
from tidegate.offload.stats import OffloadStats
from tidegate.offload.step import Step
from tidegate.offload.storage import StorageKey, ViewSpec
from tidegate.offload.tierset import TierSet
from tidegate.offload.transfer import Mover, Movers, checksum, rebuild
from tidegate.offload.unit import Arrival, Body, Outcome, State, Unit, VersionGuard

__all__ = ["Engine"]

_log = logging.getLogger("tidegate")


class Engine:
    """Thread-safe. One lock guards units, steps and books; waiting for I/O happens outside it.

    Args:
        tiers: Opens and lists the tiers.
        gate: Decides how much leaves.
        movers: Give the mover of a device.
        window: Gives the bytes that may be in flight, each way; asked once, when the first bytes leave.
        verify: Checksum every unit when it leaves and when it is back.
    """

    def __init__(
        self,
        tiers: TierSet,
        gate: Gate,
        movers: Movers,
        *,
        window: Callable[[], int],
        verify: bool,
    ) -> None:
        self.gate = gate
        self._ask_window = window
        self._tiers = tiers
        self._mover_for = movers
        self._verify = verify
        self._core = core = Core(movers, self._bury)
        self._lock, self._changed = core.lock, core.changed
        self._books, self._ledger = core.books, core.ledger
        self._cascade = Cascade(core)
        self._prefetch = Prefetch(core, self._arrival, self._retain, lambda: 2 * self.window)
        self._graves: set[Grave] = set()
        # The end of torch's weak references is Python code. Most end in a worker, where no signal handler runs.
        self._spent: deque[StorageWeakRef] = deque(maxlen=4096)
        self._open_graves: deque[weakref.ref[SavedHandle]] = deque()
        self._scopes = itertools.count()
        self._scope = next(self._scopes)
        self._regions = RegionWatch()
        self._units: dict[StorageKey, Unit] = {}
        self._staying: OrderedDict[int, Unit] = OrderedDict()
        self._staying_bytes = 0
        self._leaving_bytes = 0
        self._moved = False
        self._nowhere = False
        self._said_idle = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._core.closed

    @property
    def interrupted(self) -> bool:
        """An exception cut work on the books short: they are in doubt, and nothing moves any more."""
        return self._books.interrupted

    @functools.cached_property
    def window(self) -> int:
        """Bytes that may be in flight, each way."""
        return self._ask_window()

    # Saving

    def save(self, tensor: Tensor, guard: VersionGuard, view: ViewSpec, key: StorageKey, step: Step) -> SavedHandle:
        """Makes (or finds) the unit of a saved tensor and moves out what the gate asks for.

        Args:
            tensor: The saved tensor, strided.
            guard: Its version.
            view: Its view of the storage.
            key: Identity of the bytes that travel for it.
            step: The step that saves it.
        """
        leavers: list[Unit] = []
        steered: Unit | None = None
        with self._lock, self._books:
            self._bury()
            unit = self._units.get(key)
            body = None if unit is None or not unit.holds(guard, self._scope) else unit.body()
            if unit is None or body is None:
                unit, body = self._create(tensor, guard, key)
                step.create(unit)
                steered = self._steer(unit, step)
                leavers = self._over_budget(unit.nbytes)
            else:
                self._saved_again(unit, tensor, key)
            unit.handles += 1
            handle = SavedHandle(self, unit, body, view, guard, step, step.add(unit))
        with self._books:
            if steered is not None:
                self._depart(steered, wait=False)
            for leaver in leavers:
                self._depart(leaver, wait=True)
        return handle

    def left(self, step: Step) -> None:
        """A thread left the step. One in which nothing was saved ends at once."""
        with self._lock, self._books:
            self._bury()
            if not step.order:
                self._end(step)
            elif step.pilot is not None and step.pilot.complete:
                self._let_go(step, step.pilot.turns())

    def exclude(self, nbytes: int) -> None:
        """Books saved bytes that may not move."""
        with self._lock:
            self._ledger.counters.excluded += nbytes

    def _create(self, tensor: Tensor, guard: VersionGuard, key: StorageKey) -> tuple[Unit, Body]:
        source = tensor.conj() if tensor.is_conj() else tensor
        source = torch._neg_view(source) if source.is_neg() else source
        shift, nbytes = 0, key.span.nbytes
        origin = tensor.untyped_storage().data_ptr()
        if key.span.dense:
            source = source.contiguous()
            shift, nbytes = -key.span.start, source.nbytes
        body = Body(source)
        storage = source.untyped_storage()
        unit = Unit(
            key=key,
            nbytes=nbytes,
            device=tensor.device,
            origin=origin,
            address=storage.data_ptr() + key.span.start + shift,
            guard=guard,
            storage=StorageWeakRef(tensor.untyped_storage()),
            body=weakref.ref(body),
            source_shift=shift,
            scope=self._scope,
            memory=(storage.data_ptr(), storage.nbytes()),
            producer=self._mover_for(tensor.device).producer(),
        )
        self._units[key] = unit
        self._staying[id(unit)] = unit
        self._staying_bytes += nbytes
        self._ledger.occupy(nbytes)
        return unit, body

    def _saved_again(self, unit: Unit, tensor: Tensor, key: StorageKey) -> None:
        stream = self._mover_for(unit.device).producer()
        if stream != unit.producer and stream not in unit.savers:
            unit.savers += (stream,)
        if unit.checksum is not None and not key.span.dense:
            self._check(unit, tensor, 0)

    def _steer(self, unit: Unit, step: Step) -> Unit | None:
        """Tells the step's pilot of a new unit; returns the unit if it is to leave."""
        if self.closed:
            return None
        mover = self._mover_for(unit.device)
        if not unit.number:
            step.pilot = self.gate.pilot(unit.nbytes, mover)
        pilot = step.pilot
        if pilot is None or pilot.clock is not mover:
            return None
        leaves = pilot.saved(unit.nbytes)
        self._let_go(step, pilot.over())
        if not leaves:
            return None
        del self._staying[id(unit)]
        self._staying_bytes -= unit.nbytes
        return unit

    def _let_go(self, step: Step, numbers: Sequence[int]) -> None:
        """Lets go of the device memory of units whose copies are over by now in stream order."""
        for number in numbers:
            unit = step.units[number]
            mover = self._mover_for(unit.device)
            if unit.state is State.LEAVING and not mover.vacates_when_stored:
                mover.release(unit)
                self.vacate(unit)

    def _over_budget(self, arrived: int) -> list[Unit]:
        if self.closed:
            return []
        excess = self.gate.excess(self._staying_bytes, self._leaving_bytes, arrived)
        leavers: list[Unit] = []
        while excess > 0 and self._staying:
            _, unit = self._staying.popitem(last=False)
            self._staying_bytes -= unit.nbytes
            excess -= unit.nbytes
            leavers.append(unit)
        return leavers

    # Leaving

    def _depart(self, unit: Unit, *, wait: bool) -> None:
        """Starts moving a unit to the first tier that has room; waits for the window, if it may, without the lock."""
        mover = self._mover_for(unit.device)
        if wait:
            mover.make_room(self, unit.nbytes)
        body = unit.body()
        if body is None or not unit.intact():
            return
        tiers = self._tiers.open()
        self._cascade.flow(tiers, unit.nbytes)
        for tier in tiers:
            if tier.name in unit.refused:
                continue
            lease = mover.reserve(unit, tier)
            while lease is None and wait and self._cascade.make_room(tier, unit.nbytes):
                lease = mover.reserve(unit, tier)
            if lease is None:
                continue
            if not mover.stage(unit, tier, wait=wait):
                tier.free(lease)
                continue
            with self._lock, self._books:
                self._bury()
                if unit.state is State.DEAD or self.closed or not unit.intact():
                    mover.unstage(unit)
                    tier.free(lease)
                    return
                unit.tier, unit.lease = tier, lease
                if self._verify:
                    assert unit.source is not None
                    with mover.saving(unit):
                        unit.checksum = checksum(unit.source, unit.key.span.start + unit.source_shift, unit.nbytes)
                unit.future = future = mover.leave(unit)
                unit.state = State.LEAVING
                self._leaving_bytes += unit.nbytes
                self._moved = True
                self._core.writes.begin(future)
            future.add_done_callback(functools.partial(self._left, unit))
            return
        self._nowhere = True
        self._tiers.warn_full(unit.nbytes)

    def _left(self, unit: Unit, future: Future[int]) -> None:
        """A write ended, in a worker thread, or was called off."""
        self._spent.clear()
        try:
            if future.cancelled():
                pass  # by one who holds the lock
            elif self.interrupted:
                self._core.wake()
            else:
                self._arrived(unit, future.exception())
        finally:
            self._core.writes.end(future)

    def _arrived(self, unit: Unit, error: BaseException | None) -> None:
        """Books what a tier has now. Bytes that did not arrive take the next tier, or stay."""
        mover = self._mover_for(unit.device)
        with self._lock, self._books:
            self._bury()
            if error is None:
                self._ledger.wrote(unit)
                mover.stored(unit)
                self._cascade.rests(unit)
                if mover.vacates_when_stored:
                    self.vacate(unit)
            else:
                self._refuse(unit, mover, error)
            self._changed.notify_all()
        mover.settle(unit.nbytes)

    def _refuse(self, unit: Unit, mover: Mover, error: BaseException) -> None:
        assert unit.tier is not None
        emptied = getattr(error, "errno", None) == errno.EFAULT  # by the program, which will fill it again
        _log.log(
            logging.DEBUG if emptied else logging.WARNING,
            "%s tier: writing %d bytes failed (%s); they take the next tier, or stay where they are",
            unit.tier.name,
            unit.nbytes,
            error,
        )
        unit.refused += (unit.tier.name,)
        if unit.lease is not None:
            unit.tier.free(unit.lease)
        unit.lease = unit.future = None
        if unit.state is not State.AWAY:
            mover.unstage(unit)
        if unit.state is State.LEAVING:
            self._stay(unit)
            self._staying[id(unit)] = unit
            self._staying.move_to_end(id(unit), last=False)
            self._staying_bytes += unit.nbytes

    def _stay(self, unit: Unit) -> None:
        unit.state = State.RESIDENT
        self._leaving_bytes -= unit.nbytes

    def vacate(self, unit: Unit) -> None:
        """Lets go of device memory whose bytes are safe elsewhere. The lock is held."""
        if unit.state is not State.LEAVING:
            return
        self._stay(unit)
        if not unit.retained and unit.intact():
            unit.state = State.AWAY
            body = unit.body()
            if body is not None:
                body.source = None
            self._ledger.occupy(-unit.nbytes)

    def wait_for_room(self, nbytes: int) -> None:
        """Waits until `nbytes` more may be in flight; one unit always may."""
        with self._lock, self._books:
            self._bury()
            if not self._fits(nbytes):
                started = time.perf_counter()
                self._changed.wait_for(lambda: self._fits(nbytes))
                self._ledger.counters.stall_seconds += time.perf_counter() - started

    def _fits(self, nbytes: int) -> bool:
        return self._core.stopped or not self._leaving_bytes or self._leaving_bytes + nbytes <= self.window

    def vacate_while(self, nbytes: int, oldest: Callable[[], Unit | None]) -> None:
        """Vacates the units that `oldest` gives, until `nbytes` more may be in flight."""
        with self._lock, self._books:
            self._bury()
            while not self._fits(nbytes):
                unit = oldest()
                if unit is None:
                    return
                self._mover_for(unit.device).release(unit)
                self.vacate(unit)

    # Coming back

    def fetch(self, handle: SavedHandle) -> Tensor:
        """Returns the view a handle stands for.

        Raises:
            TierIOError: The tier lost the bytes.
            CorruptionError: They came back different.
            SessionClosedError: The session was closed while a graph still needed them.
        """
        unit = handle.unit
        mover = self._mover_for(unit.device)
        arrival: Arrival | None = None
        source: Tensor | None = None
        if self.interrupted:
            return self._fetch_at_once(handle)
        self._watch(handle)
        while arrival is None and source is None:
            with self._lock, self._books:
                self._bury()
                source = unit.source
                if source is not None:
                    self._forward(unit)
                else:
                    arrival = self._arrival(unit)
                if source is not None or arrival is not None:
                    self._prefetch.run(handle.step)
            if source is None and arrival is None:
                mover.wait_for_staging(unit.nbytes)
        if arrival is not None:
            self._land(unit, arrival, mover)
            base, shift = arrival.base, arrival.shift
        else:
            assert source is not None
            base, shift = source, unit.source_shift
            if unit.checksum is not None:
                self._check(unit, base, shift)
        tensor = rebuild(handle.view, base, shift, unit)
        with self._lock, self._books:
            self._bury()
            self._seen(handle)
        if arrival is not None:
            mover.settle(unit.nbytes)
        return tensor

    def _fetch_at_once(self, handle: SavedHandle) -> Tensor:
        """Returns the view without the books' help, if its bytes are on the device."""
        source = handle.body.source
        if source is None:
            raise SessionClosedError("the step was interrupted, and its saved bytes are lost; run its forward again")
        return rebuild(handle.view, source, handle.unit.source_shift, handle.unit)

    def new_scope(self) -> None:
        """A forward or a backward begins: bytes that autograd does not watch may have been edited since the last."""
        self._scope = next(self._scopes)

    def _watch(self, handle: SavedHandle) -> None:
        """Notes how far backward has come; the step ends when the backward that reached it has ended."""
        step = handle.step
        with self._lock, self._books:
            self._bury()
            self._regions.unpacked(step)
            starts = step.reached(handle.index, torch._C._current_graph_task_id())
            if step.pilot is not None:
                if starts:
                    step.pilot.restart()
                self._let_go(step, step.pilot.turns())
                step.pilot.used(handle.index, step.number(handle.unit))
        if starts:
            self.new_scope()
            Variable._execution_engine.queue_callback(lambda: self._backward_ended(step))

    def _backward_ended(self, step: Step) -> None:
        with self._lock, self._books:
            self._bury()
            if step.pilot is not None:
                step.pilot.ends()
            self._end(step)
            device = step.order[-1].device if step.order else None
        if device is not None:
            self._mover_for(device).settle(0)

    def _forward(self, unit: Unit) -> None:
        """Backward takes bytes that are still on the device; a write that has not begun is called off."""
        self._prefetch.used(unit)
        if unit.future is not None:  # on its way, or written after prefetch had kept the device copy
            self._ledger.used(unit, Outcome.FORWARDED)
        if unit.state is State.LEAVING:
            self._retain(unit)

    def _retain(self, unit: Unit) -> None:
        """Keeps the device copy of a leaving unit for backward."""
        assert unit.tier is not None
        unit.retained = True
        if unit.future is not None and unit.future.cancel():
            self._mover_for(unit.device).unstage(unit)
            unit.tier.free(unit.lease)
            unit.lease = unit.future = unit.outcome = None
            self._stay(unit)
            self._changed.notify_all()

    def _arrival(self, unit: Unit) -> Arrival | None:
        """Returns bytes that are back, or on their way; starts the way if need be, None without staging room."""
        arrival, mover = unit.arrival, self._mover_for(unit.device)
        if arrival is not None and arrival.unedited():
            return arrival
        self._drop_arrival(unit, mover)
        self._cascade.call_off(unit)
        if self.closed:
            raise SessionClosedError(
                "the offload session was closed while a graph still needed its bytes; "
                "run backward before session.close()"
            )
        try:
            unit.arrival = arrival = mover.bring(unit)
        except (RuntimeError, OSError, MemoryError) as error:  # no memory
            self._books.expected = error
            raise
        if arrival is not None:
            self._ledger.used(unit, Outcome.READ)
            self._ledger.occupy(unit.nbytes)
        return arrival

    def _land(self, unit: Unit, arrival: Arrival, mover: Mover) -> None:
        started = time.perf_counter()
        try:
            mover.land(arrival)
            if unit.checksum is not None and not arrival.verified:
                self._check(unit, arrival.base, arrival.shift)
                arrival.verified = True
        except CancelledError:
            raise SessionClosedError("the offload session was closed while backward read its bytes") from None
        except Exception:
            with self._lock, self._books:
                self._bury()
                if unit.arrival is arrival:
                    self._drop_arrival(unit, mover)
            raise
        waited = time.perf_counter() - started
        with self._lock, self._books:
            self._bury()
            self._ledger.counters.stall_seconds += waited

    def _check(self, unit: Unit, base: Tensor, shift: int) -> None:
        if not torch.equal(unit.checksum, checksum(base, unit.key.span.start + shift, unit.nbytes)):
            raise CorruptionError(
                f"verify: {unit.nbytes} saved bytes changed between save and use. An edit that autograd cannot see "
                f"(tensor.data, a custom kernel) does this, and so does broken hardware"
            )

    def _seen(self, handle: SavedHandle) -> None:
        """One handle has its view. When all have, the copy that came back is no longer held here."""
        unit = handle.unit
        self._prefetch.used(unit)
        if handle.grave.turn != unit.turn:
            handle.grave.turn = unit.turn
            unit.seen += 1
        self._end_turn(unit)

    def _end_turn(self, unit: Unit) -> None:
        if unit.seen and unit.seen >= unit.handles:
            unit.turn += 1
            unit.seen = 0
            self._drop_arrival(unit, self._mover_for(unit.device))

    def _drop_arrival(self, unit: Unit, mover: Mover) -> None:
        if unit.arrival is not None:
            self._prefetch.used(unit)
            mover.abandon(unit.arrival)
            unit.arrival = None
            self._ledger.occupy(-unit.nbytes)

    # The end of things

    def bury_later(self, handle: SavedHandle) -> Grave:
        """Notes what will have to be done when the handle has died. The lock is held."""
        grave = Grave(handle, self._open_graves.append)
        grave.unit, grave.step, grave.turn = handle.unit, handle.step, -1
        self._graves.add(grave)
        return grave

    def settle(self) -> None:
        """Frees what handles that died needed. Everything the engine is asked to do begins with it."""
        with self._lock, self._books:
            self._bury()

    def _bury(self) -> None:
        while self._open_graves:
            grave = self._open_graves.popleft()
            if isinstance(grave, Grave) and not self.interrupted:
                self._graves.discard(grave)
                self._forget(grave.unit, grave.step, grave.turn)

    def _forget(self, unit: Unit, step: Step, turn: int) -> None:
        unit.handles -= 1
        step.alive -= 1
        if turn == unit.turn:
            unit.seen -= 1
        if not unit.handles:
            self._kill(unit)
        else:
            self._end_turn(unit)
        if not step.alive:
            self._end(step)
            step.clear()

    def _kill(self, unit: Unit) -> None:
        mover = self._mover_for(unit.device)
        if self._units.get(unit.key) is unit:
            del self._units[unit.key]
        if self._staying.pop(id(unit), None) is not None:
            self._staying_bytes -= unit.nbytes
        if unit.future is not None and unit.future.cancel():
            unit.future = None
        if unit.state is State.LEAVING:
            self._leaving_bytes -= unit.nbytes
        self._drop_arrival(unit, mover)
        self._prefetch.used(unit)
        if unit.state is not State.AWAY:
            self._ledger.occupy(-unit.nbytes)
        self._ledger.died(unit)
        unit.state = State.DEAD
        self._cascade.died(unit)
        mover.drop(unit)
        unit.lease = None
        self._spent.append(unit.storage)
        self._changed.notify_all()

    def _end(self, step: Step) -> None:
        if not step.ended:
            step.ended = True
            self._ledger.counters.steps += bool(step.order)
            self.gate.step_ended(step.eligible)
            self._cascade.step_ended()
            if not self._moved and not self._said_idle:
                self._said_idle = True
                self._say_idle(step.eligible)

    def _say_idle(self, eligible: int) -> None:
        if self._nowhere:
            _log.warning("nothing moved in the first step: no tier took what should have moved")
        elif eligible:
            why = self.gate.idle(eligible)
            self._said_idle = why is not None
            if why is not None:
                _log.warning(why)
        else:
            _log.warning("nothing moved in the first step: no saved tensor is as large as min_bytes and free to move")

    def stats(self, *, wait: bool) -> OffloadStats:
        if wait:
            self._core.writes.wait()
        with self._lock, self._books:
            self._bury()
            pinned = [self._tiers.pinned(), *(mover.pinned() for mover in self._mover_for)]
            here, asked = (sum(part) for part in zip(*pinned, strict=True))
            return self._ledger.freeze(self._tiers.modes(), (here, asked))

    def reset_stats(self) -> None:
        self._core.writes.wait()
        with self._lock, self._books:
            self._bury()
            self._ledger.reset()

    def close(self) -> None:
        """Ends all I/O and gives everything back. Bytes that a live graph still needs are lost; it will raise."""
        with self._lock, self._books:
            self._bury()
            if self.closed:
                return
            self._core.closed = True
            self._changed.notify_all()
        for mover in self._mover_for:
            mover.quiesce()
        self._tiers.close()
        for mover in self._mover_for:
            mover.quiesce()  # a reader may have started a last copy

    def stay_behind(self) -> None:
        """In a forked child: moves nothing more, and touches nothing that belongs to the parent."""
        self._core.closed = True
        self._core.renew_locks()
        self._lock, self._changed = self._core.lock, self._core.changed
