"""Two hundred steps, some without backward, some raising: everything returns to its start."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from tests.offload.compare import assert_nothing_left, wait_until_away
from tests.offload.toys import blocks, everything
from torch import Tensor, nn

import tidegate
from tidegate import OffloadSession


def run_step(model: nn.Module, number: int) -> None:
    x = torch.randn(64, 32)
    match number % 5:
        case 0:
            model(x)  # no backward
        case 1:
            with pytest.raises(RuntimeError, match="shapes"):
                model(x[:, :31])
        case 2:
            y = model(x)
            y.register_hook(fail)
            with pytest.raises(ArithmeticError):
                y.sum().backward()
        case 3:
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        case 4:
            model(x).sum().backward()


def fail(gradient: Tensor) -> Tensor:
    raise ArithmeticError


def holdings(session: OffloadSession) -> dict[str, int]:
    assert_nothing_left(session)
    return {
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "units": len(session._engine._units),
        **{f"{tier.name} bytes": tier.used for tier in session._tiers.open()},
    }


@pytest.mark.parametrize("tiers", [("disk",), ("host", "disk")], ids=["disk", "host"])
def test_two_hundred_steps_leave_nothing_behind(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path, tiers=tiers, host_budget="64KiB", window=1 << 14)) as session:
        for number in range(25):
            run_step(model, number)
        before = holdings(session)
        for number in range(200):
            run_step(model, number)
        after = holdings(session)
    objects = after.pop("objects") - before.pop("objects")
    assert after == before
    assert objects < 200  # less than one per step: caches, no leak


def test_closing_gives_threads_and_descriptors_back(tmp_path: Path) -> None:
    model = blocks()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with tidegate.attach(model, everything(tmp_path, tiers=("host", "disk"), host_budget="64KiB")) as session:
        model(torch.randn(64, 32)).sum().backward()
        assert session.stats().modes.keys() == {"host", "disk"}
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_step_that_holds_many_backwards_forgets_what_is_done(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path)) as session, session.step():
        for _ in range(10):
            model(torch.randn(64, 32)).sum().backward()
            assert len(session._step.order) == 0


def test_a_graph_that_outlives_its_model_keeps_its_bytes(tmp_path: Path) -> None:
    def loss() -> tuple[Tensor, Tensor]:
        model, x = blocks(), torch.randn(64, 32, requires_grad=True)
        tidegate.attach(model, everything(tmp_path))
        return model(x).sum(), x

    value, x = loss()
    gc.collect()
    value.backward()
    assert x.grad is not None
    del value
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_saved_memory_is_let_go_while_the_graph_lives(tmp_path: Path) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        kept.append(weakref.ref(output))

    model = blocks()
    for module in model.modules():
        if isinstance(module, nn.Tanh):
            module.register_forward_hook(watch)
    with tidegate.attach(model, everything(tmp_path, window=1)) as session:
        loss = model(torch.randn(64, 32)).sum()
        wait_until_away(session)
        assert session.stats().resident == 0
        assert all(output() is None for output in kept)
        loss.backward()
