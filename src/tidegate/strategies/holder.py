"""What every adapter that lives through several trainings holds."""

from __future__ import annotations

from torch import nn

from tidegate.config import OffloadConfig
from tidegate.offload.session import OffloadSession, attach, open_session
from tidegate.offload.stats import OffloadStats

__all__ = ["SessionHolder"]


class SessionHolder:
    """Holds the session of the training that runs, and after its end what it has moved."""

    _session: OffloadSession | None = None
    _opened_it = False

    @property
    def session(self) -> OffloadSession | None:
        """The session of the running training, or the closed one of the last; None before the first."""
        return self._session

    @property
    def offload_stats(self) -> OffloadStats | None:
        """What moved in the running or last training; None before the first."""
        return None if self._session is None else self._session.stats()

    def _open_session(self, model: nn.Module, config: OffloadConfig, rank: int) -> OffloadSession:
        """Attaches the model. A session that somebody else has opened with the same config is used, and left open."""
        before = open_session(model)
        session = attach(model, config, rank=rank)
        if session is not self._session:
            self._session, self._opened_it = session, session is not before
        return session

    def _close_session(self) -> None:
        if self._session is not None and self._opened_it:
            self._session.close()
