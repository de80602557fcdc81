"""The main job as a user starts it: a process of its own, a table, an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples import train_gpt_lightning as main_job

SCRIPT = Path(main_job.__file__)
# One hidden state is 16 x 128 x 128 float32 values = 1 MiB: the smallest tensor that moves by default.
SMALL = ["--steps", "10", "--blocks", "4", "--width", "128", "--heads", "4", "--batch", "16", "--context", "128"]

pytestmark = pytest.mark.timeout(300)


def run_main_job(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *SMALL, "--accelerator", "cpu", *options],
        env={**os.environ, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )


def from_environment(spill: Path, **more: str) -> subprocess.CompletedProcess[str]:
    settings = {"TIDEGATE_TIERS": "disk", "TIDEGATE_DEVICE_BUDGET": "0", "TIDEGATE_DISK_PATHS": str(spill), **more}
    return run_main_job("--from-environment", **settings)


def test_it_trains_the_same_with_every_activation_on_disk(tmp_path: Path) -> None:
    done = run_main_job("--spill-dir", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bits") == 10
    assert "disk: written" in done.stdout
    assert "bit for bit" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_it_trains_the_same_under_the_registered_name_and_the_environment(tmp_path: Path) -> None:
    done = from_environment(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same bits") == 10
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_moved_nothing_fails(tmp_path: Path) -> None:
    done = from_environment(tmp_path, TIDEGATE_MIN_BYTES="1GiB")
    assert done.returncode == 1
    assert "FAILED: nothing was offloaded" in done.stdout


def test_losses_that_differ_fail() -> None:
    def problems(plain: list[float], offloaded: list[float]) -> list[str]:
        return main_job.differing_losses(main_job.Run(losses=plain), main_job.Run(losses=offloaded))

    assert problems([1.0, 2.0], [1.0, 2.0]) == []
    assert problems([1.0, 2.0], [1.0, 2.0000000000000004]) == ["losses differ from step 2 on"]
    assert problems([1.0, 2.0], [1.0]) == ["the plain run has 2 steps, the offloaded one 1"]
    assert problems([1.0, float("nan")], [1.0, float("nan")]) == ["losses are not finite from step 2 on"]
