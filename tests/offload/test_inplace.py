"""Edits between save and use raise as autograd's own check would, which hooks switch off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tidegate
from tidegate import InPlaceError, OffloadConfig

Program = Callable[[nn.Linear, Tensor], Tensor]


def edits_a_kept_result(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)[:2].exp()
    y.add_(1)
    return y.sum()


def edits_an_offloaded_input(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    z = y.sin().sum()
    y.add_(1)
    return z


def edits_through_a_view(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    z = y.sin().sum()
    y[3].zero_()
    return z


def edits_the_base_of_a_saved_view(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    z = y.t()[5:].sin().sum()
    y.mul_(2)
    return z


def edits_a_detached_alias(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    z = y.sin().sum()
    y.detach().zero_()
    return z


def edits_a_parameter(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x.requires_grad_()).sum()
    with torch.no_grad():
        layer.weight.mul_(2)
    return y


RAISING = [
    edits_a_kept_result,
    edits_an_offloaded_input,
    edits_through_a_view,
    edits_the_base_of_a_saved_view,
    edits_a_detached_alias,
    edits_a_parameter,
]


def edits_before_it_is_saved(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    y.add_(1)
    return y.sin().sum()


def edits_its_own_output(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.relu_(layer(x)).mul(2).sum()


def saves_edits_and_saves_again(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    z = y * 1
    first = z.sigmoid().sum()
    z.add_(1)
    return first + z.sin().sum()


def edits_what_backward_does_not_need(layer: nn.Linear, x: Tensor) -> Tensor:
    y = layer(x)
    unused = y.sin()
    y.add_(1)
    del unused
    return y.cos().sum()


ALLOWED = [
    edits_before_it_is_saved,
    edits_its_own_output,
    saves_edits_and_saves_again,
    edits_what_backward_does_not_need,
]


class Runs(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, 32)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer, x)


def gradients(model: Runs) -> list[Tensor]:
    torch.manual_seed(1)
    model(torch.randn(16, 32)).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def config(path: Path, window: int, min_bytes: int) -> OffloadConfig:
    return OffloadConfig(tiers="disk", device_budget=0, min_bytes=min_bytes, window=window, disk_paths=str(path))


PLACES = pytest.mark.parametrize(
    ("window", "min_bytes"), [(1, 1), (1 << 20, 1), (1, 512), (1, 1 << 30)], ids=["away", "in-flight", "some", "kept"]
)


@PLACES
@pytest.mark.parametrize("program", RAISING, ids=lambda program: program.__name__)
def test_raises_as_autograd_does(tmp_path: Path, program: Program, window: int, min_bytes: int) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(Runs(program))
    model = Runs(program)
    with (
        tidegate.attach(model, config(tmp_path, window, min_bytes)),
        pytest.raises(InPlaceError, match="modified by an inplace operation"),
    ):
        gradients(model)


@PLACES
@pytest.mark.parametrize("program", ALLOWED, ids=lambda program: program.__name__)
def test_is_right_where_autograd_allows_it(tmp_path: Path, program: Program, window: int, min_bytes: int) -> None:
    plain = gradients(Runs(program))
    model = Runs(program)
    with tidegate.attach(model, config(tmp_path, window, min_bytes)):
        offloaded = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def test_the_optimiser_between_forward_and_backward_raises(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tidegate.attach(model, config(tmp_path, 1, 1)):
        model(torch.randn(16, 32)).sum().backward()
        loss = model(torch.randn(16, 32)).sum()
        optimizer.step()
        with pytest.raises(InPlaceError):
            loss.backward()
