"""What torch's stream sanitizer and compute-sanitizer see in transfers: nothing, unless a wait is taken away."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

CHECKER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def programs(tmp_path: Path, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "tests.gpu.sanitized", str(tmp_path), *arguments],
        cwd=Path(__file__).parents[2],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_no_access_is_without_order(tmp_path: Path) -> None:
    code, said = programs(tmp_path, TORCH_CUDA_SANITIZER="1")
    assert code == 0, said[-3000:]
    assert "all programs ran" in said
    assert "data race" not in said


@pytest.mark.parametrize("fault", ["0", "3"])
def test_the_stream_sanitizer_sees_a_missing_wait(tmp_path: Path, fault: str) -> None:
    _, said = programs(tmp_path, fault, TORCH_CUDA_SANITIZER="1")
    assert "data race" in said, said[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(CHECKER is None, reason="needs compute-sanitizer")
def test_memcheck_finds_nothing(tmp_path: Path) -> None:
    prefix = (str(CHECKER), "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")
    code, said = programs(tmp_path, prefix=prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert code == 0, said[-3000:]
    assert "ERROR SUMMARY: 0 errors" in said
