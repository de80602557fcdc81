"""Decides, when the disk tier opens, whether bytes pass between device memory and disk without host RAM between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch

from tidegate.errors import ConfigError
from tidegate.memory import headroom
from tidegate.memory.cufile import KvikioError, load_kvikio
from tidegate.memory.gds import GdsStatus, gds_status
from tidegate.tiers.disk import DiskTier
from tidegate.tiers.io_kvikio import DeviceRing, KvikioPieceIo
from tidegate.tiers.io_posix import PieceIo

__all__ = ["DirectDisk"]

_log = logging.getLogger("tidegate")
_RING_SHARE = 64
"""The ring takes no more than this part of the device's memory."""


class DirectDisk:
    """The choice between kvikio and POSIX calls, one for all paths, and the staging that goes with it.

    Args:
        wanted: `OffloadConfig.gds`.
        threads: Threads per direction and path.
        window: Bytes in flight, each way.
    """

    def __init__(self, wanted: bool | Literal["auto"], threads: int, window: Callable[[], int]) -> None:
        self._wanted = wanted
        self._threads = threads
        self._window = window
        self._pieces: KvikioPieceIo | None = None
        self._rings: dict[torch.device, DeviceRing] = {}
        self._statuses: dict[str, GdsStatus] = {}

    def tier(self, paths: Sequence[str], device: torch.device, make: Callable[[PieceIo | None], DiskTier]) -> DiskTier:
        """Opens the disk tier in the way that is chosen now.

        Args:
            paths: Its directories.
            device: Where the model is.
            make: Opens it with a kind of I/O; None is POSIX calls.

        Raises:
            ConfigError: kvikio is asked for and cannot be used.
            OSError: No path can be used.
        """
        mode = self._choose(paths, device)
        if mode is not None:
            try:
                return self._open(mode, device, make)
            except KvikioError as error:
                self._close()
                if self._wanted is True:
                    raise _unusable(str(error)) from error
                _log.warning("GPUDirect Storage is not used: %s; the disk tier runs on POSIX calls", error)
            except BaseException:
                self._close()
                raise
        return make(None)

    def staging(self, device: torch.device) -> DeviceRing | None:
        """The ring of a device; None where host memory must do."""
        if self._pieces is None:
            return None
        try:
            return self._rings.get(device) or self._ring(self._pieces, device)
        except KvikioError as error:
            _log.warning("%s: bytes pass through host memory on their way to disk: %s", device, error)
            return None

    def rate(self, path: str) -> tuple[float, float] | None:
        """GB/s of writes and reads on a path; None where kvikio does not move the bytes."""
        status = self._statuses.get(path)
        if self._pieces is None or status is None or status.write is None or status.read is None:
            return None
        return status.write, status.read

    def _choose(self, paths: Sequence[str], device: torch.device) -> str | None:
        """The mode of kvikio, or None for POSIX calls."""
        if device.type != "cuda" or self._wanted is False:
            return None
        forced = self._wanted is True
        self._statuses = {path: gds_status(path, device, threads=self._threads, forced=forced) for path in paths}
        for path, status in self._statuses.items():
            if forced and not status.usable:
                raise _unusable(status.detail)
            if not forced and not status.pays:
                _log.info("GPUDirect Storage is not used: %s (%s)", status.detail, path)
                return None
        mode = "kvikio-gds" if all(status.real for status in self._statuses.values()) else "kvikio-compat"
        _log.info("the disk tier runs on kvikio (%s): %s", mode, _details(self._statuses))
        return mode

    def _open(self, mode: str, device: torch.device, make: Callable[[PieceIo | None], DiskTier]) -> DiskTier:
        self._pieces = pieces = KvikioPieceIo(load_kvikio(), mode)
        self._ring(pieces, device)
        return make(pieces)

    def _ring(self, pieces: KvikioPieceIo, device: torch.device) -> DeviceRing:
        capacity = min(2 * self._window(), headroom.device_total(device) // _RING_SHARE)
        ring = self._rings[device] = pieces.open_ring(capacity, device)
        return ring

    def _close(self) -> None:
        pieces, self._pieces = self._pieces, None
        self._rings.clear()
        if pieces is not None:
            pieces.close()


def _details(statuses: Mapping[str, GdsStatus]) -> str:
    return "; ".join(f"{status.detail} ({path})" for path, status in statuses.items())


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"gds=True, but kvikio cannot be used: {why}. Install it with pip install 'tidegate[gds]' and see to that, "
        f'or leave gds at "auto", which takes POSIX calls'
    )
