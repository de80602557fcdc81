"""Models that know nothing of offload, through all of the Trainer's loops: by name, as a user selects the strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.scripts.peer_models import PEERS, build
from tests.strategies.scripts.ranks import RANKS, Ranks, moves_everything, run_ranks
from tests.strategies.scripts.recording import through_all_loops

OUTCOMES = ("losses", "gradients", "weights", "validated", "tested", "predicted")

peers = pytest.mark.parametrize("name", PEERS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """These models are too small for two: on a busy machine threads would wait for each other."""
    torch.set_num_threads(1)


def assert_same_outcomes(plain: dict[str, Any], offloaded: dict[str, Any]) -> None:
    assert plain["losses"]
    for outcome in OUTCOMES:
        assert offloaded[outcome] == plain[outcome], outcome


@peers
def test_fit_validate_test_and_predict_give_what_auto_gives(
    name: str, spill: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in moves_everything(spill).items():
        monkeypatch.setenv(variable, value)
    limits = dict.fromkeys((f"limit_{loop}_batches" for loop in ("val", "test", "predict")), 2)
    plain, offloaded = (
        through_all_loops(build(name), strategy, tmp_path, **limits, limit_train_batches=6)
        for strategy in ("auto", "tidegate")
    )
    assert_same_outcomes(plain, offloaded)
    after_fit, after_all = offloaded["moved"]
    assert after_fit == after_all > 0
    assert offloaded["spill_dirs"]
    assert list(spill.iterdir()) == []


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    spill = tmp_path_factory.mktemp("spill")
    return run_ranks(
        "peers_in_two_processes.py",
        folder=tmp_path_factory.mktemp("ranks"),
        spill=spill,
        launched_by_lightning=True,
    )


@peers
def test_in_two_processes_they_give_what_ddp_gives(name: str, two_processes: Ranks) -> None:
    weights = set()
    for rank in range(RANKS):
        shown = two_processes.shown(rank)
        plain, offloaded = shown[f"{name}-ddp"], shown[f"{name}-tidegate_ddp"]
        assert_same_outcomes(plain, offloaded)
        after_fit, after_all = offloaded["moved"]
        assert after_fit == after_all > 0
        assert offloaded["spill_dirs"]
        assert offloaded["left"] == []
        weights.add(offloaded["weights"])
    assert len(weights) == 1, "the ranks share their gradients"
