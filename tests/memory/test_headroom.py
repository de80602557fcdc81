"""Device headroom, and what "auto" makes of readings."""

from __future__ import annotations

import pytest
import torch

from tidegate.memory import headroom

MiB, GiB = 2**20, 2**30
CPU = torch.device("cpu")


def test_free_memory_and_the_allocator_s_unused_blocks_are_headroom() -> None:
    assert headroom.unallocated(free=10 * GiB, total=80 * GiB, reserved=6 * GiB, active=4 * GiB) == 12 * GiB


def test_the_process_fraction_is_a_bound() -> None:
    left = headroom.unallocated(free=70 * GiB, total=80 * GiB, reserved=6 * GiB, active=4 * GiB, fraction=0.25)
    assert left == 16 * GiB


def test_headroom_is_never_negative() -> None:
    assert headroom.unallocated(free=0, total=8 * GiB, reserved=6 * GiB, active=6 * GiB, fraction=0.5) == 0


def test_on_a_cpu_run_the_device_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headroom, "host_headroom", lambda: 3 * GiB)
    monkeypatch.setattr(headroom, "host_total", lambda: 7 * GiB)
    assert headroom.device_headroom(CPU) == 3 * GiB
    assert headroom.device_total(CPU) == 7 * GiB


def test_half_of_the_host_headroom_is_the_host_budget() -> None:
    assert headroom.auto_host_budget(10 * GiB) == 5 * GiB


@pytest.mark.parametrize(
    ("free", "budget"), [(100 * GiB, 90 * GiB), (4 * GiB, 3 * GiB), (GiB, 0), (GiB // 2, 0), (0, 0)]
)
def test_a_tenth_of_a_disk_and_a_gibibyte_stay_free(free: int, budget: int) -> None:
    assert headroom.auto_disk_budget(free) == budget


def test_the_window_of_a_cpu_run() -> None:
    assert headroom.auto_window(CPU) == 128 * MiB


@pytest.mark.parametrize(
    ("total", "window"), [(GiB, 64 * MiB), (16 * GiB, 256 * MiB), (80 * GiB, 1280 * MiB), (256 * GiB, 4 * GiB)]
)
def test_the_window_of_a_gpu_is_a_share_of_its_memory(monkeypatch: pytest.MonkeyPatch, total: int, window: int) -> None:
    monkeypatch.setattr(headroom, "device_total", lambda device: total)
    assert headroom.auto_window(torch.device("cuda", 0)) == window


@pytest.mark.parametrize(("total", "margin"), [(GiB, 256 * MiB), (16 * GiB, GiB), (256 * GiB, 4 * GiB)])
def test_the_margin_is_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch, total: int, margin: int) -> None:
    monkeypatch.setattr(headroom, "device_total", lambda device: total)
    assert headroom.auto_margin(CPU) == margin


@pytest.mark.gpu
def test_a_tensor_on_the_gpu_takes_headroom_and_gives_it_back() -> None:
    device = torch.device("cuda", 0)
    before = headroom.device_headroom(device)
    block = torch.empty(256 * MiB, dtype=torch.uint8, device=device)
    assert abs(before - headroom.device_headroom(device) - 256 * MiB) < 64 * MiB
    del block
    assert abs(before - headroom.device_headroom(device)) < 64 * MiB


@pytest.mark.gpu
def test_the_process_fraction_of_a_gpu_counts() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(0.01, device)
    try:
        assert headroom.device_headroom(device) <= headroom.device_total(device) // 100
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
