"""Every file in configs/ as its header says to launch it, small and on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.launching import ROOT, python

from tidegate import OffloadConfig

CONFIGS = ROOT / "src" / "tidegate" / "configs"
SMALL = ["--width=64", "--layers=2", "--steps=2", "--batch=4"]
WHAT_IT_IS = """
import json
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()))
accelerator.backward(model(torch.randn(64, 64)).sum())
shown = {"num_processes": accelerator.num_processes, "kind": type(model).__name__}
with open(f"rank{accelerator.process_index}.json", "w") as file:
    json.dump(shown, file)
accelerator.end_training()
"""


def run(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(*words, cwd=cwd, TIDEGATE_MIN_BYTES="0", TMPDIR=str(cwd), **environment)


def launch(config: str, *words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    port = ["--main_process_port=0"] if "ddp" in config else []
    return run(
        *("-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config), *port, "-m", "tidegate.run"),
        *words,
        cwd=cwd,
        TIDEGATE_CONFIG=str(CONFIGS / "offload.toml"),
        ACCELERATE_USE_CPU="true",
        **environment,
    )


def test_every_file_is_here() -> None:
    names = {path.name for path in CONFIGS.iterdir() if path.suffix in (".yaml", ".toml")}
    assert names == {
        "accelerate_ddp.yaml",
        "accelerate_single.yaml",
        "lightning_ddp.yaml",
        "lightning_single.yaml",
        "offload.toml",
    }
    assert (ROOT / "configs").resolve() == CONFIGS


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.*ml")), ids=lambda path: path.name)
def test_the_header_shows_a_launch_line_with_files_that_exist(path: Path) -> None:
    header = re.match(r"(#.*\n)+", path.read_text())
    assert header is not None
    assert path.name in header[0]
    for name in re.findall(r"(?:configs|examples)/[\w.]+", header[0]):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("name", ["accelerate_single.yaml", "accelerate_ddp.yaml"])
def test_accelerate_knows_every_key_A3(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIGS / name))
    for key, value in yaml.safe_load((CONFIGS / name).read_text()).items():
        assert str(getattr(config, key)).removeprefix("DistributedType.").removeprefix("ComputeEnvironment.")
        assert key in config.to_dict() or value in (None, {}), key


def test_the_offload_file_is_a_config() -> None:
    config = OffloadConfig.from_file(CONFIGS / "offload.toml")
    assert config.device_budget == 0
    text = (CONFIGS / "offload.toml").read_text()
    for name in re.findall(r"^(?:# )?(\w+) = ", text, flags=re.MULTILINE):
        assert name in OffloadConfig.__dataclass_fields__, name


def test_every_value_that_the_offload_file_suggests_is_accepted(tmp_path: Path) -> None:
    text = (CONFIGS / "offload.toml").read_text()
    suggested = tmp_path / "suggested.toml"
    suggested.write_text(re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE))
    config = OffloadConfig.from_file(suggested)
    assert len(config.disk_paths) == 2


@pytest.mark.slow
def test_accelerate_single(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "accelerate_causal_lm.py")
    done = launch("accelerate_single.yaml", example, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "to disk (posix-" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_accelerate_ddp_starts_two_processes_with_ddp(tmp_path: Path) -> None:
    script = tmp_path / "what_it_is.py"
    script.write_text(WHAT_IT_IS)
    done = launch("accelerate_ddp.yaml", str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        shown = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert shown == {"num_processes": 2, "kind": "DistributedDataParallel"}
    assert done.stderr.count("to disk (posix-") >= 2
    assert not list(tmp_path.glob("tidegate-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("lightning_single.yaml", 1), ("lightning_ddp.yaml", 2)])
def test_lightning_cli(name: str, devices: int, tmp_path: Path) -> None:
    done = run(
        *(str(ROOT / "examples" / "lightning_cli.py"), "fit", "--config", str(CONFIGS / name)),
        *("--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.enable_progress_bar=false"),
        *("--model.width=64", "--model.layers=2", "--data.batch=4", "--data.windows=32"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(devices):
        assert re.search(rf"rank {rank}: .* to disk \(posix-", done.stdout), done.stdout
    assert not list(tmp_path.glob("tidegate-*"))
