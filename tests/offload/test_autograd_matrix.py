"""Ways of running backward x ways of checkpointing x placements: the plain run's gradients, and no byte left."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tidegate
from tidegate import OffloadConfig, OffloadSession


class Residual(nn.Module):
    """Four blocks with dropout, each under no, reentrant or non-reentrant checkpointing."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.2), nn.Linear(64, 32)) for _ in range(4)
        )
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointing == "none":
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return x


def batch(rows: int = 16) -> Tensor:
    return torch.randn(rows, 32, requires_grad=True)


def one_backward(model: nn.Module) -> None:
    model(batch()).pow(2).sum().backward()


def three_forwards_one_backward(model: nn.Module) -> None:
    torch.stack([model(batch(8)).sum() for _ in range(3)]).sum().backward()


def two_backwards(model: nn.Module) -> None:
    loss = model(batch()).pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_penalty(model: nn.Module) -> None:
    x = batch()
    y = model(x).pow(3).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    (gradient.pow(2).sum() + y).backward()


PROGRAMS = [one_backward, three_forwards_one_backward, two_backwards, gradient_penalty]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "disk": {},
    "host-then-disk": {"tiers": ("host", "disk"), "host_budget": 1 << 16, "verify": True},
    "byte-budget": {"device_budget": 1 << 14},
    "percent": {"device_budget": "30%"},
}


def gradients(model: nn.Module, program: Callable[[nn.Module], None]) -> list[Tensor]:
    torch.manual_seed(3)
    model.zero_grad()
    program(model)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_books_balance(session: OffloadSession) -> None:
    stats = session.stats()
    for tier, written in stats.written.items():
        books = (stats.read, stats.forwarded, stats.dropped, stats.demoted, stats.pending)
        assert written == sum(book.get(tier, 0) for book in books), (tier, stats)


@pytest.mark.parametrize("wide", [False, True], ids=["implicit", "explicit"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_gradients_equal_the_plain_run_and_nothing_stays(
    tmp_path: Path, checkpointing: str, program: Callable[[nn.Module], None], placement: str, wide: bool
) -> None:
    if program is gradient_penalty and checkpointing == "reentrant":
        pytest.skip("torch's reentrant checkpoint refuses torch.autograd.grad")
    torch.manual_seed(0)
    model = Residual(checkpointing)
    plain = gradients(model, program)
    settings = {"tiers": "disk", "device_budget": 0, "min_bytes": 1, "window": 1 << 14, "disk_paths": str(tmp_path)}
    with tidegate.attach(model, OffloadConfig(**settings | PLACEMENTS[placement])) as session:
        if wide:
            with session.step():
                offloaded = gradients(model, program)
        else:
            offloaded = gradients(model, program)
        gc.collect()
        assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
        assert_books_balance(session)
        assert session.stats().resident == 0
        if placement != "byte-budget":
            assert session.stats().moved > 0
    assert list(tmp_path.glob("tidegate-*")) == []
