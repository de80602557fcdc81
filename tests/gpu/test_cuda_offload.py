"""The engine on one GPU: the same bytes back, memory really free for reuse, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.offload.test_unseen_edits import Discarding
from torch import Tensor, nn

import tidegate
from tidegate import OffloadConfig, OffloadSession

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MiB = 2**20
TIERS = [("host",), ("disk",), ("host", "disk")]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        q, k, v = (y.view(B, T, 4, D // 4).transpose(1, 2) for y in self.qkv(self.norm(x_BTD)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        x_BTD = x_BTD + F.dropout(self.out(y), 0.1, self.training)
        return x_BTD + F.dropout(self.mlp(x_BTD), 0.1, self.training)


def build(width: int = 256, blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, 16)).cuda()


def train(model: nn.Module, steps: int = 5, batch: int = 8, autocast: bool = False, width: int = 256) -> list[Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen: list[Tensor] = []
    for _ in range(steps):
        x = torch.randn(batch, 256, width, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(x).float().pow(2).mean()
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def config(tmp_path: Path, **changes: object) -> OffloadConfig:
    settings: dict[str, object] = {
        "tiers": ("host", "disk"),
        "device_budget": 0,
        "disk_paths": (str(tmp_path),),
        "host_budget": "2GiB",
        "disk_budget": "4GiB",
        "min_bytes": 1024,
        "window": 16 * MiB,
    }
    return OffloadConfig(**(settings | changes))  # type: ignore[arg-type]


def assert_balanced(session: OffloadSession) -> None:
    stats = session.stats()
    for tier, written in stats.written.items():
        accounted = sum(
            book.get(tier, 0) for book in (stats.read, stats.forwarded, stats.dropped, stats.demoted, stats.pending)
        )
        assert written == accounted
    assert stats.resident == 0


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("window", [1, 4 * MiB, 1024 * MiB])
def test_losses_and_gradients_equal_the_plain_run(
    tmp_path: Path, tiers: tuple[str, ...], window: int, autocast: bool
) -> None:
    plain = train(build(), autocast=autocast)
    model = build()
    with tidegate.attach(model, config(tmp_path, tiers=tiers, window=window, verify=True)) as session:
        offloaded = train(model, autocast=autocast)
        torch.cuda.synchronize()
        stats = session.stats()
        assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
        if window > 1:
            assert stats.moved > 0
        assert_balanced(session)
    assert list(tmp_path.glob("tidegate-*")) == []


def test_host_full_sends_the_rest_to_disk(tmp_path: Path) -> None:
    plain = train(build())
    model = build()
    with tidegate.attach(model, config(tmp_path, host_budget="40MiB", verify=True)) as session:
        offloaded = train(model)
        assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))
        assert session.stats().written["host"] > 0
        assert session.stats().written["disk"] > 0


def test_device_memory_is_reused_within_the_same_forward(tmp_path: Path) -> None:
    model = build(blocks=16)
    x = torch.randn(32, 256, 256, device="cuda")
    loss = model(x).sum()
    kept = torch.cuda.memory_allocated()
    del loss
    torch.cuda.reset_peak_memory_stats()
    with tidegate.attach(model, config(tmp_path, tiers=("host",), host_budget="16GiB", window=64 * MiB)) as session:
        loss = model(x).sum()
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        moved = session.stats().written["host"]
        loss.backward()
    assert moved > 512 * MiB
    assert after < kept - moved + 128 * MiB
    assert peak < kept - moved + 512 * MiB


def test_window_bounds_bytes_in_flight(tmp_path: Path) -> None:
    model = build(blocks=8)
    with tidegate.attach(model, config(tmp_path, tiers=("host",), window=32 * MiB)) as session:
        model(torch.randn(32, 256, 256, device="cuda")).sum().backward()
        assert session.stats().peak_resident < 32 * MiB + 3 * 32 * MiB


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_two_backwards_over_one_graph(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    model = build().eval()
    x = torch.randn(8, 256, 256, device="cuda")
    model(x).sum().backward()
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with tidegate.attach(model, config(tmp_path, tiers=tiers, verify=True)):
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
    twice = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_graphs_without_backward_give_everything_back(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    model = build()
    x = torch.randn(8, 256, 256, device="cuda")
    with tidegate.attach(model, config(tmp_path, tiers=tiers)) as session:
        model(x).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        for _ in range(20):
            model(x)
        model(x).sum().backward()
        model.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= start
        assert_balanced(session)


def test_saves_on_a_side_stream(tmp_path: Path) -> None:
    class TwoStreams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Block(256), Block(256)
            self.side = torch.cuda.Stream()

        def forward(self, x: Tensor) -> Tensor:
            main = torch.cuda.current_stream()
            self.side.wait_stream(main)
            left = self.left(x)
            with torch.cuda.stream(self.side):
                right = self.right(x)
            main.wait_stream(self.side)
            right.record_stream(main)
            return left + right

    def build_two() -> nn.Module:
        torch.manual_seed(0)
        return TwoStreams().cuda().eval()

    plain = train(build_two().eval())
    model = build_two()
    with tidegate.attach(model, config(tmp_path, tiers=("host",), verify=True, window=4 * MiB)) as session:
        offloaded = train(model)
        assert session.stats().moved > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, offloaded, strict=True))


def test_cpu_tensors_stay_on_a_cuda_run(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(256, device="cuda"))

        def forward(self, host: Tensor) -> Tensor:
            return (host.exp().to("cuda") * self.scale).sum()

    model = Mixed()
    host = torch.randn(64, 256, requires_grad=True)
    with tidegate.attach(model, config(tmp_path)) as session:
        model(host).backward()
        assert session.stats().excluded >= host.nbytes
    assert host.grad is not None
    assert host.grad.device.type == "cpu"


def test_restored_views_keep_strides_and_alignment(tmp_path: Path) -> None:
    seen: list[tuple[tuple[int, ...], int]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            seen.append((x.stride(), x.data_ptr() % 256))
            return x.sum()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            seen.append((x.stride(), x.data_ptr() % 256))
            return grad.expand(x.shape)

    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 1025, device="cuda"))

        def forward(self) -> Tensor:
            wide = self.weight * 2
            return sum(map(Probe.apply, (wide[:, 1:], wide.t()[3:], wide[7:9, 5:], wide[:, ::8])))  # type: ignore[return-value]

    model = Views()
    with tidegate.attach(model, config(tmp_path, tiers=("host",), window=1, min_bytes=1)) as session:
        model().backward()
        assert session.stats().moved > 0
    assert sorted(seen[:4]) == sorted(seen[4:])


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_a_later_forward_saves_what_is_there_then(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        x, graphs, seen = torch.ones(8, 256, 256, device="cuda"), [], []
        for value in range(3):
            loss = model(x).sum()
            graphs.append(loss)
            model.zero_grad()
            loss.backward(retain_graph=True)
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            x.data.fill_(value)
            graphs.append(model(x).sum())
            torch.from_dlpack(x).fill_(value + 0.5)
        return seen

    plain, model = run(build().eval()), build().eval()
    with tidegate.attach(model, config(tmp_path, tiers=tiers)) as session:
        assert all(torch.equal(a, b) for a, b in zip(plain, run(model), strict=True))
        assert session.stats().moved > 0


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("window", [1, 8 * MiB, 1024 * MiB])
def test_storages_that_a_program_empties_and_fills_again(tmp_path: Path, tiers: tuple[str, ...], window: int) -> None:
    def gradient(model: nn.Module) -> Tensor:
        torch.manual_seed(2)
        x = torch.randn(1_000_000, device="cuda", requires_grad=True)
        model(x).backward()
        assert x.grad is not None
        return x.grad

    plain, model = gradient(Discarding().cuda()), Discarding().cuda()
    with tidegate.attach(model, config(tmp_path, tiers=tiers, window=window)) as session:
        for _ in range(5):
            assert torch.equal(plain, gradient(model))
        assert_balanced(session)
