"""Run directories: unique per run, host and rank; what dead runs left is removed, live runs are not touched.

The lock file inside a run directory is held locked for the run's life; the kernel lets go of it when the process dies,
however it dies. A directory gets its name when its lock is held, so that a starting run is never mistaken for a dead
one, and nobody waits for anybody.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import stat
import time
from pathlib import Path

__all__ = ["RunDir", "reap"]

_log = logging.getLogger("tidegate")
_LOCK = "lock"
_NEW = ".new"
_NEW_SECONDS = 60.0
_open: set[RunDir] = set()
_MODE = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _pattern(uid: int) -> re.Pattern[str]:
    return re.compile(rf"tidegate-{uid}-[0-9a-f]{{8}}-r\d+({re.escape(_NEW)})?")


class RunDir:
    """A private directory below `parent`, removed at `close`.

    Args:
        parent: Existing directory.
        rank: Rank of this process.

    Raises:
        OSError: The directory cannot be made.
    """

    def __init__(self, parent: str | os.PathLike[str], rank: int = 0) -> None:
        self._owner = os.getpid()
        self._parent = self._lock = self.fd = -1
        self.name = f"tidegate-{os.getuid()}-{secrets.token_hex(4)}-r{rank}"
        self.path = Path(parent) / self.name
        _open.add(self)
        try:
            self._parent = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _reap(self._parent, Path(parent))
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        new = self.name + _NEW
        os.mkdir(new, 0o700, dir_fd=self._parent)
        self.fd = os.open(new, _MODE, dir_fd=self._parent)
        os.fchmod(self.fd, 0o700)
        self._lock = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self.fd)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(self._lock, json.dumps({"pid": os.getpid(), "host": _host(), "started": time.time()}).encode())
        os.rename(new, self.name, src_dir_fd=self._parent, dst_dir_fd=self._parent)

    def open_unnamed(self, *, direct: bool) -> int:
        """Creates a private file, removes its name and returns the descriptor.

        Without a name the file cannot outlive the process, be reached through a symbolic link, or be changed
        by others; the kernel frees it even after SIGKILL.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        name = f"spill-{secrets.token_hex(4)}"
        fd = os.open(name, flags | (os.O_DIRECT if direct else 0), 0o600, dir_fd=self.fd)
        os.unlink(name, dir_fd=self.fd)
        return fd

    def close(self) -> None:
        """Removes the directory. Idempotent; a forked child leaves its parent's directory alone."""
        if self._parent >= 0 and os.getpid() == self._owner:
            for name in (self.name, self.name + _NEW):
                _remove(self._parent, name)
        fds = (self._lock, self.fd, self._parent)
        self._parent = self._lock = self.fd = -1  # before they are closed: their numbers will be others' then
        for fd in fds:
            if fd >= 0:
                os.close(fd)
        _open.discard(self)


def reap(parent: str | os.PathLike[str]) -> list[str]:
    """Removes what dead runs of this user left below `parent`; returns the names."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _reap(fd, Path(parent))
    finally:
        os.close(fd)


def _reap(parent: int, where: Path) -> list[str]:
    pattern = _pattern(os.getuid())
    removed = []
    for name in os.listdir(parent):
        if pattern.fullmatch(name) and _is_dead(parent, name):
            try:
                _remove(parent, name)
            except OSError as error:
                _log.warning("cannot remove what a dead run left at %s: %s", where / name, error)
            else:
                removed.append(name)
                _log.info("removed what a dead run left at %s", where / name)
    return removed


def _is_dead(parent: int, name: str) -> bool:
    """Whether the directory is ours, on this host, and nobody holds its lock."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return False
        folder = os.open(name, _MODE, dir_fd=parent)
    except OSError:
        return False
    try:
        if name.endswith(_NEW) and time.time() - status.st_mtime < _NEW_SECONDS:
            return False  # may be starting
        try:
            lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return True  # killed before it made its lock, or while it was removed
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            host = json.loads(os.pread(lock, 4096, 0) or b"{}").get("host", _host())
            return bool(host == _host())
        except (OSError, ValueError, AttributeError):
            return False
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _remove(parent: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # somebody else may be removing it too
        shutil.rmtree(name, dir_fd=parent)


def _host() -> str:
    return socket.gethostname()


@atexit.register
def _close_all() -> None:
    """Removes what an interrupted start or end of a session has left."""
    for run in list(_open):
        with contextlib.suppress(OSError):
            run.close()
