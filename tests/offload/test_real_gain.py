"""What offloading is for: a process takes less memory, and nothing happens where it cannot pay.

Step time is for benchmarks/real_gain.py: pairs of runs differ by more than the cost that a test would have to see.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from benchmarks import real_gain
from torch import nn

import tidegate


@pytest.fixture(scope="module")
def rounds() -> list[dict[str, Any]]:
    """A GPT of 4 blocks, 768 wide, plain and offloaded in processes of their own."""
    sizes = {"width": 768, "blocks": 4, "batch": 11, "context": 256, "steps": 2, "rounds": 1}
    args = real_gain.parser().parse_args([f"--{name}={value}" for name, value in sizes.items()])
    return [real_gain.measure(args)]


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestGptOnDisk:
    def test_saves_enough_to_tell(self, rounds: list[dict[str, Any]]) -> None:
        assert min(one["saved_bytes"] for one in rounds) > 500e6

    def test_peak_memory_falls_by_at_least_half_of_the_saved_bytes(self, rounds: list[dict[str, Any]]) -> None:
        for one in rounds:
            assert one["plain_peak_rss"] - one["disk_peak_rss"] >= one["saved_bytes"] / 2

    def test_every_written_byte_is_accounted_for(self, rounds: list[dict[str, Any]]) -> None:
        for one in rounds:
            assert one["written"] > 0
            assert one["written"] == one["read"] + one["forwarded"] + one["dropped"]
            assert one["pending"] == 0

    def test_most_of_it_comes_back_from_the_disk(self, rounds: list[dict[str, Any]]) -> None:
        for one in rounds:
            assert one["read"] > 0.5 * one["written"]

    def test_losses_have_the_same_bits(self, rounds: list[dict[str, Any]]) -> None:
        assert all(one["same_losses"] for one in rounds)

    def test_nothing_is_left_on_disk(self, rounds: list[dict[str, Any]]) -> None:
        assert [name for one in rounds for name in one["left"]] == []


class TestSmallBatch:
    def test_is_left_alone_by_default_and_the_log_says_so_once(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "tidegate")
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))
        with tidegate.attach(model) as session:
            for _ in range(3):
                model(torch.randn(1024, 512)).sum().backward()  # its units are large enough to move
            stats = session.stats()
            assert stats.kept > 0
            assert stats.moved == 0
            assert session.spill_dirs == ()
        assert sum("fit on the device" in message for message in caplog.messages) == 1
