"""Rows D: failures of others with disk tiers, each shown not to happen here."""

from __future__ import annotations

import errno
import gc
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.offload.compare import assert_balanced
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients
from torch import nn

import tidegate
from tidegate import ConfigError, OffloadConfig, OffloadSession
from tidegate.tiers import disk
from tidegate.tiers.disk import DiskTier
from tidegate.tiers.io_posix import PosixIo


def tier_of(session: OffloadSession) -> DiskTier:
    (tier,) = session._tiers.open()
    assert isinstance(tier, DiskTier)
    return tier


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_d1_d19_space_is_taken_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    class Full(PosixIo):
        def allocate(self, fd: int, offset: int, nbytes: int) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk, "PosixIo", Full)
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path)) as session:
        assert_same_gradients(plain, gradients(model))
        assert session.stats().moved == 0


def test_d1_d13_a_short_write_is_finished_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(PosixIo):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().pwritev(fd, [buffers[0][:4096]], offset)

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return super().preadv(fd, [buffers[0][:4096]], offset)

    monkeypatch.setattr(disk, "PosixIo", Short)
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path)) as session:
        assert_same_gradients(plain, gradients(model, session))
        assert session.stats().read["disk"] > 0


@pytest.mark.parametrize("step", [0, 7])
def test_d13_d15_a_write_that_writes_nothing_costs_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    armed = False

    class Nothing(PosixIo):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            return step if armed else super().pwritev(fd, buffers, offset)

    monkeypatch.setattr(disk, "PosixIo", Nothing)
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path)) as session:
        gradients(model)
        armed = True
        assert_same_gradients(plain, gradients(model))
        assert session.stats().kept > 0
        assert_balanced(session.stats())


def test_d2_models_and_ranks_share_a_path(tmp_path: Path) -> None:
    models = [blocks() for _ in range(3)]
    plain = gradients(blocks())
    sessions = [tidegate.attach(model, everything(tmp_path), rank=rank) for rank, model in enumerate(models)]
    for model in models:
        assert_same_gradients(plain, gradients(model))
    folders = {path for session in sessions for path in session.spill_dirs}
    assert len(folders) == 3
    assert {path.name.rpartition("-")[2] for path in folders} == {"r0", "r1", "r2"}
    for session in sessions:
        session.close()
    assert list(tmp_path.iterdir()) == []


def test_d3_files_do_not_grow_from_step_to_step(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path)) as session:
        gradients(model)
        first = tier_of(session).allocated
        for _ in range(20):
            gradients(model)
        gc.collect()
        assert tier_of(session).allocated == first
        assert tier_of(session).used == 0


def test_d4_d12_names_are_short_and_files_few(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    model = blocks(16)
    with tidegate.attach(model, everything(tmp_path)) as session:
        gradients(model)
        (folder,) = session.spill_dirs
        assert len(folder.name) < 64
        assert len(os.listdir("/proc/self/fd")) - before <= 4  # path, run directory, its lock, one spill file


def test_d5_an_unwritable_path_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **options: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="no permission to write"):
        tidegate.attach(blocks(), everything(tmp_path))


def test_d5_files_are_private(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path)) as session:
        gradients(model)
        (folder,) = session.spill_dirs
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
        assert stat.S_IMODE(os.fstat(tier_of(session)._files[0].fd).st_mode) == 0o600


def test_d6_a_budget_beyond_the_free_space_stays_bounded_by_the_disk(tmp_path: Path) -> None:
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path, disk_budget="8KiB")) as session:
        assert_same_gradients(plain, gradients(model))
        assert tier_of(session).allocated <= 8 * 1024
        assert session.stats().kept > 0


def test_d7_d8_the_tier_that_ran_is_the_tier_that_is_told(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path)) as session:
        gradients(model, session)
        stats = session.stats()
        assert stats.modes.keys() == {"disk"}
        assert stats.written.keys() == {"disk"}
        assert stats.read["disk"] > stats.written["disk"] // 2
        assert_balanced(stats)


def test_d8_a_misspelt_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'disk_paths'"):
        OffloadConfig.from_dict({"disk_path": "/somewhere"})


def test_d8_a_run_in_which_nothing_moves_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    with tidegate.attach(model, everything(tmp_path, min_bytes="1MiB")):
        for _ in range(3):
            model(torch.randn(2, 4)).sum().backward()
    assert sum("nothing moved" in message for message in caplog.messages) == 1


def test_d14_d15_a_file_system_without_o_direct_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses(PosixIo):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            import fcntl

            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "unaligned")
            return super().pwritev(fd, buffers, offset)

    monkeypatch.setattr(disk, "PosixIo", Refuses)
    model = blocks()
    plain = gradients(blocks())
    with tidegate.attach(model, everything(tmp_path)) as session:
        assert_same_gradients(plain, gradients(model, session))
        assert session.stats().modes == {"disk": "posix-buffered"}
