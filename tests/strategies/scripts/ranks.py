"""Runs one script as two ranks of this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.strategies.scripts.recording import folder_of_rank

__all__ = ["RANKS", "Ranks", "moves_everything", "run_ranks"]

RANKS = 2
ROOT = Path(__file__).parents[3]


def moves_everything(spill: Path) -> dict[str, str]:
    """Environment of a run whose saved activations all go to disk."""
    return {
        "TIDEGATE_TIERS": "disk",
        "TIDEGATE_DEVICE_BUDGET": "0",
        "TIDEGATE_MIN_BYTES": "0",
        "TIDEGATE_DISK_PATHS": str(spill),
    }


@dataclass
class Ranks:
    """How the ranks ended."""

    folder: Path
    exit_codes: list[int]

    def shown(self, rank: int) -> dict[str, Any]:
        """What a rank wrote into its result.json."""
        assert self.exit_codes == [0] * RANKS, self.logs()
        result: dict[str, Any] = json.loads((folder_of_rank(self.folder, rank) / "result.json").read_text())
        return result

    def logs(self) -> str:
        return "\n".join((folder_of_rank(self.folder, rank) / "log").read_text()[-6000:] for rank in range(RANKS))


def run_ranks(script: str, *words: str, folder: Path, spill: Path, seconds: float = 100) -> Ranks:
    """Starts `script` of this folder as ranks that meet over gloo; none outlives the call.

    Args:
        script: Its name. It gets `folder` and then `words` as arguments.
        words: Further arguments.
        folder: Every rank writes into its own folder below.
        spill: Where everything that the ranks save goes.
        seconds: Limit for all ranks together.

    Raises:
        subprocess.TimeoutExpired: A rank did not end in time.
    """
    environment = {
        **os.environ,
        **moves_everything(spill),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "NODE_RANK": "0",
    }
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder), *words]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            own = folder_of_rank(folder, rank)
            own.mkdir(parents=True)
            with (own / "log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env={**environment, "LOCAL_RANK": str(rank)}
                    )
                )
        return Ranks(folder, [process.wait(seconds) for process in started])
    finally:
        for process in started:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
