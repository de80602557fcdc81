"""GPUDirect Storage counts as real only where it is proved; nothing that a driver does can harm the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiers.fake_kvikio import FakeKvikio

from tidegate.memory import cufile, gds, gds_trial, nvfs
from tidegate.memory.cufile import KvikioError, load_kvikio
from tidegate.memory.filesystem import Filesystem
from tidegate.memory.gds import GdsStatus, gds_status, judge
from tidegate.memory.nvfs import NvfsCounters, Obstacle, gds_obstacles, nvfs_counters

GPU = torch.device("cuda", 0)

COUNTING = """\
GDS Version: 1.13.1.3
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.24.2)
Mellanox PeerDirect Supported: False
IO stats: Enabled, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 64
Active Process: 1
Batches\t\t\t\t: n=0 ok=0 err=0 Avg-Submit-Latency(usec)=0
Reads\t\t\t\t: n=4100 ok=4099 err=1 readMiB=32768 io_state_err=0
Reads\t\t\t\t: Bandwidth(MiB/s)=6411 Avg-Latency(usec)=1240
Sparse Reads\t\t        : n=3 io=5 holes=7 pages=9
Writes\t\t\t\t: n=2050 ok=2050 err=0 writeMiB=16400 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Writes\t\t\t\t: Bandwidth(MiB/s)=3021 Avg-Latency(usec)=2600
Mmap\t\t\t\t: n=21 ok=21 err=0 munmap=19
Bar1-map\t\t\t: n=21 ok=21 err=0 free=19 callbacks=0 active=2 delay-frees=0
Error\t\t\t\t: cpu-gpu-pages=0 sg-ext=0 dma-map=0 dma-ref=0
Ops\t\t\t\t: Read=0 Write=0 BatchIO=0
GPU 0000:19:00.0  uuid:0f0e0d0c-0b0a-0908-0706-050403020100 : Registered_MiB=64 Cache_MiB=0 max_pinned_MiB=2048
"""

SILENT = """\
GDS Version: 1.14.0.31
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2.25.7)
Mellanox PeerDirect Supported: True
IO stats: Disabled, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 0
Active Process: 0
Reads                : err=0 io_state_err=0
Sparse Reads         : n=0 io=0 holes=0 pages=0
Writes               : err=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Mmap                 : n=1 ok=1 err=0 munmap=2
Bar1-map             : n=1 ok=1 err=0 free=1 callbacks=0 active=0 delay-frees=0
Error                : cpu-gpu-pages=0 sg-ext=0 dma-map=0 dma-ref=0
Ops                  : Read=0 Write=0 BatchIO=0
"""

OLD = """\
NVFS statistics(ver: 1.0)
Active Shadow-Buffer (MB): 256
Active Process: 1
Reads : n=100 ok=100 err=0 readMB=800 io_state_err=0
Writes : n=50 ok=50 err=0 writeMB=400 io_state_err=0
Ops : Read=0 Write=0
"""


# Counters


def test_the_counters_of_a_module_that_counts() -> None:
    assert nvfs_counters(COUNTING) == NvfsCounters(True, writes=2050, reads=4099, written=16400, read=32768)


def test_a_module_that_does_not_count_says_so() -> None:
    assert not nvfs_counters(SILENT).counting


def test_older_versions_are_understood() -> None:
    assert nvfs_counters(OLD) == NvfsCounters(True, writes=50, reads=100, written=400, read=800)


@pytest.mark.parametrize("text", ["", "\n\n", "Reads", "Reads: n=", "Writes : n=x ok=y", "IO stats: ", "\0\xff : n=1"])
def test_what_is_not_understood_counts_nothing(text: str) -> None:
    assert not nvfs_counters(text).counting


def grown(writes: int, reads: int, written: int, read: int) -> NvfsCounters:
    text = COUNTING.replace("ok=2050", f"ok={2050 + writes}").replace("ok=4099", f"ok={4099 + reads}")
    return nvfs_counters(
        text.replace("MiB=16400", f"MiB={16400 + written}").replace("MiB=32768", f"MiB={32768 + read}")
    )


@pytest.mark.parametrize(
    ("after", "proved"),
    [
        (grown(8, 8, 64, 64), True),
        (grown(8, 8, 63, 63), True),  # rounded down
        (grown(8, 8, 4000, 4000), True),  # others work, too
        (grown(0, 0, 0, 0), False),
        (grown(8, 0, 64, 0), False),
        (grown(0, 8, 0, 64), False),
        (grown(1, 1, 8, 8), False),
        (nvfs_counters(SILENT), False),
    ],
)
def test_only_the_bytes_of_the_round_trip_are_a_proof(after: NvfsCounters, proved: bool) -> None:
    assert after.rose(nvfs_counters(COUNTING), 64) is proved


def test_where_bytes_are_not_told_operations_must_do() -> None:
    before, after = NvfsCounters(True, 1, 1), NvfsCounters(True, 9, 9)
    assert after.rose(before, 64)
    assert not before.rose(before, 64)


# Obstacles


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing stands in the way, below a directory."""
    stats = tmp_path / "nvidia-fs" / "stats"
    stats.parent.mkdir()
    stats.write_text(COUNTING)
    for name in ("udev", "dev"):
        (tmp_path / name).mkdir()
    (tmp_path / "dev" / "nvidia-fs0").touch()
    (tmp_path / "version").write_text("Linux version 6.8.0-generic")
    (tmp_path / "cufile.json").touch()
    monkeypatch.setattr(nvfs, "_STATS", stats)
    monkeypatch.setattr(nvfs, "_UDEV", str(tmp_path / "udev"))
    monkeypatch.setattr(nvfs, "_DEVICES", str(tmp_path / "dev"))
    monkeypatch.setattr(nvfs, "_VERSION", tmp_path / "version")
    monkeypatch.setattr(nvfs, "_CONFIG", str(tmp_path / "cufile.json"))
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    on_disk(monkeypatch, "ext4", "rw", "data=ordered")
    monkeypatch.setattr(gds, "_known", {})
    monkeypatch.setattr(gds, "_spec", lambda: object())
    return tmp_path


def on_disk(monkeypatch: pytest.MonkeyPatch, kind: str, *options: str) -> None:
    system = Filesystem("/nvme0", kind, "/dev/nvme0n1", 1, False, frozenset(options))
    monkeypatch.setattr(nvfs, "filesystem_of", lambda path: system)


def told(path: Path) -> str:
    return "; ".join(obstacle.what for obstacle in gds_obstacles(path, GPU))


def test_on_a_machine_made_for_it_nothing_stands_in_the_way(machine: Path) -> None:
    assert gds_obstacles(machine, GPU) == []


def test_a_missing_module_is_told(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvfs, "_STATS", machine / "none" / "stats")
    assert "nvidia-fs is not loaded" in told(machine)


def test_a_module_that_counts_nothing_is_told_with_the_remedy(machine: Path) -> None:
    (machine / "nvidia-fs" / "stats").write_text(SILENT)
    (obstacle,) = gds_obstacles(machine, GPU)
    assert "does not count" in obstacle.what
    assert "rw_stats_enabled" in obstacle.remedy


def test_counters_that_cannot_be_read_are_told(machine: Path) -> None:
    (machine / "nvidia-fs" / "stats").unlink()
    assert "cannot be read" in told(machine)


def test_wsl_is_told(machine: Path) -> None:
    (machine / "version").write_text("Linux version 5.15.90.1-microsoft-standard-WSL2")
    assert "Windows Subsystem for Linux" in told(machine)


def test_a_container_without_udev_is_told(machine: Path) -> None:
    (machine / "udev").rmdir()
    assert "udev cannot be read" in told(machine)


def test_a_container_without_the_devices_is_told(machine: Path) -> None:
    (machine / "dev" / "nvidia-fs0").unlink()
    assert "there is no" in told(machine)


def test_a_missing_configuration_is_told(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "cufile.json").unlink()
    assert "default stream" in told(machine)
    (machine / "other.json").touch()
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(machine / "other.json"))
    assert told(machine) == ""


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("tmpfs", (), "which is RAM"),
        ("overlay", (), "overlay, which cuFile does not support"),
        ("ext4", ("rw",), "do not name data=ordered"),
        ("ext4", ("rw", "data=journal"), "do not name data=ordered"),
        ("xfs", (), ""),
    ],
)
def test_file_systems_that_cannot_do_it_are_told(
    machine: Path, monkeypatch: pytest.MonkeyPatch, kind: str, options: tuple[str, ...], words: str
) -> None:
    on_disk(monkeypatch, kind, *options)
    assert words in told(machine)
    assert bool(words) is bool(told(machine))


def test_a_consumer_gpu_is_told(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA GeForce RTX 4090")
    assert "RTX 4090 is a consumer GPU" in told(machine)


# Conclusions

REPORT: dict[str, Any] = {
    "write": 6.0,
    "read": 6.5,
    "posix_write": 3.0,
    "posix_read": 4.0,
    "counted": True,
    "compat": False,
    "waits": False,
}


def test_real_and_faster_pays() -> None:
    status = judge(REPORT, [])
    assert status.pays
    assert status.to_dict()["write"] == 6.0
    assert "write 6.00 GB/s against 3.00 by POSIX" in status.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"counted": False}, "did not see the bytes"),
        ({"compat": True}, "compatibility mode is on"),
        ({"waits": True}, "wait for the work that is queued"),
        ({"write": 2.0, "read": 3.0}, "not faster"),
        ({"write": 2.0}, "not faster"),
    ],
)
def test_everything_else_does_not(change: dict[str, Any], words: str) -> None:
    status = judge(REPORT | change, [])
    assert not status.pays
    assert status.usable
    assert words in status.detail


def test_what_is_known_to_stand_in_the_way_is_the_reason() -> None:
    status = judge(REPORT | {"counted": False}, [Obstacle("ext4 is not data=ordered", "remount it")])
    assert (status.detail, status.remedy) == ("ext4 is not data=ordered", "remount it")


def test_an_error_makes_it_unusable() -> None:
    status = judge({"error": "importing kvikio fails: OSError: libcuda.so.1"}, [Obstacle("no module", "load it")])
    assert not status.usable
    assert status.detail == "importing kvikio fails: OSError: libcuda.so.1; no module"


# The round trip in another process


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], GdsStatus]:
    """Puts a program in the place of the round trip and asks for the status that results."""

    def run(program: str) -> GdsStatus:
        (tmp_path / "stand_in.py").write_text(textwrap.dedent(program))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(gds, "_TRIAL", "stand_in")
        return gds_status(tmp_path, GPU)

    return run


def test_its_report_is_judged(machine: Path, trial: Callable[[str], GdsStatus]) -> None:
    assert trial(f"print('a library talks')\nprint('''{json.dumps(REPORT)}''')").pays


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import os; os.abort()", "ended with code -6: it said nothing"),
        ("raise RuntimeError('no driver')", "ended with code 1: RuntimeError: no driver"),
        ("print('not JSON')", "ended with code 0"),
        ("print('[1]')", "ended with code 0"),
        ("import sys; sys.exit(3)", "ended with code 3"),
    ],
)
def test_a_crash_is_a_reason_and_nothing_more(
    machine: Path, trial: Callable[[str], GdsStatus], program: str, words: str
) -> None:
    status = trial(program)
    assert not status.usable
    assert words in status.detail


def test_a_hang_is_a_reason_and_nothing_more(
    machine: Path, monkeypatch: pytest.MonkeyPatch, trial: Callable[[str], GdsStatus]
) -> None:
    monkeypatch.setattr(gds, "_SECONDS", 0.5)
    status = trial("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()")
    assert not status.usable
    assert "hung" in status.detail


def test_it_is_made_once_for_a_disk_and_a_gpu(machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def attempt(path: str, device: torch.device, threads: int) -> dict[str, Any]:
        made.append(str(device))
        return REPORT

    monkeypatch.setattr(gds, "_try", attempt)
    first = gds_status(tmp_path, GPU)
    assert gds_status(tmp_path, GPU) is first
    gds_status(tmp_path, torch.device("cuda", 1))
    assert made == ["cuda:0", "cuda:1"]


def test_nothing_is_started_where_the_module_is_not_loaded(
    machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[str] = []
    monkeypatch.setattr(nvfs, "_STATS", machine / "none" / "stats")
    monkeypatch.setattr(gds, "_try", lambda *_: made.append("trial") or REPORT | {"counted": False})
    status = gds_status(tmp_path, GPU)
    assert not status.pays
    assert "nvidia-fs is not loaded" in status.detail
    assert made == []
    assert gds_status(tmp_path, GPU, forced=True).usable
    assert gds_status(tmp_path, GPU).usable  # known now
    assert made == ["trial"]


def test_nothing_is_started_without_kvikio(machine: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gds, "_spec", lambda: None)
    monkeypatch.setattr(gds, "_try", lambda *_: pytest.fail("started"))
    status = gds_status(tmp_path, GPU, forced=True)
    assert not status.usable
    assert status.detail == "kvikio is not installed"
    assert "tidegate[gds]" in status.remedy


def test_on_the_cpu_and_on_a_path_that_is_not_there_it_is_no_question(tmp_path: Path) -> None:
    assert not gds_status(tmp_path, torch.device("cpu")).usable
    assert "No such file" in gds_status(tmp_path / "none", GPU).detail


def test_the_real_program_says_why_it_cannot(tmp_path: Path) -> None:
    """Without kvikio, or with a fake one, or without a GPU: one line of JSON with the reason."""
    (tmp_path / "kvikio.py").write_text("raise SystemError('initialization failed')")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tidegate.memory.gds_trial", str(tmp_path), "0", "2"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == {"error": "importing kvikio fails: SystemError: initialization failed"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds_trial, "_BYTES", 4 << 20)
    monkeypatch.setattr(gds_trial, "_CHUNK", 1 << 20)
    monkeypatch.setattr(gds_trial, "_ROUNDS", 1)


def run_trial(monkeypatch: pytest.MonkeyPatch, path: Path, kvikio: FakeKvikio) -> dict[str, Any]:
    monkeypatch.setattr(gds_trial, "load_kvikio", lambda: kvikio)
    return gds_trial.trial(str(path), torch.device("cpu"), 2)


@pytest.mark.usefixtures("small")
def test_both_ways_are_measured_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kvikio = FakeKvikio()
    report = run_trial(monkeypatch, tmp_path, kvikio)
    status = judge(report, [])
    assert status.usable
    assert min(report[name] for name in ("write", "read", "posix_write", "posix_read")) > 0
    assert not report["counted"]
    assert list(tmp_path.iterdir()) == []
    assert kvikio.events("close", "deregister") == ["close", "deregister"]


@pytest.mark.usefixtures("small")
def test_bytes_that_the_module_counts_are_reported(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter([nvfs_counters(COUNTING), grown(4, 4, 4, 4)])
    monkeypatch.setattr(gds_trial, "read_counters", lambda: next(counted))
    assert run_trial(monkeypatch, machine, FakeKvikio())["counted"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fault", ["loses", "short", "raises", "open", "register"])
def test_a_kvikio_that_does_not_work_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cuFile error")

    kvikio = FakeKvikio()
    kvikio.loses = fault == "loses"
    if fault == "short":
        kvikio.on_read = lambda size: size - 4096
    if fault == "raises":
        kvikio.on_write = fail
    if fault == "open":
        kvikio.on_open = fail
    if fault == "register":
        kvikio.on_register = fail
    report = run_trial(monkeypatch, tmp_path, kvikio)
    words = {"loses": "other bytes", "short": "read 1044480 of 1048576"}.get(fault, "cuFile error")
    assert words in report["error"]
    assert list(tmp_path.iterdir()) == []


# The import


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('libcufile.so cannot be opened')",
        "raise OSError('libcuda.so.1: cannot open shared object file')",
        "raise ImportError('cupy')",
        "raise SystemError('initialization of _lib failed')",
        "raise SystemExit(1)",
        "class Odd(BaseException): pass\nraise Odd('odd')",
        "import a_package_that_is_not_there",
        "this is no Python",
        "",
    ],
)
def test_an_import_that_fails_in_any_way_gives_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str
) -> None:
    (tmp_path / "kvikio").mkdir()
    (tmp_path / "kvikio" / "__init__.py").write_text(body)
    (tmp_path / "kvikio" / "defaults.py").touch()
    forget_kvikio(monkeypatch)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KvikioError, match="importing kvikio fails: "):
        load_kvikio()


def forget_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvikio"]:
        monkeypatch.delitem(sys.modules, name)


def test_an_interrupted_import_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cufile.importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_kvikio()


def test_a_package_works_whatever_kvikio_does(tmp_path: Path) -> None:
    """Attaching, training to disk and the doctor, where the import of kvikio fails."""
    script = """
        import sys, torch, tidegate
        from tidegate.doctor import examine
        from tidegate.memory.probe import kvikio_status
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        with tidegate.attach(model, {"tiers": ["disk"], "device_budget": 0, "min_bytes": 0, "gds": True,
                                     "disk_paths": [sys.argv[1]]}) as session:
            model(torch.ones(8, 64)).sum().backward()
            assert session.stats().modes["disk"].startswith("posix"), session.stats()
        assert "kvikio" not in sys.modules
        assert "libcufile" in kvikio_status().detail
        examine((sys.argv[1],), quick=True)
    """
    (tmp_path / "kvikio.py").write_text("raise RuntimeError('libcufile.so cannot be opened')")
    (tmp_path / "spill").mkdir()
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "spill")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        check=True,
    )
