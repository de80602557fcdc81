"""The command line, run as users run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def tidegate(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    return subprocess.run(
        [sys.executable, "-m", "tidegate", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_version() -> None:
    done = tidegate("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("tidegate 0.")


def test_doctor_measures_a_disk_and_ends_with_the_number_of_its_findings(tmp_path: Path) -> None:
    done = tidegate("doctor", "--json", "--path", str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["ok"] else 1)
    assert bool(report["findings"]) is not report["ok"]
    row = report["disks"][str(tmp_path)]
    assert row["mode"].startswith("posix-")
    assert row["write GB/s"] > 0
    assert row["read GB/s"] > 0
    assert list(tmp_path.glob("tidegate-*")) == []


@pytest.mark.parametrize("kind", ["missing", "file", "link", "ram"])
def test_doctor_finds_each_unusable_path(tmp_path: Path, kind: str) -> None:
    path = {"missing": tmp_path / "none", "file": tmp_path / "f", "link": tmp_path / "l", "ram": Path("/dev/shm")}[kind]
    if kind == "file":
        path.write_text("")
    if kind == "link":
        path.symlink_to(tmp_path)
    done = tidegate("doctor", "--json", "--quick", "--path", str(path))
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert any(str(path) in finding["what"] and finding["remedy"] for finding in report["findings"])


def test_doctor_finds_a_wrong_setting() -> None:
    done = tidegate("doctor", "--quick", TIDEGATE_WINDOW="3 foo")
    assert done.returncode == 1
    assert "TIDEGATE_WINDOW" in done.stdout


def test_the_table_names_host_and_disks(tmp_path: Path) -> None:
    done = tidegate("doctor", "--quick", "--path", str(tmp_path))
    assert "host_budget auto" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["doctr"], ["doctor", "--no-such-flag"], ["doctor", "extra"]])
def test_wrong_use_ends_with_2(words: list[str]) -> None:
    assert tidegate(*words).returncode == 2
