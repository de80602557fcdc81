"""The doctor reports every part of the machine, and a part that fails is a finding, never a crash."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tidegate import cli, doctor
from tidegate._extras import EXTRAS, Extra, load
from tidegate.doctor import examine
from tidegate.errors import MissingExtraError
from tidegate.memory.filesystem import Filesystem
from tidegate.memory.gds import GdsStatus
from tidegate.memory.host import HostLimit
from tidegate.memory.nvfs import Obstacle
from tidegate.memory.probe import DiskRate, KvikioStatus

PARTS = ["versions", "extras", "settings", "host", "devices", "disks"]


def remedies(report: doctor.Report, word: str) -> list[str]:
    return [finding.remedy for finding in report.findings if word in finding.what]


def test_every_part_is_reported_as_plain_data(tmp_path: Path) -> None:
    report = examine((str(tmp_path),), quick=True)
    assert list(report.tables) == PARTS
    assert json.loads(json.dumps(report.to_dict())).keys() == {"ok", "findings", *PARTS}


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("broken"), OSError(5, "broken")])
@pytest.mark.parametrize(
    ("part", "function"),
    [
        ("versions", "_versions"),
        ("extras", "_extras"),
        ("settings", "_settings"),
        ("host", "_host"),
        ("disks", "_disks"),
    ],
)
def test_a_part_that_fails_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str, function: str, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(doctor, function, fail)
    report = examine((str(tmp_path),), quick=True)
    assert remedies(report, f"{part}: ")
    assert list(report.tables) == PARTS


def test_a_disk_probe_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(path: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(doctor, "disk_rate", fail)
    monkeypatch.setattr(doctor, "host_copy_rate", lambda: 1.0)
    report = examine((str(tmp_path),))
    assert any("quota" in remedy for remedy in remedies(report, "No space left"))
    assert report.tables["disks"][str(tmp_path)]["free"] > 0


def test_the_tightest_host_limit_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = [HostLimit("meminfo", 2**40, 2**40), HostLimit("/sys/fs/cgroup/job/memory.max", 2**30, 2**31)]
    monkeypatch.setattr(doctor.headroom, "host_limits", lambda: limits)
    report = examine((str(tmp_path),), quick=True)
    assert report.tables["host"]["tightest limit"] == "/sys/fs/cgroup/job/memory.max"
    assert remedies(report, "/sys/fs/cgroup/job/memory.max leaves 1.00 GiB")


@pytest.mark.parametrize(("kind", "words"), [("tmpfs", "which is RAM"), ("nfs4", "another machine")])
def test_a_path_that_is_no_local_disk_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, words: str
) -> None:
    monkeypatch.setattr(doctor.headroom, "filesystem_of", lambda path: Filesystem("/", kind, "source", 1, False))
    assert remedies(examine((str(tmp_path),), quick=True), words)


def test_what_cuda_warns_about_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unavailable() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old", UserWarning, stacklevel=2)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unavailable)
    assert remedies(examine((str(tmp_path),), quick=True), "driver on your system is too old")


def test_a_gpu_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def device(report: object, device: torch.device, quick: bool) -> dict[str, str]:
        if device.index == 0:
            raise RuntimeError("uncorrectable ECC error")
        return {"name": "fine"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(doctor, "_device", device)
    report = examine((str(tmp_path),), quick=True)
    assert report.tables["devices"] == {"cuda:0": {}, "cuda:1": {"name": "fine"}}
    assert remedies(report, "cuda:0: uncorrectable ECC error")


# GPUDirect and kvikio


def test_a_kvikio_that_is_not_installed_is_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(EXTRAS, "gds", Extra("kvikio", ("no-such-distribution",)))
    report = examine((str(tmp_path),), quick=True)
    assert report.tables["extras"]["gds"] == "not installed"
    assert not remedies(report, "kvikio")


@pytest.mark.parametrize(
    ("status", "shown", "problem"),
    [
        (KvikioStatus(True, "compat_mode=AUTO"), "26.10 (compat_mode=AUTO)", False),
        (KvikioStatus(False, "importing kvikio fails"), "26.10 (importing kvikio fails)", True),
    ],
)
def test_an_installed_kvikio_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: KvikioStatus, shown: str, problem: bool
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "26.10")
    monkeypatch.setattr(doctor, "kvikio_status", lambda: status)
    report = examine((str(tmp_path),), quick=True)
    assert report.tables["extras"]["gds"] == shown
    assert bool(remedies(report, "importing kvikio fails")) is problem


PROVED = GdsStatus(True, True, True, "GPUDirect is real", "", False, 6.0, 6.5, 3.0, 4.0)


@pytest.mark.parametrize(
    ("status", "mode", "row"),
    [
        (PROVED, "kvikio-gds", {"used": True, "why": "GPUDirect is real", "write GB/s": 6.0, "posix read GB/s": 4.0}),
        (
            GdsStatus(False, False, None, "nvidia-fs is not loaded", "modprobe nvidia-fs"),
            "posix-direct",
            {"used": False, "why": "nvidia-fs is not loaded", "remedy": "modprobe nvidia-fs"},
        ),
    ],
)
def test_the_mode_of_a_disk_is_the_one_that_would_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: GdsStatus, mode: str, row: dict[str, object]
) -> None:
    monkeypatch.setattr(doctor, "_first_gpu", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(doctor, "gds_status", lambda path, device: status)
    monkeypatch.setattr(doctor, "disk_rate", lambda path: DiskRate(3.0, 4.0, "posix-direct"))
    monkeypatch.setattr(doctor, "host_copy_rate", lambda: 1.0)
    disk = examine((str(tmp_path),)).tables["disks"][str(tmp_path)]
    assert disk["mode"] == mode
    assert disk["GPUDirect"].items() >= row.items()


def test_without_a_gpu_gpudirect_is_no_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_first_gpu", lambda: torch.device("cpu"))
    disk = examine((str(tmp_path),), quick=True).tables["disks"][str(tmp_path)]
    assert disk["GPUDirect"] == {"used": False, "why": "there is no GPU"}


def test_without_measuring_known_obstacles_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_first_gpu", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(doctor, "gds_obstacles", lambda path, device: [Obstacle("nvidia-fs is not loaded", "load it")])
    disk = examine((str(tmp_path),), quick=True).tables["disks"][str(tmp_path)]
    assert disk["GPUDirect"] == {"used": "not measured", "why": "nvidia-fs is not loaded"}


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_a_malicious_lightning_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert remedies(examine((str(tmp_path),), quick=True), f"lightning {version} is a malicious release")


def test_brackets_in_messages_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    report = doctor.Report()
    report.problem("a path [bold]", "pip install 'tidegate[lightning]'")
    monkeypatch.setattr(doctor, "examine", lambda paths, quick: report)
    done = CliRunner().invoke(cli.app, ["doctor"])
    assert done.exit_code == 1
    assert "a path [bold]" in done.stdout
    assert "pip install 'tidegate[lightning]'" in done.stdout


def test_no_finding_is_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda paths, quick: doctor.Report())
    done = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"ok": True, "findings": []}


# Extras


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"the plot needs nowhere, .* pip install 'tidegate\[here\]'"):
        _load_missing("nowhere")


def test_a_package_that_is_there_but_lacks_another_raises_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        _load_missing("elsewhere")
    assert not isinstance(caught.value, MissingExtraError)


def _load_missing(package: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXTRAS, "here", Extra(package, (package,)))
        load("nowhere", "here", "the plot")
