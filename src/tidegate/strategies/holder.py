"""What every adapter that lives through several trainings holds."""

from __future__ import annotations

from tidegate.offload.session import OffloadSession
from tidegate.offload.stats import OffloadStats

__all__ = ["SessionHolder"]


class SessionHolder:
    """Holds the session of the training that runs, and after its end what it has moved."""

    _session: OffloadSession | None = None

    @property
    def session(self) -> OffloadSession | None:
        """The session of the running training, or the closed one of the last; None before the first."""
        return self._session

    @property
    def offload_stats(self) -> OffloadStats | None:
        """What moved in the running or last training; None before the first."""
        return None if self._session is None else self._session.stats()

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
