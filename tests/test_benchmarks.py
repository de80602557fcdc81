"""The benchmark of activations runs, moves bytes, and computes the same; its models are sound."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1] / "benchmarks"
SHAPE = ["--hidden", "64", "--layers", "2", "--head", "32", "--batch", "2", "--sequence", "32", "--dtype", "float32"]


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    target = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "activations.py"), *SHAPE, *arguments, "--json", str(target)]
    subprocess.run(
        [*command, "--steps", "5", "--min-bytes", "1024", "--raw-gib", "0.02", "--disk-path", str(tmp_path)],
        check=True,
        timeout=300,
    )
    figures: dict[str, Any] = json.loads(target.read_text())
    return figures


def test_modes_on_the_cpu_agree_and_move(tmp_path: Path) -> None:
    modes = ["keep", "checkpoint", "save-on-cpu", "disk-everything"]
    figures = run(tmp_path, "--device", "cpu", "--exact", "--modes", *modes)
    rows = {row["mode"]: row for row in figures["rows"]}
    assert list(rows) == modes
    assert not any(row["error"] for row in rows.values())
    assert all(row["step"] > 0 and math.isfinite(row["loss"]) for row in rows.values())
    everything = rows["disk-everything"]
    assert everything["written"]["disk"] == everything["read"]["disk"] + everything["forwarded"].get("disk", 0) > 0
    assert figures["exact"] == {"disk-everything": True}


def test_a_mode_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    figures = run(tmp_path, "--device", "cpu", "--modes", "keep", "disk-everything", "--disk-budget", "nonsense")
    keep, everything = figures["rows"]
    assert not keep["error"]
    assert "disk_budget" in everything["error"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_modes_on_a_gpu(tmp_path: Path) -> None:
    modes = [
        "keep",
        "checkpoint",
        "save-on-cpu",
        "host-free",
        "host-everything",
        "disk-everything",
        "cascade-everything",
    ]
    figures = run(tmp_path, "--exact", "--trace", str(tmp_path / "trace"), "--modes", *modes)
    assert not any(row["error"] for row in figures["rows"])
    assert all(figures["exact"].values())
    assert figures["raw"]["out"] > 1e9


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_every_parameter_of_a_model_has_a_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    models: Any = importlib.import_module("activation_models")
    model = models.build(name, 64, 2, head=32, attention_dropout=0.0)
    x_BTD = torch.randn(2, 16, 64)
    model(x_BTD).square().mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)
    model.eval()
    plain = model(x_BTD)
    model.checkpointed = True
    assert torch.equal(plain, model(x_BTD))


def test_decoders_are_causal_and_encoders_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    models: Any = importlib.import_module("activation_models")
    x_BTD = torch.randn(1, 8, 64)
    changed = x_BTD.clone()
    changed[:, -1] += 1
    for name, causal in (("gpt", True), ("bert", False)):
        model = models.build(name, 64, 2, head=32, attention_dropout=0.0).eval()
        assert torch.equal(model(x_BTD)[:, 0], model(changed)[:, 0]) is causal


def test_unknown_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    models: Any = importlib.import_module("activation_models")
    with pytest.raises(ValueError, match="no model"):
        models.build("lstm", 64, 2)
