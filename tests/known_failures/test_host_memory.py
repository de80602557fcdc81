"""Rows M: failures of others with host memory, each shown not to happen here."""

from __future__ import annotations

import ctypes
import gc
import mmap
from pathlib import Path

import pytest
import torch
from tests.offload.compare import assert_balanced, wait_until_away
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients

import tidegate
from tidegate.memory.headroom import host_limits
from tidegate.memory.pinned import Slab, registry
from tidegate.tiers.host import HostTier

MiB = 2**20


def test_m1_m2_m5_memory_that_cannot_be_pinned_is_used_pageable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.memory.pinned._register", lambda address, nbytes: "CUDA error 2")
    monkeypatch.setattr(registry, "_warned", False)
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path, tiers="host", host_budget=MiB, pin_memory=True)) as session:
        assert_same_gradients(plain, gradients(model, session))
        assert session.stats().modes == {"host": "pageable"}
        assert session.stats().written["host"] > 0


def test_m3_slabs_are_exact_not_powers_of_two() -> None:
    nbytes = 5 * MiB + 4096
    tier = HostTier(64 * MiB, pin=False, slab_bytes=4096)
    lease = tier.reserve(nbytes)
    assert lease is not None
    assert tier.mapped == nbytes
    tier.close()


def test_m5_pinning_is_an_option(tmp_path: Path) -> None:
    for pin in (True, False, "auto"):
        assert everything(tmp_path, pin_memory=pin).pin_memory == pin


def test_m6_a_cgroup_limit_counts_as_the_machine_s_memory(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup/job"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000000 kB\nMemAvailable: 900000000 kB\n")
    (tmp_path / "proc/self/statm").write_text("1 1 1 1 1 1 1\n")
    (folder / "memory.max").write_text(str(4096 * MiB))
    (folder / "memory.current").write_text(str(1024 * MiB))
    (folder / "memory.stat").write_text("inactive_file 0\n")
    assert min(limit.available for limit in host_limits(tmp_path)) == 3072 * MiB


@pytest.mark.parametrize("budget", [16 * 1024, 100 * 1024])
def test_m8_s5_host_bytes_stay_within_their_budget(tmp_path: Path, budget: int) -> None:
    model = blocks(8)
    plain = gradients(blocks(8))
    with tidegate.attach(model, everything(tmp_path, tiers=("host", "disk"), host_budget=budget)) as session:
        assert_same_gradients(plain, gradients(model, session))
        host, _ = session._tiers.open()
        assert isinstance(host, HostTier)
        assert host.mapped <= budget
        assert session.stats().written["disk"] > 0  # what did not fit went on
        assert_balanced(session.stats())


def test_s5_host_memory_is_given_back_on_request(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path, tiers="host", host_budget=64 * MiB)) as session:
        gradients(model)
        gc.collect()
        (host,) = session._tiers.open()
        assert isinstance(host, HostTier)
        assert host.mapped > 0
        assert host.trim() == 64 * MiB
        assert host.mapped == 0
        gradients(model)


def test_m10_exactly_the_bytes_that_left_are_freed(tmp_path: Path) -> None:
    model = blocks(2).eval()
    with tidegate.attach(model, everything(tmp_path)) as session:
        loss = model(torch.randn(64, 32)).sum()
        assert session.stats().peak_resident <= 3 * 64 * 32 * 4
        wait_until_away(session)
        assert session.stats().resident == 0
        assert session.stats().written["disk"] == 3 * 64 * 32 * 4  # the input and two results of tanh
        loss.backward()


@pytest.mark.parametrize("window", [1, 3 * 64 * 32 * 4])
def test_m11_bytes_in_flight_are_capped(tmp_path: Path, window: int) -> None:
    unit = 64 * 32 * 4
    model = blocks(12).eval()
    with tidegate.attach(model, everything(tmp_path, window=window)) as session:
        for _ in range(3):
            gradients(model, session)
        in_and_out = 2 * max(window, unit)
        assert session.stats().peak_resident <= in_and_out + 2 * unit  # and what is saved or used right now


def test_m12_short_sequences_are_left_alone_by_default(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model) as session:
        gradients(model)
        assert session.stats().moved == 0
        assert session.spill_dirs == ()


def test_m13_memory_that_is_already_mapped_can_be_pinned_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr("tidegate.memory.pinned._register", lambda *span: calls.append(span) or "")
    monkeypatch.setattr("tidegate.memory.pinned._unregister", lambda address: None)
    shared = mmap.mmap(-1, MiB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    assert registry.pin(address, MiB)
    assert registry.pin(address + 4096, 4096)  # inside a pinned range: counted, not registered again
    assert calls == [(address, MiB)]
    registry.unpin(address + 4096, 4096)
    registry.unpin(address, MiB)
    assert registry.pinned_bytes == 0


def test_m4_memory_is_mapped_slab_by_slab_not_for_every_tensor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mapped: list[int] = []
    original = Slab.__init__

    def counted(self: Slab, nbytes: int, *, pin: bool) -> None:
        mapped.append(nbytes)
        original(self, nbytes, pin=pin)

    monkeypatch.setattr(Slab, "__init__", counted)
    model = blocks(8)
    with tidegate.attach(model, everything(tmp_path, tiers="host", host_budget=8 * MiB)):
        for _ in range(5):
            gradients(model)
    assert mapped == [8 * MiB]
