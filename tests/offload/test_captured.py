"""While a CUDA graph is captured a session neither moves anything nor asks the device anything."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients, hooks_installed
from torch import Tensor, nn

import tidegate
from tidegate import OffloadSession, TidegateError
from tidegate.offload import captured, saved
from tidegate.offload import session as sessions
from tidegate.offload.handle import SavedHandle

Region = Callable[[OffloadSession], AbstractContextManager[object]]
REGIONS: dict[str, Region] = {
    "implicit": lambda session: nullcontext(),
    "explicit": lambda session: session.step(),
    "nested": lambda session: session.step(),
}


class Watched(nn.Module):
    """Notes whether its forward ran under hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.hooked: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.hooked.append(hooks_installed())
        y: Tensor = self.blocks(x)
        return y


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Lets the current stream seem to record a graph, or no longer."""
    monkeypatch.setattr(captured, "_said", [])

    def switch(on: bool) -> None:
        monkeypatch.setattr(sessions, "captures", lambda: on)
        monkeypatch.setattr(saved, "captures", lambda: on)

    return switch


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> Callable[[OffloadSession], None]:
    """Makes whatever a session asks of its engine an error."""

    def guard(session: OffloadSession) -> None:
        for name in ("settle", "left", "save", "fetch"):
            monkeypatch.setattr(session._engine, name, lambda *arguments, name=name: pytest.fail(f"called {name}"))

    return guard


@pytest.mark.parametrize("region", REGIONS)
def test_a_captured_forward_runs_without_hooks(
    tmp_path: Path,
    capturing: Callable[[bool], None],
    untouched: Callable[[OffloadSession], None],
    monkeypatch: pytest.MonkeyPatch,
    region: str,
) -> None:
    model = Watched()
    plain = gradients(model)
    with tidegate.attach(model, everything(tmp_path)) as session:
        moving = gradients(model)
        capturing(True)
        untouched(session)
        with REGIONS[region](session), session.step() if region == "nested" else nullcontext():
            left_alone = gradients(model)
        monkeypatch.undo()
        again = gradients(model)
    assert model.hooked == [False, True, False, True]
    for found in (moving, left_alone, again):
        assert_same_gradients(plain, found)


def test_a_capture_inside_a_step_that_began_before_it(tmp_path: Path, capturing: Callable[[bool], None]) -> None:
    model = Watched()
    plain = gradients(model)
    with tidegate.attach(model, everything(tmp_path)) as session:
        with session.step():
            capturing(True)
            assert_same_gradients(plain, gradients(model))
            capturing(False)
            assert_same_gradients(plain, gradients(model, session))
        assert not hooks_installed()
        assert session.stats().moved > 0


def test_the_log_says_once_that_a_graph_is_left_alone(
    tmp_path: Path, capturing: Callable[[bool], None], caplog: pytest.LogCaptureFixture
) -> None:
    model = blocks()
    capturing(True)
    with caplog.at_level(logging.INFO, "tidegate"), tidegate.attach(model, everything(tmp_path)) as session:
        gradients(model)
        with session.step():
            gradients(model)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "CUDA graph" in caplog.messages[0]


def test_saved_bytes_are_not_brought_back_into_a_capture(tmp_path: Path, capturing: Callable[[bool], None]) -> None:
    handle = object.__new__(SavedHandle)
    handle.unit = SimpleNamespace(device=torch.device("cuda"))  # type: ignore[assignment]
    with tidegate.attach(blocks(), everything(tmp_path)) as session, session.step():
        capturing(True)
        with pytest.raises(TidegateError, match="Capture forward and backward together"):
            session._packer.unpack(handle)


def test_asking_for_a_capture_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asked"))
    assert not captured.captures()
