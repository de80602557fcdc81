"""A kvikio that moves host memory by system calls, with faults in front of them; it keeps a diary."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor


class Future:
    def __init__(self, done: int | Exception) -> None:
        self._done = done

    def check_bytes_done(self) -> int:
        if isinstance(self._done, Exception):
            raise self._done
        return self._done


class FakeKvikio:
    """Stands for the module.

    `on_write` and `on_read` are given the size of a call and return the bytes to move (None: all). They may raise, as
    kvikio does when it is called, or return an exception, as kvikio raises when the future is asked.
    `loses` makes a write claim to be done that never was, `offset_by` sends it elsewhere.
    """

    def __init__(self) -> None:
        self.diary: list[tuple[str, Any]] = []
        self.on_write: Callable[[int], int | Exception | None] = lambda size: None
        self.on_read: Callable[[int], int | Exception | None] = lambda size: None
        self.on_open: Callable[[], None] = lambda: None
        self.on_register: Callable[[], None] = lambda: None
        self.loses = False
        self.offset_by = 0
        self.defaults = SimpleNamespace(get=lambda name: "AUTO", is_compat_mode_preferred=lambda: False)

    def CuFile(self, path: str, flags: str) -> CuFile:
        assert flags == "r+"  # "w" would truncate
        self.on_open()
        return CuFile(self, path)

    def memory_register(self, memory: Tensor) -> None:
        self.on_register()
        self.diary.append(("register", memory.data_ptr()))

    def memory_deregister(self, memory: Tensor) -> None:
        self.diary.append(("deregister", memory.data_ptr()))

    def events(self, *names: str) -> list[str]:
        return [name for name, _ in self.diary if name in names]


class CuFile:
    def __init__(self, kvikio: FakeKvikio, path: str) -> None:
        self._kvikio = kvikio
        self._fd = os.open(path, os.O_RDWR)
        kvikio.diary.append(("open", path))

    def close(self) -> None:
        os.close(self._fd)
        self._kvikio.diary.append(("close", self._fd))

    def raw_write_async(self, memory: Tensor, stream: int, size: int, file_offset: int, dev_offset: int) -> Future:
        moved = self._kvikio.on_write(size)
        if isinstance(moved, Exception) or self._kvikio.loses:
            return Future(moved if isinstance(moved, Exception) else size)
        view = _span(memory, dev_offset, size if moved is None else moved)
        self._kvikio.diary.append(("write", file_offset))
        return Future(os.pwrite(self._fd, view, file_offset + self._kvikio.offset_by))

    def raw_read_async(self, memory: Tensor, stream: int, size: int, file_offset: int, dev_offset: int) -> Future:
        moved = self._kvikio.on_read(size)
        if isinstance(moved, Exception):
            return Future(moved)
        view = _span(memory, dev_offset, size if moved is None else moved)
        self._kvikio.diary.append(("read", file_offset))
        return Future(os.preadv(self._fd, [view], file_offset))

    def _wrong(self, *_: object, **__: object) -> int:
        raise AssertionError("this call waits for the default stream")

    raw_write = raw_read = pwrite = pread = write = read = _wrong


def _span(memory: Tensor, start: int, nbytes: int) -> memoryview:
    assert start + nbytes <= memory.numel()
    return memoryview((ctypes.c_char * nbytes).from_address(memory.data_ptr() + start)).cast("B")
