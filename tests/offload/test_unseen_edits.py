"""Edits that autograd does not count, and storages that programs empty and fill again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.compare import assert_nothing_left, same_bits, wait_until_away
from tests.offload.toys import everything
from torch import Tensor, nn

import tidegate

TIERS = pytest.mark.parametrize("tiers", ["disk", "host"])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


Edit = Callable[[Tensor, Tensor], Any]
EDITS: dict[str, Edit] = {
    "data": lambda x, new: x.data.copy_(new),
    "numpy": lambda x, new: x.detach().numpy().__setitem__(slice(None), new.numpy()),
    "dlpack": lambda x, new: torch.from_dlpack(x.detach()).copy_(new),
    "storage": lambda x, new: x.untyped_storage().copy_(new.untyped_storage()),
}


@TIERS
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("leaf", [False, True], ids=["a static input", "an input with grad"])
def test_a_later_forward_saves_what_is_there_then(edit: Edit, leaf: bool, tiers: str, tmp_path: Path) -> None:
    """An older graph that still holds the same storage must not lend its bytes."""

    def run(session: tidegate.OffloadSession | None) -> list[Tensor]:
        net = offloaded if session else model()
        x = torch.ones(256, 64, requires_grad=leaf)
        generator = torch.Generator().manual_seed(1)
        seen, graphs = [], []
        for _ in range(3):
            loss = net(x).square().sum()
            graphs.append(loss)
            if session:
                wait_until_away(session)
            net.zero_grad()
            loss.backward(retain_graph=True)
            seen += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
            edit(x, torch.randn(256, 64, generator=generator))
            graphs.append(net(x).sum())  # a step that is skipped: no backward, and its graph lives on
            edit(x, torch.randn(256, 64, generator=generator))
        return seen

    plain = run(None)
    offloaded = model()
    with tidegate.attach(offloaded, everything(tmp_path, tiers=tiers)) as session:
        assert all(same_bits(a, b) for a, b in zip(plain, run(session), strict=True))
        assert session.stats().moved > 0
        assert_nothing_left(session)


class Discarding(nn.Module):
    """Empties the outputs of a cheap function and fills them again before backward needs them."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        total = self.start
        for k in range(4):
            a = (x * (k + 1)).sin()
            z = a * a
            storage, nbytes, copy = a.untyped_storage(), a.untyped_storage().nbytes(), a.detach().clone()
            storage.resize_(0)

            def refill(
                grad: Tensor, a: Tensor = a, storage: Any = storage, nbytes: int = nbytes, copy: Tensor = copy
            ) -> None:
                storage.resize_(nbytes)
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(a):  # type: ignore[attr-defined]
                    a.copy_(copy)

            z.register_hook(refill)
            total = total + z.mean()
        return total


@TIERS
@pytest.mark.parametrize("budget", [0, "8MB", "30%"])
@pytest.mark.parametrize("elements", [10_000, 1_000_000])
def test_storages_that_a_program_empties_and_fills_again(
    elements: int, budget: int | str, tiers: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(elements, requires_grad=True)
    Discarding()(x).backward()
    assert x.grad is not None
    plain, net = x.grad.clone(), Discarding()
    with tidegate.attach(net, everything(tmp_path, tiers=tiers, device_budget=budget, window=1 << 24)) as session:
        for _ in range(4):
            x.grad = None
            net(x).backward()
            assert same_bits(plain, x.grad)
        assert_nothing_left(session)


def test_a_parameter_of_another_model_stays(tmp_path: Path) -> None:
    inside, outside = model(), nn.Linear(8, 512)
    with tidegate.attach(inside, everything(tmp_path)) as session:
        with session.step():
            before = session.stats()
            outside(inside(torch.randn(4, 64))).sum().backward()
        saved = session.stats().moved + session.stats().kept - before.moved - before.kept
        assert 0 < saved < outside.weight.nbytes
