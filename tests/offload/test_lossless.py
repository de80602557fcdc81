"""Offloaded training equals plain training bit for bit: losses, gradients, parameters, buffers, random numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.offload.compare import (
    Schedule,
    Trace,
    assert_nothing_left,
    assert_removed,
    assert_same,
    differences,
    offloaded_run,
    plain_run,
    wait_until_away,
)
from tests.offload.models import ZOO
from torch import Tensor, nn

import tidegate
from tidegate import OffloadConfig

PLACEMENTS: dict[str, dict[str, Any]] = {
    "disk": {"tiers": ("disk",)},
    "host": {"tiers": ("host",)},
    "host_then_disk": {"tiers": ("host", "disk"), "host_budget": "8KiB"},
    "tiny_budgets": {"tiers": ("host", "disk"), "host_budget": "8KiB", "disk_budget": "16KiB", "window": 1},
    "partly_kept": {"tiers": ("disk",), "device_budget": "512B", "min_bytes": 128, "window": "2KiB"},
    "share_kept": {"tiers": ("host", "disk"), "device_budget": "30%", "host_budget": "64KiB"},
    "striped_and_verified": {"tiers": ("disk",), "verify": True, "stripes": 2},
}
"""Where bytes go; the tiny ones overflow from tier to tier and back to the device."""

USED = {
    "disk": {"disk"},
    "host": {"host"},
    "host_then_disk": {"host", "disk"},
    "tiny_budgets": {"host"},
    "partly_kept": {"disk"},
    "share_kept": {"host"},
    "striped_and_verified": {"disk"},
}
"""Tiers that every model must fill in at least that placement."""

SMALL = ("attention", "packed_projection", "shifted_views", "indexing", "complex", "resnet", "checkpointed")


def configuration(spill: Path, **changes: Any) -> OffloadConfig:
    """Everything moves, however small, unless `changes` say otherwise."""
    paths = [spill / str(index) for index in range(changes.pop("stripes", 1))]
    for path in paths:
        path.mkdir()
    settings: dict[str, Any] = {
        "device_budget": 0,
        "min_bytes": 1,
        "window": "64KiB",
        "host_budget": "16MiB",
        "disk_budget": "64MiB",
        "disk_paths": paths,
        "io_threads": 2,
    }
    return OffloadConfig(**(settings | changes))


def assert_moved(trace: Trace, tiers: set[str]) -> None:
    """Asserts that bytes went to every one of `tiers` and came back from it."""
    assert trace.stats is not None
    unused = {tier for tier in tiers if not trace.stats.written.get(tier) or not trace.stats.read.get(tier)}
    assert not unused, f"nothing went through {unused}: {trace.stats}"


class TestPlainRuns:
    @pytest.mark.parametrize("name", ZOO)
    def test_are_reproducible_themselves(self, name: str) -> None:
        assert_same(plain_run(ZOO[name]), plain_run(ZOO[name]))

    def test_differ_when_a_single_gradient_differs(self) -> None:
        plain, other = plain_run(ZOO["einsum"]).tensors, plain_run(ZOO["einsum"]).tensors
        name = "step 3 grad weight"
        other[name].view(torch.uint8).flatten()[0] ^= 1
        assert differences(plain, other) == [name]


class TestOffloadedTraining:
    @pytest.mark.parametrize("placement", PLACEMENTS)
    @pytest.mark.parametrize("name", ZOO)
    def test_equals_plain_training(self, name: str, placement: str, tmp_path: Path) -> None:
        offloaded = offloaded_run(ZOO[name], configuration(tmp_path, **PLACEMENTS[placement]))
        assert_same(plain_run(ZOO[name]), offloaded)
        assert_moved(offloaded, USED[placement])

    @pytest.mark.parametrize("schedule", [schedule for schedule in Schedule if schedule is not Schedule.SINGLE])
    @pytest.mark.parametrize("name", SMALL)
    def test_equals_plain_training_in_every_schedule(self, name: str, schedule: Schedule, tmp_path: Path) -> None:
        config = configuration(tmp_path, tiers=("host", "disk"), host_budget="8KiB", window="4KiB")
        offloaded = offloaded_run(ZOO[name], config, schedule=schedule)
        assert_same(plain_run(ZOO[name], schedule=schedule), offloaded)
        assert_moved(offloaded, {"host"})

    @pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "llama_lora", "resnet", "attention", "packed_projection"])
    def test_equals_plain_training_under_autocast(self, name: str, tmp_path: Path) -> None:
        offloaded = offloaded_run(ZOO[name], configuration(tmp_path, tiers=("disk",)), autocast=True)
        assert_same(plain_run(ZOO[name], autocast=True), offloaded)
        assert_moved(offloaded, {"disk"})

    @pytest.mark.parametrize("verify", [False, True])
    def test_equals_plain_training_when_parts_of_a_storage_count_their_edits_apart(
        self, verify: bool, tmp_path: Path
    ) -> None:
        torch.set_default_dtype(torch.float64)  # the LSTM without oneDNN edits the parts of an unsafe_chunk in place
        offloaded = offloaded_run(ZOO["lstm"], configuration(tmp_path, tiers=("disk",), verify=verify))
        assert_same(plain_run(ZOO["lstm"]), offloaded)
        assert_moved(offloaded, {"disk"})

    def test_equals_plain_training_with_deterministic_algorithms(self, tmp_path: Path) -> None:
        torch.use_deterministic_algorithms(True)
        offloaded = offloaded_run(ZOO["indexing"], configuration(tmp_path, tiers=("disk",)))
        assert_same(plain_run(ZOO["indexing"]), offloaded)

    def test_equals_plain_training_with_buffered_files(self, tmp_path: Path) -> None:
        offloaded = offloaded_run(ZOO["gpt2"], configuration(tmp_path, tiers=("disk",), direct_io=False))
        assert_same(plain_run(ZOO["gpt2"]), offloaded)
        assert offloaded.stats is not None
        assert offloaded.stats.modes == {"disk": "posix-buffered"}

    def test_draws_the_random_numbers_of_plain_training(self, tmp_path: Path) -> None:
        config = configuration(tmp_path, tiers=("disk",), verify=True)
        assert torch.equal(
            plain_run(ZOO["gpt2"]).tensors["end random numbers"],
            offloaded_run(ZOO["gpt2"], config).tensors["end random numbers"],
        )


class _Probe(torch.autograd.Function):
    """Saves a tensor, and notes how it looks before and after."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, looks: list[tuple[object, ...]]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.looks = looks
        looks.append(look(x))
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        ctx.looks.append(look(x))
        return grads[0].expand(x.shape), None


def look(x: Tensor) -> tuple[object, ...]:
    """Everything about a tensor that a kernel may choose by, and its values."""
    return x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg(), x.data_ptr() % 256, x.resolve_conj().tolist()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "one element in": lambda x: x.flatten()[1:],
    "five elements in": lambda x: x.flatten()[5:],
    "transposed": lambda x: x.t(),
    "every other column": lambda x: x[:, ::2],
    "small corner": lambda x: x[1:3, 1:3],
    "sparse column": lambda x: x[:, 7:8],
    "sparse grid": lambda x: x[1::5, 3::7],
    "expanded": lambda x: x[:, None, :].expand(-1, 3, -1),
    "expanded row": lambda x: x[3].expand(5, -1),
    "overlapping windows": lambda x: x.flatten().unfold(0, 9, 4),
    "channels last": lambda x: x.view(1, 4, 8, 24).contiguous(memory_format=torch.channels_last),
    "empty": lambda x: x[:0],
    "one element": lambda x: x[3, 3],
    "half precision": lambda x: x.half()[:, 1:],
    "conjugate": lambda x: torch.view_as_complex(x.view(32, 12, 2)).conj(),
    "negative": lambda x: torch.view_as_complex(x.view(32, 12, 2)).conj().imag,
    "sparse conjugate": lambda x: torch.view_as_complex(x.view(32, 12, 2)).conj()[::5, ::7],
}


class TestRestoredView:
    @pytest.mark.parametrize("tier", ["host", "disk"])
    @pytest.mark.parametrize("view", VIEWS)
    def test_looks_as_it_did_when_saved(self, view: str, tier: str, tmp_path: Path) -> None:
        looks: list[tuple[object, ...]] = []
        x = torch.randn(32, 24, requires_grad=True)
        with tidegate.attach(nn.Module(), configuration(tmp_path, tiers=(tier,))) as session:
            with session.step():
                y = VIEWS[view](x * 2)
                moved = y.numel() > 0
                total = _Probe.apply(y, looks)
            del y
            gc.collect()
            wait_until_away(session)
            total.abs().backward()
            assert looks[0] == looks[1]
            stats = session.stats()
            assert sum(stats.read.values()) == stats.moved
            assert bool(stats.moved) is moved


class TestSession:
    def test_removes_its_files_and_keeps_its_figures_when_closed(self, tmp_path: Path) -> None:
        model = ZOO["einsum"]()
        session = tidegate.attach(model, configuration(tmp_path, tiers=("disk",)))
        model(0).backward()
        assert_nothing_left(session)
        directories, moved = session.spill_dirs, session.stats().moved
        assert directories
        assert all(path.is_dir() for path in directories)
        session.close()
        assert_removed(directories)
        assert session.stats().moved == moved > 0
        assert list((tmp_path / "0").iterdir()) == []

    def test_moves_the_same_bytes_in_every_step(self, tmp_path: Path) -> None:
        model = ZOO["transposing"]()
        eligible = []
        with tidegate.attach(model, configuration(tmp_path, tiers=("disk",))) as session:
            for batch in range(3):
                session.reset_stats()
                model(batch).backward()
                assert_nothing_left(session)
                stats = session.stats()
                eligible.append(stats.moved + stats.kept)
        assert eligible[0] > 0
        assert len(set(eligible)) == 1
