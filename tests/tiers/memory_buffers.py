"""Host memory at a chosen page phase, with guard bytes around it."""

from __future__ import annotations

import torch

from tidegate.tiers.tier import ALIGNMENT, Buffer

GUARD = 0xA5


class Span:
    """`nbytes` at page phase `phase`; random if `seed` is given, guard bytes else."""

    def __init__(self, nbytes: int, phase: int, seed: int | None = None) -> None:
        self.memory = torch.full((nbytes + 2 * ALIGNMENT,), GUARD, dtype=torch.uint8)
        self.start = (phase - self.memory.data_ptr()) % ALIGNMENT
        self.bytes = self.memory[self.start : self.start + nbytes]
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.bytes.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator))
        self.buffer = Buffer(self.memory.data_ptr() + self.start, nbytes, self.memory)

    def guards_intact(self) -> bool:
        """Whether nothing outside the span was touched."""
        outside = torch.cat((self.memory[: self.start], self.memory[self.start + len(self.bytes) :]))
        return bool((outside == GUARD).all())
