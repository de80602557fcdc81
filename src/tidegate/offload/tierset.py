"""Opens the tiers of a session when the first bytes leave, and says what they are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tidegate.tiers.host import HostTier
from tidegate.tiers.tier import Tier

__all__ = ["TierSet"]

_log = logging.getLogger("tidegate")


class TierSet:
    """Tiers in order of preference, opened once.

    Args:
        openers: One function per tier, by name; None from an opener means that the tier is off (it has said why).
    """

    def __init__(self, openers: Sequence[tuple[str, Callable[[], Tier | None]]]) -> None:
        self._openers = tuple(openers)
        self._opened: tuple[Tier, ...] | None = None
        self._modes: dict[str, str] = {}
        self._closed = False
        self._warned = False
        self._lock = threading.Lock()

    def open(self) -> tuple[Tier, ...]:
        """Returns the open tiers; opens them at the first call."""
        opened = self._opened
        if opened is None:
            with self._lock:
                if self._opened is None:
                    self._opened = () if self._closed else self._open_all()
                opened = self._opened
        return opened

    def _open_all(self) -> tuple[Tier, ...]:
        tiers: list[Tier] = []
        try:
            for _, opener in self._openers:
                tier = opener()
                if tier is not None:
                    tiers.append(tier)
        except BaseException:
            for tier in tiers:
                tier.close()
            raise
        if tiers:
            _log.info("saved tensors go to %s", ", ".join(f"{tier.name} ({tier.mode})" for tier in tiers))
        else:
            _log.warning("no tier is available (%s): all saved tensors stay on the device", self._names())
        return tuple(tiers)

    def _names(self) -> str:
        return ", ".join(name for name, _ in self._openers) or "none configured"

    def modes(self) -> dict[str, str]:
        """What each tier really runs, or ran until it was closed."""
        if self._opened:
            self._modes = {tier.name: tier.mode for tier in self._opened}
        return dict(self._modes)

    def pinned(self) -> tuple[int, int]:
        """Bytes that the tiers have page-locked, and the most that were asked for at once."""
        hosts = [tier for tier in self._opened or () if isinstance(tier, HostTier)]
        return sum(tier.pinned for tier in hosts), sum(tier.peak for tier in hosts if tier.pinned)

    def spill_dirs(self) -> tuple[Path, ...]:
        """Run directories of the disk tier, if it is open."""
        return tuple(Path(path) for tier in self._opened or () for path in getattr(tier, "directories", ()))

    def warn_full(self, nbytes: int) -> None:
        """Says once that bytes stay although they should move."""
        if not self._warned and self._opened:
            self._warned = True
            rooms = ", ".join(f"{tier.name}: {tier.used} of {tier.capacity} bytes used" for tier in self._opened)
            _log.warning(
                "no room for %d more bytes (%s); they stay on the device. "
                "Raise host_budget or disk_budget, or add a path to disk_paths",
                nbytes,
                rooms,
            )

    def close(self) -> None:
        """Closes every open tier. Idempotent."""
        with self._lock:
            self._closed = True
            self.modes()
            opened, self._opened = self._opened, ()
        for tier in opened or ():
            tier.close()
