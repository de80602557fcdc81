"""The kernel module nvidia-fs: what it counts, and what is known to stand in its way."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tidegate.memory.filesystem import filesystem_of

__all__ = ["NvfsCounters", "Obstacle", "gds_obstacles", "module_loaded", "nvfs_counters", "read_counters"]

_STATS = Path("/proc/driver/nvidia-fs/stats")
_VERSION = Path("/proc/version")
_UDEV = "/run/udev"
_DEVICES = "/dev"
_CONFIG = "/etc/cufile.json"
_FILE_SYSTEMS = frozenset({"ext4", "xfs", "lustre", "gpfs", "wekafs", "beegfs", "nfs", "nfs4", "scatefs"})


def module_loaded() -> bool:
    """Whether nvidia-fs is there."""
    return _STATS.parent.exists()


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
    if not module_loaded():
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
