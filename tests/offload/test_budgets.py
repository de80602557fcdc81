"""What device budgets do to a run: bytes, a share of a step, measured headroom."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tests.offload.compare import assert_balanced, assert_nothing_left, wait_until_away
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients

import tidegate
from tidegate import OffloadSession, OffloadStats, SessionClosedError
from tidegate.memory import headroom

MiB = 1 << 20
ROW = 64 * 32 * 4  # one activation of the toy model


def after_forward(session: OffloadSession, model: torch.nn.Module) -> OffloadStats:
    """Bytes where they rest when a forward is done and every write has ended; backward follows."""
    loss = model(torch.randn(64, 32)).square().sum()
    wait_until_away(session)
    stats = session.stats()
    loss.backward()
    assert_nothing_left(session)
    return stats


@pytest.mark.parametrize("rows", [0, 1, 3, 100])
def test_a_byte_budget_is_met_when_forward_is_done(tmp_path: Path, rows: int) -> None:
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path, device_budget=rows * ROW)) as session:
        stats = after_forward(session, model)
        assert stats.resident <= rows * ROW
        assert (stats.moved > 0) == (rows < 100)
        assert_same_gradients(plain, gradients(model))
        assert_balanced(session.stats())


def test_the_oldest_leave_first(tmp_path: Path) -> None:
    class TwoOutputs(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin().sin().sum(), (x + 1).sin().sum()

    model, x = TwoOutputs(), torch.randn(64, 32, requires_grad=True)
    session = tidegate.attach(model, everything(tmp_path, device_budget=ROW))
    older, newer = model(x)
    wait_until_away(session)
    session.close()
    newer.backward()  # is here
    with pytest.raises(SessionClosedError):
        older.backward()


def test_a_percent_budget_is_met_from_the_second_step_on(tmp_path: Path) -> None:
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path, device_budget="50%")) as session:
        first = after_forward(session, model)
        assert first.resident == 0  # nobody knows yet what half of a step is
        session.reset_stats()
        second = after_forward(session, model)
        assert 0 < second.resident <= first.moved // 2
        assert second.moved == first.moved - second.resident
        assert_same_gradients(plain, gradients(model))


class Reading:
    """A device of which the test says how much is left."""

    def __init__(self) -> None:
        self.bytes = 1 << 40

    def __call__(self, device: torch.device) -> int:
        return self.bytes


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    reading = Reading()
    monkeypatch.setattr(headroom, "device_headroom", reading)
    monkeypatch.setattr(headroom, "auto_margin", lambda device: MiB)
    return reading


def test_auto_moves_nothing_while_the_device_has_room(tmp_path: Path, reading: Reading) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path, device_budget="auto")) as session:
        for _ in range(3):
            gradients(model)
        assert session.stats().moved == 0
        assert list(tmp_path.iterdir()) == []


def test_auto_moves_as_soon_as_headroom_falls_below_the_margin_and_stops_when_it_is_back(
    tmp_path: Path, reading: Reading
) -> None:
    model = blocks(12)
    plain = gradients(blocks(12))
    with tidegate.attach(model, everything(tmp_path, device_budget="auto")) as session:
        moved = []
        for left in (1 << 40, 0, 1 << 40):
            reading.bytes = left
            session.reset_stats()
            assert_same_gradients(plain, gradients(model, session))
            moved.append(session.stats().moved)
            assert_nothing_left(session)
    assert moved[0] == moved[2] == 0
    assert moved[1] > 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({"device_budget": "1GiB"}, "fit on the device"), ({"min_bytes": "1GiB"}, "no saved tensor is as large")],
    ids=["fits", "too-small"],
)
def test_a_run_in_which_nothing_moves_says_so_once_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, object], expected: str
) -> None:
    model = blocks()
    with caplog.at_level(logging.INFO, "tidegate"), tidegate.attach(model, everything(tmp_path, **changes)):
        for _ in range(5):
            gradients(model)
    said = [message for message in caplog.messages if "nothing moved" in message]
    assert len(said) == 1
    assert expected in said[0]


def test_a_run_in_which_something_moves_does_not_say_that_nothing_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = blocks()
    with caplog.at_level(logging.INFO, "tidegate"), tidegate.attach(model, everything(tmp_path)):
        gradients(model)
    assert not any("nothing moved" in message for message in caplog.messages)
