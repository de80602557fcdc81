"""The random programs that GPU tests run under delays, here on the CPU: the programs themselves are sound."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu import fuzz


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # the operations are small


@pytest.mark.parametrize("seed", range(8))
def test_random_chains_give_the_plain_run_s_bits(tmp_path: Path, seed: int) -> None:
    plain, _ = fuzz.gradients(seed, None, chaos=False, device="cpu")
    config = fuzz.random_config(seed, str(tmp_path), verify=True)
    other, _ = fuzz.gradients(seed, config, chaos=False, device="cpu")
    assert not fuzz.differs(plain, other), config
    assert list(tmp_path.glob("tidegate-*")) == []


def test_a_seed_fixes_the_program_and_another_seed_is_another_program() -> None:
    first, _ = fuzz.gradients(1, None, chaos=False, device="cpu")
    again, _ = fuzz.gradients(1, None, chaos=False, device="cpu")
    other, _ = fuzz.gradients(2, None, chaos=False, device="cpu")
    assert not fuzz.differs(first, again)
    assert fuzz.differs(first, other)


def test_the_programs_of_a_hundred_seeds_use_every_operation() -> None:
    used = {operation for seed in range(100) for operation, _, _ in fuzz.Program(seed, None, "cpu").steps}
    assert used == set(fuzz.OPERATIONS)
