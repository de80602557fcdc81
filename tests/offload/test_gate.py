"""Gates: how many bytes must leave."""

from __future__ import annotations

from tidegate.offload.gate import FixedGate, HeadroomGate, ShareGate


def test_a_fixed_budget_lets_the_excess_leave() -> None:
    gate = FixedGate(100)
    assert gate.excess(resident=100, leaving=0, arrived=10) == 0
    assert gate.excess(resident=130, leaving=0, arrived=30) == 30


def test_a_budget_of_nothing_moves_everything() -> None:
    assert FixedGate(0).excess(resident=7, leaving=1000, arrived=7) == 7


def test_a_share_keeps_nothing_before_it_knows_a_step() -> None:
    gate = ShareGate(0.5)
    assert gate.excess(resident=80, leaving=0, arrived=80) == 80


def test_a_share_is_of_the_largest_step_so_far() -> None:
    gate = ShareGate(0.5)
    gate.step_ended(100)
    gate.step_ended(40)
    assert gate.excess(resident=50, leaving=0, arrived=1) == 0
    assert gate.excess(resident=70, leaving=0, arrived=1) == 20


def test_headroom_above_the_margin_moves_nothing() -> None:
    gate = HeadroomGate(lambda: 1000, lambda: 160)
    assert gate.excess(resident=500, leaving=0, arrived=100) == 0


def test_what_lacks_to_the_margin_leaves_less_what_is_already_leaving() -> None:
    gate = HeadroomGate(lambda: 100, lambda: 160)
    assert gate.excess(resident=500, leaving=0, arrived=10) == 60
    assert gate.excess(resident=500, leaving=20, arrived=10) == 40
    assert gate.excess(resident=500, leaving=60, arrived=10) == 0


def test_never_more_leaves_than_is_there() -> None:
    gate = HeadroomGate(lambda: 0, lambda: 160)
    assert gate.excess(resident=30, leaving=0, arrived=10) == 30


def test_headroom_is_not_read_for_every_small_tensor() -> None:
    readings: list[int] = []

    def headroom() -> int:
        readings.append(1)
        return 1 << 30

    gate = HeadroomGate(headroom, lambda: 1600)
    for _ in range(100):
        gate.excess(resident=1, leaving=0, arrived=10)
    assert len(readings) == 10  # once per sixteenth of the margin
