"""Runs one script as two ranks of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
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
    """How the processes ended; one that was still there at the end of its time was killed."""

    folder: Path
    exit_codes: list[int]

    def shown(self, rank: int) -> dict[str, Any]:
        """What a rank wrote into its result.json."""
        assert not any(self.exit_codes), self.logs()
        result: dict[str, Any] = json.loads((folder_of_rank(self.folder, rank) / "result.json").read_text())
        return result

    def logs(self) -> str:
        logs = [path.read_text()[-6000:] for path in sorted(self.folder.glob("rank*/log"))]
        return "\n".join([f"exit codes {self.exit_codes}", *logs])


def run_ranks(
    script: str, *, folder: Path, spill: Path, seconds: float = 100, launched_by_lightning: bool = False
) -> Ranks:
    """Starts `script` of this folder as ranks that meet over gloo; none outlives the call.

    Args:
        script: Its name. It gets `folder` as its argument.
        folder: Every rank writes into its own folder below.
        spill: Where everything that the ranks save goes.
        seconds: Limit for all together.
        launched_by_lightning: Start the first rank only, and let Lightning start the others.
    """
    environment = {
        **os.environ,
        **moves_everything(spill),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder)]
    end = time.monotonic() + seconds
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(RANKS):
            folder_of_rank(folder, rank).mkdir(parents=True)
        for rank in range(1 if launched_by_lightning else RANKS):
            own = {} if launched_by_lightning else {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
            with (folder_of_rank(folder, rank) / "log").open("wb") as log:
                started.append(
                    subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment | own, start_new_session=True
                    )
                )
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, end - time.monotonic()))
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return Ranks(folder, [process.wait() for process in started])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
