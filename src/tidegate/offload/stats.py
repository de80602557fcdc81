"""What really moved: counters of the engine, and the frozen picture of them that users get."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidegate.sizes import format_size

__all__ = ["Counters", "OffloadStats"]


@dataclass(frozen=True, slots=True)
class OffloadStats:
    """Bytes since attach or the last reset. A storage saved many times counts once.

    For every tier, once nothing is in flight: `written == read + forwarded + dropped + demoted + pending`.

    Args:
        written: Bytes that reached a tier, by tier.
        read: Of those, bytes read back when backward first needed them.
        forwarded: Of those, bytes that backward took from memory because they had not left it yet.
        dropped: Of those, bytes that no backward asked for.
        demoted: Of those, bytes that went on to the next tier before anybody asked for them.
        pending: Of those, bytes that a live graph may still ask for.
        reread: Bytes read again (retain_graph, a unit used by distant operations).
        kept: Eligible bytes that stayed on the device.
        recomputed: Bytes dropped in forward and computed again.
        excluded: Saved bytes that may not move: small, or of a kind that hooks cannot carry. Parameters and
            buffers are not counted.
        resident: Eligible saved bytes on the device now.
        peak_resident: Its peak.
        pinned: Bytes of host memory that are page-locked for the session: the host tier's slabs and those through which
            bytes pass on their way to a disk.
        pinned_asked: The most bytes of them that were asked for at once.
        stall_seconds: Time that training threads waited for room or for bytes.
        steps: Steps that saved something.
        modes: What each open tier really runs, e.g. {"disk": "posix-direct"}.
    """

    written: Mapping[str, int]
    read: Mapping[str, int]
    forwarded: Mapping[str, int]
    dropped: Mapping[str, int]
    demoted: Mapping[str, int]
    pending: Mapping[str, int]
    reread: Mapping[str, int]
    kept: int
    recomputed: int
    excluded: int
    resident: int
    peak_resident: int
    pinned: int
    pinned_asked: int
    stall_seconds: float
    steps: int
    modes: Mapping[str, str]

    @property
    def moved(self) -> int:
        """Bytes that left the device: written over all tiers, those that went on from one to the next once.

        Bytes that backward took from host RAM while they went on to disk count twice: the disk has written them, too.
        """
        return sum(self.written.values()) - sum(self.demoted.values())

    def __str__(self) -> str:
        """One line for a log."""
        tiers = [
            f"{format_size(count)} to {tier} ({self.modes.get(tier, 'closed')}), "
            f"{format_size(self.read.get(tier, 0))} read back"
            for tier, count in self.written.items()
            if count
        ]
        return (
            f"{'; '.join(tiers) or 'nothing moved'}; {format_size(self.kept)} stayed, "
            f"{format_size(self.excluded)} too small or of a kind that stays; "
            f"{self.steps} steps, {self.stall_seconds:.1f} s of waiting"
        )

    def to_dict(self) -> dict[str, object]:
        """Plain data, ready for JSON."""
        return dataclasses.asdict(self)


def _per_tier() -> defaultdict[str, int]:
    return defaultdict(int)


@dataclass(slots=True)
class Counters:
    """Mutable twin of OffloadStats; the engine's lock guards it."""

    written: defaultdict[str, int] = field(default_factory=_per_tier)
    read: defaultdict[str, int] = field(default_factory=_per_tier)
    forwarded: defaultdict[str, int] = field(default_factory=_per_tier)
    dropped: defaultdict[str, int] = field(default_factory=_per_tier)
    demoted: defaultdict[str, int] = field(default_factory=_per_tier)
    reread: defaultdict[str, int] = field(default_factory=_per_tier)
    kept: int = 0
    recomputed: int = 0
    excluded: int = 0
    peak_resident: int = 0
    stall_seconds: float = 0.0
    steps: int = 0

    def freeze(
        self, *, resident: int, pending: Mapping[str, int], modes: Mapping[str, str], pinned: tuple[int, int]
    ) -> OffloadStats:
        return OffloadStats(
            written=dict(self.written),
            read=dict(self.read),
            forwarded=dict(self.forwarded),
            dropped=dict(self.dropped),
            demoted=dict(self.demoted),
            pending=dict(pending),
            reread=dict(self.reread),
            kept=self.kept,
            recomputed=self.recomputed,
            excluded=self.excluded,
            resident=resident,
            peak_resident=max(self.peak_resident, resident),
            pinned=pinned[0],
            pinned_asked=pinned[1],
            stall_seconds=self.stall_seconds,
            steps=self.steps,
            modes=dict(modes),
        )
