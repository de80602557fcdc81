"""Interrupted and failing steps: nothing stays hooked, and training goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients, hooks_installed
from torch import Tensor, nn

import tidegate


class Fails(nn.Module):
    """Raises `error` after its first layers, while there is one."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.layers = blocks()
        self.error: BaseException | None = error

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return y


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit(1)], ids=repr)
def test_a_step_left_by_an_error_takes_its_hooks_along(tmp_path: Path, error: BaseException) -> None:
    model = Fails(error)
    with tidegate.attach(model, everything(tmp_path)) as session:
        with pytest.raises(type(error)), session.step():
            model(torch.randn(64, 32))
        assert not hooks_installed()
        with session.step():
            assert_same_gradients(gradients(blocks()), gradients(model))
        assert not hooks_installed()


def test_an_interrupted_forward_does_not_outlive_the_next_step(tmp_path: Path) -> None:
    model = Fails(KeyboardInterrupt())
    with tidegate.attach(model, everything(tmp_path)) as session:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(64, 32))
        with session.step():
            assert hooks_installed()
        assert not hooks_installed()


def test_a_hook_that_fails_before_ours_does_not_end_the_step_around_it(tmp_path: Path) -> None:
    def refuse(module: nn.Module, args: object) -> None:
        raise ValueError

    model = blocks()
    handle = model.register_forward_pre_hook(refuse)
    with tidegate.attach(model, everything(tmp_path)) as session, session.step():
        with pytest.raises(ValueError):  # noqa: PT011
            model(torch.randn(64, 32))
        assert hooks_installed()
        handle.remove()
        assert_same_gradients(gradients(blocks()), gradients(model))
        assert session.stats().moved > 0


def test_closing_inside_a_step_is_safe(tmp_path: Path) -> None:
    model = blocks()
    session = tidegate.attach(model, everything(tmp_path))
    with session.step():
        model(torch.randn(64, 32)).sum().backward()
        session.close()
        assert not hooks_installed()
        assert_same_gradients(gradients(blocks()), gradients(model))
    assert list(tmp_path.iterdir()) == []
