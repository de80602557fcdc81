"""Probes measure what they say they do, and leave nothing behind."""

from __future__ import annotations

import errno
import os
import random
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers.fake_kvikio import FakeKvikio

from tidegate.memory import probe
from tidegate.memory.probe import KvikioStatus, disk_rate, host_copy_rate, kvikio_status, link_rate

real_open = os.open


def test_a_disk_is_written_and_read_and_nothing_is_left(tmp_path: Path) -> None:
    rate = disk_rate(str(tmp_path), threads=2, seconds=0.02)
    assert rate.write > 0
    assert rate.read > 0
    assert rate.mode in ("posix-direct", "posix-buffered")
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_the_mode_says_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            os.close(real_open(path, flags & ~os.O_DIRECT, mode))  # as Linux does: created, then refused
            raise OSError(errno.EINVAL, "refused")
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    assert disk_rate(str(tmp_path), threads=1, seconds=0.02).mode == "posix-buffered"
    assert list(tmp_path.iterdir()) == []


def test_o_direct_that_is_refused_only_when_written_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_takes_direct", lambda fd: False)
    assert disk_rate(str(tmp_path), threads=1, seconds=0.02).mode == "posix-buffered"


def test_the_file_is_private_new_and_nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def watching(path: Any, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if ".tidegate-probe" in str(path):
            seen.append((flags, stat.S_IMODE(os.fstat(fd).st_mode)))
        return fd

    monkeypatch.setattr(os, "open", watching)
    previous = os.umask(0)
    try:
        with probe._nameless_file(str(tmp_path)) as (fd, _):
            assert os.fstat(fd).st_nlink == 0
    finally:
        os.umask(previous)
    assert seen
    for flags, mode in seen:
        assert flags & os.O_EXCL
        assert flags & os.O_NOFOLLOW
        assert mode == 0o600


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_raises_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def failing(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC if call == "pwritev" else errno.EIO, "no")

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="no"):
        disk_rate(str(tmp_path), threads=2, seconds=0.02)
    assert list(tmp_path.iterdir()) == []


def test_a_short_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real(fd, buffers, offset) // 2)
    with pytest.raises(OSError, match=r"moved \d+ of \d+ bytes"):
        disk_rate(str(tmp_path), threads=1, seconds=0.02)


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        disk_rate(str(tmp_path / "none"))


def test_host_memory_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_SECONDS", 0.01)
    assert host_copy_rate() > 0.05


def test_results_are_plain_data(tmp_path: Path) -> None:
    rate = disk_rate(str(tmp_path), threads=1, seconds=0.01)
    assert rate.to_dict() == {"write": rate.write, "read": rate.read, "mode": rate.mode}


def test_kvikio_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert not kvikio_status().usable


@pytest.mark.parametrize("error", ["RuntimeError", "OSError", "ImportError", "SystemError"])
def test_kvikio_whose_import_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: str) -> None:
    (tmp_path / "kvikio.py").write_text(f"raise {error}('libcufile.so')")
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert kvikio_status() == KvikioStatus(False, f"importing kvikio fails: {error}: libcufile.so")


def test_kvikio_that_can_be_asked_gives_its_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "load_kvikio", FakeKvikio)
    assert kvikio_status() == KvikioStatus(True, "compat_mode=AUTO")


def test_kvikio_that_fails_when_it_is_asked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "load_kvikio", lambda: object())
    assert not kvikio_status().usable


@pytest.mark.gpu
def test_the_link_to_a_gpu_is_measured_both_ways() -> None:
    rate = link_rate(torch.device("cuda", 0))
    assert rate.to_host > 0.1
    assert rate.to_device > 0.1
    assert rate.pinned


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_probes_of_a_gpu_leave_the_programs_random_numbers_alone() -> None:
    device = torch.device("cuda", 0)
    before = torch.cuda.get_rng_state(device), torch.get_rng_state()
    probe.link_rate(device)
    probe.device_copy_rate(device)
    assert torch.equal(before[0], torch.cuda.get_rng_state(device))
    assert torch.equal(before[1], torch.get_rng_state())


def test_probes_leave_the_programs_random_numbers_alone(tmp_path: Path) -> None:
    random.seed(0)
    before, python_before = torch.get_rng_state(), random.getstate()
    probe.disk_rate(str(tmp_path), seconds=0.01)
    probe.host_copy_rate()
    probe.kvikio_status()
    assert torch.equal(before, torch.get_rng_state())
    assert random.getstate() == python_before
