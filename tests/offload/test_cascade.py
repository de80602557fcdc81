"""The host tier as a write-behind cache of the disk: the oldest bytes go on, the newest stay near."""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.compare import assert_balanced, assert_nothing_left, assert_removed, wait_until_away
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients

import tidegate
from tidegate import OffloadConfig, OffloadSession
from tidegate.tiers.io_posix import PosixIo

PAGE = 4096
ROW = 64 * 32 * 4  # bytes of one activation of the toy model: two pages


def cascade(path: Path, rows: float, **changes: Any) -> OffloadConfig:
    """Host RAM for `rows` activations, the rest goes on to disk."""
    return everything(path, tiers=("host", "disk"), host_budget=int(rows * (ROW + PAGE)), **changes)


def settle(session: OffloadSession) -> None:
    wait_until_away(session)
    session.stats()  # waits for every write, those to the next tier included


@pytest.mark.parametrize("rows", [2, 5, 20])
def test_the_newest_bytes_are_near_and_the_oldest_on_disk(tmp_path: Path, rows: int) -> None:
    plain, model = gradients(blocks()), blocks()
    with tidegate.attach(model, cascade(tmp_path, rows)) as session:
        for _ in range(4):
            session.reset_stats()
            assert_same_gradients(plain, gradients(model, session))
            assert_nothing_left(session)
        stats = session.stats()
        host, disk = stats.written.get("host", 0), stats.written.get("disk", 0)
        went_on = stats.demoted.get("host", 0)
        too_late = stats.dropped.get("disk", 0)  # backward took them from host RAM while they went on
        assert host > 0
        assert (went_on > 0) == (disk > 0) == (rows < 20)
        assert went_on <= disk  # a unit goes straight to disk while the host tier's own writes are under way
        assert stats.read.get("disk", 0) == disk - too_late
        assert stats.read.get("host", 0) == host - went_on
        assert stats.moved == host + disk - went_on
        directories = session.spill_dirs
    assert_removed(directories)


def test_bytes_that_go_on_are_those_saved_first(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, cascade(tmp_path, 4)) as session:
        loss = model(torch.randn(64, 32, requires_grad=True)).square().sum()
        settle(session)
        order = session._step.order
        names = [unit.tier.name for unit in dict.fromkeys(order) if unit.tier is not None]
        assert names == sorted(names)  # "disk" before "host"
        assert {"disk", "host"} == set(names)
        loss.backward()


def test_what_is_known_to_fit_does_not_go_on(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, cascade(tmp_path, 20)) as session:
        gradients(model, session)
        used = session.stats().written["host"]
    with tidegate.attach(model, cascade(tmp_path, 1.2 * used / ROW)) as session:
        gradients(model, session)
        session.reset_stats()
        gradients(model, session)
        assert session.stats().written.get("disk", 0) == 0


def test_a_graph_used_twice_after_its_bytes_went_on(tmp_path: Path) -> None:
    def twice(model: torch.nn.Module, session: OffloadSession | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        loss = model(torch.randn(64, 32)).square().sum()
        if session is not None:
            settle(session)
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain, model = twice(blocks(), None), blocks()
    with tidegate.attach(model, cascade(tmp_path, 3, verify=True)) as session:
        assert_same_gradients(plain, twice(model, session))
        assert session.stats().written["disk"] > 0
        assert_nothing_left(session)


def test_graphs_that_nobody_uses_leave_nothing(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, cascade(tmp_path, 3)) as session:
        for _ in range(20):
            model(torch.randn(64, 32)).square().sum()
        assert_nothing_left(session)
        tiers = session._tiers.open()
        assert [tier.used for tier in tiers] == [0, 0]
        assert_same_gradients(gradients(blocks()), gradients(model))


class Refusing(PosixIo):
    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "no more")


def test_bytes_that_the_disk_refuses_stay_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = gradients(blocks()), blocks()
    with tidegate.attach(model, cascade(tmp_path, 4)) as session:
        gradients(model, session)
        monkeypatch.setattr(PosixIo, "pwritev", Refusing.pwritev)
        with caplog.at_level(logging.WARNING, "tidegate"):
            assert_same_gradients(plain, gradients(model, session))
        assert "they stay in host RAM" in caplog.text
        assert_balanced(session.stats())
        assert_nothing_left(session)


def test_a_unit_larger_than_the_host_tier_goes_straight_to_disk(tmp_path: Path) -> None:
    plain, model = gradients(blocks()), blocks()
    with tidegate.attach(model, everything(tmp_path, tiers=("host", "disk"), host_budget=PAGE)) as session:
        assert_same_gradients(plain, gradients(model, session))
        stats = session.stats()
        assert stats.written["disk"] > 0
        assert stats.demoted.get("host", 0) == 0
