"""Every example, run as its first lines say, small."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.launching import ROOT, python

SMALL = ["--width=64", "--layers=2", "--steps=2", "--batch=4"]


def run(example: str, *options: str, cwd: Path, min_bytes: str = "0") -> subprocess.CompletedProcess[str]:
    return python(ROOT / "examples" / example, *options, cwd=cwd, TIDEGATE_MIN_BYTES=min_bytes, TMPDIR=str(cwd))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("plain_pytorch.py", SMALL),
        ("plain_pytorch.py", [*SMALL, "--tiers", "host", "disk"]),
        ("accelerate_causal_lm.py", [*SMALL, "--offload"]),
        ("hf_trainer_causal_lm.py", [*SMALL, "--cpu"]),
    ],
)
def test_an_example_offloads_and_leaves_nothing(example: str, options: list[str], tmp_path: Path) -> None:
    done = run(example, *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "(posix-" in done.stdout or "(pageable)" in done.stdout
    assert not list(tmp_path.glob("tidegate-*"))


@pytest.mark.slow
@pytest.mark.parametrize("example", ["plain_pytorch.py", "accelerate_causal_lm.py", "hf_trainer_causal_lm.py"])
def test_an_example_in_which_nothing_moved_fails(example: str, tmp_path: Path) -> None:
    options = ["--offload"] if example.startswith("accelerate") else []
    done = run(example, *SMALL, *options, cwd=tmp_path, min_bytes="1TiB")
    assert done.returncode == 1
    assert "nothing moved" in done.stdout


def fit(*options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    small = ["--trainer.accelerator=cpu", "--trainer.max_steps=1", "--trainer.limit_val_batches=0"]
    model = ["--model.width=64", "--model.layers=1", "--data.batch=4", "--data.windows=8"]
    config = str(ROOT / "configs" / "lightning_single.yaml")
    return run("lightning_cli.py", "fit", "--config", config, *small, *model, *options, cwd=cwd)


@pytest.mark.slow
def test_the_lightning_cli_example_in_which_nothing_moved_fails(tmp_path: Path) -> None:
    done = fit("--trainer.strategy.init_args.offload.min_bytes=1TiB", cwd=tmp_path)
    assert done.returncode == 1
    assert "rank 0: nothing moved" in done.stdout


@pytest.mark.slow
def test_the_lightning_cli_example_leaves_a_config_file_of_its_caller_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    done = fit(cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "config.yaml").read_text() == "mine"


@pytest.mark.slow
def test_the_accelerate_example_is_a_plain_script_without_its_flag(tmp_path: Path) -> None:
    done = run("accelerate_causal_lm.py", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tidegate" not in done.stdout + done.stderr
