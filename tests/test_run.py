"""`python -m tidegate.run`: scripts that know nothing of tidegate, run by real processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.launching import ROOT, python

SCRIPTS = ROOT / "tests" / "strategies" / "scripts"


@pytest.fixture
def spill(tmp_path: Path) -> Path:
    folder = tmp_path / "spill"
    folder.mkdir()
    return folder


@pytest.fixture
def settings(spill: Path) -> dict[str, str]:
    return {
        "TIDEGATE_TIERS": "disk",
        "TIDEGATE_DEVICE_BUDGET": "0",
        "TIDEGATE_MIN_BYTES": "0",
        "TIDEGATE_DISK_PATHS": str(spill),
    }


def shown(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1", "4"])
def test_an_unmodified_accelerate_script_under_accelerate_launch(
    every: str, settings: dict[str, str], spill: Path
) -> None:
    script = SCRIPTS / "accelerate_loop.py"
    launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1"]
    plain = shown(python(script, every, "--lr", "3"))
    done = python(*launcher, "-m", "tidegate.run", script, every, "--lr", "3", **settings)
    assert shown(done) == plain
    assert plain["arguments"] == [every, "--lr", "3"]
    assert "to disk (posix-" in done.stderr
    assert list(spill.iterdir()) == []


@pytest.mark.slow
def test_two_processes_give_what_plain_ddp_gives(settings: dict[str, str], spill: Path) -> None:
    script = SCRIPTS / "accelerate_loop.py"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    plain = shown(python(*launcher, script, "4"))
    assert (plain["ranks"], plain["kind"]) == (2, "DistributedDataParallel")
    done = python(*launcher, "-m", "tidegate.run", script, "4", **settings)
    assert shown(done) == plain
    assert done.stderr.count("to disk (posix-") >= 2
    assert list(spill.iterdir()) == []


@pytest.mark.slow
def test_an_unmodified_trainer_script_is_offloaded_in_each_training(
    settings: dict[str, str], spill: Path, tmp_path: Path
) -> None:
    script = SCRIPTS / "trainer_script.py"
    config = tmp_path / "offload.json"
    config.write_text(json.dumps({"tiers": ["disk"], "device_budget": 0, "min_bytes": 0, "disk_paths": [str(spill)]}))
    plain = shown(python(script, tmp_path / "plain"))
    done = python("-m", "tidegate.run", script, tmp_path / "ours", TIDEGATE_CONFIG=str(config))
    assert shown(done) == plain
    assert "8 steps" in done.stderr, "both trainings moved"
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize("end", ["", "sys.exit(5)"])
def test_a_script_that_prepares_nothing_is_told_so_unless_it_exits(
    end: str, settings: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "nothing.py"
    script.write_text(f"import sys; print('ran', sys.argv, __name__); {end}")
    done = python("-m", "tidegate.run", script, "a", **settings)
    assert done.returncode == (5 if end else 0)
    assert done.stdout == f"ran {[str(script), 'a']} __main__\n"
    assert ("nothing was offloaded in this process" in done.stderr) == (not end)


TRAINS = """
import torch
from accelerate import Accelerator


def train():
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()))
    accelerator.backward(model(torch.randn(64, 64)).sum())


"""


@pytest.mark.parametrize(
    "program",
    [
        "import threading; threading.Thread(target=train).start()",
        "import logging.config; logging.config.dictConfig({'version': 1}); train()",
        "import logging; logging.basicConfig(level=logging.INFO); train()",
    ],
    ids=["in a thread that outlives the script", "with our logger disabled", "with logging of its own"],
)
def test_what_moved_is_said_at_the_very_end(
    program: str, settings: dict[str, str], spill: Path, tmp_path: Path
) -> None:
    script = tmp_path / "trains.py"
    script.write_text(TRAINS + program)
    done = python("-m", "tidegate.run", script, **settings)
    assert done.returncode == 0, done.stderr
    assert "; 1 steps, " in done.stderr.splitlines()[-1]
    assert "nothing was offloaded" not in done.stderr
    assert list(spill.iterdir()) == []


def test_what_the_script_pickles_at_its_end_is_found(settings: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "pickles.py"
    script.write_text(
        "import atexit, pickle\nclass Mine: pass\n"
        "atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Mine()))).__name__))"
    )
    done = python("-m", "tidegate.run", script, **settings)
    assert done.stdout == "Mine\n", done.stderr


def test_an_error_of_the_script_arrives_and_the_disk_is_clean(
    settings: dict[str, str], spill: Path, tmp_path: Path
) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
        "model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()))\n"
        "accelerator.backward(model(torch.randn(64, 64)).sum())\nraise RuntimeError('of the script')\n"
    )
    done = python("-m", "tidegate.run", script, **settings)
    assert done.returncode == 1
    assert "RuntimeError: of the script" in done.stderr
    assert "to disk (posix-" in done.stderr
    assert list(spill.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ([], {}, "usage: accelerate launch -m tidegate.run SCRIPT"),
        (["missing.py"], {}, "no script missing.py"),
        ([str(SCRIPTS / "accelerate_loop.py")], {"TIDEGATE_TIERS": "tape"}, 'TIDEGATE_TIERS: unknown tier "tape"'),
        ([str(SCRIPTS / "accelerate_loop.py")], {"TIDEGATE_CONFIG": "/missing.toml"}, "/missing.toml"),
        ([str(SCRIPTS / "accelerate_loop.py")], {"TIDEGATE_DISK_PATHS": "/missing"}, "/missing does not exist"),
    ],
    ids=["nothing", "no such script", "wrong setting", "no such file", "no such path"],
)
def test_wrong_use_ends_with_2_before_the_script_runs(
    words: list[str], environment: dict[str, str], message: str
) -> None:
    done = python("-m", "tidegate.run", *words, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_help() -> None:
    done = python("-m", "tidegate.run", "--help")
    assert done.returncode == 0
    assert "TIDEGATE_CONFIG" in done.stdout
