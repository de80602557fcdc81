"""kvikio at arm's length: its import, device memory registered with cuFile, and files that it moves to and from there.

Which of kvikio's calls is used matters. `pread`, `pwrite`, `raw_read` and `raw_write` synchronise the default stream
outside kvikio's compatibility mode, so that a write would wait for all compute that is queued. `raw_read_async` and
`raw_write_async` are ordered by the stream they are given alone; here that is a stream of the calling thread, and the
thread waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tidegate.memory.pinned import Slab

__all__ = ["DeviceFile", "DeviceSpan", "KvikioError", "load_kvikio", "own_stream"]

_PAGE = 4096
_SEGMENT = 2 << 20
"""Bytes. The caching allocator asks the driver for multiples of this; smaller requests would share a segment."""


class KvikioError(Exception):
    """kvikio cannot be used here; the message says why."""


def load_kvikio() -> Any:
    """Imports kvikio. The first use of kvikio in a process goes through here.

    Raises:
        KvikioError: It is not installed, or its import fails. It may do so in any way: RuntimeError without cuFile or a
            driver, OSError or ImportError for a library, SystemError from its extension modules.
    """
    try:
        kvikio = importlib.import_module("kvikio")
        importlib.import_module("kvikio.defaults")
        for name in ("CuFile", "memory_register", "memory_deregister"):
            getattr(kvikio, name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "kvikio":
            raise KvikioError("kvikio is not installed") from error
        raise KvikioError(f"importing kvikio fails: {_said(error)}") from error
    return kvikio


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


_streams = threading.local()


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[int]:
    """Makes a stream that only this thread uses the current one, and gives its handle; 0 on the CPU."""
    if device.type == "cpu":
        yield 0
        return
    streams: dict[torch.device, torch.cuda.Stream] = _streams.__dict__.setdefault("of", {})
    stream = streams.get(device)
    if stream is None:
        # Of high priority: those come from a set of their own, so that no copy stream is given out a second time.
        stream = streams[device] = torch.cuda.Stream(device, priority=-1)
        stream.record_event()  # binds the device's context to the thread, which kvikio needs; it takes no memory
    with torch.cuda.stream(stream):
        stream.synchronize()
        yield int(stream.cuda_stream)


class DeviceSpan:
    """Device memory in an allocation of its own, registered once with cuFile.

    cuFile registers the whole driver allocation that an address lies in. A block that the caching allocator has cut
    from a larger segment would register its neighbours, too, so the span has a memory pool to itself.

    Args:
        nbytes: Bytes; a multiple of 2 MiB is taken.
        device: The GPU. On the CPU the span is host memory, for tests.
        kvikio: The module.

    Attributes:
        tensor: The span as uint8.
        address: Its first byte, at a page's start.
        nbytes: Its length.

    Raises:
        KvikioError: There is no memory, or it cannot be registered, as may be with expandable segments.
    """

    def __init__(self, nbytes: int, device: torch.device, kvikio: Any) -> None:
        self.nbytes = -(-nbytes // _SEGMENT) * _SEGMENT
        self.device = device
        try:
            self.tensor, pool = _allocate(self.nbytes, device)
        except RuntimeError as error:
            raise KvikioError(f"no {self.nbytes} bytes of device memory for staging: {_said(error)}") from error
        self.address = self.tensor.data_ptr()
        if self.address % _PAGE:
            raise KvikioError("device memory does not start at a page")
        try:
            with own_stream(device):
                kvikio.memory_register(self.tensor)
        except Exception as error:
            raise KvikioError(f"device memory cannot be registered with cuFile: {_said(error)}") from error
        held = [self.tensor, pool]
        self._end = weakref.finalize(self, _deregister, kvikio, held, os.getpid())

    def close(self) -> None:
        """Undoes the registration; nothing may be in flight. The memory goes with its last user. Idempotent."""
        self._end()


def _allocate(nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
    if device.type == "cpu":
        return Slab(nbytes, pin=False).tensor, None
    pool = torch.cuda.MemPool()
    with torch.cuda.device(device), torch.cuda.use_mem_pool(pool, device):
        storage = torch.UntypedStorage(nbytes, device=device)  # torch.empty would fill it in deterministic mode
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,)), pool


def _deregister(kvikio: Any, held: list[Any], owner: int) -> None:
    if os.getpid() != owner:
        return  # cuFile must not be touched in a forked child
    with contextlib.suppress(Exception):
        kvikio.memory_deregister(held[0])
    held.pop(0)  # the memory goes before the pool that it is of
    held.clear()


class DeviceFile:
    """An open file to and from which kvikio moves device memory. Thread-safe; kvikio opens the file itself, twice.

    Args:
        fd: A descriptor of it; the file needs no name.
        kvikio: The module.

    Raises:
        KvikioError: kvikio cannot open it.
    """

    def __init__(self, fd: int, kvikio: Any) -> None:
        try:
            self._file = kvikio.CuFile(f"/proc/self/fd/{fd}", "r+")
            self._write, self._read = self._file.raw_write_async, self._file.raw_read_async
        except Exception as error:
            raise KvikioError(f"kvikio cannot open a file: {_said(error)}") from error

    def write(self, span: DeviceSpan, start: int, nbytes: int, offset: int) -> None:
        """Writes bytes [start, start + nbytes) of a span at `offset`; all of them are multiples of the page size.

        Raises:
            OSError: kvikio failed, or wrote less.
        """
        self._move(self._write, span, start, nbytes, offset, "wrote")

    def read(self, span: DeviceSpan, start: int, nbytes: int, offset: int) -> None:
        """Reads what lies at `offset` into bytes [start, start + nbytes) of a span.

        Raises:
            OSError: kvikio failed, or read less.
        """
        self._move(self._read, span, start, nbytes, offset, "read")

    def close(self) -> None:
        """Closes kvikio's descriptors; nothing may be in flight. Idempotent."""
        with contextlib.suppress(Exception):
            self._file.close()

    def _move(
        self, call: Callable[..., Any], span: DeviceSpan, start: int, nbytes: int, offset: int, verb: str
    ) -> None:
        try:
            with own_stream(span.device) as stream:
                # The future holds the arguments of the call, and does not know what must stay alive: `span` is ours.
                future = call(span.tensor, stream, nbytes, offset, start)
                done = future.check_bytes_done()
        except Exception as error:
            raise OSError(errno.EIO, f"kvikio: {_said(error)}") from error
        if done != nbytes:
            raise OSError(errno.EIO, f"kvikio {verb} {done} of {nbytes} bytes")
