"""Where spill files may go: checked before training starts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tidegate.errors import ConfigError
from tidegate.memory.filesystem import Filesystem
from tidegate.tiers import paths
from tidegate.tiers.paths import disk_room, usable_disk_paths

GiB = 2**30


def pretend(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, tuple[str, int]], room: int = 8 * GiB) -> None:
    """Says of each path which kind of file system, on which device, holds it."""

    def system(path: str) -> Filesystem:
        kind, device = kinds[str(path)]
        return Filesystem("/", kind, "source", device, False)

    monkeypatch.setattr(paths, "filesystem_of", system)
    monkeypatch.setattr(paths, "disk_headroom", lambda path: room)


def test_a_directory_that_can_be_written_to_is_usable(tmp_path: Path) -> None:
    assert usable_disk_paths((str(tmp_path),)) == (str(tmp_path),)


@pytest.mark.parametrize(
    ("kind", "words"), [("missing", "does not exist"), ("file", "not a directory"), ("link", "symbolic link")]
)
def test_a_path_that_cannot_hold_spill_files_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    path = tmp_path / kind
    if kind == "file":
        path.write_text("")
    if kind == "link":
        path.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=words) as caught:
        usable_disk_paths((str(path),))
    assert str(path) in str(caught.value)


def test_a_directory_of_another_user_is_refused() -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    script = (
        "import os, sys; from tidegate.tiers.paths import usable_disk_paths; os.setuid(65534)\n"
        "try: usable_disk_paths((sys.argv[1],))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ConfigError disk_paths: no permission to write to"), done.stderr


@pytest.mark.parametrize(("kind", "words"), [("tmpfs", "which is RAM"), ("nfs4", "on another machine")])
def test_a_named_path_that_is_no_local_disk_is_taken_and_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, words: str
) -> None:
    pretend(monkeypatch, {str(tmp_path): (kind, 1)})
    with caplog.at_level(logging.WARNING, logger="tidegate"):
        assert usable_disk_paths((str(tmp_path),)) == (str(tmp_path),)
    assert words in caplog.text


@pytest.mark.parametrize(("kind", "words"), [("tmpfs", "is RAM"), ("nfs4", "on another machine")])
def test_the_temporary_directory_is_not_taken_unless_it_is_a_local_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, words: str
) -> None:
    pretend(monkeypatch, {str(tmp_path): (kind, 1)})
    with caplog.at_level(logging.WARNING, logger="tidegate"):
        assert usable_disk_paths(()) == ()
    assert "the disk tier is off" in caplog.text
    assert words in caplog.text


def test_the_temporary_directory_on_a_local_disk_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {str(tmp_path): ("ext4", 1)})
    assert usable_disk_paths(()) == (str(tmp_path),)


def test_paths_on_one_device_share_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"/a": ("ext4", 1), "/b": ("ext4", 1)})
    assert disk_room(("/a", "/b")) == 8 * GiB


def test_rooms_of_several_devices_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"/a": ("ext4", 1), "/b": ("xfs", 2)})
    assert disk_room(("/a", "/b")) == 16 * GiB


def test_memory_file_systems_share_half_of_the_host_s_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, {"/a": ("tmpfs", 1), "/b": ("tmpfs", 2), "/c": ("ext4", 3)})
    monkeypatch.setattr(paths, "host_headroom", lambda: 8 * GiB)
    assert disk_room(("/a", "/b")) == 4 * GiB
    assert disk_room(("/a", "/b", "/c")) == 12 * GiB
