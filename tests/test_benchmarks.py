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


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("activation_models")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("activations")


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
    stats = everything["stats"]
    assert stats["written"]["disk"] == stats["read"]["disk"] + stats["forwarded"].get("disk", 0) > 0
    assert figures["exact"] == {"gpt disk-everything": True}
    assert everything["exact"]["trained"]
    assert everything["exact"]["moved"] > 0
    assert all(row["derived"]["same output as keep"] for row in rows.values())
    assert everything["rates"]["out"] > 0
    assert everything["derived"]["write / raw"] > 0


def test_several_models_of_a_preset_are_told_apart(tmp_path: Path) -> None:
    figures = run(
        tmp_path, "--device", "cpu", "--preset", "others", "--modes", "keep", "--trace", str(tmp_path / "trace")
    )
    assert [(row["model"], row["mode"], row["error"]) for row in figures["rows"]] == [
        ("bert", "keep", ""),
        ("t5", "keep", ""),
    ]
    assert figures["rows"][1]["loss"] != figures["rows"][0]["loss"]
    events = json.loads((tmp_path / "trace" / "t5-keep.json").read_text())["traceEvents"]
    assert any(event["name"] == "one step" for event in events)


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
        "host-aware",
        "host-everything",
        "disk-everything",
        "cascade-everything",
    ]
    trace = ["--trace", str(tmp_path / "trace")]
    figures = run(tmp_path, "--dtype", "bfloat16", "--exact", *trace, "--modes", *modes)
    assert not any(row["error"] for row in figures["rows"])
    assert all(figures["exact"].values())
    assert figures["raw"]["out"] > 1e9
    assert "write / raw" in figures["rows"][-2]["derived"]
    rows = {row["mode"]: row for row in figures["rows"]}
    assert all(row["trace"]["compute busy ms"] > 0 and row["peak"] > 0 for row in rows.values())
    assert rows["host-everything"]["trace"]["DtoH GB/s"] > 0
    assert rows["host-everything"]["exact"]["moved"] > 0


def test_a_trace_tells_when_the_device_computes_idles_and_copies(benchmark: Any) -> None:
    def event(category: str, name: str, start: float, duration: float, **arguments: int) -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": arguments}

    events = [
        {"ph": "M", "name": "process_name"},
        event("user_annotation", "one step", 0, 5000),
        event("kernel", "gemm", 1000, 2000, stream=7),
        event("gpu_memset", "Memset", 2500, 1000, stream=7),
        event("kernel", "gemm", 4000, 1000, stream=7),
        event("kernel", "small", 100, 500, stream=13),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 2000, 1000, stream=13, bytes=50_000_000),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 3000, 2000, stream=17, bytes=80_000_000),
        event("cuda_runtime", "cudaEventSynchronize", 500, 1000),
        event("cuda_runtime", "cudaEventSynchronize", 700, 500),
        event("cuda_runtime", "cudaDeviceSynchronize", 5001, 1000),
    ]
    assert benchmark.summary(events) == {
        "host waits": {"cudaEventSynchronize": (2, 1.5)},
        "compute busy ms": 3.5,
        "compute idle ms": 0.5,
        "longest idle ms": 0.5,
        "DtoH busy ms": 1.0,
        "DtoH GB/s": 50.0,
        "HtoD busy ms": 2.0,
        "HtoD GB/s": 40.0,
    }


def test_modes_are_held_against_keep_and_the_raw_rates(benchmark: Any) -> None:
    keep = benchmark.Row("gpt", "keep", step=0.6, forward=0.2, backward=0.4, loss=1.0)
    everything = benchmark.Row("gpt", "disk-everything", step=1.5, forward=0.5, backward=1.0, loss=1.0)
    everything.written, everything.read = {"disk": 1e9}, {"disk": 1e9}
    everything.rates = {"out": 2e9, "back": 1e9, "write": 2e9, "read": 1e9}
    aware = benchmark.Row("gpt", "host-aware", step=0.6, forward=0.2, backward=0.4, loss=2.0)
    aware.written, aware.rates = {"host": 8e9}, {"out": 40e9, "back": 20e9}
    raw = {"out": 50e9, "back": 50e9, "both": 45e9, "write": 2.5e9, "read": 1.25e9}
    benchmark.derive([keep, everything, aware], raw)
    assert everything.derived["step / keep"] == pytest.approx(2.5)
    assert everything.derived["step / bound"] == pytest.approx(1.5 / (0.4 + 0.8))
    assert everything.derived["write / raw"] == everything.derived["read / raw"] == pytest.approx(0.8)
    assert aware.derived["hidden / what the link can hide"] == pytest.approx(0.8)
    assert everything.derived["same output as keep"]
    assert not aware.derived["same output as keep"]


@pytest.mark.parametrize("name", ["gpt", "bert", "t5"])
def test_every_parameter_of_a_model_has_a_gradient(name: str, models: Any) -> None:
    model = models.build(name, 64, 2, head=32, attention_dropout=0.0)
    x_BTD = torch.randn(2, 16, 64)
    model(x_BTD).square().mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)
    model.eval()
    plain = model(x_BTD)
    model.checkpointed = True
    assert torch.equal(plain, model(x_BTD))


def test_decoders_are_causal_and_encoders_are_not(models: Any) -> None:
    x_BTD = torch.randn(1, 8, 64)
    changed = x_BTD.clone()
    changed[:, -1] += 1
    for name, causal in (("gpt", True), ("bert", False)):
        model = models.build(name, 64, 2, head=32, attention_dropout=0.0).eval()
        assert torch.equal(model(x_BTD)[:, 0], model(changed)[:, 0]) is causal


def test_unknown_models_are_refused(models: Any) -> None:
    with pytest.raises(ValueError, match="no model"):
        models.build("lstm", 64, 2)
