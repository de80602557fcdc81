"""Whether GPUDirect Storage is real and faster on a path, proved by a small round trip; and if not, why.

kvikio may say that its compatibility mode is off while cuFile below it bounces every byte through host memory, so its
word is no proof. What proves it: the counters of the kernel module nvidia-fs rise by the bytes of this very round trip.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tidegate.memory.filesystem import filesystem_of

__all__ = ["GdsStatus", "NvfsCounters", "Obstacle", "gds_obstacles", "gds_status", "nvfs_counters"]

_STATS = Path("/proc/driver/nvidia-fs/stats")
_VERSION = Path("/proc/version")
_UDEV = "/run/udev"
_DEVICES = "/dev"
_CONFIG = "/etc/cufile.json"
_TRIAL = "tidegate.memory.gds_trial"
_SECONDS = 60.0
_FILE_SYSTEMS = frozenset({"ext4", "xfs", "lustre", "gpfs", "wekafs", "beegfs", "nfs", "nfs4", "scatefs"})


@dataclass(frozen=True, slots=True)
class NvfsCounters:
    """What nvidia-fs has done since it was loaded, for all processes.

    Args:
        counting: Whether it counts at all; it does not by default.
        writes: Writes that succeeded.
        reads: Reads that succeeded.
        written: MiB written; None where the module does not tell.
        read: MiB read; None where it does not tell.
    """

    counting: bool
    writes: int = 0
    reads: int = 0
    written: int | None = None
    read: int | None = None

    def rose(self, before: NvfsCounters, mib: int) -> bool:
        """Whether at least `mib` MiB were written and as many read since `before`."""
        return (
            self.counting
            and self.writes > before.writes
            and self.reads > before.reads
            and _by(self.written, before.written, mib)
            and _by(self.read, before.read, mib)
        )


def _by(now: int | None, before: int | None, mib: int) -> bool:
    return now is None or before is None or now - before >= mib - 1  # both are rounded down


def nvfs_counters(text: str) -> NvfsCounters:
    """Reads the text of /proc/driver/nvidia-fs/stats, of any version; what is not understood is left out."""
    fields: dict[str, dict[str, int]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        found = re.findall(r"([A-Za-z_-]+)(?:\([^)]*\))?\s*=\s*(\d+)", rest)
        fields.setdefault(name.strip().lower(), {}).update((key, int(value)) for key, value in found)
    said = re.search(r"^\s*IO stats:\s*(\w+)", text, re.MULTILINE)
    reads, writes = fields.get("reads", {}), fields.get("writes", {})
    counting = "n" in reads and "n" in writes and (said is None or said[1].lower() == "enabled")
    return NvfsCounters(counting, _done(writes), _done(reads), _mib(writes, "write"), _mib(reads, "read"))


def _done(fields: Mapping[str, int]) -> int:
    return fields.get("ok", fields.get("n", 0))


def _mib(fields: Mapping[str, int], verb: str) -> int | None:
    return next((value for key, value in fields.items() if re.fullmatch(f"{verb}_?Mi?B", key, re.IGNORECASE)), None)


def read_counters() -> NvfsCounters | None:
    """The counters now; None without the module, or where they cannot be read."""
    try:
        return nvfs_counters(_STATS.read_text(errors="replace"))
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something that stands in the way of GPUDirect Storage.

    Args:
        what: What it is.
        remedy: What to do about it.
    """

    what: str
    remedy: str


def gds_obstacles(path: str | os.PathLike[str], device: torch.device) -> list[Obstacle]:
    """Known reasons why GPUDirect Storage is not real between a GPU and a path, told without touching either.

    An empty list is no proof that it is real.
    """
    found: list[Obstacle] = []
    with contextlib.suppress(OSError):
        if "microsoft" in _VERSION.read_text(errors="replace").lower():
            found.append(Obstacle("the Windows Subsystem for Linux has no GPUDirect Storage", "run on Linux itself"))
    found += _module_obstacles()
    if not os.access(_UDEV, os.R_OK | os.X_OK):
        found.append(
            Obstacle(
                f"{_UDEV} cannot be read, and kvikio keeps to its compatibility mode",
                f"a container needs --volume {_UDEV}:{_UDEV}:ro",
            )
        )
    if not os.path.exists(os.environ.get("CUFILE_ENV_PATH_JSON") or _CONFIG):
        found.append(
            Obstacle(
                f"there is no {_CONFIG}, without which cuFile's stream calls wait for the default stream",
                "install NVIDIA's nvidia-gds package, or name a file in CUFILE_ENV_PATH_JSON",
            )
        )
    with contextlib.suppress(OSError):
        found += _path_obstacles(path)
    with contextlib.suppress(Exception):
        name = torch.cuda.get_device_name(device)
        if "GeForce" in name:
            found.append(Obstacle(f"{name} is a consumer GPU, which GPUDirect does not support", "none"))
    return found


def _module_obstacles() -> list[Obstacle]:
    if not _STATS.parent.exists():
        return [
            Obstacle(
                "the kernel module nvidia-fs is not loaded",
                "install NVIDIA's nvidia-gds package on the host, then: modprobe nvidia-fs",
            )
        ]
    counters = read_counters()
    if counters is None:
        return [Obstacle(f"{_STATS} cannot be read, so nothing can be proved", "let this user read it")]
    found = []
    if not counters.counting:
        found.append(
            Obstacle(
                "nvidia-fs does not count its reads and writes (IO stats: Disabled), so nothing can be proved",
                "as root: echo 1 > /sys/module/nvidia_fs/parameters/rw_stats_enabled",
            )
        )
    with contextlib.suppress(OSError):
        if not any(name.startswith("nvidia-fs") for name in os.listdir(_DEVICES)):
            found.append(Obstacle(f"there is no {_DEVICES}/nvidia-fs*", "give the container these devices"))
    return found


def _path_obstacles(path: str | os.PathLike[str]) -> list[Obstacle]:
    system = filesystem_of(path)
    place = os.fspath(path)
    if system.is_ram:
        return [Obstacle(f"{place} is {system.kind}, which is RAM", "name a directory on an NVMe disk")]
    if system.kind not in _FILE_SYSTEMS:
        return [Obstacle(f"{place} is {system.kind}, which cuFile does not support", "name a directory on ext4 or xfs")]
    if system.kind == "ext4" and "data=ordered" not in system.options:
        return [
            Obstacle(
                f"{place} is ext4, and its mount options do not name data=ordered, for which cuFile looks",
                f"remount it: mount -o remount,data=ordered {system.mount}, or the same in /etc/fstab",
            )
        ]
    return []


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
    if not forced and not _STATS.parent.exists():
        return False, _refuted(False, obstacles)
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
