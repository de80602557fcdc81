"""What leaves without cost, what goes on to disk, and pinned memory that is used again, on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.gpu.test_cuda_offload import assert_balanced, build, config, train

import tidegate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MiB = 2**20


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tiers", [("host",), ("disk",), ("host", "disk")], ids="+".join)
def test_free_is_the_plain_run_and_moves_from_the_fourth_step_on(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    plain = train(build(width=1024, blocks=8), steps=12, batch=32, width=1024)
    model = build(width=1024, blocks=8)
    settings = config(tmp_path, tiers=tiers, device_budget="free", verify=True, min_bytes=MiB)
    with tidegate.attach(model, settings) as session:
        assert session.stats().moved == 0
        moved = train(model, steps=12, batch=32, width=1024)
        assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
        if tiers != ("disk",):
            assert session.stats().moved > 0
        assert_balanced(session)
    assert list(tmp_path.glob("tidegate-*")) == []


def test_free_lowers_the_memory_after_forward(tmp_path: Path) -> None:
    model, x = build(width=2048, blocks=12), torch.randn(32, 256, 2048, device="cuda")
    with tidegate.attach(
        model, config(tmp_path, tiers=("host",), device_budget="free", host_budget="24GiB")
    ) as session:
        after = []
        for _ in range(8):
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = model(x).sum()
            after.append(torch.cuda.memory_allocated() - before)
            loss.backward()
        torch.cuda.synchronize()
        moved = session.stats().moved // 5
    assert moved > 256 * MiB
    assert after[-1] < after[0] - 0.9 * moved


@pytest.mark.parametrize("host", ["64MiB", "256MiB"])
def test_the_cascade_is_the_plain_run(tmp_path: Path, host: str) -> None:
    plain = train(build(), steps=6, batch=32)
    model = build()
    with tidegate.attach(model, config(tmp_path, host_budget=host, verify=True)) as session:
        moved = train(model, steps=6, batch=32)
        assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
        stats = session.stats()
        assert stats.demoted["host"] > 0
        assert stats.read["disk"] > 0
        assert_balanced(session)
    assert list(tmp_path.glob("tidegate-*")) == []


def test_pinned_memory_is_used_again_while_the_cpu_runs_ahead(tmp_path: Path) -> None:
    model, x = build(blocks=8), torch.randn(32, 256, 256, device="cuda")
    with tidegate.attach(model, config(tmp_path, tiers=("host",), host_budget="16GiB")) as session:
        for _ in range(2):
            model(x).sum().backward()
        torch.cuda.synchronize()
        pinned = session.stats().pinned
        for _ in range(20):  # nothing here waits for the GPU
            torch.cuda._sleep(20_000_000)
            model(x).sum().backward()
        torch.cuda.synchronize()
        stats = session.stats()
        assert stats.pinned <= pinned + 256 * MiB
        assert stats.pinned >= stats.pinned_asked > 0


def test_a_host_tier_smaller_than_a_step_waits_on_the_device_not_on_the_cpu(tmp_path: Path) -> None:
    plain = train(build(blocks=8), steps=4)
    model = build(blocks=8)
    with tidegate.attach(model, config(tmp_path, tiers=("host",), host_budget="300MiB", verify=True)) as session:
        moved = train(model, steps=4)
        assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
        assert session.stats().pinned <= 300 * MiB
        assert_balanced(session)
