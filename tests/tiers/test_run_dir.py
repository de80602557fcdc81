"""Run directories: private, unique, removed; what a killed run left goes at the next start, a live run stays."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.tiers.run_dir import RunDir, reap

HOLDER = """
import sys
from tidegate.tiers.run_dir import RunDir
run = RunDir(sys.argv[1], 0)
fd = run.open_unnamed(direct=False)
open(run.path / "visible", "w").write("left over")
print(run.name, flush=True)
sys.stdin.read()
"""


def holder(path: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str], number: int) -> None:
    process.send_signal(number)
    process.communicate(timeout=30)


def test_directory_and_files_are_private(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        run = RunDir(tmp_path)
        fd = run.open_unnamed(direct=False)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((run.path / "lock").stat().st_mode) == 0o600
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    os.close(fd)
    run.close()


def test_spill_files_have_no_name(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    fd = run.open_unnamed(direct=False)
    assert os.fstat(fd).st_nlink == 0
    assert [path.name for path in run.path.iterdir()] == ["lock"]
    os.close(fd)
    run.close()


def test_close_removes_the_directory_and_may_be_repeated(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.close()
    run.close()
    assert list(tmp_path.iterdir()) == []


def test_two_runs_and_two_ranks_share_a_path(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path, 0), RunDir(tmp_path, 0), RunDir(tmp_path, 1)]
    assert len({run.name for run in runs}) == 3
    assert all(run.path.is_dir() for run in runs)
    for run in runs:
        run.close()
    assert list(tmp_path.iterdir()) == []


def test_names_are_short(tmp_path: Path) -> None:
    run = RunDir(tmp_path, 12345)
    assert len(run.name) < 64
    run.close()


def test_what_a_killed_run_left_goes_at_the_next_start(tmp_path: Path) -> None:
    process, name = holder(tmp_path)
    end(process, signal.SIGKILL)
    assert (tmp_path / name / "visible").exists()
    run = RunDir(tmp_path)
    assert not (tmp_path / name).exists()
    run.close()


def test_a_live_run_is_never_removed(tmp_path: Path) -> None:
    process, name = holder(tmp_path)
    assert reap(tmp_path) == []
    assert (tmp_path / name).is_dir()
    end(process, signal.SIGKILL)


def test_a_run_killed_before_its_lock_is_removed(tmp_path: Path) -> None:
    name = f"tidegate-{os.getuid()}-0123abcd-r0"
    (tmp_path / name).mkdir()
    assert reap(tmp_path) == [name]


def test_a_starting_run_is_left_alone_and_goes_when_it_never_started(tmp_path: Path) -> None:
    new = tmp_path / f"tidegate-{os.getuid()}-0123abcd-r0.new"
    new.mkdir()
    assert reap(tmp_path) == []
    os.utime(new, (0, 0))
    assert reap(tmp_path) == [new.name]


def test_a_lock_that_somebody_else_holds_on_the_parent_stops_nobody(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    run = RunDir(tmp_path)
    run.close()
    assert reap(tmp_path) == []
    os.close(fd)


def test_what_an_interrupted_end_left_goes_when_the_process_does(tmp_path: Path) -> None:
    program = (
        "import shutil, sys; from tidegate.tiers import run_dir; run = run_dir.RunDir(sys.argv[1])\n"
        "def interrupt(*_, **__): shutil.rmtree = real; raise KeyboardInterrupt\n"
        "real, shutil.rmtree = shutil.rmtree, interrupt\n"
        "try: run.close()\nexcept KeyboardInterrupt: print('interrupted')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "interrupted\n", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tidegate", "tidegate-notes", "tidegate-0-0123abcd-r0.bak", "other"])
def test_directories_that_are_not_run_directories_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert reap(tmp_path) == []
    assert (tmp_path / name).is_dir()


def test_a_symbolic_link_with_a_run_directorys_name_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (tmp_path / f"tidegate-{os.getuid()}-0123abcd-r0").symlink_to(precious)
    assert reap(tmp_path) == []
    assert (precious / "file").read_text() == "kept"


def test_links_inside_a_dead_run_are_removed_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    dead = tmp_path / f"tidegate-{os.getuid()}-0123abcd-r0"
    dead.mkdir()
    (dead / "link").symlink_to(precious)
    assert reap(tmp_path) == [dead.name]
    assert (precious / "file").read_text() == "kept"


def test_another_users_directory_stays(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to give a directory to another user")
    other = tmp_path / "tidegate-0-0123abcd-r0"
    other.mkdir()
    os.chown(other, 12345, 12345)
    assert reap(tmp_path) == []
    assert other.is_dir()


def test_another_hosts_directory_stays(tmp_path: Path) -> None:
    other = tmp_path / f"tidegate-{os.getuid()}-0123abcd-r0"
    other.mkdir()
    (other / "lock").write_text('{"pid": 1, "host": "another-host"}')
    assert reap(tmp_path) == []
    assert other.is_dir()


def test_a_forked_child_leaves_its_parents_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    pid = os.fork()
    if pid == 0:
        run.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert run.path.is_dir()
    run.close()
