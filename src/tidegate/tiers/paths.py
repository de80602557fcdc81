"""Checks where spill files may go, before training starts."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence

from tidegate.errors import ConfigError
from tidegate.memory.headroom import auto_host_budget, disk_headroom, filesystem_of, host_headroom

__all__ = ["disk_room", "usable_disk_paths"]

_log = logging.getLogger("tidegate")


def usable_disk_paths(paths: Sequence[str]) -> tuple[str, ...]:
    """Returns the directories that spill files go to.

    Args:
        paths: What the user named; empty means the temporary directory, if it is on a local disk. If it is not,
            the result is empty and the log says why.

    Raises:
        ConfigError: A named path is missing, is no directory or a symbolic link, or cannot be written to.
    """
    if not paths:
        return _default_path()
    for path in paths:
        _check(path)
        kind = filesystem_of(path)
        if kind.is_ram:
            _log.warning(
                "disk_paths: %s is %s, which is RAM, not a disk; what goes there counts as RAM", path, kind.kind
            )
        elif kind.is_network:
            _log.warning("disk_paths: %s is %s, on another machine; expect it to be slow", path, kind.kind)
    return tuple(paths)


def _check(path: str) -> None:
    if os.path.islink(path):
        raise ConfigError(f"disk_paths: {path} is a symbolic link; name the directory itself: {os.path.realpath(path)}")
    if not os.path.exists(path):
        raise ConfigError(f"disk_paths: {path} does not exist; create it, or name another directory")
    if not os.path.isdir(path):
        raise ConfigError(f"disk_paths: {path} is not a directory; name one on a local disk")
    if filesystem_of(path).read_only:
        raise ConfigError(f"disk_paths: {path} is on a read-only file system; name another directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"disk_paths: no permission to write to {path}; change it, or name another directory")


def _default_path() -> tuple[str, ...]:
    path = os.path.realpath(tempfile.gettempdir())
    kind = filesystem_of(path)
    if kind.is_ram or kind.is_network:
        what = "RAM" if kind.is_ram else "on another machine"
        _log.warning(
            "the disk tier is off: the temporary directory %s is %s (%s); name a local disk in disk_paths",
            path,
            what,
            kind.kind,
        )
        return ()
    return (path,)


def disk_room(paths: Sequence[str]) -> int:
    """Bytes free under all paths, each device counted once.

    Memory file systems share one host: together they have no more than half of its headroom, as the host tier has.
    """
    systems = {(system := filesystem_of(path)).device: (system, path) for path in paths}
    disks = sum(disk_headroom(path) for system, path in systems.values() if not system.is_ram)
    ram = sum(disk_headroom(path) for system, path in systems.values() if system.is_ram)
    return disks + (min(ram, auto_host_budget(host_headroom())) if ram else 0)
