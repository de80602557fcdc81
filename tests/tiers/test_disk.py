"""The disk tier: every byte comes back or an error says so; never above its budget; nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers.memory_buffers import Span

from tidegate.errors import CorruptionError, SessionClosedError, TierIOError
from tidegate.tiers.disk import DiskLease, DiskTier
from tidegate.tiers.io_posix import PosixIo

KiB, MiB = 2**10, 2**20


class Faulty(PosixIo):
    """System calls with a fault in front of them; None means "go on"."""

    def __init__(self) -> None:
        self.on_write: Callable[[int], int | None] = lambda nbytes: None
        self.on_read: Callable[[int], int | None] = lambda nbytes: None
        self.on_allocate: Callable[[], None] = lambda: None

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self.on_write(sum(map(len, buffers)))
        return super().pwritev(fd, buffers if limit is None else _first(buffers, limit), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        limit = self.on_read(sum(map(len, buffers)))
        return super().preadv(fd, buffers if limit is None else _first(buffers, limit), offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        self.on_allocate()
        super().allocate(fd, offset, nbytes)


def _first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    parts = []
    for buffer in buffers:
        parts.append(buffer[:nbytes])
        nbytes -= len(parts[-1])
    return [part for part in parts if part]


def fails(code: int, times: int = 1 << 30) -> Callable[..., None]:
    left = iter(range(times))

    def fault(*_: object) -> None:
        if next(left, None) is not None:
            raise OSError(code, os.strerror(code))

    return fault


@contextmanager
def opened(path: Path | Sequence[Path], io: PosixIo | None = None, **options: object) -> Iterator[DiskTier]:
    paths = [path] if isinstance(path, Path) else list(path)
    settings_: dict[str, object] = {"capacity": 8 * MiB, "chunk_bytes": 64 * KiB, "grow_bytes": MiB, "threads": 2}
    tier = DiskTier(paths, io=io, **(settings_ | options))  # type: ignore[arg-type]
    try:
        yield tier
    finally:
        tier.close()


def stored(tier: DiskTier, nbytes: int, phase: int = 64, seed: int = 1) -> tuple[DiskLease, Span]:
    source = Span(nbytes, phase, seed)
    lease = tier.reserve(nbytes, phase)
    assert lease is not None
    assert tier.write(lease, source.buffer).result() == nbytes
    return lease, source


def read_back(tier: DiskTier, lease: DiskLease, source: Span, phase: int = 64) -> None:
    target = Span(lease.nbytes, phase)
    assert tier.read(lease, target.buffer).result() == lease.nbytes
    assert torch.equal(source.bytes, target.bytes)
    assert target.guards_intact()


def file_descriptor(tier: DiskTier, index: int = 0) -> int:
    return tier._files[index].fd


def waits(gate: threading.Event) -> None:
    gate.wait(30)


# Round trips


@settings(max_examples=60)
@given(data=st.data())
def test_bytes_come_back_whatever_their_size_and_alignment(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    paths = [tmp_path_factory.mktemp("disk") for _ in range(data.draw(st.integers(1, 3)))]
    direct = data.draw(st.sampled_from([None, False]))
    with opened(paths, direct=direct, chunk_bytes=data.draw(st.sampled_from([4096, 3 * 4096, 64 * KiB]))) as tier:
        units = data.draw(
            st.lists(
                st.tuples(
                    st.one_of(st.integers(1, 300_000), st.sampled_from([4064, 4065, 4095, 4096, 4097, 8160, 8192])),
                    st.one_of(st.integers(0, 4095), st.sampled_from([0, 64, 4032])),
                    st.one_of(st.none(), st.integers(0, 4095)),
                ),
                min_size=1,
                max_size=5,
            )
        )
        held = [(*stored(tier, nbytes, phase, seed), phase, other) for seed, (nbytes, phase, other) in enumerate(units)]
        for lease, source, phase, other in held:
            read_back(tier, lease, source, phase if other is None else other)
            tier.free(lease)
        assert tier.used == 0


def test_a_lease_may_be_read_many_times(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        lease, source = stored(tier, 200_000)
        for _ in range(3):
            read_back(tier, lease, source)


def test_room_is_used_again(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        for seed in range(40):
            lease, source = stored(tier, MiB, seed=seed)
            read_back(tier, lease, source)
            tier.free(lease)
        assert tier.allocated <= 3 * MiB


def test_units_are_striped_over_the_paths(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    with opened(paths) as tier:
        stored(tier, MiB)
        assert all(file.extents.used > 400 * KiB for file in tier._files)


def test_files_and_reservations_never_pass_the_capacity(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=3 * MiB, grow_bytes=2 * MiB) as tier:
        leases = []
        while (lease := tier.reserve(100 * KiB)) is not None:
            leases.append(lease)
            assert tier.used <= tier.allocated <= tier.capacity
        assert len(leases) >= 25
        tier.free(leases[0])
        assert tier.reserve(100 * KiB) is not None


def test_a_refused_reservation_takes_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=MiB) as tier:
        assert tier.reserve(2 * MiB) is None
        assert tier.used == 0


# Order of events


def test_a_write_that_has_not_begun_can_be_cancelled(tmp_path: Path) -> None:
    with opened(tmp_path, threads=1) as tier:
        gate = threading.Event()
        first, second = (tier.reserve(4096), tier.reserve(4096))
        assert first is not None
        assert second is not None
        source = Span(4096, 0, seed=1)
        running = tier.write(first, source.buffer, after=lambda: waits(gate))
        waiting = tier.write(second, source.buffer)
        assert waiting.cancel()
        tier.free(second)
        gate.set()
        running.result()


def test_room_freed_during_io_is_taken_until_the_io_ends(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        gate = threading.Event()
        source = Span(4096, 0, seed=1)
        lease = tier.reserve(4096)
        assert lease is not None
        future = tier.write(lease, source.buffer, after=lambda: waits(gate))
        tier.free(lease)
        tier.free(lease)
        assert tier.used > 0
        gate.set()
        future.result()
        assert tier.used == 0


def test_closing_ends_waiting_work_and_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path, threads=1) as tier:
        begun, gate = threading.Event(), threading.Event()

        def hold() -> None:
            begun.set()
            gate.wait(30)

        source = Span(4096, 0, seed=1)
        leases = [tier.reserve(4096) for _ in range(5)]
        futures = [tier.write(lease, source.buffer, after=hold) for lease in leases if lease is not None]
        begun.wait(30)
        closer = threading.Thread(target=tier.close)
        closer.start()
        gate.set()
        closer.join(30)
        assert not closer.is_alive()
        assert all(future.done() for future in futures)
        with pytest.raises(SessionClosedError):
            tier.write(leases[0], source.buffer)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# Faults


def test_a_short_write_is_continued(tmp_path: Path) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        io.on_write = lambda nbytes: max(4096, nbytes // 2 // 4096 * 4096)
        lease, source = stored(tier, 200_001)
        read_back(tier, lease, source)


def test_a_short_read_is_continued(tmp_path: Path) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        lease, source = stored(tier, 200_001)
        io.on_read = lambda nbytes: max(4096, nbytes // 2 // 4096 * 4096)
        read_back(tier, lease, source)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_failed_write_says_so(tmp_path: Path, code: int) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        lease = tier.reserve(100_000)
        assert lease is not None
        io.on_write = fails(code, times=1)
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            tier.write(lease, Span(100_000, 0, seed=1).buffer).result()
        assert caught.value.errno == code


def test_a_write_of_nothing_is_an_error(tmp_path: Path) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        lease = tier.reserve(8192)
        assert lease is not None
        io.pwritev = lambda fd, buffers, offset: 0  # type: ignore[method-assign]
        with pytest.raises(OSError, match="wrote 0 of"):
            tier.write(lease, Span(8192, 0, seed=1).buffer).result()


def test_one_failed_read_is_tried_again(tmp_path: Path) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        lease, source = stored(tier, 8192)
        io.on_read = fails(errno.EIO, times=1)
        read_back(tier, lease, source)


def test_bytes_that_cannot_be_read_raise(tmp_path: Path) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        lease, _ = stored(tier, 8192)
        io.on_read = fails(errno.EIO)
        with pytest.raises(TierIOError, match="failed twice"):
            tier.read(lease, Span(8192, 64).buffer).result()


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        lease, _ = stored(tier, 200_000)
        with open(f"/proc/self/fd/{file_descriptor(tier)}", "r+b") as file:
            file.truncate(4096)
        with pytest.raises(TierIOError):
            tier.read(lease, Span(200_000, 64).buffer).result()


def test_zeros_of_a_regrown_file_are_never_returned(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        lease, _ = stored(tier, 200_000)
        size = os.fstat(file_descriptor(tier)).st_size
        os.ftruncate(file_descriptor(tier), 0)
        os.ftruncate(file_descriptor(tier), size)
        with pytest.raises(CorruptionError):
            tier.read(lease, Span(200_000, 64).buffer).result()


def test_bytes_of_another_unit_are_never_returned(tmp_path: Path) -> None:
    with opened(tmp_path) as tier:
        first, _ = stored(tier, 4096, phase=0)
        tier.free(first)
        second = tier.reserve(4096, 0)
        assert second is not None
        assert second.pieces[0].offset == first.pieces[0].offset
        with pytest.raises(CorruptionError):  # its write was lost: the old unit's bytes still lie there
            tier.read(second, Span(4096, 0).buffer).result()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_file_that_cannot_grow_refuses_room_and_says_so_once(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        lease, source = stored(tier, 100_000)
        io.on_allocate = fails(code)
        assert tier.reserve(4 * MiB) is None
        assert tier.reserve(4 * MiB) is None
        read_back(tier, lease, source)
    assert sum("cannot grow" in message for message in caplog.messages) == 1


def test_when_one_path_is_full_the_other_is_used(tmp_path: Path) -> None:
    io = Faulty()
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    with opened(paths, io) as tier:
        io.on_allocate = fails(errno.ENOSPC, times=2)
        lease, source = stored(tier, 300_000)
        read_back(tier, lease, source)
        assert [file.extents.used > 0 for file in tier._files].count(True) == 1


def test_a_path_that_keeps_failing_is_taken_out_of_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    io = Faulty()
    with opened(tmp_path, io) as tier:
        io.on_write = fails(errno.EIO)
        for _ in range(3):
            lease = tier.reserve(4096)
            assert lease is not None
            with pytest.raises(OSError, match="Input/output"):
                tier.write(lease, Span(4096, 0, seed=1).buffer).result()
        assert tier.reserve(4096) is None
    assert "taken out of use" in caplog.text


# Real file systems


@contextmanager
def mounted(kind: str, where: Path, size: int) -> Iterator[Path]:
    if os.getuid() != 0:
        pytest.skip("needs root to mount a small file system")
    where.mkdir()
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    else:
        image = where.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(size)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, capture_output=True)
        command = ["mount", "-o", "loop", str(image), str(where)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def fill(path: Path) -> None:
    """Writes a file until its file system is full."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(64 * KiB))


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_that_fills_up_refuses_room_and_keeps_what_it_has(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path / "small", 16 * MiB) as path, opened(path, capacity=1 << 30) as tier:
        held = []
        while (lease := tier.reserve(MiB, 64)) is not None:
            source = Span(MiB, 64, seed=len(held))
            tier.write(lease, source.buffer).result()
            held.append((lease, source))
        assert 4 <= len(held) < 16
        for lease, source in held:
            read_back(tier, lease, source)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system_at_start_gives_a_tier_without_room(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path / "small", 16 * MiB) as path:
        fill(path / "filler")
        with contextlib.suppress(OSError), opened(path) as tier:  # perhaps not even the run directory fits
            assert tier.reserve(MiB) is None
        assert not list(path.glob("tidegate-*"))


def test_tmpfs_takes_what_mode_it_offers(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "ram", 16 * MiB) as path, opened(path) as tier:
        assert tier.mode in ("posix-direct", "posix-buffered")
        lease, source = stored(tier, 300_000)
        read_back(tier, lease, source)


def test_a_file_size_limit_refuses_room(tmp_path: Path) -> None:
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
from tidegate.tiers.disk import DiskTier
tier = DiskTier([{str(tmp_path)!r}], 1 << 30, grow_bytes=1 << 20)
count = 0
while tier.reserve(256 << 10) is not None:
    count += 1
tier.close()
print(count)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 12
    assert list(tmp_path.iterdir()) == []


def test_descriptors_and_threads_return(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(3):
        with opened(tmp_path) as tier:
            stored(tier, 100_000)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
