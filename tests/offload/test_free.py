"""`device_budget="free"`: measure first, act later, move less when steps get slower, stay where nothing is hidden."""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.compare import Schedule, assert_nothing_left, assert_same, offloaded_run, plain_run
from tests.offload.toys import blocks, everything
from torch import nn

import tidegate
from tidegate.memory import probe
from tidegate.offload.course import Course, Lane
from tidegate.offload.free import Clock, FreeGate, Pilot
from tidegate.offload.gate import FixedGate

MiB = 1 << 20


@dataclass(eq=False)
class FakeClock:
    """A device whose time passes when the test says so."""

    now: float = 0.0
    late: float = 0.0
    measured: tuple[float | None, float | None] = (None, None)
    watching: list[bool] = field(default_factory=list)

    def stamp(self) -> float:
        return self.now

    def passed(self, stamp: float) -> bool:
        return self.now >= stamp + self.late

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def watch_rates(self, on: bool) -> None:
        self.watching.append(on)

    def rates(self) -> tuple[float | None, float | None]:
        return self.measured


class Lanes:
    def __init__(self, lane: Lane | None) -> None:
        self.lane = lane
        self.asked = 0

    def __call__(self) -> Lane | None:
        self.asked += 1
        return self.lane


def run(gate: FreeGate, clock: FakeClock, sizes: list[int], *, pace: float = 1.0) -> tuple[Pilot, int]:
    """One step that saves a unit every 10 ms and uses one every 20 ms; gives its pilot and the bytes that left."""
    pilot = gate.pilot(sizes[0], clock)
    moved = 0
    for size in sizes:
        moved += size * pilot.saved(size)
        pilot.over()
        clock.now += 0.01 * pace
    pilot.turns()
    for number in reversed(range(len(sizes))):
        pilot.used(number, number)
        clock.now += 0.02 * pace
    pilot.ends()
    return pilot, moved


def gate_over(lane: Lane | None) -> tuple[FreeGate, Lanes]:
    lanes = Lanes(lane)
    return FreeGate(lanes, FixedGate(1 << 60)), lanes


FAST = Lane(out=1e9, back=1e9)
SIZES = [MiB] * 20


def test_first_steps_measure_and_later_ones_act() -> None:
    (gate, lanes), clock = gate_over(FAST), FakeClock()
    moved = [run(gate, clock, SIZES)[1] for _ in range(6)]
    assert moved[:3] == [0, 0, 0]
    assert all(0.9 * sum(SIZES) < later < sum(SIZES) for later in moved[3:])
    assert lanes.asked == 1


def test_the_first_step_is_not_believed() -> None:
    (gate, _), clock = gate_over(FAST), FakeClock()
    run(gate, clock, SIZES, pace=50)
    for _ in range(3):
        run(gate, clock, SIZES)
    course = run(gate, clock, SIZES)[0].course
    assert course is not None


def test_nothing_moves_where_nothing_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    (gate, _), clock = gate_over(Lane(out=1e5, back=1e5)), FakeClock()
    assert gate.idle(1) is None
    assert [run(gate, clock, SIZES)[1] for _ in range(8)] == [0] * 8
    assert "could be hidden" in (gate.idle(1) or "")


def test_without_a_tier_nothing_moves() -> None:
    (gate, _), clock = gate_over(None), FakeClock()
    assert [run(gate, clock, SIZES)[1] for _ in range(8)] == [0] * 8


def test_every_size_has_a_course_of_its_own() -> None:
    (gate, lanes), clock = gate_over(FAST), FakeClock()
    for _ in range(5):
        run(gate, clock, SIZES)
        run(gate, clock, [2 * MiB] * 20)
    assert run(gate, clock, SIZES)[1] > 0
    assert run(gate, clock, [2 * MiB] * 20)[1] > 20 * MiB
    assert run(gate, clock, [3 * MiB] * 20)[1] == 0
    assert lanes.asked == 1


def test_a_step_that_differs_stays_on_the_device_from_there_on() -> None:
    (gate, _), clock = gate_over(FAST), FakeClock()
    for _ in range(4):
        run(gate, clock, SIZES)
    other = [MiB] * 5 + [7 * MiB] * 15
    assert run(gate, clock, other)[1] <= 5 * MiB
    assert run(gate, clock, SIZES)[1] > 15 * MiB  # one stray does not end a course
    for _ in range(4):
        run(gate, clock, other)
    assert run(gate, clock, SIZES)[1] == 0  # several in a row do


def test_steps_that_got_slower_move_less_and_then_nothing() -> None:
    (gate, _), clock = gate_over(FAST), FakeClock()
    for _ in range(3):
        run(gate, clock, SIZES)
    first = run(gate, clock, SIZES, pace=1.1)[1]
    amounts = [run(gate, clock, SIZES, pace=1.1)[1] for _ in range(60)]
    assert amounts == sorted(amounts, reverse=True)
    assert 0 < amounts[10] < first
    assert amounts[-1] == 0


def test_steps_as_fast_as_before_keep_their_course() -> None:
    (gate, _), clock = gate_over(FAST), FakeClock()
    amounts = [run(gate, clock, SIZES, pace=1.01 if index > 3 else 1)[1] for index in range(40)]
    assert len(set(amounts[3:])) == 1


def test_the_link_is_believed_as_it_is_seen() -> None:
    (gate, _), clock = gate_over(Lane(out=1e8, back=1e8)), FakeClock()
    for _ in range(3):
        run(gate, clock, SIZES)
    full = run(gate, clock, SIZES)[1]
    assert clock.watching == [True]
    clock.measured = (4e7, 4e7)
    run(gate, clock, SIZES)
    assert 0 < run(gate, clock, SIZES)[1] < full


def test_nobody_waits_for_stamps_that_are_not_over() -> None:
    (gate, _), clock = gate_over(FAST), FakeClock(late=1e9)
    assert [run(gate, clock, SIZES)[1] for _ in range(8)] == [0] * 8
    clock.late = 0
    run(gate, clock, SIZES)
    assert run(gate, clock, SIZES)[1] > 0


def test_steps_without_backward_are_not_learnt_from() -> None:
    (gate, _), clock = gate_over(FAST), FakeClock()
    for _ in range(40):
        gate.pilot(MiB, clock).saved(MiB)
    for _ in range(14):
        run(gate, clock, SIZES)
    assert run(gate, clock, SIZES)[1] > 0


def fast_disk(path: str, threads: int = 4, seconds: float = 0.0) -> probe.DiskRate:
    return probe.DiskRate(50.0, 50.0, "posix-direct")


def slow_disk(path: str, threads: int = 4, seconds: float = 0.0) -> probe.DiskRate:
    return probe.DiskRate(1e-5, 1e-5, "posix-direct")


@pytest.mark.parametrize("schedule", Schedule)
def test_training_is_the_plain_run(tmp_path: Path, schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "disk_rate", fast_disk)
    config = everything(tmp_path, device_budget="free", verify=True)
    plain = plain_run(Wide, schedule=schedule, steps=8)
    offloaded = offloaded_run(Wide, config, schedule=schedule, steps=8)
    assert_same(plain, offloaded)
    assert offloaded.stats is not None


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)))

    def forward(self, batch: int) -> torch.Tensor:
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(batch))
        loss: torch.Tensor = self.body(x).square().mean()
        return loss


def test_a_real_run_moves_bytes_from_the_fourth_step_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "disk_rate", fast_disk)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(6))), torch.randn(2048, 512)
    with (
        caplog.at_level(logging.INFO, "tidegate"),
        tidegate.attach(model, everything(tmp_path, device_budget="free", min_bytes=MiB)) as session,
    ):
        for step in range(5):
            model(x).square().mean().backward()
            assert (session.stats().moved > 0) == (step > 2)
        assert_nothing_left(session)
    assert "leave it without cost" in caplog.text


def test_a_slow_disk_leaves_the_step_untouched_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "disk_rate", slow_disk)
    model = blocks()
    with tidegate.attach(model, everything(tmp_path, device_budget="free")) as session:
        for _ in range(6):
            model(torch.randn(64, 32)).square().sum().backward()
        assert session.stats().moved == 0
    assert "could be hidden" in caplog.text


def test_a_disk_that_cannot_be_measured_moves_nothing_and_the_log_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: str, threads: int = 4, seconds: float = 0.0) -> probe.DiskRate:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(probe, "disk_rate", full)
    plain = plain_run(Wide, steps=6)
    offloaded = offloaded_run(Wide, everything(tmp_path, device_budget="free"), steps=6)
    assert_same(plain, offloaded)
    assert offloaded.stats is not None
    assert offloaded.stats.moved == 0
    assert "cannot be measured" in caplog.text


class OnCourse(FixedGate):
    """Every step follows one course."""

    course: Course

    def pilot(self, nbytes: int, clock: Clock) -> Pilot:  # type: ignore[override]
        return Pilot(clock, self.course, observing=False)


def test_what_is_due_comes_back_whatever_is_kept_in_between_and_however_small_the_window(tmp_path: Path) -> None:
    arrived: list[int] = []

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            arrived.append(sum(unit.arrival is not None for unit in session._step.units))
            return gradient

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = Watching.apply(x.tanh())
        return x

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

    model, x = Model(), torch.randn(64, 32, requires_grad=True)
    with tidegate.attach(model, everything(tmp_path, device_budget="free", window=1)) as session:
        gate = OnCourse(1 << 60)
        gate.course = Course(
            sizes=(x.nbytes,) * 10,
            leaves=(True, True, False, False, True) + (False,) * 5,
            released={},
            last=(0, 1, 4),
            reads=((1, 9), (0, 9), (4, 6)),  # an order of need that is not the reverse of the saves
            moved=3 * x.nbytes,
            early=0,
        )
        session._engine.gate = gate
        loss = model(x).sum()
        settled = session.stats()
        assert settled.written["disk"] == 3 * x.nbytes
        loss.backward()
        assert arrived[:5] == [0, 2, 2, 2, 3]  # the first is called before anything was unpacked
        assert_nothing_left(session)
