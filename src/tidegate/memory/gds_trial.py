"""A round trip between a GPU and a file, through kvikio and by POSIX calls: python -m tidegate.memory.gds_trial.

It runs in a process of its own, as a driver that is not in order may crash or hang, and prints one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tidegate.memory.cufile import DeviceFile, DeviceSpan, KvikioError, load_kvikio, own_stream
from tidegate.memory.nvfs import read_counters
from tidegate.memory.pinned import Slab

__all__ = ["trial"]

_BYTES, _CHUNK, _SMALL = 64 << 20, 8 << 20, 1 << 20
_ROUNDS = 3
_SLEEP = 1 << 29
"""Cycles that the default stream is kept busy: about 0.3 s."""


def trial(path: str, device: torch.device, threads: int) -> dict[str, Any]:
    """Moves random bytes there and back in both ways and reports what `gds.judge` needs, or an "error"."""
    try:
        kvikio = load_kvikio()
        span = DeviceSpan(_BYTES, device, kvikio)
    except KvikioError as error:
        return {"error": str(error)}
    try:
        fd, direct = _open(path)
        try:
            os.posix_fallocate(fd, 0, _BYTES)
            file = DeviceFile(fd, kvikio)
            try:
                return _report(kvikio, file, fd, span, threads) | {"posix": direct}
            finally:
                file.close()
        finally:
            os.close(fd)
    except (OSError, RuntimeError, KvikioError) as error:
        return {"error": f"a round trip through kvikio failed: {error}"}
    finally:
        span.close()


def _open(path: str) -> tuple[int, str]:
    """A private file that no name leads to, and how it is opened."""
    base = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    name = os.path.join(path, f".tidegate-probe-{os.urandom(8).hex()}")
    fd = os.open(name, base, 0o600)
    try:
        try:
            return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC), "posix-direct"
        except OSError:
            return os.dup(fd), "posix-buffered"
    finally:
        os.unlink(name)
        os.close(fd)


def _report(kvikio: Any, file: DeviceFile, fd: int, span: DeviceSpan, threads: int) -> dict[str, Any]:
    original = torch.randint(256, (_BYTES,), dtype=torch.uint8, device=span.device)
    span.tensor.copy_(original)
    _synchronize(span.device)
    before = read_counters()

    def by_kvikio(move: Callable[..., None]) -> Callable[[int], None]:
        return lambda start: move(span, start, _CHUNK, start)

    with ThreadPoolExecutor(threads) as pool:
        _sweep(pool, by_kvikio(file.write))
        span.tensor.zero_()
        _synchronize(span.device)
        _forget(fd)
        _sweep(pool, by_kvikio(file.read))
        after = read_counters()
        if not torch.equal(span.tensor, original):
            return {"error": "kvikio brought other bytes back than were written"}
        del original
        slabs = [Slab(_CHUNK, pin=span.device.type == "cuda") for _ in range(threads)]
        ways = {
            "write": by_kvikio(file.write),
            "read": by_kvikio(file.read),
            "posix_write": _by_posix(os.pwritev, fd, span, slabs),
            "posix_read": _by_posix(os.preadv, fd, span, slabs),
        }
        rates = dict.fromkeys(ways, 0.0)
        for _ in range(_ROUNDS):
            for name, move in ways.items():
                if name.endswith("read"):
                    _forget(fd)
                rates[name] = max(rates[name], _BYTES / _sweep(pool, move) / 1e9)
    counted = before is not None and after is not None and after.rose(before, _BYTES >> 20)
    compat = getattr(kvikio.defaults, "is_compat_mode_preferred", None)
    return {
        **rates,
        "counted": counted,
        "compat": bool(compat()) if compat is not None else False,
        "waits": _waits(file, span),
    }


def _sweep(pool: ThreadPoolExecutor, move: Callable[[int], None]) -> float:
    """Seconds for all chunks."""
    started = time.perf_counter()
    for _ in pool.map(move, range(0, _BYTES, _CHUNK)):
        pass
    return time.perf_counter() - started


def _by_posix(
    call: Callable[[int, list[memoryview], int], int], fd: int, span: DeviceSpan, slabs: list[Slab]
) -> Callable[[int], None]:
    """What the disk tier does without kvikio: a copy between the device and pinned memory, and a system call."""
    free = list(slabs)
    writing = call is os.pwritev

    def move(start: int) -> None:
        slab = free.pop()
        part, view = span.tensor[start : start + _CHUNK], (ctypes.c_char * _CHUNK).from_address(slab.address)
        with own_stream(span.device):
            if writing:
                slab.tensor.copy_(part, non_blocking=True)
                _finish(span.device)
            done = call(fd, [memoryview(view).cast("B")], start)
            if not writing:
                part.copy_(slab.tensor, non_blocking=True)
                _finish(span.device)
        free.append(slab)
        if done != _CHUNK:
            raise OSError(f"moved {done} of {_CHUNK} bytes")

    return move


def _waits(file: DeviceFile, span: DeviceSpan) -> bool:
    """Whether a write waits for what is queued on the default stream."""
    if span.device.type == "cpu":
        return False
    with torch.cuda.device(span.device):
        file.write(span, 0, _SMALL, 0)
        torch.cuda._sleep(_SLEEP)
        done = torch.cuda.current_stream().record_event()
        file.write(span, 0, _SMALL, 0)
        waited = bool(done.query())
        done.synchronize()
    return waited


def _forget(fd: int) -> None:
    """Buffered reads, too, come from the disk."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Entry point: path, index of the GPU, threads."""
    path, index, threads = sys.argv[1:]
    report = trial(path, torch.device("cuda", int(index)), int(threads))
    sys.stdout.write("\n" + json.dumps(report) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what libraries do at exit must not change the outcome


if __name__ == "__main__":
    main()
