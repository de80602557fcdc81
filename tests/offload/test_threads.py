"""Threads that train one model at once, and backward in another thread than forward."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from tests.offload.compare import assert_nothing_left, same_bits
from tests.offload.toys import blocks, everything, hooks_installed
from torch import Tensor, nn

import tidegate


def slopes(model: nn.Module, seed: int) -> tuple[Tensor, ...]:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad(model(x).square().sum(), tuple(model.parameters()))


def in_threads(work: list[Callable[[], object]]) -> None:
    errors: list[BaseException] = []

    def guarded(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(task,)) for task in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_threads_with_implicit_steps_of_their_own_get_their_own_gradients(tmp_path: Path) -> None:
    model = blocks().eval()
    plain = [slopes(model, seed) for seed in range(4)]
    results: dict[int, tuple[Tensor, ...]] = {}
    with tidegate.attach(model, everything(tmp_path, window=1 << 14, verify=True)) as session:
        for _ in range(5):
            in_threads([lambda seed=seed: results.update({seed: slopes(model, seed)}) for seed in range(4)])  # type: ignore[misc]
            for seed in range(4):
                assert all(same_bits(a, b) for a, b in zip(plain[seed], results[seed], strict=True))
        assert session.stats().moved > 0
        assert_nothing_left(session)


def test_threads_share_the_input_that_they_save(tmp_path: Path) -> None:
    model = blocks().eval()
    x = torch.randn(64, 32, requires_grad=True)
    (plain,) = torch.autograd.grad(model(x).sum(), x)
    results: list[Tensor] = []
    with tidegate.attach(model, everything(tmp_path)) as session:
        in_threads([lambda: results.extend(torch.autograd.grad(model(x).sum(), x)) for _ in range(4)])
        assert len(results) == 4
        assert all(same_bits(plain, result) for result in results)
        assert_nothing_left(session)


def test_threads_that_save_one_tensor_at_the_same_time_see_no_edit(tmp_path: Path) -> None:
    class Saves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(10):
                x = x + x0.cos() + x0[1:].sin().sum()
            return x.sum()

    x0 = torch.randn(64, 64, requires_grad=True)
    model = Saves()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with tidegate.attach(model, everything(tmp_path, device_budget="1GiB")) as session:
            in_threads([lambda: [torch.autograd.grad(model(x0), x0) for _ in range(20)] for _ in range(4)])
            assert_nothing_left(session)
    finally:
        sys.setswitchinterval(interval)


def test_backward_may_run_in_another_thread(tmp_path: Path) -> None:
    model = blocks().eval()
    plain = slopes(model, 0)
    with tidegate.attach(model, everything(tmp_path)) as session:
        x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        loss = model(x).square().sum()
        in_threads([loss.backward])
        assert all(same_bits(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True) if p.grad is not None)
        del loss
        assert_nothing_left(session)


def test_a_thread_that_does_not_enter_the_step_is_not_hooked(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path)) as session, session.step():
        seen: list[bool] = []
        in_threads([lambda: seen.append(hooks_installed())])
        assert seen == [False]
        assert hooks_installed()
