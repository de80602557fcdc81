"""The cascade: host RAM as a write-behind cache of the disk.

Bytes leave the device for the host tier. While it fills, those that backward needs last go on to the disk, behind the
training's back, and their place is free for newer ones: what is needed first is nearest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tidegate.offload.unit import Unit
from tidegate.tiers.host import HostLease, HostTier
from tidegate.tiers.tier import Tier

__all__ = ["Cascade", "Onward"]

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


class Cascade:
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
    def of(tiers: tuple[Tier, ...]) -> Cascade | None:
        """The cascade of tiers in order of preference, if they make one."""
        if len(tiers) == 2 and isinstance(tiers[0], HostTier) and not isinstance(tiers[1], HostTier):
            return Cascade(tiers[0], tiers[1])
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
