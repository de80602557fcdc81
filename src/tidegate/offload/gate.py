"""Gates: how many resident bytes must leave now. The oldest go first, so the tail that backward needs stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tidegate.offload.free import Clock, Pilot

__all__ = ["FixedGate", "Gate", "HeadroomGate", "ShareGate"]

_READINGS_PER_MARGIN = 16


class Gate(Protocol):
    """Decides by bytes alone; the engine chooses which units."""

    def excess(self, resident: int, leaving: int, arrived: int) -> int:
        """Bytes that must leave.

        Args:
            resident: Eligible bytes that stay on the device now, those on their way out not counted.
            leaving: Bytes on their way out.
            arrived: Bytes saved since the last call.
        """
        ...

    def step_ended(self, eligible: int) -> None:
        """Learns the eligible bytes of a finished step."""
        ...

    def pilot(self, nbytes: int, clock: Clock) -> Pilot | None:
        """Begins a step whose first unit has `nbytes`: what steers its units one by one, if anything does."""
        ...

    def idle(self, eligible: int) -> str | None:
        """What to say of a step in which nothing moved, if it is time to say it."""
        ...


class _ByBytes:
    """A gate that does not look at single units."""

    __slots__ = ()

    def pilot(self, nbytes: int, clock: Clock) -> None:
        return None

    def idle(self, eligible: int) -> str | None:
        return (
            f"nothing moved in the first step: its {eligible} bytes of saved tensors fit on the device. "
            f"device_budget says how much may stay; 0 moves everything eligible"
        )


@dataclass(slots=True)
class FixedGate(_ByBytes):
    """Keeps at most `budget` bytes; 0 moves everything."""

    budget: int

    def excess(self, resident: int, leaving: int, arrived: int) -> int:
        return max(0, resident - self.budget)

    def step_ended(self, eligible: int) -> None:
        pass


@dataclass(slots=True)
class ShareGate(_ByBytes):
    """Keeps a share of what a step saves. The first step is not known yet, so all of it moves."""

    share: float
    _largest: int = 0

    def excess(self, resident: int, leaving: int, arrived: int) -> int:
        return max(0, resident - int(self.share * self._largest))

    def step_ended(self, eligible: int) -> None:
        self._largest = max(self._largest, eligible)


@dataclass(slots=True)
class HeadroomGate(_ByBytes):
    """Moves nothing while measured headroom stays above a margin.

    Args:
        headroom: Reads the headroom in bytes.
        margin: Gives the bytes that must stay free; asked once.
    """

    headroom: Callable[[], int]
    margin: Callable[[], int]
    _margin: int = -1
    _since: int = 0

    def excess(self, resident: int, leaving: int, arrived: int) -> int:
        if self._margin < 0:
            self._margin = self.margin()
        self._since += arrived
        if self._since * _READINGS_PER_MARGIN < self._margin:
            return 0  # a reading costs tens to hundreds of microseconds
        self._since = 0
        return max(0, min(resident, self._margin - self.headroom() - leaving))

    def step_ended(self, eligible: int) -> None:
        pass
