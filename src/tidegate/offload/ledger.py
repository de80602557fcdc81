"""Accounts for every byte a unit moves: written = read + forwarded + dropped + demoted + pending, per tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from tidegate.errors import TidegateError
from tidegate.offload.stats import Counters, OffloadStats
from tidegate.offload.unit import Outcome, Unit
from tidegate.tiers.tier import Tier

__all__ = ["Books", "Ledger"]


class Ledger:
    """Books of one engine; the engine's lock guards it."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.resident = 0
        self._epoch = 0
        self._pending: defaultdict[str, int] = defaultdict(int)

    def occupy(self, nbytes: int) -> None:
        """Saved bytes appear on the device (or, negative, disappear)."""
        self.resident += nbytes
        self.counters.peak_resident = max(self.counters.peak_resident, self.resident)

    def wrote(self, unit: Unit) -> None:
        """The unit's bytes reached its tier."""
        name = self._tier(unit)
        unit.written_epoch = self._epoch
        self.counters.written[name] += unit.nbytes
        if unit.outcome is None:
            self._pending[name] += unit.nbytes
        else:
            self._count(unit, unit.outcome)

    def went_on(self, unit: Unit, tier: Tier) -> None:
        """The unit's bytes moved from its tier to `tier`; nobody has used them yet."""
        name = self._tier(unit)
        if unit.written_epoch == self._epoch:
            self._pending[name] -= unit.nbytes
            self.counters.demoted[name] += unit.nbytes
        unit.written_epoch = self._epoch
        self.counters.written[tier.name] += unit.nbytes
        self._pending[tier.name] += unit.nbytes

    def went_on_in_vain(self, unit: Unit, tier: Tier) -> None:
        """The unit's bytes reached `tier`, too, when they were no longer needed there."""
        self.counters.written[tier.name] += unit.nbytes
        self.counters.dropped[tier.name] += unit.nbytes

    def used(self, unit: Unit, outcome: Outcome) -> None:
        """Backward took the unit's bytes, or nothing ever will; the first use decides."""
        if unit.outcome is not None:
            if outcome is Outcome.READ:
                self.counters.reread[self._tier(unit)] += unit.nbytes
            return
        unit.outcome = outcome
        if unit.written_epoch == self._epoch:
            self._pending[self._tier(unit)] -= unit.nbytes
            self._count(unit, outcome)

    def died(self, unit: Unit) -> None:
        """The last handle is gone."""
        if unit.future is None and unit.written_epoch is None:
            self.counters.kept += unit.nbytes
        self.used(unit, Outcome.DROPPED)

    def reset(self) -> None:
        """Starts new books; units written before it no longer count."""
        self._epoch += 1
        self._pending.clear()
        self.counters = Counters()
        self.counters.peak_resident = self.resident

    def freeze(self, modes: Mapping[str, str], pinned: tuple[int, int] = (0, 0)) -> OffloadStats:
        """The books as they stand.

        Args:
            modes: What each tier runs.
            pinned: Bytes of host memory that are page-locked, and the most that were asked for at once.
        """
        return self.counters.freeze(resident=self.resident, pending=self._pending, modes=modes, pinned=pinned)

    def _count(self, unit: Unit, outcome: Outcome) -> None:
        books = {
            Outcome.READ: self.counters.read,
            Outcome.FORWARDED: self.counters.forwarded,
            Outcome.DROPPED: self.counters.dropped,
        }
        books[outcome][self._tier(unit)] += unit.nbytes

    @staticmethod
    def _tier(unit: Unit) -> str:
        assert unit.tier is not None
        return unit.tier.name


class Books:
    """Stretches of work on an engine's books. One that an exception cuts short leaves them in doubt.

    Args:
        interrupted: That has happened: a signal handler raised (Ctrl-C does), or there is a fault.
        expected: An exception that left the books in order, as our own do.
    """

    __slots__ = ("expected", "interrupted")

    def __init__(self) -> None:
        self.interrupted = False
        self.expected: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and error is not self.expected and not isinstance(error, TidegateError):
            self.interrupted = True
        self.expected = None
