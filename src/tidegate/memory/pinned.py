"""Host memory in exact slabs, page-locked for a GPU where that is asked for and possible.

`torch.empty(pin_memory=True)` rounds to powers of two and blocks while it pins; a mapping of our own that is
registered with CUDA does neither.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["PinnedRegistry", "Slab", "copy_bytes", "read_bytes", "registry"]

_log = logging.getLogger("tidegate")


@dataclass(slots=True)
class _Range:
    nbytes: int
    count: int


class PinnedRegistry:
    """Ranges of host memory that are registered with CUDA, each counted.

    Pinning a range that lies within a pinned one only counts it again. A range that overlaps one in part cannot
    be registered by CUDA and is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: dict[int, _Range] = {}
        self._warned = False

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are page-locked now."""
        with self._lock:
            return sum(entry.nbytes for entry in self._ranges.values())

    def pin(self, address: int, nbytes: int) -> bool:
        """Page-locks [address, address + nbytes); False, said once, when the system refuses.

        A range of no bytes needs no pinning and succeeds.
        """
        if nbytes == 0:
            return True
        with self._lock:
            start = self._covering(address, nbytes)
            if start is not None:
                self._ranges[start].count += 1
                return True
            error = _register(address, nbytes)
            if error:
                self._warn(nbytes, error)
                return False
            self._ranges[address] = _Range(nbytes, 1)
            return True

    def unpin(self, address: int, nbytes: int) -> None:
        """Undoes one `pin`; the last one unlocks the range."""
        if nbytes == 0:
            return
        with self._lock:
            start = self._covering(address, nbytes)
            if start is None:
                return
            entry = self._ranges[start]
            entry.count -= 1
            if not entry.count:
                del self._ranges[start]
                _unregister(start)

    def _covering(self, address: int, nbytes: int) -> int | None:
        for start, entry in self._ranges.items():
            if start <= address and address + nbytes <= start + entry.nbytes:
                return start
        return None

    def _warn(self, nbytes: int, error: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "cannot page-lock %d bytes of host memory (%s); copies to and from the GPU will be slower. "
                "Raise the locked-memory limit (ulimit -l), lower host_budget, or set pin_memory=False",
                nbytes,
                error,
            )


registry = PinnedRegistry()
"""The process's registry."""


def _register(address: int, nbytes: int) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, nbytes, 1))  # 1: usable from every device
    return f"CUDA error {code}" if code else ""


def _unregister(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


class Slab:
    """Anonymous memory of exactly the pages asked for, as a uint8 tensor.

    Args:
        nbytes: Bytes; a multiple of the page size is mapped.
        pin: Page-lock it; `pinned` tells whether that worked.
    """

    def __init__(self, nbytes: int, *, pin: bool) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        if pin and nbytes >= _POPULATE:
            _populate(self.address, nbytes)
        self.pinned = pin and registry.pin(self.address, nbytes)
        if self.pinned:
            self._finalizer = weakref.finalize(self.tensor.untyped_storage(), registry.unpin, self.address, nbytes)

    def discard(self) -> None:
        """Tells the system that the contents are no longer needed; pages come back as zeros when touched."""
        if not self.pinned:
            self._map.madvise(mmap.MADV_DONTNEED)

    def view(self, offset: int, nbytes: int) -> Tensor:
        """Bytes [offset, offset + nbytes) as a tensor that keeps the slab mapped."""
        return self.tensor[offset : offset + nbytes]


_POPULATE = 64 << 20
_THREADS = 8
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23


def _populate(address: int, nbytes: int) -> None:
    """Gives fresh memory its pages by several threads; registering would do it with one, page by page.

    Both requests are wishes: on a kernel that knows neither, registering does the work.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise(address, nbytes, _MADV_HUGEPAGE)
    part = -(-nbytes // _THREADS // _HUGE_PAGE) * _HUGE_PAGE
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for start in range(0, nbytes, part):
            pool.submit(advise, address + start, min(part, nbytes - start), _MADV_POPULATE_WRITE)


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copies between addresses; other Python threads go on meanwhile."""
    _memmove(target, source, nbytes)


def read_bytes(target: int, source: int, nbytes: int) -> None:
    """Copies from memory that may be unmapped meanwhile, as when a program empties a tensor's storage.

    Raises:
        OSError: It was (EFAULT); a plain copy would end the process.
    """
    done = 0
    while done < nbytes and _readable_by_kernel:
        length = min(nbytes - done, _MOST_AT_ONCE)
        step = _process_vm_readv(os.getpid(), _Span(target + done, length), 1, _Span(source + done, length), 1, 0)
        if step <= 0:
            code = ctypes.get_errno()
            if code in (errno.EPERM, errno.ENOSYS):  # some containers forbid it
                _readable_by_kernel.clear()
                break
            raise OSError(errno.EFAULT, "the memory to be saved is gone: its storage was emptied")
        done += step
    if done < nbytes:
        copy_bytes(target + done, source + done, nbytes - done)


class _Span(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


_MOST_AT_ONCE = 1 << 30
_libc = ctypes.CDLL(None, use_errno=True)
_memmove = _libc.memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p
_readable_by_kernel: list[bool] = [True] if hasattr(_libc, "process_vm_readv") else []
if _readable_by_kernel:
    _process_vm_readv = _libc.process_vm_readv
    _process_vm_readv.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.POINTER(_Span),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    _process_vm_readv.restype = ctypes.c_ssize_t
