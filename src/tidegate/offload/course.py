"""The course of a step: which units leave, when their memory is let go, when they start to come back.

Pure data in and out. All times are seconds since the step's first save, on the clock of the device.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Course", "Lane", "Observed", "Timeline", "chart"]

_TRIES = 64
_SLACK = 0.0005
"""Seconds between the predicted end of a copy out and the moment that counts on it."""
_LEAD = 0.002
"""The same for a copy back: being late there stops the device."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A unit as a step showed it.

    Args:
        nbytes: Bytes.
        saved: When it was first saved.
        needed: When backward first needed it; infinite if it never did.
    """

    nbytes: int
    saved: float
    needed: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step in which nothing moved.

    Args:
        units: By first save.
        turned: When backward began.
        ended: When backward had ended.
        unpacked: (time, index of the save) of every use in backward, by time.
    """

    units: tuple[Observed, ...]
    turned: float
    ended: float
    unpacked: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """The way to a tier and back. Rates are bytes a second, of one direction at a time.

    Args:
        out: Rate at which device memory is freed.
        back: Rate at which bytes come back to the device.
        store: Rate at which a tier behind the copy takes the bytes; infinite when the copy itself stores them.
        load: Rate at which it gives them.
        depth: Bytes that may wait between the copy and the tier.
        capacity: Bytes that the way's end can hold.
    """

    out: float
    back: float
    store: float = math.inf
    load: float = math.inf
    depth: int = 1 << 62
    capacity: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Course:
    """What each unit of a step does, by its number in the step.

    Args:
        sizes: Bytes of every unit; a step that differs has left the course.
        leaves: Whether the unit leaves when it is saved.
        released: By number of the unit saved last: units whose copies are over by then.
        last: Units whose memory is let go when forward has ended.
        reads: Units in the order in which their ways back begin, each with the index of a save: it begins when backward
            has come down to it.
        moved: Bytes that leave.
        early: The most bytes that are back before they are needed, at one moment.
    """

    sizes: tuple[int, ...]
    leaves: tuple[bool, ...]
    released: dict[int, tuple[int, ...]]
    last: tuple[int, ...]
    reads: tuple[tuple[int, int], ...]
    moved: int
    early: int


def chart(timeline: Timeline, lane: Lane, *, smallest: int = 1) -> Course:
    """Chooses as many bytes as the lane hides behind the step's own work, those that are needed last first.

    A unit's copy starts when it is saved or when the copies before it are over, and ends before backward begins; its
    way back starts as late as it can and ends before it is needed. What does not fit stays.

    Args:
        timeline: A step in which nothing moved.
        lane: The way.
        smallest: Units of fewer bytes stay.
    """
    order = sorted(
        (number for number, unit in enumerate(timeline.units) if unit.nbytes >= smallest and unit.needed > unit.saved),
        key=lambda number: (timeline.units[number].saved - timeline.units[number].needed, number),
    )
    chosen = _fitting(timeline, lane, _longest(timeline, lane, order))
    taken = set(chosen)
    tries = 0
    for number in order:
        if number in taken:
            continue
        if tries == _TRIES:
            break
        tries += 1
        more = sorted((*chosen, number))
        if _feasible(timeline, lane, more):
            chosen = more
            taken.add(number)
    return _course(timeline, lane, chosen)


def _longest(timeline: Timeline, lane: Lane, order: Sequence[int]) -> list[int]:
    """As many bytes as the lane could carry out at most, in order of lifetime; then by number."""
    room = min(lane.capacity, int(timeline.turned * lane.out))
    some: list[int] = []
    for number in order:
        nbytes = timeline.units[number].nbytes
        if nbytes <= room:
            some.append(number)
            room -= nbytes
    return sorted(some)


def _fitting(timeline: Timeline, lane: Lane, numbers: list[int]) -> list[int]:
    """Drops what does not fit, until the rest is feasible: first what ends too late on its way out."""
    free_at, fits = 0.0, []
    for number in numbers:
        unit = timeline.units[number]
        ends = max(free_at, unit.saved) + unit.nbytes / lane.out
        if ends + _SLACK <= timeline.turned:
            free_at = ends
            fits.append(number)
    low, high = 0, len(fits)
    by_need = sorted(fits, key=lambda number: -timeline.units[number].needed)
    while low < high:  # the largest number of units, needed last, that can come back in time
        middle = (low + high + 1) // 2
        if _feasible(timeline, lane, sorted(by_need[:middle])):
            low = middle
        else:
            high = middle - 1
    return sorted(by_need[:low])


def _feasible(timeline: Timeline, lane: Lane, numbers: Sequence[int]) -> bool:
    if not numbers:
        return True
    units = timeline.units
    if sum(units[number].nbytes for number in numbers) > lane.capacity:
        return False
    ends = _ends_out(timeline, lane, numbers)
    if ends is None or max(copied for copied, _ in ends) + _SLACK > timeline.turned:
        return False
    starts = _starts_back(timeline, lane, numbers)
    first = min(starts.values())
    # A disk serves one direction at a time.
    return first >= timeline.turned and (lane.store == math.inf or first >= max(stored for _, stored in ends))


def _ends_out(timeline: Timeline, lane: Lane, numbers: Sequence[int]) -> list[tuple[float, float]] | None:
    """When each unit is copied and stored; None when the copy would have to wait for room between the two."""
    copied = stored = 0.0
    ends: list[tuple[float, float]] = []
    waiting: list[tuple[float, int]] = []
    for number in numbers:
        unit = timeline.units[number]
        begins = max(copied, unit.saved)
        if sum(nbytes for end, nbytes in waiting if end > begins) + unit.nbytes > lane.depth:
            return None
        copied = begins + unit.nbytes / lane.out
        stored = max(stored, copied) + (0.0 if lane.store == math.inf else unit.nbytes / lane.store)
        if lane.depth < 1 << 62:
            waiting = [entry for entry in waiting if entry[0] > begins]
            waiting.append((stored, unit.nbytes))
        ends.append((copied, stored))
    return ends


def _starts_back(timeline: Timeline, lane: Lane, numbers: Sequence[int]) -> dict[int, float]:
    """The latest moment at which each way back may begin. Units that are never needed have none."""
    rate = min(lane.back, lane.load)
    starts: dict[int, float] = {}
    next_start = math.inf
    for number in sorted(numbers, key=lambda number: -timeline.units[number].needed):
        unit = timeline.units[number]
        if unit.needed == math.inf:
            starts[number] = math.inf
            continue
        next_start = min(unit.needed - _LEAD, next_start) - unit.nbytes / rate
        starts[number] = next_start
    return starts


def _course(timeline: Timeline, lane: Lane, numbers: Sequence[int]) -> Course:
    units = timeline.units
    leaves = [False] * len(units)
    released: dict[int, tuple[int, ...]] = {}
    last: list[int] = []
    saves = [unit.saved for unit in units]
    ends = _ends_out(timeline, lane, numbers) or []
    for number, (copied, _) in zip(numbers, ends, strict=True):
        leaves[number] = True
        at = bisect.bisect_left(saves, copied + _SLACK)
        if at < len(units):
            released[at] = (*released.get(at, ()), number)
        else:
            last.append(number)
    starts = _starts_back(timeline, lane, numbers)
    times, indices = _lows(timeline)
    return Course(
        sizes=tuple(unit.nbytes for unit in units),
        leaves=tuple(leaves),
        released=released,
        last=tuple(last),
        reads=tuple(
            (number, indices[max(0, bisect.bisect_right(times, start) - 1)])
            for number, start in sorted(starts.items(), key=lambda entry: entry[1])
            if start < math.inf
        ),
        moved=sum(units[number].nbytes for number in numbers),
        early=_most_early(timeline, starts),
    )


def _lows(timeline: Timeline) -> tuple[list[float], list[int]]:
    """When backward first came down to each new lowest index of a save."""
    times: list[float] = []
    indices: list[int] = []
    for time, index in timeline.unpacked:
        if not indices or index < indices[-1]:
            times.append(time)
            indices.append(index)
    return times, indices


def _most_early(timeline: Timeline, starts: dict[int, float]) -> int:
    """The most bytes that are on their way back, or back and not needed yet, at one moment."""
    changes: list[tuple[float, int]] = []
    for number, start in starts.items():
        if start < math.inf:
            unit = timeline.units[number]
            changes += [(start, unit.nbytes), (unit.needed, -unit.nbytes)]
    held = most = 0
    for _, nbytes in sorted(changes):
        held += nbytes
        most = max(most, held)
    return most
