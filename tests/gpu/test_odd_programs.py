"""Programs that do not run on one default stream of the current device."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_cuda_offload import Block, assert_balanced, build, config
from torch import Tensor, nn

import tidegate
from tidegate import TidegateError
from tidegate.offload import captured, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]

MiB = 2**20
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
TIERS = [("host",), ("disk",), ("host", "disk")]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 0 and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def forward_on_a_side_stream(model: nn.Module, x: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = model(x).sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()


def backward_on_a_side_stream(model: nn.Module, x: Tensor) -> None:
    loss = model(x).sum()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss.backward()
    torch.cuda.current_stream().wait_stream(side)


def both_on_a_side_stream(model: nn.Module, x: Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)


def backward_in_the_calling_thread(model: nn.Module, x: Tensor) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        model(x).sum().backward()


ODD = [forward_on_a_side_stream, backward_on_a_side_stream, both_on_a_side_stream, backward_in_the_calling_thread]


@pytest.mark.parametrize("window", [1, 8 * MiB, 1024 * MiB])
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
@pytest.mark.parametrize("run", ODD)
def test_streams_and_threads(
    tmp_path: Path, run: Callable[[nn.Module, Tensor], None], tiers: tuple[str, ...], window: int
) -> None:
    x = torch.randn(8, 256, 256, device="cuda")
    model = build().eval()
    run(model, x)
    plain = gradients(model)
    with tidegate.attach(model, config(tmp_path, tiers=tiers, window=window, verify=True)) as session:
        for _ in range(3):
            run(model, x)
            torch.cuda.synchronize()
            assert same(plain, gradients(model))
        assert session.stats().moved > 0
        assert_balanced(session)


class SquaredElsewhere(torch.autograd.Function):
    """Saves on the current stream; its backward takes what was saved on a stream of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            (x,) = ctx.saved_tensors
            result: Tensor = 2 * x * grads[0]
        main.wait_stream(side)
        result.record_stream(main)
        return result


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = SquaredElsewhere.apply(layer(x).tanh())  # type: ignore[no-untyped-call]
        return x


@pytest.mark.parametrize("window", [1, 4 * MiB, 1024 * MiB])
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_saved_on_one_stream_and_used_on_another(tmp_path: Path, tiers: tuple[str, ...], window: int) -> None:
    model, x = Squares().cuda(), torch.randn(2048, 256, device="cuda")
    model(x).sum().backward()
    plain = gradients(model)
    with tidegate.attach(model, config(tmp_path, tiers=tiers, window=window)) as session:
        for _ in range(3):
            model(x).sum().backward()
            torch.cuda.synchronize()
            assert same(plain, gradients(model))
        assert session.stats().moved > 0
        assert_balanced(session)


def test_two_threads_train_at_once(tmp_path: Path) -> None:
    inputs = [torch.randn(8, 256, 256, device="cuda") for _ in range(2)]
    model = build().eval()

    def loss_gradient(x: Tensor) -> list[Tensor]:
        loss = model(x).sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    plain = [loss_gradient(x) for x in inputs]
    found: dict[int, list[list[Tensor]]] = {0: [], 1: []}
    errors: list[str] = []
    with tidegate.attach(model, config(tmp_path, verify=True)) as session:

        def work(number: int) -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(5):
                        with session.step():
                            found[number].append(loss_gradient(inputs[number]))
                    torch.cuda.current_stream().synchronize()
            except Exception:
                errors.append(traceback.format_exc())

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert session.stats().moved > 0
    assert all(same(plain[number], one) for number in range(2) for one in found[number])
    assert [len(found[number]) for number in range(2)] == [5, 5]


class WithGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.inner, self.tail = Block(256), nn.Sequential(nn.Linear(256, 256), nn.GELU()), Block(256)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tail(self.inner(self.head(x)))
        return y


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_a_captured_submodule(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model, x = WithGraph().cuda().eval(), torch.randn(8, 256, 256, device="cuda")
    sample = torch.randn(8, 256, 256, device="cuda", requires_grad=True)
    model.inner = torch.cuda.make_graphed_callables(model.inner, (sample,))  # type: ignore[assignment]
    model(x).sum().backward()
    plain = gradients(model)
    with tidegate.attach(model, config(tmp_path, tiers=tiers, verify=True)) as session:
        for _ in range(3):
            model(x).sum().backward()
            torch.cuda.synchronize()
            assert same(plain, gradients(model))
        assert session.stats().moved > 0
        assert_balanced(session)


def test_a_submodule_that_is_captured_inside_a_step(tmp_path: Path) -> None:
    sample = torch.randn(8, 256, 256, device="cuda", requires_grad=True)
    x = torch.randn(8, 256, 256, device="cuda")

    def build_model() -> WithGraph:
        torch.manual_seed(0)
        return WithGraph().cuda().eval()

    def capture(model: WithGraph) -> None:
        model.inner = torch.cuda.make_graphed_callables(model.inner, (sample,))  # type: ignore[assignment]

    reference = build_model()
    capture(reference)
    reference(x).sum().backward()
    plain = gradients(reference)
    model = build_model()
    with tidegate.attach(model, config(tmp_path, tiers=("host",), verify=True)) as session:
        with session.step():
            capture(model)
        for _ in range(3):
            model(x).sum().backward()
            torch.cuda.synchronize()
            assert same(plain, gradients(model))
        assert session.stats().moved > 0


@pytest.mark.parametrize("explicit", [False, True], ids=["implicit", "explicit"])
def test_a_captured_step_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture, explicit: bool) -> None:
    captured._said.clear()
    model, x = build().eval(), torch.randn(8, 256, 256, device="cuda")
    model(x).sum().backward()
    plain = gradients(model)
    with (
        caplog.at_level(logging.INFO, "tidegate"),
        tidegate.attach(model, config(tmp_path, tiers=("host",))) as session,
    ):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model.zero_grad(set_to_none=False)
                model(x).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        session.reset_stats()
        graph = torch.cuda.CUDAGraph()
        model.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph), session.step() if explicit else nullcontext():
            model(x).sum().backward()
        for _ in range(3):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.zero_()
            graph.replay()
            torch.cuda.synchronize()
        assert session.stats().moved == 0
        for parameter, gradient in zip((p for p in model.parameters()), plain, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, gradient)
    assert sum("CUDA graph is captured" in record.message for record in caplog.records) == 1


def test_a_session_may_see_captured_steps_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    captured._said.clear()
    model, x = build().eval(), torch.randn(8, 256, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
        model(x).sum().backward()
        plain = gradients(model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with caplog.at_level(logging.INFO, "tidegate"), tidegate.attach(model, config(tmp_path)):
        with torch.cuda.graph(graph):
            model(x).sum().backward()
        graph.replay()
        torch.cuda.synchronize()
        assert same(plain, gradients(model))
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_a_captured_backward_of_a_forward_that_was_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = build().eval(), torch.randn(8, 256, 256, device="cuda")
    with tidegate.attach(model, config(tmp_path, tiers=("host",))):
        loss = model(x).sum()
        monkeypatch.setattr(saved, "captures", lambda: True)  # torch itself refuses most such programs before
        with pytest.raises(TidegateError, match="captured"):
            loss.backward()


@pytest.mark.multi_gpu
@several
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_a_model_that_is_not_on_the_current_device(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    model, x = build().to("cuda:1").eval(), torch.randn(8, 256, 256, device="cuda:1")
    model(x).sum().backward()
    plain = gradients(model)
    assert torch.cuda.current_device() == 0
    with tidegate.attach(model, config(tmp_path, tiers=tiers, verify=True, window=8 * MiB)) as session:
        for _ in range(3):
            model(x).sum().backward()
            assert same(plain, gradients(model))
        assert session.stats().moved > 0
    assert torch.cuda.current_device() == 0


class Pipeline(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Block(256).to("cuda:0"), Block(256).to("cuda:1")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).to("cuda:1"))
        return y


@pytest.mark.multi_gpu
@several
@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_one_step_on_two_devices(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    model, x = Pipeline().eval(), torch.randn(8, 256, 256, device="cuda:0")
    model(x).sum().backward()
    plain = gradients(model)
    with tidegate.attach(model, config(tmp_path, tiers=tiers, verify=True, window=8 * MiB)) as session:
        for _ in range(3):
            model(x).sum().backward()
            assert same(plain, gradients(model))
        assert session.stats().moved > 0
        assert_balanced(session)
