"""Data-parallel training over gloo: plain DDP's bits on every rank, and ranks that share nothing on disk."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from tests.strategies.models import SmallModel
from tests.strategies.scripts.ddp_in_two_processes import CASES, STEPS
from tests.strategies.scripts.ranks import RANKS, Ranks, run_ranks
from tests.strategies.scripts.recording import folder_of_rank

from tidegate import OffloadConfig
from tidegate.strategies import OffloadStrategy


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    spill = tmp_path_factory.mktemp("spill")
    return run_ranks("ddp_in_two_processes.py", folder=tmp_path_factory.mktemp("ranks"), spill=spill)


@pytest.fixture
def shown(two_processes: Ranks) -> Callable[[str, str], list[dict[str, Any]]]:
    """What each rank saw of a case."""

    def pick(case: str, how: str) -> list[dict[str, Any]]:
        return [two_processes.shown(rank)[case][how] for rank in range(RANKS)]

    return pick


Shown = Callable[[str, str], list[dict[str, Any]]]

cases = pytest.mark.parametrize("case", CASES)


@cases
def test_losses_gradients_and_weights_are_plain_ddps_on_each_rank_L7_L15(case: str, shown: Shown) -> None:
    for plain, offloaded in zip(shown(case, "plain"), shown(case, "offloaded"), strict=True):
        assert (plain["strategy"], offloaded["strategy"]) == ("DDPStrategy", "OffloadDDPStrategy")
        assert plain["steps"] == offloaded["steps"] == len(plain["gradients"]) == STEPS
        for outcome in ("losses", "gradients", "weights"):
            assert offloaded[outcome] == plain[outcome], outcome


@cases
def test_ranks_learn_from_different_data_and_share_their_gradients(case: str, shown: Shown) -> None:
    first, second = shown(case, "offloaded")
    assert first["losses"] != second["losses"]
    assert first["gradients"] == second["gradients"]
    assert first["weights"] == second["weights"]


@cases
def test_every_rank_moves_bytes_into_a_directory_of_its_own(case: str, shown: Shown) -> None:
    first, second = shown(case, "offloaded")
    assert first["written"] > 0
    assert second["written"] > 0
    (ours,), (theirs,) = first["spill_dirs"], second["spill_dirs"]
    assert ours.endswith("-r0")
    assert theirs.endswith("-r1")


@cases
def test_after_a_fit_no_rank_left_anything_on_disk(case: str, shown: Shown) -> None:
    for rank in shown(case, "offloaded"):
        assert rank["left"] == []
        assert rank["pending"] == 0


def test_when_sigkill_takes_a_rank_the_other_ends_and_the_next_start_cleans_up(
    spill: Path, tmp_path: Path, make_trainer: Callable[..., L.Trainer], everything: OffloadConfig
) -> None:
    ranks = run_ranks("rank_that_dies.py", folder=tmp_path / "ranks", spill=spill, seconds=60)
    survivor, killed = ranks.exit_codes
    assert killed == -signal.SIGKILL, ranks.logs()
    assert survivor > 0, ranks.logs()
    ours, theirs = (
        {Path(path) for path in json.loads((folder_of_rank(ranks.folder, rank) / "result.json").read_text())}
        for rank in range(RANKS)
    )
    assert ours
    assert set(spill.iterdir()) == theirs != set()

    strategy = OffloadStrategy(offload=everything)
    make_trainer(strategy).fit(SmallModel())
    assert strategy.offload_stats is not None
    assert strategy.offload_stats.written["disk"] > 0
    assert list(spill.iterdir()) == []
