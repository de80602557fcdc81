"""What every test starts from: fixed seeds, no settings from the outside, nothing left behind."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("tidegate", deadline=None)  # a busy machine is no failure
settings.load_profile("tidegate")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count()
    needs = {"gpu": 1, "multi_gpu": 2}
    for item in items:
        for marker, count in needs.items():
            if gpus < count and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device(s), found {gpus}"))


@pytest.fixture(autouse=True)
def _no_outside_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keeps the developer's TIDEGATE_* out, and spill files of default configurations inside the test's own folder."""
    for name in [name for name in os.environ if name.startswith("TIDEGATE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_defaults_restored() -> Iterator[None]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    dtype = torch.get_default_dtype()
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
