"""What the parts of an engine share: the lock, the books, the movers, and the writes that are under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from tidegate.offload.ledger import Books, Ledger
from tidegate.offload.transfer import Movers

__all__ = ["Core", "Writes"]


class Writes:
    """Writes that have begun and are not in the books yet.

    A worker ends one while another thread may wait for it inside or outside the engine's lock, so it has its own.
    """

    def __init__(self) -> None:
        self._begun: set[Future[int]] = set()
        self._lock = threading.RLock()
        self._ended = threading.Condition(self._lock)

    def begin(self, future: Future[int]) -> None:
        self._begun.add(future)

    def end(self, future: Future[int]) -> None:
        """The write is in the books, or was called off."""
        with self._lock:
            self._begun.discard(future)
            self._ended.notify_all()

    def wait(self) -> None:
        """Waits until the writes that have begun by now have ended."""
        with self._lock:
            begun = set(self._begun)
            self._ended.wait_for(lambda: begun.isdisjoint(self._begun))


class Core:
    """Guarded by `lock`. Work on the books is done as `with core.lock, core.books:` and begins with `core.bury()`.

    Args:
        movers: Give the mover of a device.
        bury: Frees what handles that died needed.
    """

    def __init__(self, movers: Movers, bury: Callable[[], None]) -> None:
        self.movers = movers
        self.bury = bury
        self.books = Books()
        self.ledger = Ledger()
        self.closed = False
        self.renew_locks()

    def renew_locks(self) -> None:
        """Makes new locks, in a forked child: a thread of the parent may have held the old ones."""
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.writes = Writes()

    @property
    def stopped(self) -> bool:
        """Nothing moves any more: nobody may wait for it."""
        return self.closed or self.books.interrupted

    def wake(self) -> None:
        """Lets those who wait look again, after an exception has left the books in doubt."""
        with self.lock:
            self.changed.notify_all()
