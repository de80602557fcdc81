"""A few random programs for a checker to watch: python -m tests.gpu.sanitized DIRECTORY [FAULT]

Under TORCH_CUDA_SANITIZER=1 torch looks for accesses that no event orders. It sees operations through the dispatcher,
which the hooks leave out of users' modes; here they do not. It does not see what
workers start: the way back from a disk.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from tests.gpu import fuzz


def main(directory: str, fault: str | None = None) -> None:
    torch_c: Any = torch._C
    torch_c._DisableTorchDispatch = contextlib.nullcontext
    torch.use_deterministic_algorithms(True)
    for seed in range(4):
        plain, _ = fuzz.gradients(seed, None, chaos=False)
        config = fuzz.random_config(seed, directory, device_budget=0, tiers=("host", "disk") if seed % 2 else ("host",))
        with contextlib.nullcontext() if fault is None else fuzz.faulty(list(fuzz.FAULTS)[int(fault)]):
            other, moved = fuzz.gradients(seed, config, chaos=False)
        assert moved > 0
        assert fault is not None or not fuzz.differs(plain, other)
    print("all programs ran")


if __name__ == "__main__":
    main(*sys.argv[1:])
