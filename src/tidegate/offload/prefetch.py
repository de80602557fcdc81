"""Prefetch: what backward needs next starts to come back before it is needed."""

from __future__ import annotations

from collections.abc import Callable

from tidegate.offload.core import Core
from tidegate.offload.free import Pilot
from tidegate.offload.step import Step
from tidegate.offload.unit import Arrival, State, Unit

__all__ = ["Prefetch"]


class Prefetch:
    """Runs ahead of backward; the engine's lock guards it.

    Args:
        core: What it shares with the engine.
        bring: Starts bringing a unit back; None without staging room.
        retain: Keeps the device copy of a unit that is leaving.
        ahead: Gives the bytes that it may be ahead of backward's needs.
    """

    def __init__(
        self,
        core: Core,
        bring: Callable[[Unit], Arrival | None],
        retain: Callable[[Unit], None],
        ahead: Callable[[], int],
    ) -> None:
        self._core = core
        self._bring = bring
        self._retain = retain
        self._ahead = ahead
        self._claimed = 0

    def run(self, step: Step) -> None:
        """Starts what the step's course says is due, or what the window allows."""
        pilot = step.pilot
        if pilot is not None and pilot.course is not None:
            self._follow_course(step, pilot)
        else:
            self._fill_window(step, self._ahead())

    def used(self, unit: Unit) -> None:
        """The unit no longer waits on the device for its use."""
        if unit.claimed:
            unit.claimed = False
            self._claimed -= unit.nbytes

    def _follow_course(self, step: Step, pilot: Pilot) -> None:
        while (number := pilot.next_read(step.lowest)) is not None:
            if self._core.closed or not self._start(step.units[number]):
                return
            pilot.begun()

    def _fill_window(self, step: Step, ahead: int) -> None:
        while not self._core.closed:
            unit = step.next_needed()
            if unit is None or step.ahead() > ahead:  # what is kept in between is a distance, too
                return
            if self._claimed and self._claimed + unit.nbytes > ahead:
                return
            if unit.state is State.LEAVING and not unit.claimed:
                self._claim(unit)
                self._retain(unit)
            elif not self._start(unit):
                return
            step.cursor -= 1

    def _start(self, unit: Unit) -> bool:
        """Starts bringing a unit back if it is away; False if that cannot be done now."""
        if unit.state is State.AWAY and unit.arrival is None:
            try:
                if self._bring(unit) is None:
                    return False
            except (RuntimeError, OSError):  # no memory to run ahead with; what is needed now may still fit
                return False
            self._claim(unit)
        return True

    def _claim(self, unit: Unit) -> None:
        unit.claimed = True
        self._claimed += unit.nbytes
