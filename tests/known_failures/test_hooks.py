"""Rows H: failures of others with saved-tensor hooks, each shown not to happen here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.compare import assert_balanced, same_bits, wait_until_away
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import tidegate
from tidegate import InPlaceError, OffloadConfig, OffloadSession

Program = Callable[[Tensor], Tensor]


class Runs(nn.Module):
    """Runs a program on the output of a linear layer."""

    def __init__(self, program: Program, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(32, width)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.layer(x))


def weight_gradient(model: Runs, session: OffloadSession | None = None) -> Tensor:
    (weight, _) = gradients_of(model, session)
    return weight


def gradients_of(model: Runs, session: OffloadSession | None = None) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    loss = model(torch.randn(32, 32))
    if session is not None:
        wait_until_away(session)
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def assert_lossless(path: Path, program: Program, *, width: int = 32, **changes: Any) -> tidegate.OffloadStats:
    plain = gradients_of(Runs(program, width))
    model = Runs(program, width)
    with tidegate.attach(model, everything(path, verify=True, **changes)) as session:
        assert_same_gradients(plain, gradients_of(model, session))
        assert_same_gradients(plain, gradients_of(model))  # backward races with the writes
        stats = session.stats()
    assert stats.moved > 0
    assert_balanced(stats)
    return stats


def test_h2_square_transpose_of_one_storage(tmp_path: Path) -> None:
    stats = assert_lossless(tmp_path, lambda y: (y.sin() @ y.t().cos()).sum() + (y.t() * y).square().sum())
    assert stats.written["disk"] < 2 * 7 * 32 * 32 * 4  # y and y.t() travel once


def test_h2_slices_of_one_storage_at_other_offsets(tmp_path: Path) -> None:
    assert_lossless(tmp_path, lambda y: (y[:16] * y[16:] * y[8:24]).sum() + (y[:, 1:9] * y[:, 20:28]).sum())


def test_h2_memory_that_is_used_again_at_the_same_address(tmp_path: Path) -> None:
    def program(y: Tensor) -> Tensor:
        total = y.sum() * 0
        for number in range(20):  # each product dies at once; the allocator hands its address out again
            total = total + (y * number).sin().sum()
        return total

    assert_lossless(tmp_path, program)


def test_h2_one_storage_saved_many_times_travels_once(tmp_path: Path) -> None:
    model = Runs(lambda y: (y.sin() + y.cos() + y.exp() * y).sum())
    with tidegate.attach(model, everything(tmp_path)) as session:
        gradients_of(model, session)
        assert session.stats().written["disk"] == 3 * 32 * 32 * 4  # the input, y, and the result of exp


def test_h3_a_reload_waits_for_its_own_store(tmp_path: Path) -> None:
    model = Runs(lambda y: (y.sin() * y.cos()).sum())
    plain = weight_gradient(Runs(model.program))
    with tidegate.attach(model, everything(tmp_path, verify=True)) as session:
        for _ in range(50):
            assert same_bits(plain, weight_gradient(model))
        assert_balanced(session.stats())


@pytest.mark.parametrize("scope", ["block", "whole"])
def test_h8_h9_compiled_programs_get_the_same_gradients(tmp_path: Path, scope: str) -> None:
    model: nn.Module = blocks().eval()
    plain = gradients(model)
    with tidegate.attach(model, everything(tmp_path)) as session:
        if scope == "whole":
            compiled: Any = torch.compile(model, backend="aot_eager")
        else:
            compiled = model
            for block in model.children():
                block.compile(backend="aot_eager")
        with session.step():
            for _ in range(2):
                assert_same_gradients(plain, gradients(compiled))
        assert session.stats().moved > 0
        assert_balanced(session.stats())


@pytest.mark.parametrize("min_bytes", [1, 1 << 30], ids=["moved", "kept"])
def test_h10_the_in_place_check_is_not_lost(tmp_path: Path, min_bytes: int) -> None:
    def program(y: Tensor) -> Tensor:
        loss = y.sin().sum()
        y.add_(1)
        return loss

    model = Runs(program)
    with tidegate.attach(model, everything(tmp_path, min_bytes=min_bytes)), pytest.raises(InPlaceError):
        gradients_of(model)


class EditsWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(2) * slopes[0]


def test_h11_an_edit_of_an_unpacked_tensor_never_reaches_another_reader(tmp_path: Path) -> None:
    def program(y: Tensor) -> Tensor:
        edited: Tensor = EditsWhatItSaved.apply(y)
        return (edited + y.sin()).sum()

    def outcome(model: Runs, session: OffloadSession | None) -> Tensor | None:
        try:
            return weight_gradient(model, session)
        except InPlaceError:
            return None

    right = weight_gradient(Runs(lambda y: (y.square() + y.sin()).sum()))
    for away in (True, False):
        model = Runs(program)
        with tidegate.attach(model, everything(tmp_path)) as session:
            result = outcome(model, session if away else None)
        assert result is None or torch.allclose(result, right)


def test_h13_restored_tensors_are_on_the_device_that_they_came_from(tmp_path: Path) -> None:
    model = Runs(lambda y: y.exp())
    with tidegate.attach(model, everything(tmp_path)) as session:
        y = model(torch.randn(32, 32))
        wait_until_away(session)
        saved = y.grad_fn._saved_result
        assert saved.device == y.device
        assert same_bits(saved, y)


@pytest.mark.parametrize("away", [True, False])
def test_h14_h24_strides_offsets_and_alignment_are_restored(tmp_path: Path, away: bool) -> None:
    views: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.t(),
        lambda y: y[1:, 3:],
        lambda y: y.flatten()[1:],
        lambda y: y[::5, ::7],
        lambda y: y[:, None].expand(32, 4, 32),
        lambda y: y.as_strided((8, 8), (1, 2), 5),
        lambda y: y.unfold(1, 8, 2),
    ]
    for view in views:
        model = Runs(lambda y, view=view: view(y).sin())  # type: ignore[misc]
        with tidegate.attach(model, everything(tmp_path)) as session:
            x = torch.randn(32, 32)
            original = view(model.layer(x).detach())
            y = model(x)
            if away:
                wait_until_away(session)
            saved = y.grad_fn._saved_self
            assert saved.shape == original.shape
            assert saved.stride() == original.stride()
            assert saved.data_ptr() % 64 == original.data_ptr() % 64
            assert same_bits(saved, original)


def test_h15_unpack_gives_the_same_bytes_each_time(tmp_path: Path) -> None:
    model = Runs(lambda y: y.exp())
    with tidegate.attach(model, everything(tmp_path)) as session:
        y = model(torch.randn(32, 32))
        wait_until_away(session)
        first, second = y.grad_fn._saved_result, y.grad_fn._saved_result
        assert same_bits(first, second)
        y.sum().backward(retain_graph=True)
        assert same_bits(first, y.grad_fn._saved_result)
        y.sum().backward()


def test_h15_only_the_innermost_hooks_apply(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def program(y: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
            inner = y.sin()
        return (inner * inner.cos()).sum()

    assert_lossless(tmp_path, program)
    assert seen


def test_h17_weights_and_their_views_stay(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 64))
            self.register_buffer("scale", torch.randn(256, 64))

        def forward(self, x: Tensor) -> Tensor:
            y = torch.nn.functional.linear(x, self.weight[::2])
            return (y @ (self.weight * self.scale).chunk(2)[0].detach()).sum() + (x @ self.weight.t()).sum()

    model = Tied()
    with tidegate.attach(model, everything(tmp_path, min_bytes=8 * 64 * 4 + 1)) as session:
        model(torch.randn(8, 64, requires_grad=True)).backward()
        assert session.stats().written.get("disk", 0) <= 128 * 64 * 4  # the detached half is an activation


@pytest.mark.parametrize("nesting", ["inside", "nested", "whole"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "selective"])
def test_h18_checkpoint_boundaries(tmp_path: Path, nesting: str, kind: str) -> None:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saves = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks(6)

        def run(self, x: Tensor, first: int, last: int) -> Tensor:
            for block in self.blocks[first:last]:
                x = block(x)
            return x

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_() if not x.requires_grad else x
            if nesting == "whole":
                return checkpoint(self.run, x, 0, 6, **options)  # type: ignore[no-any-return]
            if nesting == "inside":
                x = self.run(x, 0, 2)
                x = checkpoint(self.run, x, 2, 4, **options)
                return self.run(x, 4, 6)

            def outer(x: Tensor) -> Tensor:
                x = checkpoint(self.run, x, 0, 2, **options)
                return self.run(x, 2, 6)

            if kind == "selective":
                options_outer: dict[str, Any] = {"use_reentrant": False}
            else:
                options_outer = options
            return checkpoint(outer, x, **options_outer)  # type: ignore[no-any-return]

    plain = gradients(Checkpointed())
    model = Checkpointed()
    with tidegate.attach(model, everything(tmp_path)) as session:
        assert_same_gradients(plain, gradients(model, session))
        assert_same_gradients(plain, gradients(model))
        assert session.stats().moved > 0
        assert_balanced(session.stats())


def test_h23_dropout_is_the_plain_run_s_under_every_budget(tmp_path: Path) -> None:
    plain = gradients(blocks())
    for budget in (0, 4096, "10%", "50%", "auto"):
        model = blocks()
        config = OffloadConfig(tiers="disk", device_budget=budget, min_bytes=1, disk_paths=str(tmp_path))
        with tidegate.attach(model, config):
            for _ in range(3):
                assert_same_gradients(plain, gradients(model))
