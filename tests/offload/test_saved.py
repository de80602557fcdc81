"""What the hooks do with tensors that are not plain: kept, or carried so that nothing can be told apart."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.offload.compare import assert_balanced, same_bits, wait_until_away
from torch import Tensor, nn

import tidegate
from tidegate import InPlaceError, OffloadConfig

Program = Callable[[Tensor], Tensor]


class Runs(nn.Module):
    """Runs a program on the output of a linear layer."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 64)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer(x))


def config(path: Path, **changes: int) -> OffloadConfig:
    settings = {"tiers": "disk", "device_budget": 0, "min_bytes": 1, "window": 1 << 20, "disk_paths": str(path)}
    return OffloadConfig(**settings | changes)


def gradient(model: Runs, session: tidegate.OffloadSession | None = None) -> Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(torch.randn(8, 16))
    if session is not None:
        wait_until_away(session)
    loss.backward()
    assert model.layer.weight.grad is not None
    return model.layer.weight.grad.clone()


def transposed_complex(y: Tensor) -> Tensor:
    z = torch.view_as_complex(y.reshape(8, 32, 2)).transpose(0, 1)
    return (z * z.exp()).abs().sum() + torch.view_as_real(z).square().sum()


def conjugate_and_negative(y: Tensor) -> Tensor:
    z = torch.view_as_complex(y.reshape(8, 32, 2)).t()
    c = z.conj()
    return (c * z * c.imag).abs().sum()


def jagged(y: Tensor) -> Tensor:
    nested = torch.nested.nested_tensor_from_jagged(y, offsets=torch.tensor([0, 3, 5, 8]))
    product: Tensor = nested * nested.sin() * nested
    return product.values().sum()


def wrapper_subclass(y: Tensor) -> Tensor:
    from torch.testing._internal.two_tensor import TwoTensor

    pair = TwoTensor(y.detach(), y.detach() * 2).requires_grad_()
    tripled = pair * 3
    (slope,) = torch.autograd.grad((tripled * tripled).sum(), pair)
    return (y * slope.a).sum()


def chunks_with_counters_of_their_own(y: Tensor) -> Tensor:
    left, right = y.unsafe_chunk(2, 1)
    return (left.sigmoid_() * right.tanh_()).sum()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("away", [True, False], ids=["away", "in-flight"])
@pytest.mark.parametrize(
    "program",
    [
        transposed_complex,
        conjugate_and_negative,
        jagged,
        wrapper_subclass,
        chunks_with_counters_of_their_own,
    ],
    ids=lambda program: program.__name__,
)
def test_gradients_are_the_plain_run_s(tmp_path: Path, program: Program, away: bool) -> None:
    plain = gradient(Runs(program))
    model = Runs(program)
    with tidegate.attach(model, config(tmp_path)) as session:
        assert same_bits(plain, gradient(model, session if away else None))
        assert session.stats().moved > 0
        assert_balanced(session.stats())


def test_an_unknown_subclass_stays_and_the_log_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Runs(wrapper_subclass)
    with caplog.at_level(logging.INFO, "tidegate"), tidegate.attach(model, config(tmp_path)):
        gradient(model)
        gradient(model)
    assert sum("TwoTensor" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("min_bytes", [1, 1 << 30], ids=["moving", "kept"])
def test_an_edit_of_a_subclass_raises_as_autograd_does(tmp_path: Path, min_bytes: int) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def program(y: Tensor) -> Tensor:
        pair = TwoTensor(y.detach(), y.detach()).requires_grad_()
        doubled = pair * 2
        square = doubled * doubled
        doubled.add_(1)  # moves the version counter of the wrapper, not those of the tensors inside
        (slope,) = torch.autograd.grad(square.sum(), pair)
        return (y * slope.a).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(Runs(program))
    model = Runs(program)
    with tidegate.attach(model, config(tmp_path, min_bytes=min_bytes)), pytest.raises(InPlaceError):
        gradient(model)


@pytest.fixture
def mesh() -> Iterator[dist.device_mesh.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("edit", [False, True])
def test_the_local_shard_of_a_dtensor_moves(tmp_path: Path, mesh: dist.device_mesh.DeviceMesh, edit: bool) -> None:
    from torch.distributed.tensor import DTensor, Shard

    def program(y: Tensor) -> Tensor:
        z = DTensor.from_local(y, mesh, [Shard(0)]) * 2
        result = z.sin()
        if edit:
            z.add_(1)
        loss: Tensor = result.to_local().sum()
        return loss

    model = Runs(program)
    if edit:
        with tidegate.attach(model, config(tmp_path)), pytest.raises(InPlaceError):
            gradient(model)
        return
    plain = gradient(Runs(program))
    with tidegate.attach(model, config(tmp_path)) as session:
        assert same_bits(plain, gradient(model, session))
        assert session.stats().written["disk"] == 8 * 16 * 4 + 8 * 64 * 4


def test_unsharded_parameters_stay_from_the_first_step_on(tmp_path: Path, mesh: dist.device_mesh.DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(blocks, mesh=mesh)
        return blocks

    def gradients(model: nn.Module, session: tidegate.OffloadSession | None) -> list[Tensor]:
        torch.manual_seed(1)
        loss = model(torch.randn(16, 32)).square().sum()
        if session is not None:
            wait_until_away(session)
        loss.backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]

    plain = gradients(build(), None)
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        offloaded = gradients(model, session)
        assert session.stats().written["disk"] == 4 * 16 * 32 * 4  # the input and three results of tanh
    assert all(same_bits(a, b) for a, b in zip(plain, offloaded, strict=True))


FSDP1 = """
import sys, warnings
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
import tidegate

warnings.simplefilter("ignore")

def main(rank, store, spill):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def shard(module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    def build():
        torch.manual_seed(0)
        return shard(nn.Sequential(*(shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh())) for _ in range(4))))

    def gradients(model):
        found = []
        for seed in range(3):
            torch.manual_seed(seed)
            model(torch.randn(128, 64)).square().sum().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        return found

    plain, model = gradients(build()), build()
    config = tidegate.OffloadConfig(tiers="disk", disk_paths=spill, device_budget=0, min_bytes=1)
    with tidegate.attach(model, config, rank=rank) as session:
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model), strict=True))
        stats = session.stats()
        assert stats.moved + stats.kept == 3 * 5 * 128 * 64 * 4, stats  # activations, and no weight
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, args=tuple(sys.argv[1:]), nprocs=2)
"""


@pytest.mark.slow
def test_fsdp1_weights_stay_though_their_memory_is_emptied_after_forward(tmp_path: Path) -> None:
    script, spill = tmp_path / "train.py", tmp_path / "spill"
    script.write_text(FSDP1)
    spill.mkdir()
    command = [sys.executable, str(script), str(tmp_path / "store"), str(spill)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert list(spill.iterdir()) == []
