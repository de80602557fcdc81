"""What file systems are and what they have left; on real mounts where this user may mount."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tidegate.memory import filesystem
from tidegate.memory.filesystem import Filesystem, disk_headroom, filesystem_of, quota_headroom

MiB = 2**20


@contextmanager
def mounted(target: Path, *arguments: str) -> Iterator[Path]:
    """Mounts something on `target` for a while."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    target.mkdir()
    done = subprocess.run(["mount", *arguments, str(target)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"this system does not mount here: {done.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


@contextmanager
def ext4(folder: Path, reserved_percent: int) -> Iterator[Path]:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(64 * MiB)
    subprocess.run(["mkfs.ext4", "-q", "-m", str(reserved_percent), str(image)], check=True)
    with mounted(folder / "disk", "-o", "loop", str(image)) as target:
        yield target


def kind(name: str) -> Filesystem:
    return Filesystem("/", name, "source", 1, False)


# Kinds


@pytest.mark.parametrize("name", ["tmpfs", "ramfs"])
def test_memory_file_systems_are_ram(name: str) -> None:
    assert kind(name).is_ram
    assert not kind(name).is_local


@pytest.mark.parametrize("name", ["nfs4", "cifs", "lustre", "9p", "fuse.sshfs", "fuse.gcsfuse", "fuse.something-new"])
def test_file_systems_of_other_machines_are_not_local(name: str) -> None:
    assert kind(name).is_network
    assert not kind(name).is_local


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs", "fuse.mergerfs", "fuseblk"])
def test_file_systems_on_disks_are_local(name: str) -> None:
    assert kind(name).is_local


# Which one a path is on


def test_shared_memory_is_ram() -> None:
    assert filesystem_of("/dev/shm").is_ram


def test_options_of_the_mount_and_of_its_file_system_are_told(tmp_path: Path) -> None:
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=1m,nosuid", "tmpfs") as target:
        assert {"nosuid", "size=1024k"} <= filesystem_of(target).options
    assert filesystem_of("/dev/shm").options & {"rw", "ro"}


def test_a_folder_is_on_its_parent_s_file_system(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert filesystem_of(inner) == filesystem_of(tmp_path)


def test_a_missing_path_has_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        filesystem_of(tmp_path / "none")


@pytest.mark.parametrize("name", ["plain", "with space", "ümläut", "tab\tand\\slash"])
def test_a_mount_point_is_found_whatever_its_name(tmp_path: Path, name: str) -> None:
    with mounted(tmp_path / name, "-t", "tmpfs", "-o", "size=1m", "none") as target:
        found = filesystem_of(target)
        assert (found.kind, found.mount) == ("tmpfs", str(target))


def test_of_mounts_on_one_another_the_upper_counts(tmp_path: Path) -> None:
    with mounted(tmp_path / "a", "-t", "tmpfs", "none") as lower:
        done = subprocess.run(["mount", "-t", "ramfs", "none", str(lower)], capture_output=True)
        if done.returncode:
            pytest.skip("this system does not mount ramfs")
        try:
            assert filesystem_of(lower).kind == "ramfs"
        finally:
            subprocess.run(["umount", str(lower)], check=True)


def test_a_bind_mount_is_the_file_system_behind_it(tmp_path: Path) -> None:
    with mounted(tmp_path / "a", "--bind", "/dev/shm") as target:
        found = filesystem_of(target)
        assert (found.kind, found.mount, found.device) == ("tmpfs", str(target), os.stat("/dev/shm").st_dev)


def test_without_mount_numbers_the_device_number_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "_mount_id", lambda fd: None)
    with mounted(tmp_path / "a", "-t", "tmpfs", "none") as target:
        assert filesystem_of(target).mount == str(target)


def test_read_only_mounts_say_so(tmp_path: Path) -> None:
    with mounted(tmp_path / "a", "-t", "tmpfs", "-o", "ro", "none") as target:
        assert filesystem_of(target).read_only


# What is left


def test_blocks_reserved_for_root_are_not_counted_even_for_root(tmp_path: Path) -> None:
    with ext4(tmp_path, reserved_percent=40) as disk:
        status = os.statvfs(disk)
        assert disk_headroom(disk) == status.f_bavail * status.f_frsize
        assert disk_headroom(disk) < status.f_bfree * status.f_frsize - 20 * MiB


def test_a_written_file_takes_room(tmp_path: Path) -> None:
    with ext4(tmp_path, reserved_percent=0) as disk:
        before = disk_headroom(disk)
        with (disk / "file").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 8 * MiB)
        assert 8 * MiB <= before - disk_headroom(disk) <= 9 * MiB


def test_a_memory_file_system_has_no_more_than_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted(tmp_path / "a", "-t", "tmpfs", "-o", "size=64m", "none") as target:
        assert disk_headroom(target) == 64 * MiB
        monkeypatch.setattr(filesystem, "host_headroom", lambda: 5 * MiB)
        assert disk_headroom(target) == 5 * MiB


def test_a_disk_is_not_bounded_by_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "host_headroom", lambda: 0)
    with ext4(tmp_path, reserved_percent=0) as disk:
        assert disk_headroom(disk) > 0


# Quotas; the kernel's answer is put in at the system call


def quotas(monkeypatch: pytest.MonkeyPatch, answers: dict[int, tuple[int, int, int]]) -> None:
    def quotactl_fd(number: int, fd: int, command: int, owner: int, block: ctypes.Array[ctypes.c_char]) -> int:
        answer = answers.get(command & 0xFF)
        if answer is None:
            return -1
        filesystem._BLOCK.pack_into(block, 0, *answer, 0, 0, 0, 0, 0, 0)
        return 0

    monkeypatch.setattr(filesystem, "_syscall", quotactl_fd)


def test_a_quota_s_hard_limit_less_what_is_used_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas(monkeypatch, {0: (10 * 1024, 9 * 1024, 7 * MiB)})
    assert quota_headroom(tmp_path) == 3 * MiB
    assert disk_headroom(tmp_path) == 3 * MiB


def test_a_soft_limit_alone_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas(monkeypatch, {0: (0, 8 * 1024, 7 * MiB)})
    assert quota_headroom(tmp_path) == MiB


def test_the_tighter_of_user_and_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas(monkeypatch, {0: (10 * 1024, 0, 0), 1: (4 * 1024, 0, 0)})
    assert quota_headroom(tmp_path) == 4 * MiB


def test_more_than_the_quota_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas(monkeypatch, {0: (1024, 0, 2 * MiB)})
    assert quota_headroom(tmp_path) == 0


def test_a_quota_without_limits_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quotas(monkeypatch, {0: (0, 0, 7 * MiB)})
    assert quota_headroom(tmp_path) is None


def test_the_real_call_answers_or_is_refused(tmp_path: Path) -> None:
    room = quota_headroom(tmp_path)
    assert room is None or room >= 0
