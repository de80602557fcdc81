"""The disk tier on kvikio with a real GPU, in its compatibility mode where the machine has no GPUDirect Storage."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tidegate
from tidegate.memory import gds
from tidegate.memory.cufile import KvikioError, load_kvikio
from tidegate.memory.gds import gds_status
from tidegate.memory.nvfs import module_loaded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MiB = 2**20
KVIKIO = ("kvikio-gds", "kvikio-compat")
LOADED = module_loaded()


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def _kvikio() -> None:
    try:
        load_kvikio()
    except KvikioError as error:
        pytest.skip(str(error))


def build(blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers += [nn.Linear(512, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, 512), nn.LayerNorm(512)]
    return nn.Sequential(*layers).cuda()


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: list[Tensor] = []
    for _ in range(steps):
        loss = model(torch.randn(1001, 512, device="cuda")).pow(2).mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def config(path: Path, **changes: object) -> dict[str, object]:
    given: dict[str, object] = {
        "tiers": ("disk",),
        "device_budget": 0,
        "disk_paths": (str(path),),
        "disk_budget": "4GiB",
        "min_bytes": 1024,
        "window": 256 * MiB,
        "gds": True,
    }
    return given | changes


@pytest.mark.usefixtures("_kvikio")
@pytest.mark.parametrize("window", [4 * MiB, 256 * MiB])
@pytest.mark.parametrize("verify", [False, True])
def test_training_equals_the_plain_run(tmp_path: Path, window: int, verify: bool) -> None:
    plain = train(build())
    model = build()
    with tidegate.attach(model, config(tmp_path, window=window, verify=verify)) as session:
        seen = train(model)
        torch.cuda.synchronize()
        stats = session.stats()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert stats.modes["disk"] in KVIKIO
    assert (stats.read.get("disk", 0) > 0) == (window < 256 * MiB)  # a step fits in the larger one
    assert stats.pinned == 0
    assert list(tmp_path.glob("tidegate-*")) == []


@pytest.mark.usefixtures("_kvikio")
def test_what_passes_through_the_host_tier_comes_back_by_kvikio(tmp_path: Path) -> None:
    plain = train(build())
    model = build()
    given = config(tmp_path, tiers=("host", "disk"), host_budget="24MiB", verify=True)
    with tidegate.attach(model, given) as session:
        seen = train(model)
        torch.cuda.synchronize()
        stats = session.stats()
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
    assert stats.written["disk"] > 0
    assert stats.modes["disk"].startswith("kvikio-")
    assert list(tmp_path.glob("tidegate-*")) == []


@pytest.mark.usefixtures("_kvikio")
def test_the_forward_returns_while_the_gpu_is_still_busy_with_what_came_before(tmp_path: Path) -> None:
    """Neither the ring nor kvikio makes the training thread wait for the compute stream."""
    model = build()
    x = torch.randn(1001, 512, device="cuda")
    with tidegate.attach(model, config(tmp_path)) as session:
        for _ in range(3):  # opens the tier, and gives the allocator its blocks
            model(x).sum().backward()
        torch.cuda.synchronize()
        before = session.stats().written["disk"]
        torch.cuda._sleep(1 << 30)  # about half a second
        slept = torch.cuda.current_stream().record_event()
        loss = model(x).sum()
        assert not slept.query()
        loss.backward()
        torch.cuda.synchronize()
        assert session.stats().written["disk"] > before


@pytest.mark.usefixtures("_kvikio")
def test_a_closed_session_gives_the_ring_back(tmp_path: Path) -> None:
    model = build()
    x = torch.randn(1001, 512, device="cuda")
    model(x).sum().backward()
    model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    session = tidegate.attach(model, config(tmp_path))
    model(x).sum().backward()
    model.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() > start + 64 * MiB
    session.close()
    del session
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= start + 2 * MiB


@pytest.mark.usefixtures("_kvikio")
def test_a_round_trip_works_and_is_real_only_with_the_module(tmp_path: Path) -> None:
    status = gds_status(tmp_path, torch.device("cuda"), forced=True)
    assert status.usable, status.detail
    assert status.write is not None
    assert status.write > 0
    if not LOADED:
        assert not status.real
        assert "nvidia-fs is not loaded" in status.detail
    elif not status.real:
        assert status.detail


@pytest.mark.skipif(LOADED, reason="nvidia-fs is loaded here")
def test_by_default_a_machine_without_the_module_runs_on_system_calls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gds, "_known", {})
    monkeypatch.setattr(gds, "_try", lambda *_: pytest.fail("a round trip was made"))
    caplog.set_level(logging.INFO, "tidegate")
    model = build()
    with tidegate.attach(model, config(tmp_path, gds="auto")) as session:
        model(torch.randn(1001, 512, device="cuda")).sum().backward()
        assert session.stats().modes["disk"].startswith("posix-")
    assert sum("GPUDirect Storage is not used" in message for message in caplog.messages) == 1


@pytest.mark.usefixtures("_kvikio")
@pytest.mark.parametrize(
    "environment", [{"KVIKIO_COMPAT_MODE": "ON"}, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}]
)
def test_other_settings_of_kvikio_and_of_the_allocator(tmp_path: Path, environment: dict[str, str]) -> None:
    script = """
        import sys, torch, tidegate
        def run(given):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
            x = torch.randn(1001, 512, device="cuda")
            if given is None:
                model(x).sum().backward()
            else:
                with tidegate.attach(model, given) as session:
                    model(x).sum().backward()
                    print(session.stats().modes["disk"])
            return [p.grad for p in model.parameters()]
        torch.use_deterministic_algorithms(True)
        plain = run(None)
        disk = run({"tiers": ["disk"], "device_budget": 0, "min_bytes": 0, "disk_paths": [sys.argv[1]], "gds": True})
        assert all(map(torch.equal, plain, disk))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in KVIKIO
    assert list(tmp_path.glob("tidegate-*")) == []
