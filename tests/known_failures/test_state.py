"""Rows S: failures of others with state and leaks, each shown not to happen here."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from tests.offload.compare import assert_nothing_left, wait_until_away
from tests.offload.toys import assert_same_gradients, blocks, everything, gradients
from torch import Tensor, nn

import tidegate
from tidegate import SessionClosedError


class Routed(nn.Module):
    """Saves for two branches and uses one, as a mixture of experts does."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(blocks(2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (branch(x) for branch in self.branches)
        self.unused = right
        return left  # type: ignore[no-any-return]


def test_s1_unused_branches_need_no_empty_tracker(tmp_path: Path) -> None:
    plain = gradients(Routed())
    model = Routed()
    with tidegate.attach(model, everything(tmp_path)) as session:
        for _ in range(3):
            assert_same_gradients(plain, gradients(model))
        del model.unused
        assert_nothing_left(session)
        assert session.stats().dropped["disk"] > 0


def test_s2_what_is_never_unpacked_is_freed_with_its_graph(tmp_path: Path) -> None:
    model = Routed()
    with tidegate.attach(model, everything(tmp_path)) as session:
        for _ in range(20):
            gradients(model)
        del model.unused
        gc.collect()
        assert session.stats().resident == 0
        assert session._engine._units == {}
        assert [tier.used for tier in session._tiers.open()] == [0]


def test_s3_a_slot_lives_as_long_as_its_graph(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path)) as session:
        with session.step():
            loss = model(torch.randn(64, 32)).sum()
        wait_until_away(session)
        (tier,) = session._tiers.open()
        gradients(blocks())  # work that has nothing to do with it
        assert tier.used > 0
        loss.backward()  # outside the context
        del loss
        assert_nothing_left(session)
        assert tier.used == 0


def test_s4_a_forward_without_grad_in_train_mode_changes_nothing(tmp_path: Path) -> None:
    plain = gradients(blocks())
    model = blocks()
    with tidegate.attach(model, everything(tmp_path)) as session:
        with torch.no_grad():
            model(torch.randn(64, 32))
        assert session.stats().modes == {}
        assert_same_gradients(plain, gradients(model))
        with torch.no_grad():
            model(torch.randn(64, 32))
        assert_same_gradients(plain, gradients(model))


def test_s6_neither_the_session_nor_its_hooks_outlive_the_model(tmp_path: Path) -> None:
    model = blocks()
    session = tidegate.attach(model, everything(tmp_path))
    gradients(model)
    engine, packer = weakref.ref(session._engine), weakref.ref(session._packer)
    session.close()
    del session, model
    gc.collect()
    assert engine() is None
    assert packer() is None


def test_s7_passes_without_backward_teach_no_budget(tmp_path: Path) -> None:
    model = blocks()
    with tidegate.attach(model, everything(tmp_path, device_budget="50%")) as session:
        with torch.no_grad():
            for _ in range(3):
                model(torch.randn(4096, 32))
        loss = model(torch.randn(4096, 32)).pow(2).sum()
        wait_until_away(session)
        loss.backward()
        assert session.stats().kept == 0  # the first training step is not known yet: all of it moves
        gradients(model)
        assert session.stats().kept > 0


def test_s8_backward_after_close_raises_and_names_the_remedy(tmp_path: Path) -> None:
    model = blocks()
    session = tidegate.attach(model, everything(tmp_path))
    loss = model(torch.randn(64, 32)).sum()
    wait_until_away(session)
    session.close()
    with pytest.raises(SessionClosedError, match=r"run backward before session\.close"):
        loss.backward()
