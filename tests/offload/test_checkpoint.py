"""Activation checkpointing inside and around an attached model: what torch promises there still holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.compare import assert_balanced, assert_nothing_left, same_bits, wait_until_away
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import tidegate
from tidegate import OffloadSession

KINDS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def recompute(function: Callable[..., Any], *args: Any, reentrant: bool = False, **kwargs: Any) -> Tensor:
    result: Tensor = checkpoint(function, *args, use_reentrant=reentrant, **kwargs)
    return result


class Runs(nn.Module):
    """A program over the model's blocks."""

    def __init__(self, program: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = blocks()
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.blocks, x.clone().requires_grad_())


def rows(stats: tidegate.OffloadStats) -> float:
    """Bytes that left, in activations of the toy model."""
    return stats.moved / (64 * 32 * 4)


def assert_lossless(path: Path, program: Callable[[nn.Sequential, Tensor], Tensor], **changes: Any) -> OffloadSession:
    plain = gradients(Runs(program))
    model = Runs(program)
    with tidegate.attach(model, everything(path, verify=True, **changes)) as session:
        assert_same_gradients(plain, gradients(model, session))
        assert_same_gradients(plain, gradients(model))
        assert session.stats().moved > 0
        assert_nothing_left(session)
    return session


@KINDS
def test_only_the_boundary_of_a_checkpointed_block_is_saved(tmp_path: Path, reentrant: bool) -> None:
    model = Runs(lambda layers, x: recompute(layers, x, reentrant=reentrant))
    with tidegate.attach(model, everything(tmp_path)) as session:
        loss = model(torch.randn(64, 32))
        wait_until_away(session)
        assert rows(session.stats()) == 1
        loss.sum().backward()
        assert_nothing_left(session)


@KINDS
def test_what_backward_computes_again_does_not_leave_again(tmp_path: Path, reentrant: bool) -> None:
    model = Runs(lambda layers, x: recompute(layers, x, reentrant=reentrant))
    with tidegate.attach(model, everything(tmp_path)) as session:
        with session.step():
            loss = model(torch.randn(64, 32))
            wait_until_away(session)
            session.reset_stats()
            loss.sum().backward()
        wait_until_away(session)
        stats = session.stats()
        assert stats.moved + stats.kept <= 64 * 32 * 4  # the boundary, booked before the reset or after it
        assert_nothing_left(session)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of a reentrant one in another
@KINDS
@pytest.mark.parametrize("where", ["around", "segments", "twice-over"])
def test_gradients_are_the_plain_run_s(tmp_path: Path, reentrant: bool, where: str) -> None:
    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            if where == "twice-over":
                for block in layers:
                    x = recompute(block, x, reentrant=reentrant)
                return x
            y: Tensor = layers(x)
            return y

        if where == "segments":
            y: Tensor = checkpoint_sequential(layers, 2, x, use_reentrant=reentrant).sin()
            return y
        return recompute(run, x, reentrant=reentrant).sin()

    assert_lossless(tmp_path, program)


@KINDS
@pytest.mark.parametrize("wide", [False, True], ids=["implicit", "explicit"])
def test_the_attached_model_itself_may_be_checkpointed(tmp_path: Path, reentrant: bool, wide: bool) -> None:
    def train(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        x = torch.randn(64, 32, requires_grad=True)
        recompute(model, x, reentrant=reentrant).square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]

    plain, model = train(blocks()), blocks()
    with tidegate.attach(model, everything(tmp_path)) as session:
        for _ in range(2):
            if wide:
                with session.step():
                    assert_same_gradients(plain, train(model))
            else:
                assert_same_gradients(plain, train(model))
        assert_nothing_left(session)


def test_inputs_in_keywords_and_containers_come_back(tmp_path: Path) -> None:
    def inner(layers: nn.Module, *, pair: dict[str, Tensor]) -> Tensor:
        y: Tensor = layers(pair["left"] * pair["right"].sin())
        return y

    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        pair = {"left": layers[0](x), "right": layers[1](x)}
        return recompute(inner, layers, pair=pair)

    assert_lossless(tmp_path, program)


@KINDS
def test_random_numbers_are_drawn_as_in_the_first_pass(tmp_path: Path, reentrant: bool) -> None:
    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        x = recompute(layers, x, reentrant=reentrant)
        return nn.functional.dropout(x, 0.5) * torch.rand_like(x)

    assert_lossless(tmp_path, program)


def test_retained_graphs_are_computed_again_each_time(tmp_path: Path) -> None:
    model = Runs(lambda layers, x: recompute(layers, x))
    with tidegate.attach(model, everything(tmp_path)) as session:
        loss = model(torch.randn(64, 32)).square().sum()
        wait_until_away(session)
        passes = [torch.autograd.grad(loss, tuple(model.parameters()), retain_graph=turn < 2) for turn in range(3)]
        for later in passes[1:]:
            assert_same_gradients(list(passes[0]), list(later))
        assert_balanced(session.stats())


def test_a_gradient_penalty_through_a_checkpoint(tmp_path: Path) -> None:
    def penalty(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        x = torch.randn(64, 32, requires_grad=True)
        y: Any = recompute(model, x)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain, model = penalty(blocks()), blocks()
    with tidegate.attach(model, everything(tmp_path)) as session:
        with session.step():
            assert_same_gradients(plain, penalty(model))
        assert_nothing_left(session)


@pytest.mark.parametrize("min_bytes", [1, 1 << 30], ids=["moved", "kept"])
def test_an_edit_of_a_checkpoint_s_input_raises(tmp_path: Path, min_bytes: int) -> None:
    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        held = layers[0](x)
        y = recompute(layers[1:], held, reentrant=True)
        held.add_(1)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(Runs(program))
    model = Runs(program)
    with tidegate.attach(model, everything(tmp_path, min_bytes=min_bytes)) as session:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(model)
        assert_nothing_left(session)


@KINDS
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=lambda error: error.__name__)
def test_training_goes_on_after_an_error_in_recomputation(
    tmp_path: Path, reentrant: bool, error: type[BaseException]
) -> None:
    calls: list[int] = []

    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 2:
                raise error
            y: Tensor = layers(x)
            return y

        return recompute(inner, x, reentrant=reentrant)

    model = Runs(program)
    with tidegate.attach(model, everything(tmp_path)) as session:
        with pytest.raises(error):
            gradients(model)
        later = gradients(model, session)
        assert_nothing_left(session)
    calls[:] = [1, 1]
    assert_same_gradients(gradients(Runs(program)), later)


def test_a_block_whose_last_results_backward_does_not_need_stops_early(tmp_path: Path) -> None:
    ran: list[str] = []

    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            x = layers(x).sin()
            ran.append("needed")
            x = x * 2
            ran.append("not needed")
            return x

        return recompute(inner, x)

    counts = []
    for attached in (False, True):
        ran.clear()
        model = Runs(program)
        if attached:
            with tidegate.attach(model, everything(tmp_path)):
                gradients(model)
        else:
            gradients(model)
        counts.append(list(ran))
    assert counts[0] == counts[1]


def test_an_input_that_is_a_view_comes_back_as_one(tmp_path: Path) -> None:
    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        wide = torch.cat([layers[0](x), layers[1](x)], dim=1)
        left, right = wide.chunk(2, dim=1)
        return recompute(lambda a, b: layers((a.t() @ b).tanh()), left, right)

    assert_lossless(tmp_path, program)


def test_unpacking_twice_inside_a_recomputed_block_is_torch_s_error(tmp_path: Path) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            (x,), (again,) = ctx.saved_tensors, ctx.saved_tensors
            assert same_bits(x, again)
            result: Tensor = slope * (x + again)
            return result

    twice: Any = Twice.apply

    def program(layers: nn.Sequential, x: Tensor) -> Tensor:
        return recompute(lambda x: twice(layers(x)), x)

    kinds = []
    for attached in (False, True):
        model = Runs(program)
        session = tidegate.attach(model, everything(tmp_path)) if attached else None
        with pytest.raises(RuntimeError) as caught:
            gradients(model)
        kinds.append(caught.type)
        if session is not None:
            session.close()
    assert kinds[0] is kinds[1]
