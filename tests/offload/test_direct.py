"""The disk tier runs on kvikio only where every path has proved it, and says what it runs on and why."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tests.tiers.fake_kvikio import FakeKvikio

from tidegate.errors import ConfigError
from tidegate.memory.cufile import KvikioError
from tidegate.memory.gds import GdsStatus
from tidegate.offload import direct
from tidegate.offload.direct import DirectDisk
from tidegate.tiers.disk import DiskTier
from tidegate.tiers.io_kvikio import DeviceRing, KvikioPieceIo
from tidegate.tiers.io_posix import PieceIo

CPU, GPU, OTHER_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)
MiB = 2**20

PROVED = GdsStatus(True, True, True, "GPUDirect is real", "", False, 6.0, 6.5, 3.0, 4.0)
SLOWER = GdsStatus(True, True, False, "not faster", "", False, 2.0, 2.5, 3.0, 4.0)
WAITS = GdsStatus(True, True, True, "its calls wait", "", True, 6.0, 6.5, 3.0, 4.0)
COMPAT = GdsStatus(True, False, None, "nvidia-fs did not see the bytes", "", True, 2.0, 2.5, 3.0, 4.0)
UNUSABLE = GdsStatus(False, False, None, "kvikio is not installed", "pip install 'tidegate[gds]'")


class Bench:
    """A choice over one disk tier, with statuses, a kvikio and GPUs that are made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, paths: Mapping[Path, GdsStatus]) -> None:
        self.kvikio = FakeKvikio()
        self.asked: list[bool] = []
        self.paths = [str(path) for path in paths]
        for path in paths:
            path.mkdir(exist_ok=True)

        def status(path: str, device: torch.device, *, threads: int, forced: bool) -> GdsStatus:
            self.asked.append(forced)
            return paths[Path(path)]

        def open_ring(pieces: KvikioPieceIo, capacity: int, device: torch.device) -> DeviceRing:
            ring = DeviceRing(capacity, CPU, self.kvikio)
            pieces._rings.append(ring)
            return ring

        monkeypatch.setattr(direct, "gds_status", status)
        monkeypatch.setattr(direct, "load_kvikio", lambda: self.kvikio)
        monkeypatch.setattr(KvikioPieceIo, "open_ring", open_ring)
        monkeypatch.setattr(direct.headroom, "device_total", lambda device: 64 * 8 * MiB)

    def choose(self, wanted: bool | Literal["auto"], device: torch.device = GPU) -> tuple[DirectDisk, DiskTier]:
        choice = DirectDisk(wanted, 2, lambda: 64 * MiB)
        return choice, choice.tier(self.paths, device, self.make)

    def make(self, pieces: PieceIo | None) -> DiskTier:
        return DiskTier(self.paths, 8 * MiB, pieces=pieces)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Bench]:
    def build(*statuses: GdsStatus) -> Bench:
        return Bench(monkeypatch, {tmp_path / str(index): status for index, status in enumerate(statuses)})

    return build


def test_where_it_is_proved_it_is_taken_and_said(bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tidegate")
    setting = bench(PROVED)
    choice, tier = setting.choose("auto")
    assert tier.mode == "kvikio-gds"
    assert "the disk tier runs on kvikio (kvikio-gds): GPUDirect is real" in caplog.text
    assert choice.rate(setting.paths[0]) == (6.0, 6.5)
    tier.close()
    assert setting.kvikio.events("register", "deregister") == ["register", "deregister"]


@pytest.mark.parametrize("status", [SLOWER, WAITS, COMPAT, UNUSABLE], ids=lambda status: status.detail)
def test_where_it_is_not_system_calls_are_taken_and_the_reason_is_said_once(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, status: GdsStatus
) -> None:
    caplog.set_level(logging.INFO, "tidegate")
    setting = bench(status)
    choice, tier = setting.choose("auto")
    assert tier.mode.startswith("posix-")
    assert choice.staging(GPU) is None
    assert choice.rate(setting.paths[0]) is None
    assert [message for message in caplog.messages if status.detail in message] == [
        f"GPUDirect Storage is not used: {status.detail} ({setting.paths[0]})"
    ]
    assert setting.kvikio.diary == []
    tier.close()


def test_one_path_that_has_not_proved_it_decides_for_all(bench: Callable[..., Bench]) -> None:
    _, tier = bench(PROVED, SLOWER).choose("auto")
    assert tier.mode.startswith("posix-")
    tier.close()


@pytest.mark.parametrize(("wanted", "device"), [(False, GPU), (True, CPU), ("auto", CPU)])
def test_where_it_is_no_question_nothing_is_tried(
    bench: Callable[..., Bench], wanted: bool | Literal["auto"], device: torch.device
) -> None:
    setting = bench(PROVED)
    _, tier = setting.choose(wanted, device)
    assert tier.mode.startswith("posix-")
    assert setting.asked == []
    tier.close()


@pytest.mark.parametrize(
    ("statuses", "mode"),
    [
        ((PROVED,), "kvikio-gds"),
        ((SLOWER,), "kvikio-gds"),
        ((COMPAT,), "kvikio-compat"),
        ((PROVED, COMPAT), "kvikio-compat"),
    ],
)
def test_what_is_asked_for_is_taken_and_named_honestly(
    bench: Callable[..., Bench], statuses: tuple[GdsStatus, ...], mode: str
) -> None:
    setting = bench(*statuses)
    _, tier = setting.choose(True)
    assert tier.mode == mode
    assert set(setting.asked) == {True}
    tier.close()


def test_what_is_asked_for_and_cannot_be_had_is_an_error_that_names_the_extra(bench: Callable[..., Bench]) -> None:
    with pytest.raises(ConfigError, match=r"gds=True, .*: kvikio is not installed\. .*'tidegate\[gds\]'"):
        bench(UNUSABLE).choose(True)


# kvikio that passed the round trip and fails afterwards


def failing(*_: object) -> Any:
    raise RuntimeError("cuFile error")


@pytest.mark.parametrize("part", ["on_register", "on_open"])
def test_a_failure_when_the_tier_opens_leads_to_system_calls(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture, tmp_path: Path, part: str
) -> None:
    setting = bench(PROVED)
    setattr(setting.kvikio, part, failing)
    choice, tier = setting.choose("auto")
    assert tier.mode.startswith("posix-")
    assert choice.staging(GPU) is None
    assert "GPUDirect Storage is not used" in caplog.text
    assert "cuFile error" in caplog.text
    assert len(setting.kvikio.events("deregister")) == len(setting.kvikio.events("register"))
    tier.close()
    assert list((tmp_path / "0").iterdir()) == []


@pytest.mark.parametrize("part", ["on_register", "on_open"])
def test_a_failure_when_the_tier_opens_is_an_error_if_it_was_asked_for(
    bench: Callable[..., Bench], tmp_path: Path, part: str
) -> None:
    setting = bench(PROVED)
    setattr(setting.kvikio, part, failing)
    with pytest.raises(ConfigError, match="cuFile error"):
        setting.choose(True)
    assert list((tmp_path / "0").iterdir()) == []


def test_an_import_that_fails_after_all_leads_to_system_calls(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise KvikioError("importing kvikio fails")

    setting = bench(PROVED)
    monkeypatch.setattr(direct, "load_kvikio", broken)
    _, tier = setting.choose("auto")
    assert tier.mode.startswith("posix-")
    tier.close()


def test_a_full_disk_is_no_fault_of_kvikio(bench: Callable[..., Bench]) -> None:
    setting = bench(PROVED)

    def full(pieces: PieceIo | None) -> DiskTier:
        raise OSError(errno.ENOSPC, "No space left on device")

    choice = DirectDisk(True, 2, lambda: MiB)
    with pytest.raises(OSError, match="No space left"):
        choice.tier(setting.paths, GPU, full)
    assert setting.kvikio.events("register", "deregister") == ["register", "deregister"]
    assert choice.staging(GPU) is None


# Staging


def test_the_ring_is_bounded_by_the_window_and_by_the_device(bench: Callable[..., Bench]) -> None:
    setting = bench(PROVED)
    choice, tier = setting.choose("auto")
    ring = choice.staging(GPU)
    assert ring is not None
    assert ring.capacity == 8 * MiB  # a 64th of the device
    assert choice.staging(GPU) is ring
    tier.close()

    small = DirectDisk("auto", 2, lambda: 2 * MiB)
    tier = small.tier(setting.paths, GPU, setting.make)
    ring = small.staging(GPU)
    assert ring is not None
    assert ring.capacity == 4 * MiB
    tier.close()


def test_each_device_has_a_ring_and_one_that_cannot_have_it_takes_host_memory(
    bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    setting = bench(PROVED)
    choice, tier = setting.choose("auto")
    other = choice.staging(OTHER_GPU)
    assert other is not None
    assert other is not choice.staging(GPU)
    setting.kvikio.on_register = failing
    assert choice.staging(torch.device("cuda", 2)) is None
    assert "cuda:2: bytes pass through host memory" in caplog.text
    tier.close()
    assert setting.kvikio.events("deregister") == ["deregister"] * 2
