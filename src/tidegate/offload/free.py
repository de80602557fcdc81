"""`device_budget="free"`: as little device memory as costs no time.

For every first size of a step the first step warms up, the next ones are measured with everything kept, and later ones
follow a course that hides every copy behind the step's own work. Steps that got slower all the same move less.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidegate.offload.course import Course, Lane, Observed, Timeline, chart
from tidegate.offload.gate import Gate
from tidegate.sizes import format_size

__all__ = ["Clock", "FreeGate", "Pilot"]

_log = logging.getLogger("tidegate")

_WARM_UP = 1
_MEASURED = 2
_SIZES = 16
"""Sizes of steps whose courses are remembered."""
_SLOWER = 1.025
"""A step that takes longer than this, times its measured time, moves too much."""
_JUDGED = 5
"""Steps on a course whose median is judged."""
_LESS = 0.85
"""Share of its bytes that move after such a judgement."""
_LEAST = 0.3
"""Under this share of the first course's bytes nothing moves any more."""
_CARE = 0.95
"""Share of a measured rate that a course counts on."""
_STRAYS = 3
"""Steps in a row that left their course, after which their size has none."""
_DRIFT = 0.05
"""Change of a rate that makes a new course."""


class Clock(Protocol):
    """Time on a device, in stream order."""

    def stamp(self) -> Any: ...

    def passed(self, stamp: Any) -> bool: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def watch_rates(self, on: bool) -> None: ...

    def rates(self) -> tuple[float | None, float | None]: ...


@dataclass(slots=True, eq=False)
class Pilot:
    """Steers and observes one step; the engine's lock guards it.

    Args:
        clock: The device's.
        course: What its units do; None while a step is measured, or after it has left its course.
        observing: Whether every save and use is timed.
    """

    clock: Clock
    course: Course | None
    observing: bool
    start: Any = None
    ended: Any = None
    acted: bool = False
    deviated: bool = False
    _turned: bool = False
    _read: int = 0
    _count: int = 0
    _saved: list[tuple[int, Any]] = field(default_factory=list)
    _used: list[tuple[Any, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.clock.stamp()
        self.acted = self.course is not None

    def saved(self, nbytes: int) -> bool:
        """The step's next unit is saved; returns whether it leaves."""
        number = self._count
        self._count += 1
        if self.observing:
            self._saved.append((nbytes, self.clock.stamp() if number else self.start))
        course = self.course
        if course is None:
            return False
        if number >= len(course.sizes) or course.sizes[number] != nbytes:
            self.course, self.deviated = None, True
            return False
        return course.leaves[number]

    def over(self) -> Sequence[int]:
        """Numbers of the units whose copies are over by the save that was just made."""
        return () if self.course is None else self.course.released.get(self._count - 1, ())

    def turns(self) -> Sequence[int]:
        """Forward has ended, or backward begins: numbers of the units whose memory goes now."""
        if self.course is None or self._turned:
            return ()
        self._turned = True
        return self.course.last

    @property
    def complete(self) -> bool:
        """Whether every unit of the course was saved."""
        return self.course is not None and self._count == len(self.course.sizes)

    def restart(self) -> None:
        """A backward begins."""
        self._read = 0

    def next_read(self, lowest: int) -> int | None:
        """Number of the unit whose way back begins, now that backward has come down to the save `lowest`."""
        reads = () if self.course is None else self.course.reads
        if self._read == len(reads) or lowest > reads[self._read][1]:
            return None
        return reads[self._read][0]

    def begun(self) -> None:
        """The way back that was next has begun, or is not needed."""
        self._read += 1

    def used(self, index: int, number: int) -> None:
        """Backward uses the save at `index`, of the unit with this number."""
        if self.observing and self.ended is None:
            self._used.append((self.clock.stamp(), index, number))

    def ends(self) -> None:
        """Backward has ended."""
        if self.ended is None:
            self.ended = self.clock.stamp()
            self.deviated |= self.course is not None and not self.complete

    def readable(self) -> bool:
        """Whether all its moments are over. They may lie on several streams."""
        if self.ended is None:
            return False
        stamps = [self.start, self.ended, *(stamp for _, stamp in self._saved), *(use[0] for use in self._used)]
        return all(self.clock.passed(stamp) for stamp in stamps)

    def total(self) -> float:
        """Seconds of the step."""
        return self.clock.seconds(self.start, self.ended)

    def timeline(self) -> Timeline:
        """What an observed step showed."""
        uses = [(self.clock.seconds(self.start, stamp), index, number) for stamp, index, number in self._used]
        needed: dict[int, float] = {}
        for time, _, number in uses:
            needed.setdefault(number, time)
        ended = self.total()
        return Timeline(
            units=tuple(
                Observed(nbytes, self.clock.seconds(self.start, stamp), needed.get(number, math.inf))
                for number, (nbytes, stamp) in enumerate(self._saved)
            ),
            turned=uses[0][0] if uses else ended,
            ended=ended,
            unpacked=tuple((time, index) for time, index, _ in uses),
        )


@dataclass(slots=True, eq=False)
class _Size:
    """What is known of the steps that begin with a unit of one size."""

    seen: int = 0
    course: Course | None = None
    limit: int = 1 << 62
    most: int = 0
    given_up: bool = False
    strays: int = 0
    pending: deque[Pilot] = field(default_factory=lambda: deque(maxlen=2 * _JUDGED))
    timelines: list[Timeline] = field(default_factory=list)
    judged: deque[float] = field(default_factory=lambda: deque(maxlen=_JUDGED))

    @property
    def baseline(self) -> float:
        return statistics.median(timeline.ended for timeline in self.timelines)


class FreeGate:
    """Moves what costs no time, and more only when memory runs short.

    Args:
        lane: Measures the way to the tiers; asked once. None when there is no tier.
        safety: Decides what must leave all the same.
    """

    def __init__(self, lane: Callable[[], Lane | None], safety: Gate) -> None:
        self._ask_lane = lane
        self._safety = safety
        self._lane: Lane | None = None
        self._asked = False
        self._sizes: OrderedDict[tuple[Any, int], _Size] = OrderedDict()
        self._decided = False
        self._said: set[str] = set()

    def excess(self, resident: int, leaving: int, arrived: int) -> int:
        return self._safety.excess(resident, leaving, arrived)

    def step_ended(self, eligible: int) -> None:
        self._safety.step_ended(eligible)

    def pilot(self, nbytes: int, clock: Clock) -> Pilot:
        """Begins a step whose first unit has `nbytes`."""
        key = (clock, nbytes)
        size = self._sizes.setdefault(key, _Size())
        self._sizes.move_to_end(key)
        if len(self._sizes) > _SIZES:
            self._sizes.popitem(last=False)
        self._learn(size, clock)
        observing = size.course is None and not size.given_up and size.seen >= _WARM_UP
        size.seen += 1
        pilot = Pilot(clock, size.course if size.course is not None and size.course.moved else None, observing)
        size.pending.append(pilot)
        return pilot

    def idle(self, eligible: int) -> str | None:
        """Why nothing moved, once that is known."""
        if not self._decided:
            return None
        return (
            f"nothing moves: no copy of this step's {eligible} bytes of saved tensors could be hidden behind its own "
            f'work. device_budget="auto", bytes or a percentage move them at the cost of time'
        )

    def _learn(self, size: _Size, clock: Clock) -> None:
        """Reads the stamps of the steps that are over."""
        while size.pending and size.pending[0].readable():
            pilot = size.pending.popleft()
            if pilot.acted:
                self._judge(size, pilot, clock)
            elif pilot.observing and size.course is None:
                size.timelines = [*size.timelines, pilot.timeline()][-_MEASURED:]
                if len(size.timelines) == _MEASURED:
                    self._set_course(size)

    def _set_course(self, size: _Size) -> None:
        if not self._asked:
            self._asked = True
            self._lane = self._ask_lane()
        size.judged.clear()
        self._decided = True
        moved = 0 if size.course is None else size.course.moved
        first, second = size.timelines[0], size.timelines[-1]
        if self._lane is None or [u.nbytes for u in first.units] != [u.nbytes for u in second.units]:
            size.given_up = True
            if self._lane is not None:
                self._say_strays()
            return
        quicker = min(first, second, key=lambda timeline: timeline.ended)
        size.course = chart(quicker, self._careful(self._lane, size.limit))
        size.most = max(size.most, size.course.moved)
        for clock, _ in self._sizes:
            clock.watch_rates(True)
        if size.course.moved == moved:
            return
        _log.info(
            "device_budget=free: %s of %s saved in a step of %.0f ms leave it without cost",
            format_size(size.course.moved),
            format_size(sum(size.course.sizes)),
            1e3 * size.baseline,
        )

    def _careful(self, lane: Lane, limit: int) -> Lane:
        return dataclasses.replace(
            lane,
            out=lane.out * _CARE,
            back=lane.back * _CARE,
            store=lane.store * _CARE,
            load=lane.load * _CARE,
            capacity=min(lane.capacity, limit),
        )

    def _judge(self, size: _Size, pilot: Pilot, clock: Clock) -> None:
        """A step on a course is over."""
        if pilot.deviated:
            size.strays += 1
            if size.strays >= _STRAYS:
                self._say_strays()
                size.given_up, size.course = True, None
            return
        size.strays = 0
        if size.course is None:
            return
        size.judged.append(pilot.total())
        if self._update_rates(clock):
            self._set_course(size)
        elif len(size.judged) == _JUDGED and statistics.median(size.judged) > _SLOWER * size.baseline:
            size.limit = int(_LESS * size.course.moved)
            if size.limit < _LEAST * size.most:
                size.given_up, size.course = True, None
                _log.info("device_budget=free: steps stay slower than they were with everything kept; nothing moves")
            else:
                self._set_course(size)

    def _update_rates(self, clock: Clock) -> bool:
        """Takes over what the copies showed; returns whether that changes a course."""
        lane, (out, back) = self._lane, clock.rates()
        if lane is None:
            return False
        new = dataclasses.replace(lane, out=out or lane.out, back=back or lane.back)
        drift = max(abs(new.out / lane.out - 1), abs(new.back / lane.back - 1))
        if drift > _DRIFT:
            self._lane = new
        return drift > _DRIFT

    def _say_strays(self) -> None:
        if "strays" not in self._said:
            self._said.add("strays")
            _log.info(
                "device_budget=free: steps that begin alike save tensors of different sizes; what such a step saves "
                "after it has differed stays on the device"
            )
