"""Sustained bandwidth of the disk tier beside a raw O_DIRECT loop in the same run.

    python benchmarks/disk_tier.py --path /nvme0/spill --total-gib 4

Raw and tier take turns with the same number of threads, on files in the same directory, so that a disk whose speed
drifts treats both alike. Data is random. The ratio is that of the medians over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tidegate.tiers.disk import DiskTier
from tidegate.tiers.tier import Buffer

MiB, GiB = 2**20, 2**30
CHUNK = 8 * MiB


class Raw:
    """pwrite and pread of whole chunks on one preallocated O_DIRECT file."""

    def __init__(self, directory: str, total: int, threads: int) -> None:
        handle, name = tempfile.mkstemp(dir=directory)
        os.close(handle)
        self.fd = os.open(name, os.O_RDWR | os.O_DIRECT)
        os.unlink(name)
        os.posix_fallocate(self.fd, 0, total)
        self.pool = ThreadPoolExecutor(threads)

    def run(self, call: Callable[[int, memoryview, int], int], memory: memoryview, unit: int, total: int) -> None:
        size = min(unit, CHUNK)

        def one(offset: int) -> None:
            start = offset % unit
            if call(self.fd, memory[start : start + size], offset) != size:
                raise OSError("short transfer")

        list(self.pool.map(one, range(0, total, size)))

    def write(self, memory: memoryview, unit: int, total: int) -> None:
        self.run(os.pwrite, memory, unit, total)

    def read(self, memory: memoryview, unit: int, total: int) -> None:
        self.run(lambda fd, view, offset: os.preadv(fd, [view], offset), memory, unit, total)


@contextmanager
def timed(book: list[float], nbytes: int) -> Iterator[None]:
    started = time.perf_counter()
    yield
    book.append(nbytes / (time.perf_counter() - started) / 1e9)


def measure(path: str, unit: int, total: int, threads: int, rounds: int) -> dict[str, float]:
    total = total // unit * unit
    memory = mmap.mmap(-1, unit)
    memory.write(os.urandom(unit))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    view, buffer = memoryview(memory), Buffer(address, unit, memory)
    books: dict[str, list[float]] = {"raw_write": [], "tier_write": [], "raw_read": [], "tier_read": []}
    raw = Raw(path, total, threads)
    tier = DiskTier((path,), total + total // 2 + GiB, threads=threads, chunk_bytes=CHUNK, grow_bytes=total)
    try:
        leases = [tier.reserve(unit) for _ in range(total // unit)]
        raw.write(view, unit, total)  # the first pass turns allocated blocks into written ones
        for future in [tier.write(lease, buffer) for lease in leases if lease]:
            future.result()
        for _ in range(rounds):
            with timed(books["raw_write"], total):
                raw.write(view, unit, total)
            with timed(books["tier_write"], total):
                for future in [tier.write(lease, buffer) for lease in leases if lease]:
                    future.result()
            with timed(books["raw_read"], total):
                raw.read(view, unit, total)
            with timed(books["tier_read"], total):
                for future in [tier.read(lease, buffer) for lease in leases if lease]:
                    future.result()
    finally:
        tier.close()
        raw.pool.shutdown()
        os.close(raw.fd)
    medians = {name: statistics.median(book) for name, book in books.items()}
    return medians | {
        "unit_mib": unit / MiB,
        "write_ratio": medians["tier_write"] / medians["raw_write"],
        "read_ratio": medians["tier_read"] / medians["raw_read"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the disk to measure")
    parser.add_argument("--units", type=int, nargs="+", default=[1, 4, 16, 64], help="unit sizes in MiB")
    parser.add_argument("--total-gib", type=float, default=1.0, help="bytes per pass")
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {args.threads} threads a direction"
    rows = [measure(args.path, unit * MiB, int(args.total_gib * GiB), args.threads, args.rounds) for unit in args.units]
    table = Table(
        "unit MiB", "raw write", "tier write", "ratio", "raw read", "tier read", "ratio", title=f"GB/s; {machine}"
    )
    for row in rows:
        names = ("raw_write", "tier_write", "write_ratio", "raw_read", "tier_read", "read_ratio")
        table.add_row(f"{row['unit_mib']:.0f}", *(f"{row[name]:.2f}" for name in names))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
