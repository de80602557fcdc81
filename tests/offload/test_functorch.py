"""torch.func and forward-mode differentiation inside steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.compare import same_bits
from tests.offload.toys import blocks, everything, gradients
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import tidegate


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).tanh()
        slope = torch.func.grad(lambda z: z.sin().sum())(y.detach())
        return (y * slope).sum()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def weight_gradient(model: Outer) -> Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(8, 16)).backward()
    assert model.inner.layer.weight.grad is not None
    return model.inner.layer.weight.grad.clone()


def test_the_hooks_of_two_nested_sessions_step_aside_and_come_back(tmp_path: Path) -> None:
    plain = weight_gradient(Outer())
    model = Outer()
    with tidegate.attach(model, everything(tmp_path)), tidegate.attach(model.inner, everything(tmp_path)) as inner:
        assert same_bits(plain, weight_gradient(model))
        assert inner.stats().moved > 0


def test_functional_call_swaps_parameters_for_the_step(tmp_path: Path) -> None:
    model = Outer()
    others = {name: torch.full_like(tensor, 0.01).requires_grad_() for name, tensor in model.named_parameters()}
    x = torch.randn(8, 16)
    plain = torch.autograd.grad(torch.func.functional_call(Outer(), others, (x,)), list(others.values()))
    with tidegate.attach(model, everything(tmp_path)) as session:
        offloaded = torch.autograd.grad(torch.func.functional_call(model, others, (x,)), list(others.values()))
        assert all(same_bits(a, b) for a, b in zip(plain, offloaded, strict=True))
        assert session.stats().written.get("disk", 0) <= 4 * x.nbytes  # the weights stayed


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("min_bytes", [1, 1 << 30], ids=["moving", "kept"])
def test_forward_over_reverse_keeps_its_tangents(tmp_path: Path, min_bytes: int) -> None:
    class Cubes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).tanh().pow(3)

    def hessian_times_vector(model: nn.Module) -> Tensor:
        x = torch.linspace(-1, 1, 128).reshape(8, 16).requires_grad_()
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, torch.ones_like(x)))
            (slope,) = torch.autograd.grad(y.sum(), x)
            return forward_ad.unpack_dual(slope).tangent.clone()

    plain = hessian_times_vector(Cubes())
    model = Cubes()
    with tidegate.attach(model, everything(tmp_path, min_bytes=min_bytes)):
        assert same_bits(plain, hessian_times_vector(model))


@pytest.mark.filterwarnings("ignore")  # torch warns of its own parts in linearize
@pytest.mark.parametrize("verify", [False, True])
def test_tracing_inside_a_step(tmp_path: Path, verify: bool) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path, verify=verify)) as session, session.step():
        y = model(torch.randn(64, 32))
        _, tangent = torch.func.linearize(torch.sin, y)
        assert same_bits(tangent(y), y.cos() * y)
        graph = make_fx(model)(torch.randn(64, 32))
        assert {"addmm", "tanh"} <= {node.name for node in graph.graph.nodes}


@pytest.mark.parametrize("verify", [False, True])
def test_modes_see_what_the_plain_run_computes(tmp_path: Path, verify: bool) -> None:
    class Log(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is not torch.ops.aten.detach.default:  # the one operation that a pack hook cannot hide
                self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def logged(model: nn.Module) -> list[str]:
        with Log() as log:
            gradients(model)
        return log.seen

    plain, model = logged(blocks()), blocks()
    with tidegate.attach(model, everything(tmp_path, verify=verify)) as session:
        assert logged(model) == plain
        assert session.stats().moved > 0
