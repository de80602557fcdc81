"""Every peer model through every loop, plain and offloaded, in one process group."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from tests.strategies.scripts.peer_models import PEERS, build
from tests.strategies.scripts.ranks import RANKS
from tests.strategies.scripts.recording import folder_of_rank, through_all_loops

import tidegate.strategies  # noqa: F401


def main() -> None:
    rank = int(os.environ.get("LOCAL_RANK", 0))
    folder = folder_of_rank(Path(sys.argv[1]), rank)
    result = {}
    for name in PEERS:
        for strategy in ("ddp", "tidegate_ddp"):
            options = {"devices": RANKS, "limit_val_batches": 2, "limit_test_batches": 2, "limit_predict_batches": 2}
            run = through_all_loops(build(name, rank), strategy, folder, **options, limit_train_batches=6)
            torch.distributed.barrier()
            run["left"] = os.listdir(os.environ["TIDEGATE_DISK_PATHS"])
            torch.distributed.barrier()
            result[f"{name}-{strategy}"] = run
    (folder / "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()  # the first rank does not wait for those that it started


if __name__ == "__main__":
    main()
