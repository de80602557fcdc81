"""Slabs are exact, and pins are counted."""

from __future__ import annotations

import pytest
import torch

from tidegate.memory import pinned
from tidegate.memory.pinned import PinnedRegistry, Slab, copy_bytes


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What the driver holds registered: a stand-in at the driver's boundary, since CI has no GPU."""
    held: dict[int, int] = {}

    def register(address: int, nbytes: int) -> str:
        held[address] = nbytes
        return ""

    monkeypatch.setattr(pinned, "_register", register)
    monkeypatch.setattr(pinned, "_unregister", held.pop)
    return held


def test_a_slab_maps_exactly_what_was_asked() -> None:
    slab = Slab(9 * 4096, pin=False)
    assert slab.tensor.numel() == 9 * 4096
    assert slab.address % 4096 == 0
    assert not slab.pinned


def test_discarded_pages_come_back_as_zeros() -> None:
    slab = Slab(8192, pin=False)
    slab.tensor.fill_(7)
    slab.discard()
    assert not slab.tensor.any()


def test_copies_between_addresses() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    copy_bytes(target.data_ptr() + 10, source.data_ptr(), 50)
    assert torch.equal(target[10:60], source[:50])
    assert not target[60:].any()


def test_repeated_and_inner_pins_are_counted(registered: dict[int, int]) -> None:
    registry = PinnedRegistry()
    assert registry.pin(4096, 8192)
    assert registry.pin(4096, 8192)
    assert registry.pin(8192, 4096)
    assert registered == {4096: 8192}
    assert registry.pinned_bytes == 8192
    for address, nbytes in ((4096, 8192), (8192, 4096), (4096, 8192)):
        assert registered
        registry.unpin(address, nbytes)
    assert registered == {}


def test_empty_ranges_need_no_pin(registered: dict[int, int]) -> None:
    registry = PinnedRegistry()
    assert registry.pin(0, 0)
    registry.unpin(0, 0)
    assert registered == {}


def test_a_refused_pin_is_said_once_and_memory_stays_pageable(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("here the driver does pin")
    registry = PinnedRegistry()
    assert not registry.pin(4096, 4096)
    assert not registry.pin(8192, 4096)
    assert sum("cannot page-lock" in message for message in caplog.messages) == 1


def test_a_pinned_slab_is_unpinned_when_its_last_view_dies(
    registered: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slab = Slab(8192, pin=True)
    assert slab.pinned
    view = slab.view(0, 16)
    del slab
    assert registered
    del view
    assert registered == {}
