"""What this machine can do for offload, measured, with a remedy for each problem."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import tidegate
from tidegate._extras import EXTRAS
from tidegate.config import OffloadConfig
from tidegate.errors import TidegateError
from tidegate.memory import headroom
from tidegate.memory.probe import (
    GdsStatus,
    disk_rate,
    gds_obstacles,
    gds_status,
    host_copy_rate,
    kvikio_status,
    link_rate,
)
from tidegate.tiers.paths import disk_room, usable_disk_paths

__all__ = ["Finding", "Report", "examine"]

_MALICIOUS_LIGHTNING = ("2.6.2", "2.6.3")  # GHSA-w37p-236h-pfx3
_LOW_DISK, _LOW_HOST, _SLOW_DISK = 8 << 30, 2 << 30, 0.2


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem.

    Args:
        what: What is wrong.
        remedy: What to do about it.
    """

    what: str
    remedy: str


@dataclass(slots=True)
class Report:
    """What was found; `tables` maps a title to rows of name and value."""

    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; sizes are bytes, rates GB/s."""
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings], **self.tables}

    def problem(self, what: str, remedy: str) -> None:
        """Adds a finding."""
        self.findings.append(Finding(what, remedy))


def examine(paths: tuple[str, ...] = (), *, quick: bool = False) -> Report:
    """Looks at this machine. A probe that fails is a finding, never an error.

    Args:
        paths: Directories to examine instead of the configured ones.
        quick: Leave the measurements out.
    """
    report = Report()
    parts: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("versions", _versions),
        ("extras", lambda: _extras(report)),
        ("settings", lambda: _settings(report)),
        ("host", lambda: _host(report, quick)),
        ("devices", lambda: _devices(report, quick)),
        ("disks", lambda: _disks(report, paths, quick)),
    ]
    for title, part in parts:
        try:
            report.tables[title] = part()
        except Exception as error:
            report.tables[title] = {}
            report.problem(f"{title}: {error}", "see the message; the rest of this report does not depend on it")
    return report


def _versions() -> dict[str, Any]:
    return {
        "tidegate": tidegate.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda of torch": torch.version.cuda or "none",
        "kernel": platform.release(),
    }


def _extras(report: Report) -> dict[str, Any]:
    found: dict[str, Any] = {name: extra.version or "not installed" for name, extra in EXTRAS.items()}
    if found["lightning"] in _MALICIOUS_LIGHTNING:
        report.problem(
            f"lightning {found['lightning']} is a malicious release (GHSA-w37p-236h-pfx3)",
            "take this machine off the network, follow the advisory, and install another version",
        )
    if EXTRAS["gds"].version is not None:
        status = kvikio_status()
        found["gds"] = f"{found['gds']} ({status.detail})"
        if not status.usable:
            report.problem(
                f"kvikio: {status.detail}", "none is needed: the disk tier does without; or reinstall kvikio"
            )
    return found


def _settings(report: Report) -> dict[str, Any]:
    given = {name: value for name, value in sorted(os.environ.items()) if name.startswith("TIDEGATE_")}
    try:
        OffloadConfig()
    except TidegateError as error:
        report.problem(f"settings: {error}", "correct or unset the variable, or the file that TIDEGATE_CONFIG names")
    return given


def _host(report: Report, quick: bool) -> dict[str, Any]:
    limits = headroom.host_limits()
    tightest = min(limits, key=lambda limit: limit.available)
    if tightest.available < _LOW_HOST:
        report.problem(
            f"host: {tightest.source} leaves {tightest.available / 2**30:.2f} GiB",
            "free memory, or raise that limit; the host tier takes half of what is left",
        )
    table: dict[str, Any] = {limit.source: {"available": limit.available, "total": limit.total} for limit in limits}
    table["tightest limit"] = tightest.source
    table["host_budget auto"] = headroom.auto_host_budget(tightest.available)
    if not quick:
        table["copy GB/s"] = round(host_copy_rate(), 2)
    return table


def _devices(report: Report, quick: bool) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    for warning in said:
        report.problem(f"cuda: {warning.message}", "a driver and a torch build that fit each other")
    if not usable:
        if os.path.exists("/dev/nvidiactl") and not said:
            report.problem(
                "cuda: this machine has an NVIDIA driver, and torch does not see a GPU",
                "install a CUDA build of torch, and look at CUDA_VISIBLE_DEVICES",
            )
        return {"cpu": {"window auto": headroom.auto_window(torch.device("cpu"))}}
    table: dict[str, Any] = {}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            table[str(device)] = _device(report, device, quick)
        except Exception as error:
            table[str(device)] = {}
            report.problem(f"{device}: {error}", "nvidia-smi shows who uses it and whether it is healthy")
    return table


def _device(report: Report, device: torch.device, quick: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": torch.cuda.get_device_name(device),
        "headroom": headroom.device_headroom(device),
        "total": headroom.device_total(device),
        "window auto": headroom.auto_window(device),
    }
    if not quick:
        rate = link_rate(device)
        row["link"] = rate.to_dict()
        if not rate.pinned:
            report.problem(
                f"{device}: host memory cannot be page-locked",
                "raise the locked-memory limit (ulimit -l unlimited); copies are several times slower without it",
            )
    return row


def _disks(report: Report, paths: tuple[str, ...], quick: bool) -> dict[str, Any]:
    try:
        named = paths or OffloadConfig().disk_paths
    except TidegateError:
        named = ()  # told under settings
    chosen = named or usable_disk_paths(())
    if not chosen:
        report.problem(
            "disk: the temporary directory is not on a local disk, so the disk tier is off",
            "name directories on a local disk: disk_paths, or TIDEGATE_DISK_PATHS",
        )
    return {path: _disk(report, path, quick) for path in chosen}


def _disk(report: Report, path: str, quick: bool) -> dict[str, Any]:
    try:
        usable_disk_paths((path,))
        system, status = headroom.filesystem_of(path), os.statvfs(path)
    except (TidegateError, OSError) as error:
        report.problem(str(error), "name a directory on a local disk that you may write to")
        return {}
    free = headroom.disk_headroom(path)
    row: dict[str, Any] = {
        "file system": system.kind,
        "mount": system.mount,
        "free": free,
        "reserved": (status.f_bfree - status.f_bavail) * status.f_frsize,
        "quota left": headroom.quota_headroom(path),
        "disk_budget auto": headroom.auto_disk_budget(disk_room((path,))),
    }
    if system.is_ram:
        report.problem(f"{path} is {system.kind}, which is RAM", "name a directory on a disk")
    if system.is_network:
        report.problem(f"{path} is {system.kind}, on another machine", "name a directory on a local disk")
    if free < _LOW_DISK:
        report.problem(f"{path} has {free / 2**30:.2f} GiB free", "free space, or name a larger disk")
    device = _first_gpu()
    direct = None if quick else gds_status(path, device)
    if not quick:
        try:
            rates = disk_rate(path)
        except OSError as error:
            report.problem(
                f"{path}: writing and reading failed: {error}", "check the disk, its quota and its free space"
            )
        else:
            mode = "kvikio-gds" if direct is not None and direct.pays else rates.mode
            row |= {"mode": mode, "write GB/s": round(rates.write, 3), "read GB/s": round(rates.read, 3)}
            if rates.write < _SLOW_DISK or rates.read < _SLOW_DISK:
                report.problem(
                    f"{path} writes {rates.write:.2f} and reads {rates.read:.2f} GB/s",
                    "name a faster disk; several disk_paths on separate devices add up",
                )
    return row | {"GPUDirect": _gpudirect(path, device, direct)}


def _first_gpu() -> torch.device:
    """The GPU that GPUDirect is tried with; the CPU where there is none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told under devices
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _gpudirect(path: str, device: torch.device, status: GdsStatus | None) -> dict[str, Any]:
    if device.type == "cpu":
        return {"used": False, "why": "there is no GPU"}
    if status is None:
        known = "; ".join(obstacle.what for obstacle in gds_obstacles(path, device))
        return {"used": "not measured", "why": known or "nothing is known against it"}
    row: dict[str, Any] = {"used": status.pays, "why": status.detail}
    if status.remedy:
        row["remedy"] = status.remedy
    for name in ("write", "read", "posix_write", "posix_read"):
        rate = getattr(status, name)
        if rate is not None:
            row[f"{name.replace('_', ' ')} GB/s"] = round(rate, 3)
    return row
