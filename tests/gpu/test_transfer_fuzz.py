"""A hundred random programs with delays on every stream and spoilt free memory; they find each missing wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.gpu import fuzz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_delays_and_poison_change_no_bit(tmp_path: Path, first: int) -> None:
    moved = 0
    for seed in range(first, first + 25):
        plain, _ = fuzz.gradients(seed, None, chaos=False)
        with fuzz.sleepy(seed):
            other, nbytes = fuzz.gradients(seed, fuzz.random_config(seed, str(tmp_path)), chaos=True)
        assert not fuzz.differs(plain, other), f"seed {seed}: {fuzz.random_config(seed, str(tmp_path))}"
        moved += nbytes
    assert moved > 0
    assert list(tmp_path.glob("tidegate-*")) == []


def test_delays_and_poison_under_a_course(tmp_path: Path) -> None:
    for seed in range(6):
        plain, _ = fuzz.gradients(seed, None, chaos=False, steps=8)
        config = fuzz.random_config(seed, str(tmp_path), device_budget="free", tiers=("host",))
        with fuzz.sleepy(seed):
            other, _ = fuzz.gradients(seed, config, chaos=True, steps=8)
        assert not fuzz.differs(plain, other), f"seed {seed}"


@pytest.mark.parametrize("fault", range(4))
def test_a_missing_wait_is_found(tmp_path: Path, fault: int) -> None:
    name = list(fuzz.FAULTS)[fault]
    for seed in range(60):
        plain, _ = fuzz.gradients(seed, None, chaos=False)
        config = fuzz.random_config(seed, str(tmp_path), device_budget=0, tiers=("host",), host_budget="256MiB")
        # The first fault shows when the copies run ahead of the kernels, the others when they lag behind.
        with fuzz.faulty(name), fuzz.sleepy(seed) if fault else contextlib.nullcontext():
            other, _ = fuzz.gradients(seed, config, chaos=True, chance=0.3 if fault else 0.9)
        if fuzz.differs(plain, other):
            return
    pytest.fail(f"sixty programs did not show that {name}")
