"""Loops of one's own with Fabric: `tidegate.attach` after `fabric.setup`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from tests.strategies.scripts.fabric_loop import CASES, STEPS, train
from tests.strategies.scripts.ranks import RANKS, Ranks, run_ranks

from tidegate import OffloadConfig
from tidegate.strategies import OffloadDDPStrategy, OffloadStrategy

cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """These models are too small for two: on a busy machine threads would wait for each other."""
    torch.set_num_threads(1)


def assert_same_run(plain: dict[str, Any], offloaded: dict[str, Any]) -> None:
    assert len(plain["gradients"]) == STEPS
    for outcome in ("losses", "gradients", "weights", "names"):
        assert offloaded[outcome] == plain[outcome], outcome
    assert offloaded["written"] > 0
    assert offloaded["pending"] == 0
    assert offloaded["steps"] == len(plain["losses"])


@cases
def test_losses_gradients_and_weights_are_the_plain_loops(case: str, everything: OffloadConfig, spill: Path) -> None:
    plain, offloaded = (
        train(Fabric(accelerator="cpu", devices=1), config, **CASES[case]) for config in (None, everything)
    )
    assert_same_run(plain, offloaded)
    assert offloaded["spill_dirs"]
    assert list(spill.iterdir()) == []


def test_a_widened_step_takes_what_the_loss_saves_too(everything: OffloadConfig) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    forward, widened = (train(fabric, everything, widened=widened) for widened in (False, True))
    assert widened["written"] > forward["written"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_under_fabrics_precisions_it_is_the_plain_loop_too(precision: Any, everything: OffloadConfig) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    assert_same_run(train(fabric, None), train(fabric, everything))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    spill = tmp_path_factory.mktemp("spill")
    return run_ranks("fabric_loop.py", folder=tmp_path_factory.mktemp("ranks"), spill=spill)


@cases
def test_in_two_processes_each_rank_is_the_plain_loops(case: str, two_processes: Ranks) -> None:
    shown = [two_processes.shown(rank)[case] for rank in range(RANKS)]
    for rank, run in enumerate(shown):
        assert_same_run(run["plain"], run["offloaded"])
        (spill_dir,) = run["offloaded"]["spill_dirs"]
        assert spill_dir.endswith(f"-r{rank}")
        assert run["left"] == []
    first, second = (run["offloaded"] for run in shown)
    assert first["losses"] != second["losses"]
    assert first["gradients"] == second["gradients"]
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize("strategy", [OffloadStrategy, OffloadDDPStrategy])
def test_a_strategy_for_the_trainer_is_refused_and_says_that_it_is_one(
    strategy: type[OffloadStrategy | OffloadDDPStrategy],
) -> None:
    with pytest.raises(ValueError, match=rf"{strategy.__name__} for lightning\.Trainer"):
        Fabric(accelerator="cpu", devices=1, strategy=strategy())  # type: ignore[arg-type]
