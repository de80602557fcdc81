"""The cascade: host RAM as a write-behind cache of the disk.

Bytes leave the device for the host tier. While it fills, those that backward needs last go on to the disk, behind the
training's back, and their place is free for newer ones: what is needed first is nearest.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tidegate.offload.core import Core
from tidegate.offload.unit import State, Unit
from tidegate.tiers.host import HostLease, HostTier
from tidegate.tiers.tier import ALIGNMENT, Buffer, Tier

__all__ = ["Cascade", "Choice", "Onward"]

_log = logging.getLogger("tidegate")
_REFUSALS = 8
"""Units in a row that cannot go on, after which no more are tried: they are in the order of age."""

_FULL = 0.75
"""Share of the host tier above which bytes go on when it is not known how many will come."""
_USABLE = 0.95
"""Share of the host tier that is counted on when it is known: spans leave gaps."""


@dataclass(slots=True, eq=False)
class Onward:
    """A unit's way from the host tier to the disk tier.

    Args:
        source: Where the bytes are.
        lease: Where they go.
        future: The write.
    """

    source: HostLease
    lease: Any
    future: Future[int]


class Choice:
    """Chooses what goes on; the engine's lock guards it.

    Args:
        upper: The host tier.
        lower: The disk tier.
    """

    def __init__(self, upper: HostTier, lower: Tier) -> None:
        self.upper = upper
        self.lower = lower
        self.moving = 0
        self.arrived = 0
        self._resting: OrderedDict[int, Unit] = OrderedDict()
        self._asked = 0
        self._gone_on = 0
        self._expected: int | None = None

    @staticmethod
    def of(tiers: tuple[Tier, ...]) -> Choice | None:
        """The choice over tiers in order of preference, if they make a cascade."""
        if len(tiers) == 2 and isinstance(tiers[0], HostTier) and not isinstance(tiers[1], HostTier):
            return Choice(tiers[0], tiers[1])
        return None

    def asks(self, nbytes: int) -> None:
        """The step sends so many bytes more to the tiers."""
        self._asked += nbytes

    def rests(self, unit: Unit) -> None:
        """The unit's bytes are in the host tier."""
        self._resting[id(unit)] = unit

    def begins(self, unit: Unit) -> None:
        """The unit's bytes go on."""
        self._resting.pop(id(unit), None)
        self.moving += unit.nbytes
        self._gone_on += unit.nbytes

    def stops(self, unit: Unit) -> None:
        """They have arrived, or were called off: their place is free."""
        self.moving -= unit.nbytes
        self.arrived += 1

    def forget(self, unit: Unit) -> None:
        """The unit's bytes are no longer in the host tier, or must stay there."""
        self._resting.pop(id(unit), None)

    def step_ended(self) -> None:
        """The next step will ask for as much as this one."""
        if self._asked:
            self._expected = self._asked
        self._asked = self._gone_on = 0

    def due(self) -> Iterator[Unit]:
        """Units that should go on now, the oldest first."""
        for unit in tuple(self._resting.values()):
            if not self._overflows():
                return
            yield unit

    def oldest(self) -> Iterator[Unit]:
        """Units that could go on, the oldest first."""
        return iter(tuple(self._resting.values()))

    def _overflows(self) -> bool:
        if self._expected is not None and self._gone_on < self._expected - _USABLE * self.upper.capacity:
            return True
        if self._expected is not None and self._asked <= self._expected <= _USABLE * self.upper.capacity:
            return False
        return self.upper.used - self.moving > _FULL * self.upper.capacity


class Cascade:
    """Moves bytes of the host tier on to the disk tier.

    Args:
        core: What it shares with the engine.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._choice: Choice | None = None
        self._asked = False

    def flow(self, tiers: tuple[Tier, ...], nbytes: int) -> None:
        """So many bytes more go to the tiers: lets the oldest bytes of a filling host tier go on."""
        core = self._core
        with core.lock, core.books:
            if not self._asked:
                self._asked, self._choice = True, Choice.of(tiers)
            choice = self._choice
            if choice is None or core.closed:
                return
            choice.asks(nbytes)
            begun = self._begin(choice, choice.due())
        self._follow(begun)

    def make_room(self, tier: Tier, nbytes: int) -> bool:
        """Waits until bytes of a full host tier have gone on; False if that cannot help."""
        core, choice = self._core, self._choice
        if choice is None or tier is not choice.upper or nbytes > choice.upper.capacity:
            return False
        with core.lock, core.books:
            core.bury()
            begun = self._begin(choice, choice.oldest(), nbytes)
            before = choice.arrived
        self._follow(begun)
        with core.lock, core.books:
            if not choice.moving and choice.arrived == before:
                return False
            started = time.perf_counter()
            core.changed.wait_for(lambda: core.stopped or choice.arrived != before or not choice.moving)
            core.ledger.counters.stall_seconds += time.perf_counter() - started
            return not core.stopped and choice.arrived != before

    # The lock is held

    def rests(self, unit: Unit) -> None:
        """The unit's bytes have reached a tier."""
        if self._choice is not None and unit.tier is self._choice.upper and unit.state is not State.DEAD:
            self._choice.rests(unit)

    def call_off(self, unit: Unit) -> None:
        """The unit's bytes are about to be used: a way on that has not begun is not needed any more."""
        onward, choice = unit.onward, self._choice
        if onward is not None and choice is not None and onward.future.cancel():
            unit.onward = None
            choice.stops(unit)
            choice.lower.free(onward.lease)
            self._core.changed.notify_all()

    def died(self, unit: Unit) -> None:
        """The unit is dead. While its bytes go on all the same, who writes them frees what it reads."""
        if self._choice is not None:
            self._choice.forget(unit)
            self.call_off(unit)
        if unit.onward is not None:
            unit.lease = None

    def step_ended(self) -> None:
        if self._choice is not None:
            self._choice.step_ended()

    def _begin(self, choice: Choice, units: Iterable[Unit], enough: int | None = None) -> list[Unit]:
        begun: list[Unit] = []
        refusals = 0
        for unit in units:
            if refusals == _REFUSALS or (enough is not None and choice.moving >= enough):
                break
            if self._go_on(choice, unit):
                begun.append(unit)
            else:
                refusals += 1
        return begun

    def _go_on(self, choice: Choice, unit: Unit) -> bool:
        """Starts a unit's way on."""
        if unit.state is not State.AWAY or unit.arrival is not None or unit.outcome is not None:
            return False
        mover, source = self._core.movers(unit.device), unit.lease
        lease = choice.lower.reserve(unit.nbytes, source.address % ALIGNMENT) if mover.returns(unit.nbytes) else None
        if lease is None:
            return False
        after = mover.stored_by(unit)
        future = choice.lower.write(lease, Buffer(source.address, unit.nbytes, source), after=after)
        unit.onward = Onward(source, lease, future)
        choice.begins(unit)
        self._core.writes.begin(future)
        return True

    # It is not

    def _follow(self, begun: Sequence[Unit]) -> None:
        for unit in begun:
            onward = unit.onward
            if onward is not None:
                onward.future.add_done_callback(functools.partial(self._went_on, unit, onward))

    def _went_on(self, unit: Unit, onward: Onward, future: Future[int]) -> None:
        """A write ended, in a worker thread, or was called off."""
        core = self._core
        try:
            if future.cancelled():
                pass  # by one who holds the lock
            elif core.books.interrupted:
                core.wake()
            else:
                self._settle(unit, onward, future.exception())
        finally:
            core.writes.end(future)

    def _settle(self, unit: Unit, onward: Onward, error: BaseException | None) -> None:
        core, choice = self._core, self._choice
        assert choice is not None
        mover = core.movers(unit.device)
        with core.lock, core.books:
            core.bury()
            choice.stops(unit)
            unit.onward = None
            if error is not None:
                _log.warning("disk tier: writing %d bytes failed (%s); they stay in host RAM", unit.nbytes, error)
            alive = unit.state is not State.DEAD
            if error is None and alive and unit.outcome is None:
                core.ledger.went_on(unit, choice.lower)
                unit.tier, unit.lease = choice.lower, onward.lease
                mover.free(unit, choice.upper, onward.source)
            else:
                if error is None:
                    core.ledger.went_on_in_vain(unit, choice.lower)
                choice.lower.free(onward.lease)
                if not alive:
                    mover.free(unit, choice.upper, onward.source)
            core.changed.notify_all()
