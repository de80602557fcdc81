"""Courses: what leaves is hidden, what must come back in time does, and nothing moves that cannot."""

from __future__ import annotations

import math
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.offload.course import Course, Lane, Observed, Timeline, chart

MB = 1_000_000
GB = 1_000 * MB


def step(sizes: list[int], forward: float, backward: float) -> Timeline:
    """Units saved evenly over the forward and needed in reverse order, evenly over the backward."""
    count = len(sizes)
    saved = [forward * index / count for index in range(count)]
    needed = [forward + backward * (count - index) / count for index in range(count)]
    units = tuple(Observed(size, *times) for size, *times in zip(sizes, saved, needed, strict=True))
    unpacked = tuple((time, index) for index, time in reversed(list(enumerate(needed))))
    return Timeline(units, forward, forward + backward, unpacked)


def gone(course: Course) -> list[int]:
    return [number for number, leaves in enumerate(course.leaves) if leaves]


def test_a_link_carries_what_the_forward_lasts_for_the_oldest_first() -> None:
    timeline = step([256 * MB] * 64, forward=0.2, backward=0.4)  # 16 GB
    course = chart(timeline, Lane(out=50 * GB, back=50 * GB))
    assert gone(course) == list(range(len(gone(course))))
    assert 0.9 * 10 * GB < course.moved <= 10 * GB


def test_all_leaves_when_the_link_is_fast_but_for_the_tail() -> None:
    timeline = step([MB] * 100, forward=1.0, backward=2.0)
    course = chart(timeline, Lane(out=50 * GB, back=50 * GB))
    assert 95 <= len(gone(course)) <= 100


def test_nothing_moves_when_the_link_is_too_slow() -> None:
    course = chart(step([MB] * 10, forward=0.001, backward=0.002), Lane(out=100 * MB, back=100 * MB))
    assert course.moved == 0
    assert not course.released
    assert not course.last


def test_a_large_unit_that_does_not_fit_makes_room_for_small_ones() -> None:
    course = chart(step([900 * MB, 90 * MB, 90 * MB, 90 * MB], 0.1, 0.2), Lane(out=3 * GB, back=3 * GB))
    assert not course.leaves[0]
    assert course.moved >= 180 * MB


def test_small_units_stay() -> None:
    course = chart(step([10 * MB, 1, 10 * MB], 1.0, 2.0), Lane(out=GB, back=GB), smallest=2)
    assert not course.leaves[1]


def test_capacity_bounds_what_leaves() -> None:
    course = chart(step([10 * MB] * 10, 1.0, 2.0), Lane(out=GB, back=GB, capacity=35 * MB))
    assert course.moved == 30 * MB


def test_a_disk_behind_the_link_serves_one_direction_at_a_time() -> None:
    timeline = step([16 * MB] * 64, forward=0.2, backward=0.4)
    lane = Lane(out=50 * GB, back=50 * GB, store=2.5 * GB, load=1.8 * GB, depth=4 * GB)
    course = chart(timeline, lane)
    assert course.moved / lane.store + course.moved / lane.load <= timeline.ended
    assert course.moved >= 0.8 * min(0.2 * lane.store, 0.4 * lane.load)


def test_nothing_waits_for_room_between_copy_and_disk() -> None:
    timeline = step([16 * MB] * 64, forward=0.2, backward=0.4)
    course = chart(timeline, Lane(out=50 * GB, back=50 * GB, store=GB, load=GB, depth=40 * MB))
    assert 0 < course.moved <= 0.2 * GB + 40 * MB


def test_what_comes_back_starts_late_but_not_too_late() -> None:
    """Kept groups are not crowded out by early arrivals."""
    timeline = step([256 * MB] * 64, forward=0.2, backward=0.4)
    course = chart(timeline, Lane(out=50 * GB, back=50 * GB))
    first_needed = max(gone(course))
    assert first_needed < dict(course.reads)[first_needed] < first_needed + 20
    assert course.early < 0.25 * course.moved


def test_a_slow_way_back_starts_earlier() -> None:
    timeline = step([256 * MB] * 64, forward=0.2, backward=0.4)
    lanes = [Lane(out=20 * GB, back=back * GB) for back in (40, 20)]
    fast, slow = (chart(timeline, lane) for lane in lanes)
    assert dict(slow.reads)[0] >= dict(fast.reads)[0]
    assert slow.early >= fast.early


def test_units_that_backward_never_needs_may_leave() -> None:
    units = (Observed(MB, 0.0, math.inf), Observed(MB, 0.5, 1.5))
    course = chart(Timeline(units, 1.0, 2.0, ((1.5, 1),)), Lane(out=GB, back=GB))
    assert course.leaves == (True, True)
    assert [number for number, _ in course.reads] == [1]


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    count = draw(st.integers(1, 40))
    gaps = draw(st.lists(st.floats(0, 0.02), min_size=count, max_size=count))
    saved = [sum(gaps[: index + 1]) for index in range(count)]
    turned = saved[-1] + draw(st.floats(0, 0.1))
    ended = turned + draw(st.floats(0.001, 1))
    sizes = draw(st.lists(st.integers(1, 500 * MB), min_size=count, max_size=count))
    needed = draw(st.lists(st.floats(turned, ended) | st.just(math.inf), min_size=count, max_size=count))
    units = tuple(map(Observed, sizes, saved, needed))
    unpacked = tuple(sorted((time, index) for index, time in enumerate(needed) if time < math.inf))
    return Timeline(units, turned, ended, unpacked)


rates = st.floats(1e6, 1e11)


@given(timelines(), rates, rates, st.none() | st.tuples(rates, rates, st.integers(1, GB)), st.integers(0, 2 * GB))
def test_every_course_is_hidden(
    timeline: Timeline, out: float, back: float, disk: tuple[float, float, int] | None, capacity: int
) -> None:
    store, load, depth = disk or (math.inf, math.inf, 1 << 62)
    lane = Lane(out, back, store, load, depth, capacity)
    course = chart(timeline, lane)
    assert course.sizes == tuple(unit.nbytes for unit in timeline.units)
    moved = gone(course)
    assert course.moved == sum(course.sizes[number] for number in moved) <= capacity
    free_at = stored = 0.0
    for number in moved:  # a queue of copies, replayed
        unit = timeline.units[number]
        free_at = max(free_at, unit.saved) + unit.nbytes / out
        stored = max(stored, free_at) + (unit.nbytes / store if disk else 0)
        assert free_at <= timeline.turned
        point = next((at for at, numbers in course.released.items() if number in numbers), None)
        if point is None:
            assert number in course.last
        else:
            assert timeline.units[point].saved >= free_at
    returns = sorted(
        (unit.needed, unit.nbytes) for unit in (timeline.units[n] for n in moved) if unit.needed < math.inf
    )
    begin = max(timeline.turned, stored)
    for needed, nbytes in returns:  # the way back, begun at once, is in time
        begin += nbytes / min(back, load)
        assert begin <= needed + 1e-9
    assert sorted([*course.last, *(n for numbers in course.released.values() for n in numbers)]) == moved


@given(timelines(), rates, rates)
def test_more_bandwidth_never_moves_less_by_much(timeline: Timeline, out: float, back: float) -> None:
    slow, fast = (chart(timeline, Lane(out * factor, back * factor)).moved for factor in (1, 4))
    largest = max(unit.nbytes for unit in timeline.units)
    assert fast >= slow - largest


def test_thousands_of_units_are_charted_quickly() -> None:
    timeline = step([MB] * 3000, forward=1.0, backward=2.0)
    started = time.perf_counter()
    chart(timeline, Lane(out=2 * GB, back=2 * GB))
    assert time.perf_counter() - started < 5


def test_reads_are_ordered_by_need() -> None:
    course = chart(step([MB] * 50, 0.1, 0.2), Lane(out=GB, back=GB))
    assert [number for number, _ in course.reads] == sorted(gone(course), reverse=True)
    indices = [index for _, index in course.reads]
    assert all(earlier >= later for earlier, later in pairwise(indices))


def test_what_is_needed_at_once_in_another_order_is_read_in_the_order_of_need() -> None:
    """An attention's large inputs come before its small output, which was saved after them and starts later."""
    units = (Observed(400 * MB, 0.0, 1.5), Observed(MB, 0.5, 1.5001))
    course = chart(Timeline(units, 1.0, 2.0, ((1.0, 9), (1.45, 8), (1.5, 0), (1.5001, 1))), Lane(out=GB, back=GB))
    assert course.reads == ((0, 9), (1, 8))


@pytest.mark.parametrize("count", [0, 1])
def test_steps_of_hardly_anything(count: int) -> None:
    course = chart(step([MB] * count, 0.1, 0.2), Lane(out=GB, back=GB))
    assert course.moved == count * MB
