"""Whether GPUDirect Storage is real and faster on a path, proved by a small round trip; and if not, why.

kvikio may say that its compatibility mode is off while cuFile below it bounces every byte through host memory, so its
word is no proof. What proves it: the counters of the kernel module nvidia-fs rise by the bytes of this very round trip.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tidegate.memory.nvfs import Obstacle, gds_obstacles, module_loaded

__all__ = ["GdsStatus", "gds_status", "judge"]

_log = logging.getLogger("tidegate")
_TRIAL = "tidegate.memory.gds_trial"
_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class GdsStatus:
    """What a round trip between a GPU and a path through kvikio showed.

    Args:
        usable: Whether kvikio brought the bytes there and back at all, by whatever way.
        real: Whether nvidia-fs moved them, that is, not through host memory.
        faster: Whether that took less time than the POSIX way through pinned memory; None if it was not measured.
        detail: What was found, and why it is not real or not faster.
        remedy: What could be done about it; empty if there is nothing to do.
        waits: Whether the calls wait for what is queued on the default stream.
        write: GB/s from the GPU to the disk through kvikio; None if not measured.
        read: GB/s back.
        posix_write: GB/s from the GPU to the disk by the POSIX way.
        posix_read: GB/s back.
    """

    usable: bool
    real: bool
    faster: bool | None
    detail: str
    remedy: str = ""
    waits: bool | None = None
    write: float | None = None
    read: float | None = None
    posix_write: float | None = None
    posix_read: float | None = None

    @property
    def pays(self) -> bool:
        """Whether the disk tier should take this way."""
        return self.real and bool(self.faster) and not self.waits

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


_known: dict[tuple[int, str], tuple[bool, GdsStatus]] = {}
_known_lock = threading.Lock()


def gds_status(
    path: str | os.PathLike[str], device: torch.device, *, threads: int = 4, forced: bool = False
) -> GdsStatus:
    """Proves or refutes that GPUDirect Storage is real and faster; kept for each disk and GPU of the process.

    The round trip runs in a process of its own, since a driver that is not in order may crash or hang; it is given a
    minute. Where nvidia-fs is not loaded there is nothing to prove, and nothing is started unless `forced`.

    Args:
        path: A directory.
        device: A GPU.
        threads: Threads that write, then read.
        forced: Make the round trip all the same, to see whether kvikio works in its compatibility mode.
    """
    if device.type != "cuda":
        return GdsStatus(False, False, None, "there is no GPU")
    if str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        key = (os.stat(path).st_dev, str(device))
    except OSError as error:
        return GdsStatus(False, False, None, f"{os.fspath(path)}: {error.strerror}")
    with _known_lock:
        tried, status = _known.get(key, (False, None))
        if status is None or (forced and not tried):
            tried, status = _examine(os.fspath(path), device, threads, forced)
            _known[key] = tried, status
        return status


def _examine(path: str, device: torch.device, threads: int, forced: bool) -> tuple[bool, GdsStatus]:
    """Whether the round trip was made, and what is known."""
    obstacles = gds_obstacles(path, device)
    if _spec() is None:
        missing = Obstacle("kvikio is not installed", "pip install 'tidegate[gds]'")
        return True, _refuted(False, [missing, *obstacles])
    if not forced and not module_loaded():
        return False, _refuted(False, obstacles)
    _log.info(
        "a round trip between %s and %s tells whether GPUDirect Storage is real; it may take some seconds", device, path
    )
    return True, judge(_try(path, device, threads), obstacles)


def _spec() -> Any:
    try:
        return importlib.util.find_spec("kvikio")
    except (ImportError, ValueError):  # something that is no package stands in its place
        return None


def _refuted(usable: bool, obstacles: list[Obstacle], **known: Any) -> GdsStatus:
    detail = "; ".join(obstacle.what for obstacle in obstacles)
    remedy = "; ".join(obstacle.remedy for obstacle in obstacles if obstacle.remedy != "none")
    return GdsStatus(usable, False, None, detail, remedy, **known)


def judge(evidence: Mapping[str, Any], obstacles: list[Obstacle]) -> GdsStatus:
    """Draws the conclusion from what the round trip reported.

    Args:
        evidence: As `gds_trial` prints it.
        obstacles: What is known to stand in the way.
    """
    error = evidence.get("error")
    if error is not None:
        return _refuted(False, [Obstacle(str(error), "none"), *obstacles])
    rates = {name: float(evidence[name]) for name in ("write", "read", "posix_write", "posix_read")}
    waits = bool(evidence["waits"])
    if not evidence["counted"]:
        unseen = Obstacle(
            "nvidia-fs did not see the bytes: they went through host memory",
            "NVIDIA's gdscheck -p shows what cuFile supports here; IOMMU or ACS may bar the NVMe drive",
        )
        return _refuted(True, obstacles or [unseen], waits=waits, **rates)
    if evidence.get("compat", False):
        compat = Obstacle("kvikio's compatibility mode is on", "unset KVIKIO_COMPAT_MODE")
        return _refuted(True, [compat, *obstacles], waits=waits, **rates)
    there_and_back = 1 / rates["write"] + 1 / rates["read"]
    faster = there_and_back < 1 / rates["posix_write"] + 1 / rates["posix_read"]
    shown = ", ".join(
        f"{verb} {rates[verb]:.2f} GB/s against {rates['posix_' + verb]:.2f} by POSIX" for verb in ("write", "read")
    )
    detail, remedy = f"GPUDirect is real: {shown}", ""
    if waits:
        detail += "; but its calls wait for the work that is queued on the GPU"
        remedy = "; ".join(obstacle.remedy for obstacle in obstacles)
    elif not faster:
        detail += ", which is not faster"
    return GdsStatus(True, True, faster, detail, remedy, waits, **rates)


def _try(path: str, device: torch.device, threads: int) -> Mapping[str, Any]:
    """Makes the round trip in another process; a report with "error" says what went wrong."""
    command = [sys.executable, "-P", "-m", _TRIAL, path, str(device.index), str(threads)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        trial = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except (OSError, TypeError) as error:
        return {"error": f"the round trip cannot be made: {error}"}
    try:
        said, complaints = trial.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        _end(trial)
        return {"error": f"a round trip through kvikio hung for {_SECONDS:.0f} s"}
    except BaseException:
        _end(trial)
        raise
    try:
        report = json.loads(said.strip().splitlines()[-1])
    except (IndexError, ValueError):
        report = None
    if isinstance(report, dict):
        return report
    last = (complaints.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"a round trip through kvikio ended with code {trial.returncode}: {last[-300:]}"}


def _end(trial: subprocess.Popen[str]) -> None:
    """Kills it. A process that hangs in a driver may not die; nobody waits for it."""
    with contextlib.suppress(OSError):
        os.killpg(trial.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        trial.wait(timeout=1)
    for pipe in (trial.stdout, trial.stderr):
        if pipe is not None:
            pipe.close()
