"""What an import of tidegate costs and loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

TIMED = "import sys, time; began = time.perf_counter(); {}; print(time.perf_counter() - began)"


def seconds(statement: str) -> float:
    """The least of three fresh processes: others on the machine only ever add."""
    command = [sys.executable, "-c", TIMED.format(statement)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, timeout=120) for _ in range(3)]
    return min(float(run.stdout) for run in runs)


@pytest.mark.slow
def test_importing_costs_at_most_three_tenths_of_a_second_over_torch() -> None:
    torch = seconds("import torch")
    assert seconds("import tidegate") <= torch + 0.3
    assert seconds("import tidegate; tidegate.attach, tidegate.OffloadConfig") <= torch + 0.3


@pytest.mark.parametrize("statement", ["import tidegate", "import tidegate.strategies", "import torch, tidegate"])
def test_importing_loads_no_trainer(statement: str) -> None:
    trainers = ["lightning", "pytorch_lightning", "accelerate", "transformers", "deepspeed", "kvikio", "triton"]
    wanted = f"loaded = sorted(set({trainers!r}) & set(sys.modules)); assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", f"import sys; {statement}; {wanted}"], check=True, timeout=120)
