"""The books: written = read + forwarded + dropped + pending, to the byte, whatever the order of events."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.offload.compare import assert_balanced

from tidegate.offload.ledger import Ledger
from tidegate.offload.unit import Outcome


def unit(nbytes: int = 8, tier: str = "disk") -> Any:
    """What the ledger looks at in a unit whose write has begun."""
    future: Future[int] = Future()
    return SimpleNamespace(
        nbytes=nbytes, tier=SimpleNamespace(name=tier), future=future, outcome=None, written_epoch=None
    )


def test_bytes_are_pending_until_backward_takes_them() -> None:
    ledger, one = Ledger(), unit()
    ledger.wrote(one)
    assert ledger.freeze({}).pending == {"disk": 8}
    ledger.used(one, Outcome.READ)
    assert ledger.freeze({}).pending == {"disk": 0}
    assert ledger.freeze({}).read == {"disk": 8}


def test_a_second_read_is_told_apart() -> None:
    ledger, one = Ledger(), unit()
    ledger.wrote(one)
    ledger.used(one, Outcome.READ)
    ledger.used(one, Outcome.READ)
    ledger.died(one)
    assert ledger.freeze({}).read == {"disk": 8}
    assert ledger.freeze({}).reread == {"disk": 8}
    assert ledger.freeze({}).dropped == {}


def test_what_never_left_is_kept() -> None:
    ledger, one = Ledger(), unit()
    one.future = None
    ledger.died(one)
    assert ledger.freeze({}).kept == 8
    assert ledger.freeze({}).written == {}


def test_a_reset_forgets_what_was_written_before() -> None:
    ledger, old, new = Ledger(), unit(), unit(16)
    ledger.wrote(old)
    ledger.reset()
    ledger.used(old, Outcome.READ)
    ledger.wrote(new)
    ledger.died(new)
    assert ledger.freeze({}).written == ledger.freeze({}).dropped == {"disk": 16}
    assert ledger.freeze({}).read == {}


EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from(["wrote", "read", "forwarded", "died", "reset"])), max_size=40
)


@given(EVENTS)
def test_the_books_balance_after_every_event(events: list[tuple[int, str]]) -> None:
    ledger = Ledger()
    units = [unit(1 << index, tier) for index, tier in enumerate(["disk", "host", "disk", "host"])]
    dead: set[int] = set()
    for index, event in events:
        one = units[index]
        if event == "reset":
            ledger.reset()
        elif event == "wrote" and one.written_epoch is None:
            ledger.wrote(one)
        elif event == "died" and index not in dead:
            dead.add(index)
            ledger.died(one)
        elif event == "read" and one.written_epoch is not None and index not in dead:
            ledger.used(one, Outcome.READ)
        elif event == "forwarded" and index not in dead:
            ledger.used(one, Outcome.FORWARDED)
        assert_balanced(ledger.freeze({}))


def test_peak_follows_what_is_resident() -> None:
    ledger = Ledger()
    for change in (10, 20, -25, 3):
        ledger.occupy(change)
    assert ledger.freeze({}).resident == 8
    assert ledger.freeze({}).peak_resident == 30
