"""The disk tier on kvikio: the same promises as by system calls, whatever kvikio does."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers.fake_kvikio import FakeKvikio
from tests.tiers.memory_buffers import Span

from tidegate.errors import CorruptionError, TierIOError
from tidegate.memory.cufile import DeviceFile, KvikioError
from tidegate.tiers import io_kvikio
from tidegate.tiers.disk import DiskLease, DiskTier
from tidegate.tiers.io_kvikio import DeviceLease, DeviceRing, KvikioPieceIo, fingerprint
from tidegate.tiers.io_posix import PosixIo
from tidegate.tiers.tier import ALIGNMENT, Buffer

CPU = torch.device("cpu")
KiB, MiB = 2**10, 2**20


class Deck:
    """A disk tier on a fake kvikio, with a ring."""

    def __init__(self, paths: Sequence[Path], kvikio: FakeKvikio, io: PosixIo | None = None, **options: object) -> None:
        self.kvikio = kvikio
        self.pieces = KvikioPieceIo(kvikio, "kvikio-gds", io)
        self.ring = self.pieces.open_ring(4 * MiB, CPU)
        given_: dict[str, object] = {"capacity": 8 * MiB, "chunk_bytes": 64 * KiB, "grow_bytes": MiB, "threads": 2}
        self.tier = DiskTier(paths, pieces=self.pieces, **(given_ | options))  # type: ignore[arg-type]

    @property
    def fd(self) -> int:
        return self.tier._files[0].fd

    def on_device(self, nbytes: int, seed: int | None = None) -> DeviceLease:
        lease = self.ring.reserve(nbytes)
        assert lease is not None
        lease.tensor.fill_(0x5A)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            lease.tensor.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator))
        return lease

    def stored(self, nbytes: int, seed: int = 1) -> tuple[DiskLease, torch.Tensor]:
        """Writes random bytes from the device; their place there is free again."""
        source, lease = self.on_device(nbytes, seed), self.tier.reserve(nbytes)
        assert lease is not None
        assert self.tier.write(lease, buffer(source)).result() == nbytes
        original = source.tensor.clone()
        self.ring.free(source)
        return lease, original

    def read_back(self, lease: DiskLease) -> torch.Tensor:
        target = self.on_device(lease.nbytes)
        try:
            assert self.tier.read(lease, buffer(target)).result() == lease.nbytes
            return target.tensor.clone()
        finally:
            self.ring.free(target)


def buffer(lease: DeviceLease) -> Buffer:
    return Buffer(lease.address, lease.nbytes, lease)


@contextmanager
def opened(
    path: Path | Sequence[Path], kvikio: FakeKvikio | None = None, io: PosixIo | None = None, **options: object
) -> Iterator[Deck]:
    deck = Deck([path] if isinstance(path, Path) else path, kvikio or FakeKvikio(), io, **options)
    try:
        yield deck
    finally:
        deck.tier.close()


def raising(error: Exception, times: int = 1 << 30) -> Callable[[int], None]:
    left = iter(range(times))

    def fault(size: int) -> None:
        if next(left, None) is not None:
            raise error

    return fault


SIZES = st.one_of(st.integers(1, 300_000), st.sampled_from([4064, 4065, 4095, 4096, 4097, 8160, 8192, 64 * KiB]))


# Round trips


@settings(max_examples=60)
@given(data=st.data())
def test_bytes_come_back_whatever_their_size(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    paths = [tmp_path_factory.mktemp("disk") for _ in range(data.draw(st.integers(1, 3)))]
    with opened(paths, chunk_bytes=data.draw(st.sampled_from([4096, 3 * 4096, 64 * KiB]))) as deck:
        sizes = data.draw(st.lists(SIZES, min_size=1, max_size=5))
        held = [deck.stored(nbytes, seed) for seed, nbytes in enumerate(sizes)]
        for lease, original in held:
            assert torch.equal(deck.read_back(lease), original)
            deck.tier.free(lease)
        assert deck.tier.used == deck.ring.used == 0
        assert deck.tier.mode == "kvikio-gds"


@settings(max_examples=40)
@given(nbytes=SIZES, phase=st.sampled_from([0, 0, 64, 4032]), chunk=st.sampled_from([4096, 64 * KiB]))
def test_what_host_memory_wrote_can_be_read_into_device_memory(
    tmp_path_factory: pytest.TempPathFactory, nbytes: int, phase: int, chunk: int
) -> None:
    with opened(tmp_path_factory.mktemp("disk"), chunk_bytes=chunk) as deck:
        source, lease = Span(nbytes, phase, seed=1), deck.tier.reserve(nbytes, phase)
        assert lease is not None
        deck.tier.write(lease, source.buffer).result()
        if phase == 0:
            assert torch.equal(deck.read_back(lease), source.bytes)
        target = Span(nbytes, phase)
        deck.tier.read(lease, target.buffer).result()
        assert torch.equal(target.bytes, source.bytes)
        assert "posix" in deck.tier.mode


def test_pieces_of_another_phase_are_read_into_device_memory_by_way_of_the_host(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        source, lease = Span(50_000, 64, seed=1), deck.tier.reserve(50_000, 64)
        assert lease is not None
        deck.tier.write(lease, source.buffer).result()
        assert torch.equal(deck.read_back(lease), source.bytes)
        assert deck.kvikio.events("read") == []


@settings(max_examples=30)
@given(nbytes=SIZES, phase=st.integers(0, 4095))
def test_what_device_memory_wrote_can_be_read_into_host_memory(
    tmp_path_factory: pytest.TempPathFactory, nbytes: int, phase: int
) -> None:
    with opened(tmp_path_factory.mktemp("disk")) as deck:
        lease, original = deck.stored(nbytes)
        target = Span(nbytes, phase)
        deck.tier.read(lease, target.buffer).result()
        assert torch.equal(target.bytes, original)
        assert target.guards_intact()


def test_the_mode_names_both_ways_once_host_memory_was_written(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        deck.stored(4096)
        assert deck.tier.mode == "kvikio-gds"
        lease = deck.tier.reserve(4096)
        assert lease is not None
        deck.tier.write(lease, Span(4096, 0, seed=1).buffer).result()
        assert deck.tier.mode in ("kvikio-gds+posix-direct", "kvikio-gds+posix-buffered")


def test_many_units_in_flight_at_once_come_back(tmp_path: Path) -> None:
    with opened(tmp_path, threads=4, chunk_bytes=4096) as deck:
        sources = [deck.on_device(30_000 + seed, seed) for seed in range(20)]
        leases = [deck.tier.reserve(source.nbytes) for source in sources]
        writes = [
            deck.tier.write(lease, buffer(source))
            for lease, source in zip(leases, sources, strict=True)
            if lease is not None
        ]
        assert sum(write.result() for write in writes) == sum(source.nbytes for source in sources)
        for lease, source in zip(leases, sources, strict=True):
            assert lease is not None
            assert torch.equal(deck.read_back(lease), source.tensor)


# What kvikio may do


def test_a_short_write_is_an_error(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        deck.kvikio.on_write = lambda size: size - 4096
        source, lease = deck.on_device(100_000, seed=1), deck.tier.reserve(100_000)
        assert lease is not None
        with pytest.raises(OSError, match=r"kvikio wrote \d+ of \d+ bytes") as caught:
            deck.tier.write(lease, buffer(source)).result()
        assert caught.value.errno == errno.EIO
        deck.kvikio.on_write = lambda size: None
        lease, original = deck.stored(100_000)
        assert torch.equal(deck.read_back(lease), original)


@pytest.mark.parametrize("error", [RuntimeError("cuFile error"), OSError(28, "full"), ValueError("?"), SystemError()])
@pytest.mark.parametrize("late", [False, True])
def test_a_write_that_raises_is_an_io_error(tmp_path: Path, error: Exception, late: bool) -> None:
    with opened(tmp_path) as deck:
        deck.kvikio.on_write = (lambda size: error) if late else raising(error)
        source, lease = deck.on_device(8192, seed=1), deck.tier.reserve(8192)
        assert lease is not None
        with pytest.raises(OSError, match="kvikio: ") as caught:
            deck.tier.write(lease, buffer(source)).result()
        assert caught.value.errno == errno.EIO


def test_a_path_that_keeps_failing_is_taken_out_of_use(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        deck.kvikio.on_write = raising(RuntimeError("cuFile error"))
        for _ in range(3):
            source, lease = deck.on_device(4096, seed=1), deck.tier.reserve(4096)
            assert lease is not None
            with pytest.raises(OSError, match="cuFile error"):
                deck.tier.write(lease, buffer(source)).result()
        assert deck.tier.reserve(4096) is None


@pytest.mark.parametrize("late", [False, True])
def test_a_read_that_fails_is_tried_again_by_system_calls_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    with opened(tmp_path) as deck:
        lease, original = deck.stored(200_001)
        error = RuntimeError("cuFile error 5030")
        deck.kvikio.on_read = (lambda size: error) if late else raising(error)
        assert torch.equal(deck.read_back(lease), original)
        assert torch.equal(deck.read_back(lease), original)
    assert sum("a read by kvikio failed" in message for message in caplog.messages) == 1


def test_a_short_read_is_tried_again_by_system_calls(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        lease, original = deck.stored(200_001)
        deck.kvikio.on_read = lambda size: size - 4096
        assert torch.equal(deck.read_back(lease), original)


def test_a_full_device_does_not_keep_bytes_from_coming_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(span: object, start: int, nbytes: int) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with opened(tmp_path) as deck:
        lease, original = deck.stored(200_001)
        monkeypatch.setattr(io_kvikio, "_fingerprint", full)
        assert torch.equal(deck.read_back(lease), original)


def test_bytes_that_no_way_can_read_raise(tmp_path: Path) -> None:
    class Unreadable(PosixIo):
        broken = False

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if self.broken:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().preadv(fd, buffers, offset)

    io = Unreadable()
    with opened(tmp_path, io=io) as deck:
        lease, _ = deck.stored(8192)
        io.broken = True
        deck.kvikio.on_read = raising(RuntimeError("cuFile error"))
        with pytest.raises(TierIOError, match="failed twice"):
            deck.read_back(lease)


def test_a_truncated_file_raises(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        lease, _ = deck.stored(200_000)
        os.ftruncate(deck.fd, 4096)
        with pytest.raises(TierIOError):
            deck.read_back(lease)


# What was not written is never returned


def test_zeros_of_a_regrown_file_are_never_returned(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        lease, _ = deck.stored(200_000)
        size = os.fstat(deck.fd).st_size
        os.ftruncate(deck.fd, 0)
        os.ftruncate(deck.fd, size)
        with pytest.raises(CorruptionError):
            deck.read_back(lease)


def test_a_write_that_never_happened_is_found(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        first, _ = deck.stored(100_000, seed=1)
        deck.tier.free(first)
        deck.kvikio.loses = True
        second, _ = deck.stored(100_000, seed=2)
        assert second.pieces[0].offset == first.pieces[0].offset
        with pytest.raises(CorruptionError):
            deck.read_back(second)


def test_a_write_that_went_elsewhere_is_found(tmp_path: Path) -> None:
    with opened(tmp_path, chunk_bytes=MiB) as deck:
        deck.kvikio.offset_by = 4096
        lease, _ = deck.stored(100_000)
        with pytest.raises(CorruptionError):
            deck.read_back(lease)


def test_pages_that_changed_places_are_found(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        lease, _ = deck.stored(3 * 4096)
        offset = lease.pieces[0].offset
        with open(f"/proc/self/fd/{deck.fd}", "r+b") as file:
            file.seek(offset)
            pages = file.read(2 * 4096)
            file.seek(offset)
            file.write(pages[4096:] + pages[:4096])
        with pytest.raises(CorruptionError):
            deck.read_back(lease)


@settings(max_examples=30)
@given(data=st.data(), nbytes=st.integers(1, 100_000))
def test_any_changed_byte_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, nbytes: int) -> None:
    with opened(tmp_path_factory.mktemp("disk"), chunk_bytes=4 * 4096) as deck:
        lease, _ = deck.stored(nbytes)
        piece = data.draw(st.sampled_from(lease.pieces))
        where = piece.offset + data.draw(st.integers(0, piece.nbytes - 1))
        with open(f"/proc/self/fd/{deck.fd}", "r+b") as file:
            file.seek(where)
            old = file.read(1)[0]
            file.seek(where)
            file.write(bytes([old ^ data.draw(st.integers(1, 255))]))
        with pytest.raises(CorruptionError):
            deck.read_back(lease)


def test_a_stamp_of_host_memory_is_looked_at_when_the_device_reads(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        first, _ = deck.stored(8192)
        deck.tier.free(first)
        lease = deck.tier.reserve(8192)  # nothing was written here since
        assert lease is not None
        with pytest.raises(CorruptionError):
            deck.read_back(lease)


def test_equal_contents_have_equal_fingerprints_and_others_not() -> None:
    pages = torch.arange(3 * ALIGNMENT, dtype=torch.int64).to(torch.uint8)
    assert fingerprint(pages) == fingerprint(pages.clone())
    assert fingerprint(torch.zeros_like(pages)) != fingerprint(pages)
    assert fingerprint(torch.zeros(ALIGNMENT, dtype=torch.uint8)) == 0


# Opening and closing


def test_everything_is_closed_in_order_and_nothing_is_left(tmp_path: Path) -> None:
    with opened(tmp_path) as deck:
        deck.stored(100_000)
        kvikio, ring = deck.kvikio, deck.ring
    assert kvikio.events("register", "open", "close", "deregister") == ["register", "open", "close", "deregister"]
    assert kvikio.diary[0] == ("register", kvikio.diary[-1][1])
    assert list(tmp_path.iterdir()) == []
    assert ring.reserve(1) is None
    deck.tier.close()
    assert kvikio.events("deregister") == ["deregister"]


def test_a_file_that_kvikio_cannot_open_leaves_nothing(tmp_path: Path) -> None:
    kvikio = FakeKvikio()
    kvikio.on_open = lambda: raising(RuntimeError("no cuFile"))(0)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(KvikioError, match="no cuFile"):
        Deck([tmp_path], kvikio)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []
    assert kvikio.events("deregister") == ["deregister"]


def test_a_kvikio_without_stream_calls_is_refused(tmp_path: Path) -> None:
    class Old(FakeKvikio):
        def CuFile(self, path: str, flags: str) -> object:  # type: ignore[override]
            return object()

    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    try:
        with pytest.raises(KvikioError, match="raw_write_async"):
            DeviceFile(fd, Old())
    finally:
        os.close(fd)


def test_a_kvikio_that_fails_to_close_does_not_keep_the_tier_from_closing(tmp_path: Path) -> None:
    class Stuck(FakeKvikio):
        def memory_deregister(self, memory: torch.Tensor) -> None:
            raise RuntimeError("the driver is gone")

    with opened(tmp_path, Stuck()):
        pass
    assert list(tmp_path.iterdir()) == []


# The ring


def test_the_ring_is_registered_once_and_handed_out_in_pages() -> None:
    kvikio = FakeKvikio()
    ring = DeviceRing(1, CPU, kvikio)
    leases = []
    while (lease := ring.reserve(4097)) is not None:
        assert lease.address % ALIGNMENT == 0
        assert lease.tensor.numel() == lease.nbytes == 4097
        assert lease.tensor.data_ptr() == lease.address
        leases.append(lease)
    assert len(leases) == ring.capacity // 8192 == 256
    assert ring.used == ring.capacity
    assert ring.peak == 256 * 4097
    for lease in leases:
        ring.free(lease)
        ring.free(lease)
    assert ring.used == 0
    assert kvikio.events("register") == ["register"]


def test_a_unit_that_the_ring_could_never_hold_is_refused_at_once() -> None:
    ring = DeviceRing(2 * MiB, CPU, FakeKvikio())
    assert ring.reserve_blocking(2 * MiB + 1) is None
    assert ring.reserve_blocking(2 * MiB) is not None
    assert ring.reserve_blocking(1, timeout=0.01) is None


def test_a_waiting_thread_gets_the_room_that_another_gives_back() -> None:
    ring = DeviceRing(2 * MiB, CPU, FakeKvikio())
    whole = ring.reserve(2 * MiB)
    assert whole is not None
    got: list[DeviceLease | None] = []
    waiter = threading.Thread(target=lambda: got.append(ring.reserve_blocking(4096, timeout=30)))
    waiter.start()
    ring.free(whole)
    waiter.join(30)
    assert got[0] is not None


def test_closing_ends_every_wait() -> None:
    ring = DeviceRing(2 * MiB, CPU, FakeKvikio())
    assert ring.reserve(2 * MiB) is not None
    got: list[DeviceLease | None] = []
    waiter = threading.Thread(target=lambda: got.append(ring.reserve_blocking(4096, timeout=30)))
    waiter.start()
    ring.close()
    waiter.join(30)
    assert got == [None]


def test_memory_that_cannot_be_registered_is_refused() -> None:
    kvikio = FakeKvikio()
    kvikio.on_register = lambda: raising(RuntimeError("CU_FILE_INVALID_MAPPING"))(0)
    with pytest.raises(KvikioError, match="cannot be registered with cuFile: RuntimeError: CU_FILE_INVALID_MAPPING"):
        DeviceRing(2 * MiB, CPU, kvikio)


def test_a_ring_that_nobody_closed_is_deregistered_when_it_dies() -> None:
    kvikio = FakeKvikio()
    ring = DeviceRing(2 * MiB, CPU, kvikio)
    lease = ring.reserve(4096)
    del ring, lease
    assert kvikio.events("register", "deregister") == ["register", "deregister"]


def test_a_forked_child_leaves_the_registration_alone() -> None:
    kvikio = FakeKvikio()
    ring = DeviceRing(2 * MiB, CPU, kvikio)
    child = os.fork()
    if not child:
        ring.close()
        os._exit(len(kvikio.events("deregister")))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
