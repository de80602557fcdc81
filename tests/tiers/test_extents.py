"""Extents never overlap, are never lost, and come back whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.tiers.extents import ExtentAllocator

PAGE = 4096


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20 * PAGE)), max_size=60))
def test_extents_are_disjoint_and_all_room_returns(actions: list[tuple[bool, int]]) -> None:
    allocator = ExtentAllocator(64 * PAGE)
    taken: dict[int, int] = {}
    for free, nbytes in actions:
        if free and taken:
            offset = sorted(taken)[nbytes % len(taken)]
            del taken[offset]
            allocator.free(offset)
        else:
            found = allocator.alloc(nbytes)
            length = -(-nbytes // PAGE) * PAGE
            if found is None:
                assert allocator.largest < length
                continue
            assert found % PAGE == 0
            assert found + length <= allocator.size
            assert all(found + length <= start or start + size <= found for start, size in taken.items())
            taken[found] = length
        assert allocator.used == sum(taken.values())
    for offset in taken:
        allocator.free(offset)
    assert allocator.largest == allocator.size
    assert allocator.used == 0


def test_smallest_extent_that_fits_is_taken() -> None:
    allocator = ExtentAllocator(10 * PAGE)
    first, _, third, _ = (allocator.alloc(size * PAGE) for size in (3, 1, 2, 4))
    assert first is not None
    assert third is not None
    allocator.free(first)
    allocator.free(third)
    assert allocator.alloc(2 * PAGE) == third


def test_growth_joins_the_free_end() -> None:
    allocator = ExtentAllocator(2 * PAGE)
    allocator.grow(8 * PAGE)
    assert allocator.largest == 8 * PAGE


def test_shrinking_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot grow"):
        ExtentAllocator(2 * PAGE).grow(PAGE)


def test_freeing_what_was_not_taken_is_an_error() -> None:
    with pytest.raises(KeyError):
        ExtentAllocator(2 * PAGE).free(0)
