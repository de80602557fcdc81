"""Faults under a training step: the bytes take the next place or the training thread raises; never other bytes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.tiers.test_disk import Faulty, fails, fill, mounted
from torch import Tensor, nn

import tidegate
from tidegate import OffloadConfig, OffloadSession, TierIOError
from tidegate.tiers import disk

MiB = 2**20


@pytest.fixture
def io(monkeypatch: pytest.MonkeyPatch) -> Faulty:
    """The system calls of every disk tier opened in the test."""
    faulty = Faulty()
    monkeypatch.setattr(disk, "PosixIo", lambda: faulty)
    return faulty


def build() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*layers)


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(256, 64)).pow(2).mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def attached(model: nn.Module, path: Path, **changes: object) -> OffloadSession:
    settings = {"tiers": "disk", "device_budget": 0, "min_bytes": 1, "window": 1 << 16, "disk_paths": str(path)}
    return tidegate.attach(model, OffloadConfig(**settings | changes))


def assert_same_as_plain(model: nn.Module) -> None:
    plain = gradients(build())
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("times", [1, 1 << 30], ids=["once", "always"])
def test_failed_writes_leave_the_bytes_on_the_device(tmp_path: Path, io: Faulty, code: int, times: int) -> None:
    model = build()
    with attached(model, tmp_path) as session:
        gradients(model)
        io.on_write = fails(code, times)
        assert_same_as_plain(model)
        assert session.stats().kept > 0
        assert session.stats().resident == 0


def test_failed_writes_take_the_next_tier(tmp_path: Path, io: Faulty) -> None:
    model = build()
    with attached(model, tmp_path, tiers=("disk", "host"), host_budget="64MiB") as session:
        gradients(model)
        io.on_write = fails(errno.EIO)
        assert_same_as_plain(model)
        assert session.stats().written["host"] > 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_cannot_grow_keeps_the_rest_on_the_device(tmp_path: Path, io: Faulty, code: int) -> None:
    io.on_allocate = fails(code)
    model = build()
    with attached(model, tmp_path) as session:
        assert_same_as_plain(model)
        assert session.stats().moved == 0
        assert session.stats().kept > 0


def test_short_transfers_change_nothing(tmp_path: Path, io: Faulty) -> None:
    io.on_write = io.on_read = lambda nbytes: max(4096, nbytes // 3 // 4096 * 4096)
    model = build()
    with attached(model, tmp_path) as session:
        assert_same_as_plain(model)
        assert session.stats().moved > 0


def test_a_read_that_fails_once_changes_nothing(tmp_path: Path, io: Faulty) -> None:
    model = build()
    with attached(model, tmp_path):
        gradients(model)
        io.on_read = fails(errno.EIO, times=1)
        assert_same_as_plain(model)


def test_bytes_that_cannot_be_read_raise_in_the_training_thread(tmp_path: Path, io: Faulty) -> None:
    model = build()
    with attached(model, tmp_path) as session:
        gradients(model)
        io.on_read = fails(errno.EIO)
        with pytest.raises(TierIOError):
            gradients(model)
        io.on_read = lambda nbytes: None
        assert_same_as_plain(model)
        assert session.stats().resident == 0


@pytest.mark.parametrize("damage", ["truncate", "zero"])
def test_a_file_changed_under_us_raises(tmp_path: Path, damage: str) -> None:
    model = build()
    with attached(model, tmp_path) as session:
        gradients(model)
        loss = model(torch.randn(256, 64)).sum()
        (tier,) = session._tiers.open()
        assert isinstance(tier, disk.DiskTier)
        for file in tier._files:
            file.writers.submit(lambda: None).result()
            size = os.fstat(file.fd).st_size
            os.ftruncate(file.fd, 0)
            if damage == "zero":
                os.ftruncate(file.fd, size)
        with pytest.raises(TierIOError):
            loss.backward()


def test_verify_finds_an_edit_that_autograd_cannot_see(tmp_path: Path) -> None:
    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x: Tensor) -> Tensor:
            y = x @ self.weight
            first = y.sin().sum()
            y.data.mul_(2)  # no version counter moves
            return first + y.cos().sum()

    model = Edits()
    with attached(model, tmp_path, verify=True), pytest.raises(tidegate.CorruptionError, match="verify"):
        model(torch.randn(64, 64)).backward()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_small_file_system_that_fills_up(tmp_path: Path, kind: str) -> None:
    with mounted(kind, tmp_path / "small", 16 * MiB) as path:
        model = build()
        with attached(model, path, disk_budget="1GiB", device_budget=0) as session:
            (path / "other").write_bytes(bytes(64))
            assert_same_as_plain(model)
            fill(path / "filler")
            assert_same_as_plain(model)
            assert session.stats().resident == 0
        assert not list(path.glob("tidegate-*"))


CHILD = """
import os, signal, sys, resource
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has switched it off
import torch, tidegate
from torch import nn
where, event = sys.argv[1:3]
if event == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

class Signal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, at):
        if at == "forward":
            os.kill(os.getpid(), number)
        ctx.at = at
        return x * 1
    @staticmethod
    def backward(ctx, g):
        if ctx.at == "backward":
            os.kill(os.getpid(), number)
        return g, None

number = signal.SIGKILL if "kill" in event else signal.SIGINT
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))
    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if index == 3:
                x = Signal.apply(x, event.rpartition("-")[2])
        return x.sum()
torch.manual_seed(0)
plain, model = Model(), Model()
model.load_state_dict(plain.state_dict())
x = torch.randn(1024, 256)
config = tidegate.OffloadConfig(tiers="disk", device_budget=0, min_bytes=1, window=1 << 20, disk_paths=where)
session = tidegate.attach(model, config)
model(x).backward()
if event == "limit":
    plain(x).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), model.parameters()))
    assert session.stats().kept > 0
"""


def child(path: Path, event: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CHILD, str(path), event], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_ctrl_c_leaves_no_files(tmp_path: Path, where: str) -> None:
    done = child(tmp_path, f"int-{where}")
    assert "KeyboardInterrupt" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_sigkill_leaves_holds_no_bytes_and_goes_at_the_next_start(tmp_path: Path, where: str) -> None:
    done = child(tmp_path, f"kill-{where}")
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert [file.name for file in left.iterdir()] == ["lock"]
    model = build()
    with attached(model, tmp_path):
        gradients(model)
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_keeps_the_rest_on_the_device(tmp_path: Path) -> None:
    done = child(tmp_path, "limit")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_two_sessions_share_a_path(tmp_path: Path) -> None:
    models = [build(), build()]
    sessions = [attached(model, tmp_path) for model in models]
    for model in models:
        assert_same_as_plain(model)
    assert len({path for session in sessions for path in session.spill_dirs}) == 2
    for session in sessions:
        session.close()
    assert list(tmp_path.iterdir()) == []


def test_data_loader_workers_leave_the_spill_directory_alone(tmp_path: Path) -> None:
    model = build()
    data = torch.utils.data.TensorDataset(torch.randn(64, 64))
    with attached(model, tmp_path) as session:
        gradients(model)
        loader = torch.utils.data.DataLoader(data, batch_size=16, num_workers=1, multiprocessing_context="fork")
        for (batch,) in loader:
            model(batch).sum().backward()
        assert all(path.is_dir() for path in session.spill_dirs)
        assert_same_as_plain(model)


@pytest.mark.parametrize("rest", ["another path", "the host tier", "nothing"])
def test_a_path_that_is_full_at_the_start_is_left_out(
    rest: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, healthy = build(), tmp_path / "healthy"
    healthy.mkdir()
    with mounted("tmpfs", tmp_path / "small", 4 * MiB) as path:
        fill(path / "filler")
        paths = [str(path)] + [str(healthy)] * (rest == "another path")
        tiers = "disk,host" if rest == "the host tier" else "disk"
        settings = {"tiers": tiers, "disk_budget": "1GiB", "disk_paths": paths, "device_budget": 0, "min_bytes": 1}
        with tidegate.attach(model, OffloadConfig(**settings)) as session:
            assert_same_as_plain(model)
            written = session.stats().written
        assert set(written) == {"another path": {"disk"}, "the host tier": {"host"}, "nothing": set()}[rest]
    messages = [record.message for record in caplog.records]
    assert sum(str(path) in message and "No space left" in message for message in messages) == 1
    assert not any("fit on the device" in message for message in messages)
    assert any("no tier took" in message for message in messages) == (rest == "nothing")


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    model = build()
    session = tidegate.attach(
        model, OffloadConfig(tiers="disk", device_budget=0, min_bytes=1, disk_paths=[str(good), str(bad)])
    )
    bad.rmdir()  # after it was checked
    with pytest.raises(tidegate.ConfigError, match=f"No such file or directory: '{bad}'"):
        gradients(model)
    session.close()
    assert list(good.iterdir()) == []
