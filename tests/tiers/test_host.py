"""The host tier: exact, bounded, and its bytes come back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers.memory_buffers import Span

from tidegate.errors import SessionClosedError
from tidegate.tiers.host import HostTier, SlabPool

MiB = 2**20


@pytest.fixture
def tier() -> Iterator[HostTier]:
    tier = HostTier(4 * MiB, pin=False, slab_bytes=MiB)
    yield tier
    tier.close()


@given(nbytes=st.integers(1, 300_000), phase=st.integers(0, 4095), seed=st.integers(0, 99))
def test_bytes_come_back_whatever_their_size_and_alignment(nbytes: int, phase: int, seed: int) -> None:
    tier = HostTier(2 * MiB, pin=False, slab_bytes=MiB)
    source, target = Span(nbytes, phase, seed), Span(nbytes, phase)
    lease = tier.reserve(nbytes, phase)
    assert lease is not None
    assert lease.address % 4096 == phase
    assert tier.write(lease, source.buffer).result() == nbytes
    assert tier.read(lease, target.buffer).result() == nbytes
    assert torch.equal(source.bytes, target.bytes)
    assert target.guards_intact()
    tier.close()


def test_a_full_tier_says_no_and_recovers(tier: HostTier) -> None:
    leases = [tier.reserve(MiB) for _ in range(4)]
    assert all(leases)
    assert tier.reserve(1) is None
    assert tier.used <= tier.mapped <= tier.capacity
    assert leases[0] is not None
    tier.free(leases[0])
    assert tier.reserve(MiB) is not None


def test_a_unit_larger_than_a_slab_gets_its_own(tier: HostTier) -> None:
    assert tier.reserve(3 * MiB) is not None
    assert tier.mapped == 3 * MiB


def test_slabs_are_exact_not_powers_of_two() -> None:
    pool = SlabPool(100 * MiB, pin=False, slab_bytes=MiB)
    assert pool.reserve(9 * MiB // 4) is not None
    assert pool.mapped == 9 * MiB // 4


def test_trim_gives_empty_slabs_back(tier: HostTier) -> None:
    lease = tier.reserve(3 * MiB)
    assert lease is not None
    tier.free(lease)
    assert tier.trim() == 3 * MiB
    assert tier.mapped == 0


def waits(gate: threading.Event) -> None:
    gate.wait(30)


def test_free_is_idempotent_and_waits_for_copies(tier: HostTier) -> None:
    gate = threading.Event()
    source = Span(MiB, 0, seed=1)
    lease = tier.reserve(MiB)
    assert lease is not None
    future = tier.write(lease, source.buffer, after=lambda: waits(gate))
    tier.free(lease)
    tier.free(lease)
    assert tier.used == MiB
    gate.set()
    future.result()
    tier.close()
    assert tier.used == 0


def test_a_waiting_reservation_gets_the_room_that_frees() -> None:
    pool = SlabPool(MiB, pin=False)
    held = pool.reserve(MiB)
    assert held is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(pool.reserve_blocking(MiB, timeout=30)))
    waiter.start()
    pool.free(held)
    waiter.join(30)
    assert got
    assert got[0] is not None


def test_a_reservation_larger_than_the_pool_does_not_wait() -> None:
    assert SlabPool(MiB, pin=False).reserve_blocking(2 * MiB) is None


def test_a_closed_tier_refuses(tier: HostTier) -> None:
    lease = tier.reserve(16)
    assert lease is not None
    tier.close()
    tier.close()
    assert tier.reserve(16) is None
    with pytest.raises(SessionClosedError):
        tier.write(lease, Span(16, 0, seed=0).buffer)


def test_without_a_gpu_the_mode_is_pageable(tier: HostTier) -> None:
    assert tier.mode == "pageable"
