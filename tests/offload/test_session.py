"""The session: when it acts, when it does not, and that it leaves a model as it was."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tidegate
from tidegate import ConfigError, OffloadConfig, SessionClosedError
from tidegate.tiers import disk
from tidegate.tiers.io_posix import PosixIo


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 32))


def config(path: Path, **changes: Any) -> OffloadConfig:
    settings = {"tiers": "disk", "device_budget": 0, "min_bytes": 1, "window": 1 << 14, "disk_paths": str(path)}
    return OffloadConfig(**settings | changes)


def gradients(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(64, 32)).pow(2).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def hooks_installed() -> bool:
    return bool(torch._C._autograd._top_saved_tensors_default_hooks(True))  # type: ignore[attr-defined]


# Attaching


def test_attaching_twice_gives_the_same_session(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        assert tidegate.attach(model, config(tmp_path)) is session


def test_another_config_for_an_attached_model_is_refused(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)), pytest.raises(ConfigError, match="close it first"):
        tidegate.attach(model, config(tmp_path, min_bytes=2))


def test_a_closed_model_can_be_attached_again(tmp_path: Path) -> None:
    model = build()
    plain = gradients(build())
    for _ in range(2):
        with tidegate.attach(model, config(tmp_path)):
            assert same(plain, gradients(model))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_unusable_path_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        tidegate.attach(build(), config(tmp_path / "missing"))


def test_a_collected_model_takes_its_session_along(tmp_path: Path) -> None:
    model = build()
    session = weakref.ref(tidegate.attach(model, config(tmp_path)))
    gradients(model)
    del model
    gc.collect()
    assert session() is None
    assert list(tmp_path.glob("tidegate-*")) == []


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_of_an_attached_model_is_not_attached(tmp_path: Path, how: str) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        gradients(model)
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        moved = session.stats().moved
        assert same(gradients(build()), gradients(twin))
        assert session.stats().moved == moved


def test_the_state_dict_is_untouched(tmp_path: Path) -> None:
    model = build()
    keys = list(model.state_dict())
    with tidegate.attach(model, config(tmp_path)):
        assert list(model.state_dict()) == keys


# Steps


def test_nothing_is_hooked_outside_a_step(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        gradients(model)
        assert not hooks_installed()
        with session.step():
            assert hooks_installed()
        assert not hooks_installed()


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_no_grad_no_work(tmp_path: Path, guard: Any) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session, guard():
        model(torch.randn(64, 32))
        assert session.stats().moved == 0
        assert list(tmp_path.iterdir()) == []


def test_eval_with_grad_is_training(tmp_path: Path) -> None:
    model = build().eval()
    plain = gradients(copy.deepcopy(model))
    with tidegate.attach(model, config(tmp_path)) as session:
        assert same(plain, gradients(model))
        assert session.stats().moved > 0


def test_a_wide_step_takes_the_loss_along(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        with session.step():
            loss = torch.ones(64, 32, requires_grad=True).exp().sum()
        loss.backward()
        assert session.stats().peak_resident == 64 * 32 * 4


def test_steps_nest(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session, session.step():
        with session.step():
            assert same(gradients(build()), gradients(model))
        assert hooks_installed()


def test_a_thread_takes_part_by_entering_the_step(tmp_path: Path) -> None:
    model = build().eval()
    with tidegate.attach(model, config(tmp_path)) as session:
        losses: list[Tensor] = []

        def work() -> None:
            with session.step():
                losses.append(model(torch.randn(64, 32, generator=torch.Generator().manual_seed(1))).sum())

        with session.step():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            losses.append(model(torch.randn(64, 32, generator=torch.Generator().manual_seed(2))).sum())
        torch.stack(losses).sum().backward()
        assert session.stats().dropped == {}
    plain = build().eval()
    for seed in (1, 2):
        plain(torch.randn(64, 32, generator=torch.Generator().manual_seed(seed))).sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# Ends


def test_backward_after_close_raises(tmp_path: Path) -> None:
    model = build()
    session = tidegate.attach(model, config(tmp_path, window=1))
    loss = model(torch.randn(64, 32)).sum()
    session.close()
    session.close()
    with pytest.raises(SessionClosedError, match=r"before session\.close"):
        loss.backward()
    with pytest.raises(SessionClosedError), session.step():
        pass


def test_an_exception_in_forward_leaves_nothing_hooked_and_training_goes_on(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(64, 31))
        assert not hooks_installed()
        assert same(gradients(build()), gradients(model))
        assert session.stats().resident == 0


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_closing_in_a_hook_of_the_forward_leaves_nothing_hooked(tmp_path: Path, when: str) -> None:
    model, plain = build(), gradients(build())
    session = tidegate.attach(model, config(tmp_path))
    if when == "before":
        handle = model.register_forward_pre_hook(lambda *_: session.close(), prepend=True)
    elif when == "inside":
        handle = model[1].register_forward_hook(lambda *_: session.close())
    else:
        handle = model.register_forward_hook(lambda *_: session.close(), prepend=True)
    if when == "before":
        assert same(gradients(model), plain)
    else:
        with pytest.raises(SessionClosedError):
            gradients(model)
    handle.remove()
    assert not hooks_installed()
    assert same(gradients(model), plain)
    with tidegate.attach(model, config(tmp_path)) as again:
        assert same(gradients(model), plain)
        assert again.stats().moved > 0
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_backward_leaves_nothing_and_training_goes_on(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        output = model(torch.randn(64, 32))
        output.register_hook(lambda gradient: gradient.no_such_thing)
        with pytest.raises(AttributeError):
            output.sum().backward()
        del output
        gc.collect()
        assert session.stats().resident == 0
        assert same(gradients(build()), gradients(model))


def test_an_interrupted_forward_is_left_at_the_next(tmp_path: Path) -> None:
    class Interrupted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.interrupt = nn.Linear(32, 32), True

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).tanh()
            if self.interrupt:
                raise KeyboardInterrupt
            return y

    model = Interrupted()
    with tidegate.attach(model, config(tmp_path)):
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(64, 32))
        model.interrupt = False
        model(torch.randn(64, 32)).sum().backward()
        assert not hooks_installed()


# Programs


def test_saved_tensors_can_be_unpacked_again_and_again(tmp_path: Path) -> None:
    model = build().eval()
    with tidegate.attach(model, config(tmp_path, window=1)) as session, session.step():
        y = model(torch.randn(64, 32)).exp()
        expected = y.detach().clone()
        for _ in range(3):
            assert torch.equal(y.grad_fn._saved_result, expected)  # type: ignore[union-attr]


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_the_users_own_hooks_go_on_working(tmp_path: Path, where: str) -> None:
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()

        def forward(self, x: Tensor) -> Tensor:
            if where == "outside":
                return self.inner(x)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return self.inner(x)

    model = Hooked()
    with tidegate.attach(model, config(tmp_path)):
        if where == "outside":
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                offloaded = gradients(model)
        else:
            offloaded = gradients(model)
    assert same(gradients(build()), offloaded)
    assert seen


def test_a_function_that_edits_its_saved_tensor_in_backward(tmp_path: Path) -> None:
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return x.mul_(2) * gradients[0]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).tanh()
            return Doubles.apply(y.clone()) + Doubles.apply(y.clone())  # type: ignore[no-any-return]

    model = Model()
    with tidegate.attach(model, config(tmp_path)):
        assert same(gradients(Model()), gradients(model))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev", "hessian"])
def test_torch_func_inside_a_step(tmp_path: Path, transform: str) -> None:
    class Transformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x).tanh()
            small = y[0, :4]
            results = {
                "grad": lambda: torch.func.grad(lambda z: z.sin().sum())(small),
                "vmap": lambda: torch.func.vmap(torch.sin)(y),
                "jvp": lambda: torch.func.jvp(torch.sin, (small,), (small,))[1],
                "jacrev": lambda: torch.func.jacrev(torch.sin)(small),
                "hessian": lambda: torch.func.hessian(lambda z: z.sin().sum())(small),
            }
            return results[transform]().sum() + y.sin().sum()

    model = Transformed()
    plain = gradients(Transformed())
    before = torch.autograd.graph.disable_saved_tensors_hooks
    with tidegate.attach(model, config(tmp_path)) as session:
        assert same(plain, gradients(model))
        assert session.stats().peak_resident > 0  # outside the transform the hooks were at work
    assert torch.autograd.graph.disable_saved_tensors_hooks is before


def test_foreign_hooks_are_still_refused_by_torch_func(tmp_path: Path) -> None:
    with (
        tidegate.attach(build(), config(tmp_path)),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        pytest.raises(RuntimeError, match="saved tensor hooks"),
    ):
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(3))


@pytest.mark.parametrize("scope", ["block", "model-after-attach", "attach-after-model"])
def test_compiled_models_are_right(tmp_path: Path, scope: str) -> None:
    plain = gradients(build())
    model: Any = build()
    if scope == "block":
        model[0].compile(backend="aot_eager")
        root: Any = model
    elif scope == "attach-after-model":
        root = model = torch.compile(model, backend="aot_eager")
    else:
        root = model
    with tidegate.attach(root, config(tmp_path)):
        runs = torch.compile(model, backend="aot_eager") if scope == "model-after-attach" else root
        assert same(plain, gradients(runs))


def test_sparse_and_complex_tensors(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sparse.mm(torch.eye(64).to_sparse(), self.layer(x))
            z = torch.complex(y, y.cos())
            return (z.conj() * z.exp()).real + (z @ z.t().conj()).imag.sum()

    model = Model()
    with tidegate.attach(model, config(tmp_path)) as session:
        assert same(gradients(Model()), gradients(model))
        assert session.stats().moved > 0


# Books and logs


def test_fitting_activations_stay_by_default_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with caplog.at_level(logging.INFO, "tidegate"), tidegate.attach(model) as session:
        for _ in range(3):
            gradients(model)
        assert session.stats().moved == 0
    assert sum("nothing moved" in message for message in caplog.messages) == 1


def test_a_byte_budget_keeps_the_tail(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)))
    with tidegate.attach(model, config(tmp_path, device_budget=3 * 64 * 32 * 4)) as session:
        model(torch.randn(64, 32)).sum().backward()
        kept = session.stats().kept  # backward also takes what had not left yet
        assert 3 * 64 * 32 * 4 <= kept <= 3 * 64 * 32 * 4 + (1 << 14)
        assert session.stats().moved > 0


def test_reset_starts_new_books(tmp_path: Path) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)) as session:
        gradients(model)
        session.reset_stats()
        assert session.stats().moved == 0
        gradients(model)
        stats = session.stats()
        assert stats.written["disk"] == sum(
            book.get("disk", 0) for book in (stats.read, stats.forwarded, stats.dropped, stats.demoted, stats.pending)
        )
        assert stats.modes["disk"].startswith("posix-")
        assert isinstance(stats.to_dict()["written"], dict)


def test_stats_wait_for_writes_that_have_begun_unless_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    class Held(PosixIo):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            assert not wanted.is_set() or may_write.wait(60)
            return super().pwritev(fd, buffers, offset)

    wanted = threading.Event()  # the probe that opens the tier is let through
    monkeypatch.setattr(disk, "PosixIo", Held)
    model, x = build(), torch.randn(64, 32)
    with tidegate.attach(model, config(tmp_path, window=1 << 20)) as session, ThreadPoolExecutor(1) as reader:
        model(x).sum().backward()
        session.reset_stats()
        wanted.set()
        loss = model(x).sum()
        assert session.stats(wait=False).moved == 0
        reading = reader.submit(session.stats)
        with pytest.raises(TimeoutError):
            reading.result(timeout=0.2)
        may_write.set()
        moved = reading.result(timeout=60).moved
        assert moved > 0
        loss.backward()
        assert session.stats().moved == moved


@pytest.mark.parametrize(
    "what", [None, 3, "model", len, torch.jit.ScriptModule()], ids=lambda what: type(what).__name__
)
def test_only_modules_can_be_attached(what: Any) -> None:
    with pytest.raises(ConfigError, match="attach needs"):
        tidegate.attach(what)


def test_a_config_may_be_a_mapping(tmp_path: Path) -> None:
    with tidegate.attach(build(), {"tiers": ["disk"], "disk_paths": [str(tmp_path)]}) as session:
        assert session.config == OffloadConfig(tiers="disk", disk_paths=str(tmp_path))
    with pytest.raises(ConfigError, match="no mapping"):
        tidegate.attach(build(), 3)  # type: ignore[arg-type]


def test_a_session_that_saw_no_step_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    with tidegate.attach(model, config(tmp_path)):
        model.forward(torch.randn(4, 32)).sum().backward()
    assert "saw no step" in caplog.text
    caplog.clear()
    with tidegate.attach(model, config(tmp_path)):
        gradients(model)
    assert "saw no step" not in caplog.text


@pytest.mark.parametrize("every", [1, 4])
def test_twenty_optimiser_steps_of_a_plain_loop(tmp_path: Path, every: int) -> None:
    def train(model: nn.Sequential) -> tuple[list[Tensor], list[Tensor]]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(3)
        losses = []
        for index in range(20 * every):
            loss = model(torch.randn(64, 32)).square().mean() / every
            loss.backward()
            losses.append(loss.detach())
            if (index + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses, [parameter.detach().clone() for parameter in model.parameters()]

    plain, model = train(build()), build()
    with tidegate.attach(model, config(tmp_path)) as session:
        losses, weights = train(model)
        assert session.stats().moved > 0
    assert same(losses, plain[0])
    assert same(weights, plain[1])
    assert not list(tmp_path.glob("tidegate-*"))
