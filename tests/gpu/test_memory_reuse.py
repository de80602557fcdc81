"""Memory that offload frees is used again by the same forward, whatever segments the allocator makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MiB = 2**20


def peaks(directory: str, offloaded: bool) -> dict[str, int]:
    """The allocator's own figures of the third step."""
    import tidegate

    model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(24))).cuda()
    x = torch.randn(8192, 2048, device="cuda")
    options: dict[str, Any] = {"tiers": ("host",), "device_budget": 0, "window": 128 * MiB, "host_budget": "8GiB"}
    after = 0
    session = tidegate.attach(model, tidegate.OffloadConfig(disk_paths=directory, **options)) if offloaded else None
    for step in range(3):
        if step == 2:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        loss = model(x).sum()
        after = torch.cuda.memory_allocated() - before
        loss.backward()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    moved = 0 if session is None else session.stats().moved // 3
    if session is not None:
        session.close()
    return {
        "after": after,
        "moved": moved,
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "segments": stats["segment.all.peak"],
        "expandable": sum(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()),
    }


NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch took the first one up in 2.9


@pytest.mark.parametrize(
    ("name", "expandable"), [(NAMES[0], True), (NAMES[1], True), (NAMES[0], False)], ids=["new", "old", "off"]
)
def test_what_leaves_makes_room_for_the_same_forward(tmp_path: Path, name: str, expandable: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in NAMES}
    environment[name] = f"expandable_segments:{expandable}"
    figures = []
    for offloaded in (False, True):
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.test_memory_reuse", str(tmp_path), str(int(offloaded))],
            cwd=Path(__file__).parents[2],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        figures.append(json.loads(done.stdout.splitlines()[-1]))
    plain, offloaded_figures = figures
    moved = offloaded_figures["moved"]
    assert moved > 2048 * MiB
    assert [bool(run["expandable"]) for run in figures] == [expandable, expandable]
    for figure in ("after", "allocated", "reserved"):
        assert offloaded_figures[figure] < plain[figure] - moved + 700 * MiB, figures


if __name__ == "__main__":
    print(json.dumps(peaks(sys.argv[1], sys.argv[2] == "1")))
