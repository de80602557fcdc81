"""The doctor reports every part of the machine, and a part that fails is a finding, never a crash."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tidegate import cli, doctor
from tidegate._extras import EXTRAS, load
from tidegate.doctor import examine
from tidegate.errors import MissingExtraError
from tidegate.memory.filesystem import Filesystem
from tidegate.memory.host import HostLimit

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
    from tidegate._extras import Extra

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(EXTRAS, "here", Extra(package, (package,)))
        load("nowhere", "here", "the plot")
