"""Under torch.compile: the compiled run's bits, and a log line that says why little moves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients
from torch import Tensor, nn

import tidegate
from tidegate.offload import compiled

# The compiler itself looks at `.grad` of a region's inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Compile = Callable[[nn.Module], Any]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "_said", False)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """The compiler skips modules of torch itself that compile in place, nn.Sequential among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def compile_whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def lines(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.message for record in caplog.records if record.levelno == logging.WARNING)


@pytest.mark.parametrize("how", [compile_whole, compile_in_place])
def test_a_model_compiled_with_its_hooks_says_once_that_nothing_moves(
    how: Compile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    with tidegate.attach(model, everything(tmp_path)) as session:
        runnable = how(model)
        offloaded = gradients(runnable)  # the plain run is the second one: it would lend its code to this one
        gradients(runnable)
        assert session.stats().moved == 0
    assert_same_gradients(gradients(compile_whole(Net())), offloaded)
    assert lines(caplog, "compiled as a whole") == 1


def test_attaching_to_a_model_that_compiled_itself_says_so_at_once_A8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = compile_in_place(Net())
    gradients(model)  # from now on hooks that come later are not even traced
    with tidegate.attach(model, everything(tmp_path)) as session:
        gradients(model)
        assert session.stats().moved == 0
        assert lines(caplog, "compiled as a whole") == 1
        with session.step():
            gradients(model)
        assert session.stats().moved > 0


@pytest.mark.parametrize("wide", [False, True], ids=["attached to the compiled module", "inside session.step()"])
def test_one_region_moves_and_says_once_that_it_comes_back_at_once(
    wide: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    plain = gradients(compile_whole(Net()))
    runnable = compile_whole(model)
    with tidegate.attach(model if wide else runnable, everything(tmp_path)) as session:
        for _ in range(2):
            if wide:
                with session.step():
                    assert_same_gradients(plain, gradients(runnable))
            else:
                assert_same_gradients(plain, gradients(runnable))
        assert session.stats().moved > 0
    assert lines(caplog, "one compiled region") == 1


def test_blocks_compiled_one_by_one_need_no_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def by_block(model: nn.Sequential) -> nn.Sequential:
        return nn.Sequential(*(compile_whole(block) for block in model))

    plain = gradients(by_block(blocks()))
    model = by_block(blocks())
    with tidegate.attach(model, everything(tmp_path)) as session:
        assert_same_gradients(plain, gradients(model))
        assert session.stats().moved > 0
    assert lines(caplog, "compile") == 0
