"""Text that every machine has: the source of Python's standard library, a token a byte."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 256


class StandardLibrary(Dataset[dict[str, Tensor]]):
    """Windows of text for a causal language model; the same ones in every run.

    Args:
        windows: How many.
        length: Tokens of each.
    """

    def __init__(self, windows: int, length: int) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(source.read_bytes() for source in sources)
        self.ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length
        self.starts = torch.randint(len(self.ids) - length, (windows,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = int(self.starts[index])
        ids = self.ids[start : start + self.length].long()
        return {"input_ids": ids, "labels": ids}
