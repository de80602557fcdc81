"""Readings of the memory that is left on a device, on the host and on disk, and what "auto" makes of them."""

from __future__ import annotations

import torch

from tidegate.memory.filesystem import Filesystem, disk_headroom, filesystem_of, quota_headroom
from tidegate.memory.host import HostLimit, HostReader, host_headroom, host_limits, host_total

__all__ = [
    "Filesystem",
    "HostLimit",
    "HostReader",
    "auto_disk_budget",
    "auto_host_budget",
    "auto_margin",
    "auto_window",
    "device_headroom",
    "device_total",
    "disk_headroom",
    "filesystem_of",
    "host_headroom",
    "host_limits",
    "host_total",
    "quota_headroom",
    "unallocated",
]

MiB, GiB = 2**20, 2**30


def device_headroom(device: torch.device) -> int:
    """Bytes that this process can still allocate on a device; on the CPU, host headroom.

    Creates a CUDA context on a device that has none yet.
    """
    if device.type == "cpu":
        return host_headroom()
    free, total = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    return unallocated(
        free=free,
        total=total,
        reserved=int(stats.get("reserved_bytes.all.current", 0)),
        active=int(stats.get("active_bytes.all.current", 0)),
        fraction=torch.cuda.get_per_process_memory_fraction(device),
    )


def unallocated(*, free: int, total: int, reserved: int, active: int, fraction: float = 1.0) -> int:
    """What the driver has free plus what the caching allocator holds unused, within the process's fraction.

    Active bytes count, not allocated ones: a block that a stream still uses is freed but not yet to be had.

    Args:
        free: Bytes that the driver has free, for all processes.
        total: Bytes of the device.
        reserved: Bytes that this process's allocator holds.
        active: Bytes of those that are in use.
        fraction: Share of `total` that this process may take.
    """
    return max(0, min(free + reserved - active, int(fraction * total) - active))


def device_total(device: torch.device) -> int:
    """Bytes of memory of a device; on the CPU, the host bound."""
    return host_total() if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[1])


def auto_host_budget(headroom: int) -> int:
    """Half of the host headroom."""
    return headroom // 2


def auto_disk_budget(free: int) -> int:
    """Nine tenths of the free space, and 1 GiB is never touched."""
    return max(0, min(free * 9 // 10, free - GiB))


def auto_window(device: torch.device) -> int:
    """Bytes in flight: 128 MiB on the CPU; 1/64 of a GPU's memory, 64 MiB to 4 GiB."""
    if device.type == "cpu":
        return 128 * MiB
    return max(64 * MiB, min(4 * GiB, device_total(device) // 64))


def auto_margin(device: torch.device) -> int:
    """Bytes that `device_budget="auto"` leaves free: 1/16 of the device, 256 MiB to 4 GiB."""
    return max(256 * MiB, min(4 * GiB, device_total(device) // 16))
